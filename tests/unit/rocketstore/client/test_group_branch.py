"""What a member does at one group of brokers when its locks end, its plan changes, or the master is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dledger.errors import UnavailableError
from rocketstore.client.group_offsets import Beginnings
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BrokerRole
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.remoting.harness import RemotingHarness
from tests.unit.rocketstore.client.test_group_consumer import member, put


@pytest.fixture
def broker() -> Iterator[RemotingHarness]:
    with RemotingHarness() as harness:
        harness.state.table["%RETRY%g"] = TopicConfig("%RETRY%g", 1, 1)
        yield harness


def lockable(broker: RemotingHarness) -> list[int]:
    """The queues that another client may lock; it does."""
    queues = tuple(MessageQueue("T", broker.config.name, queue_id) for queue_id in range(4))

    async def lock() -> list[int]:
        return [one.queue_id for one in broker.remoting.members._locks.lock("g", "java", queues)]

    return broker.bridge.run(lock())


def test_nothing_is_handed_out_once_a_lock_has_ended(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the member was doing meanwhile; renewed, it goes on."""
    monkeypatch.setattr("rocketstore.client.group_branch.LOCK_VALID_S", 0.3)
    monkeypatch.setattr("rocketstore.client.group_branch.RENEW_S", 0.05)
    monkeypatch.setattr("rocketstore.client.group_branch.LOOK_S", 0.05)
    put(broker, 5)
    with member(broker, ordered=True) as one:
        share = one._shares.queues[next(name for name in one.queues if name.topic == "T")]
        first = [each for each in (one.receive(15.0) for _ in range(4)) if each is not None]
        broker.become(BrokerRole.SLAVE)
        wait_until(lambda: not share.usable, "the lock has ended")
        for each in first:
            one.ack(each)
        assert one.receive(0.1) is None
        broker.become(BrokerRole.SYNC_MASTER)
        last = one.receive(15.0)
        assert last is not None
        assert last.body == b"4"


def test_a_queue_that_is_not_taken_after_all_is_not_locked(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offset could not be had. Another member need not wait until the lock ends."""

    def unavailable(*_: object) -> None:
        raise UnavailableError("scripted")

    monkeypatch.setattr(Beginnings, "of", unavailable)
    with pytest.raises(UnavailableError):
        member(broker, ordered=True, timeout_s=3.0)
    assert lockable(broker) == [0, 1, 2, 3]
