"""What brokers say of themselves: ours and others', also nonsense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.monitoring import CONDITIONS_MAX, Condition
from dledger.remoting.codes import RequestError
from dledger.remoting.fastjson import dumps
from rocketstore.remoting.runtime import LOG_END, MEMBERS_MAX, TEXT_MAX, RuntimeInfo, own_table
from rocketstore.remoting.topics import KVTable
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN

MEMBERS = {"n1": "h:2", "n0": "h:1", "n2": ""}


def told(**table: str) -> RuntimeInfo:
    return RuntimeInfo.decode(KVTable(table).encode())


def test_what_a_broker_of_ours_adds_is_read_back() -> None:
    """Also a member's address that is not known yet, and several conditions of one kind."""
    problems = tuple(Condition(kind, f"{kind} ä", 1, kind[:2]) for kind in ("disk_full", "at_limit", "disk_full"))
    table = own_table("1.2", "n0", "LEADER", 7, MEMBERS, problems, leader="n0")
    table |= {LOG_END: "30", "commitLogMinOffset": "10", "commitLogMaxOffset": "20", "dispatchBehindBytes": "5"}

    found = told(brokerVersionDesc="V4_9_8", putTps="1.50 2.50 3.50", getTransferedTps="0.00 0 0", **table)

    members = (("n0", "h:1"), ("n1", "h:2"), ("n2", ""))
    log = RuntimeInfo(begin=10, end=20, written=30, dispatch_behind=5)
    expected = replace(log, version="V4_9_8", put_tps=1.5, get_tps=0.0, release="1.2", members=members)
    assert found == replace(expected, node="n0", role="LEADER", term=7, leader="n0", problems=problems)
    assert found.conditions == ("at_limit", "disk_full")


@pytest.mark.parametrize(("role", "is_master"), [("", False), ("SLAVE", False), ("ASYNC_MASTER", True)])
def test_only_a_broker_that_says_so_is_a_master(role: str, *, is_master: bool) -> None:
    """RocketMQ's own tell their role elsewhere."""
    assert told(brokerRole=role).is_master is is_master


@pytest.mark.parametrize(("said", "port"), [("10913", 10913), ("0", 0), ("", 0), ("x", 0), ("70000", 0), ("-1", 0)])
def test_where_grpc_is_served_is_read(said: str, port: int) -> None:
    """0 stands for nowhere, and so does nonsense."""
    assert told(grpcServerPort=said).grpc_port == port


def test_a_broker_without_a_group_tells_no_term() -> None:
    """It has no role either."""
    assert told(**own_table("1.2", "0", "", 0, {"0": "h:1"}, [])) == RuntimeInfo(release="1.2", node="0")


def test_rocketmqs_own_broker_is_none_of_ours() -> None:
    """F10, captured from RocketMQ 4.9.7 after ten seconds: its rates are still blanks."""
    found = RuntimeInfo.decode(GOLDEN["F10"].frame.body)

    assert found.version.startswith("V4_9")
    assert (found.release, found.role, found.members) == ("", "", ())
    assert (found.put_tps, found.get_tps) == (None, None)


@pytest.mark.parametrize("rate", ["", "x", "-1", "nan", "inf", "1e999"])
def test_a_rate_that_is_none_is_not_told(rate: str) -> None:
    """Nor summed with others."""
    assert told(putTps=rate).put_tps is None


def test_nonsense_is_bounded() -> None:
    """A stranger may answer anything."""
    found = told(
        brokerVersionDesc="v" * 10_000,
        dledgerTerm="9" * 50,
        dledgerConditions=dumps(
            [["kind", "subject", 1, "m" * 1000], ["kind"], 7, *([["k", "s", 2, "m"]] * 100)]
        ).decode(),
        dledgerMembers=";".join(f"n{number}-{'a' * 500}" for number in range(100)) + ";;",
    )

    assert len(found.version) == TEXT_MAX
    assert found.term == 0
    assert len(found.problems) <= CONDITIONS_MAX
    assert max(len(one.message) for one in found.problems) == TEXT_MAX
    assert len(found.members) == MEMBERS_MAX
    assert max(len(address) for _, address in found.members) <= TEXT_MAX
    assert told(dledgerTerm="²", dledgerMembers=";-x;n0").members == (("n0", ""),)
    with pytest.raises(RequestError):
        RuntimeInfo.decode(b"[]")
