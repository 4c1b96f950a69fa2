"""Whose word is believed about where a request came from."""

from __future__ import annotations

import asyncio

import pytest

from rocketstore.broker import member_hosts
from rocketstore.broker.member_hosts import MemberHosts
from rocketstore.broker.ports import GroupView
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.harness import Harness


def test_a_defect_in_looking_up_members_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A member that moves would never be believed again. What is known stays."""
    monkeypatch.setattr(member_hosts, "LOOK_UP_INTERVAL_S", 0.01)
    with Harness() as broker:
        broker.view = GroupView(members={"n0": "192.0.2.1:1"})
        hosts = broker.broker.member_hosts
        look_up, fails = hosts._addresses_of_members, True

        async def sometimes() -> frozenset[str]:
            if fails:
                raise RuntimeError("a defect")
            return await look_up() | {"192.0.2.7"}

        monkeypatch.setattr(hosts, "_addresses_of_members", sometimes)
        hosts.known = frozenset({"192.0.2.1"})
        broker.on_loop(hosts.start)
        wait_until(lambda: any("looked up" in one.message for one in caplog.records), "it has failed")
        assert hosts.known == {"192.0.2.1"}
        fails = False
        wait_until(lambda: "192.0.2.7" in hosts.known, "it goes on")


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
