"""A group of ours that registers with name servers of both kinds, of which RocketMQ's dies: ``make interop``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import free_ports
from rocketstore.client import Message, Producer, TopicInfo
from rocketstore.nameserver.server import NameServer
from tests.interop import java, rocketmq
from tests.support import known
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop

CLUSTER: Final = "Together"
GROUP: Final = "together"
TOPIC: Final = "Known"
TIMEOUT_S: Final = 180
BACK_S_MAX: Final = 10.0
"""How long a restarted name server has no route once it answers, at most: our brokers look for it every 2 s. Their next
registration would be due after up to 30 s."""


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[NameServer]:
    """Ours."""
    java.build()
    with running(config_in(tmp_path)) as started:
        yield started


class _Route:
    """What one name server says of the topic."""

    def __init__(self, address: str) -> None:
        self._address = address

    def brokers(self) -> dict[int, str] | None:
        """Addresses by id; empty if it does not know the topic, None if it does not answer."""
        try:
            found = known.route(self._address, TOPIC)
        except (OSError, EOFError):
            return None
        return {} if found is None else dict(found.broker_datas[0].broker_addrs)


def test_either_is_enough_and_a_restarted_one_soon_knows_all(tmp_path: Path, name_server: NameServer) -> None:
    """While RocketMQ's is dead, the master dies, too: both know the next one, and clients go on."""
    (port,) = free_ports(1)
    both = f"127.0.0.1:{port};{name_server.address}"
    settings = {"brokerClusterName": CLUSTER, "namesrvAddr": both}
    with ExitStack() as stack:
        theirs = stack.enter_context(ExitStack())
        address = theirs.enter_context(rocketmq.name_server(tmp_path / "namesrv", port))
        group = stack.enter_context(LocalBrokers(tmp_path / "brokers", name=GROUP, settings=settings))
        at_theirs, at_ours = _Route(address), _Route(name_server.address)
        with group.admin() as admin:
            group.master()
            admin.put_topic(TopicInfo(TOPIC, 4, 4))
        wait_until(lambda: len(at_ours.brokers() or {}) == 3, "registered with ours", TIMEOUT_S)
        wait_until(lambda: at_theirs.brokers() == at_ours.brokers(), "registered with RocketMQ's", TIMEOUT_S)
        sent = stack.enter_context(rocketmq.open_client(tmp_path / "load", "load", both, TOPIC, "600"))
        producer = stack.enter_context(Producer(name_servers=both))

        def go_on() -> None:
            enough = len(sent()) + 50
            wait_until(lambda: len(sent()) >= enough, "RocketMQ's producer goes on", TIMEOUT_S, poll_s=0.1)
            assert producer.send(Message(TOPIC, b"-1")).offset >= 0

        go_on()
        theirs.close()
        assert at_theirs.brokers() is None
        killed = group.master()
        group.kill(killed)
        master = group.nodes[group.master(other_than=killed)].client_address
        go_on()
        group.start(killed)
        wait_until(lambda: len(at_ours.brokers() or {}) == 3, "all are registered with ours", TIMEOUT_S)

        stack.enter_context(rocketmq.name_server(tmp_path / "namesrv", port))
        wait_until(lambda: at_theirs.brokers() is not None, "RocketMQ's answers again", TIMEOUT_S)
        began = time.monotonic()
        wait_until(lambda: len(at_theirs.brokers() or {}) == 3, "all are registered with RocketMQ's", TIMEOUT_S)
        took = time.monotonic() - began
        assert at_theirs.brokers() == at_ours.brokers()
        assert (at_theirs.brokers() or {})[0] == master
        go_on()
    print(f"{took:.1f} s without routes")  # noqa: T201  # for those who run it with -s
    assert took <= BACK_S_MAX
