"""G3: a route leaves out members that are down, and never all of a client's addresses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dledger.rpc.loops import LoopBridge
from rocketstore.broker.mastership import GroupView
from rocketstore.grpc import routes
from tests.support.waiting import wait_until
from tests.unit.rocketstore.grpc.harness import GatewayClient, GatewayHarness


class Member(GatewayHarness):
    """It knows where it serves."""

    async def _serve(self, bridge: LoopBridge) -> None:
        await super()._serve(bridge)
        self.gateway.presence.own_address = lambda: f"127.0.0.1:{self.server.port}"


@pytest.fixture
def other() -> Iterator[Member]:
    with Member() as harness:
        yield harness


@pytest.fixture
def one(other: Member, monkeypatch: pytest.MonkeyPatch) -> Iterator[Member]:
    monkeypatch.setattr(routes, "ASK_INTERVAL_S", 0.02)
    monkeypatch.setattr(routes, "SILENT_S_MAX", 0.3)
    with Member() as harness:
        own = harness.config.node_id
        where = {own: f"127.0.0.1:{harness.remoting_port}", "n1": f"127.0.0.1:{other.remoting_port}"}
        harness.view = GroupView("LEADER", 3, own, where[own], where)
        harness.on_loop(harness.gateway.presence.start)
        yield harness


def addresses(client: GatewayClient, *given: str) -> list[str]:
    found = client.route("T", *given).message_queues[0].broker.endpoints.addresses
    return [f"{one.host}:{one.port}" for one in found]


def test_a_member_that_does_not_answer_is_left_out_until_it_does(one: Member, other: Member) -> None:
    """The client then opens its stream of commands at another one, which some do at no other occasion. An address of
    nobody that was ever seen, such as a balancer's, stays.
    """
    here, there = (f"127.0.0.1:{harness.server.port}" for harness in (one, other))
    with one.dial() as client:
        wait_until(lambda: there in one.gateway.presence.serving().values(), "it has answered")
        assert addresses(client, there, here, "balancer:8081") == [there, here, "balancer:8081"]
        assert set(addresses(client)) == {here, there}
        other.stop()
        wait_until(lambda: one.gateway.presence.down() == {there}, "it is silent for long enough")
        assert addresses(client, there, here, "balancer:8081") == [here, "balancer:8081"]
        assert addresses(client, there) == [there]
        assert addresses(client) == [here]


def test_a_member_that_was_removed_is_left_out_at_once(one: Member, other: Member) -> None:
    """It may still answer, and is no member any more."""
    there = f"127.0.0.1:{other.server.port}"
    wait_until(lambda: there in one.gateway.presence.serving().values(), "it has answered")
    own = one.config.node_id
    one.view = GroupView("LEADER", 4, own, one.view.leader_address, {own: one.view.members[own]})
    assert one.gateway.presence.down() == {there}


def test_a_defect_does_not_end_the_asking(
    one: Member, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is known would never change again."""
    asks = one.gateway.presence
    fails = True
    ask = asks._ask_all

    async def sometimes() -> None:
        if fails:
            raise RuntimeError("a defect")
        await ask()

    monkeypatch.setattr(asks, "_ask_all", sometimes)
    wait_until(lambda: any("retrying" in record.message for record in caplog.records), "it has failed")
    asks._seen.clear()
    fails = False
    wait_until(lambda: bool(asks._seen), "it goes on")
