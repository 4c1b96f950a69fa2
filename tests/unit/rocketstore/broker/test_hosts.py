"""Host addresses of records.

Whose word is believed about where a request came from.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from rocketstore.broker import mastership
from rocketstore.broker.mastership import GroupView, MemberHosts, host_address, resolve
from rocketstore.message.message import LOOPBACK, HostAddress
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import Harness

V6_LOOPBACK = b"\0" * 15 + b"\1"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.1.2.3", HostAddress(b"\x0a\1\2\3", 4711)),
        ("::1", HostAddress(V6_LOOPBACK, 4711)),
        ("::ffff:10.1.2.3", HostAddress(b"\x0a\1\2\3", 4711)),
        ("nonsense", LOOPBACK),
        ("", LOOPBACK),
    ],
)
def test_where_a_client_is_becomes_an_address(host: str, expected: HostAddress) -> None:
    """IPv4 in IPv6 is stored as IPv4; what is no address counts as local."""
    assert host_address(host, 4711) == expected


def test_a_name_is_resolved_for_records(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers are taken as they are; a name that leads nowhere counts as local, and that is said."""
    monkeypatch.setattr(mastership, "PAUSE_S", 0)
    assert resolve("127.0.0.1", 5) == HostAddress(b"\x7f\0\0\1", 5)
    assert resolve("::1", 5) == HostAddress(V6_LOOPBACK, 5)
    assert resolve("localhost", 5) == HostAddress(b"\x7f\0\0\1", 5)
    assert caplog.text == ""
    assert resolve("no.such.host.invalid", 5) == HostAddress(b"\x7f\0\0\1", 5)
    assert "own name no.such.host.invalid cannot be resolved" in caplog.text


def test_a_name_that_is_known_a_little_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's or a container's name service starts beside the broker."""
    answers = iter([OSError("not yet"), [(socket.AF_INET, 0, 0, "", ("10.0.0.7", 5))]])

    def ask(*_: object, **__: object) -> object:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(mastership, "PAUSE_S", 0)
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    assert resolve("late.example", 5) == HostAddress(b"\x0a\0\0\7", 5)


def test_a_defect_in_looking_up_members_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A member that moves would never be believed again. What is known stays."""
    monkeypatch.setattr(mastership, "LOOK_UP_INTERVAL_S", 0.01)
    with Harness() as broker:
        broker.view = GroupView(members={"n0": "192.0.2.1:1"})
        members = broker.broker.member_hosts
        look_up, fails = members._addresses_of_members, True

        async def sometimes() -> frozenset[str]:
            if fails:
                raise RuntimeError("a defect")
            return await look_up() | {"192.0.2.7"}

        monkeypatch.setattr(members, "_addresses_of_members", sometimes)
        members.known = frozenset({"192.0.2.1"})
        broker.on_loop(members.start)
        wait_until(lambda: any("looked up" in one.message for one in caplog.records), "it has failed")
        assert members.known == {"192.0.2.1"}
        fails = False
        wait_until(lambda: "192.0.2.7" in members.known, "it goes on")


def test_a_start_is_one_task_however_often() -> None:
    """Requests are passed on by two protocols: each starts it."""
    with Harness() as broker:
        broker.view = GroupView(members={"n0": "192.0.2.1:1"})

        async def started(hosts: MemberHosts) -> int:
            before = len(asyncio.all_tasks())
            hosts.start()
            hosts.start()
            return len(asyncio.all_tasks()) - before

        assert broker.bridge.run(started(broker.broker.member_hosts)) == 1
