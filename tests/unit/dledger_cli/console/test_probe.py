"""How often a node is asked for what, and when what it said before counts no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.client.blocking import DLedgerClient
from dledger.errors import UnavailableError
from dledger.rpc.ports import NodeStatus
from dledger.types import LogIndex, NodeId, Position, Role, Term
from dledger_cli.console import probe
from dledger_cli.console.probe import GroupProbe
from rocketstore.client import Admin, BrokerStatus
from rocketstore.client.aio.routes import RoutedBroker
from tests.unit.dledger_cli.console.support import NAMED, broker_status

FOLLOWS = NodeStatus(
    cluster_id="c",
    group="g",
    node_id=NodeId("n0"),
    role=Role.FOLLOWER,
    term=Term(1),
    leader=None,
    members=(),
    begin_index=LogIndex(0),
    end_index=LogIndex(9),
    committed_index=LogIndex(9),
    flushed_index=LogIndex(9),
    begin_position=Position(0),
    end_position=Position(900),
    flush_mode="SYNC_FLUSH",
    disk_full=False,
    voter=True,
    pending_entries=0,
)


class Log(DLedgerClient):
    """A node; ``status`` None: it is silent."""

    status: NodeStatus | None = FOLLOWS

    def __init__(self) -> None:
        pass

    def metadata(self, address: str | None = None, *, timeout_s: float | None = None) -> NodeStatus:
        if self.status is None:
            raise UnavailableError("h:1 is unreachable")
        return self.status


class Node(Admin):
    """A broker of a group, which counts how often it is asked for a broker's own figures."""

    def __init__(self) -> None:
        self.log = Log()
        self.asked = 0

    def status(self, address: str) -> BrokerStatus:
        self.asked += 1
        is_master = self.log.status is not None and self.log.status.role is Role.LEADER
        return broker_status(dledgerRole="LEADER", brokerRole="SYNC_MASTER" if is_master else "SLAVE")

    def brokers(self) -> tuple[RoutedBroker, ...]:
        return (NAMED,)


def probe_of(node: Node) -> GroupProbe:
    return GroupProbe(node.log, node)


def role(asked: GroupProbe) -> str:
    found = asked.ask("h:1", 1.0).broker
    assert found is not None
    return found.role


def test_a_brokers_figures_are_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are means over seconds; a node is asked for its place in the log every time."""
    node = Node()
    asked = probe_of(node)
    monkeypatch.setattr(probe, "BROKER_INTERVAL_S", 3600.0)
    assert [role(asked) for _ in range(5)] == ["SLAVE"] * 5
    assert node.asked == 1

    monkeypatch.setattr(probe, "BROKER_INTERVAL_S", 0.0)
    role(asked)
    assert node.asked == 2


def test_a_new_role_is_asked_about_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page shows a leader whose broker is a slave; another term is another role."""
    monkeypatch.setattr(probe, "BROKER_INTERVAL_S", 3600.0)
    node = Node()
    asked = probe_of(node)
    role(asked)
    for status in (replace(FOLLOWS, role=Role.LEADER), replace(FOLLOWS, role=Role.LEADER, term=Term(2))):
        node.log.status, before = status, node.asked
        assert role(asked) == "SYNC_MASTER"
        assert node.asked == before + 1


def test_what_a_broker_said_before_it_fell_silent_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may be there when somebody answers again."""
    monkeypatch.setattr(probe, "BROKER_INTERVAL_S", 3600.0)
    node = Node()
    asked = probe_of(node)
    role(asked)
    node.log.status = None
    with pytest.raises(UnavailableError):
        asked.ask("h:1", 1.0)
    node.log.status = FOLLOWS
    role(asked)

    assert node.asked == 2
