"""What happens to a consumer while something else is under way: a commit, a handler, a change of members."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rocketstore.client import fetcher
from rocketstore.client.consumer import Consumer
from rocketstore.client.shares import GroupDelivery
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.client.test_group_consumer import broker, committed, member, put, queues_of

__all__ = ("broker",)


def test_a_queue_that_comes_back_is_taken_once_its_message_is_done(broker: RemotingHarness) -> None:
    """In order: a member that loses a queue and regains it does not begin the message that it still works on again."""
    put(broker, 8)
    with member(broker, ordered=True) as one:
        held = {each.message.queue_id: each for each in (one.receive(15.0) for _ in range(4)) if each}
        with member(broker, ordered=True) as two:
            wait_until(lambda: len(queues_of(one)[0]) == 2, "it gave half of them up")
            freed, kept = sorted(set(range(4)) - set(queues_of(one)[0]))
            assert two.receive(0.3) is None
        one.ack(held[freed])
        came = one.receive(15.0)  # it knows by then that the other one is gone
        assert came is not None
        assert came.body == b"%d" % (freed + 4)
        assert one.receive(0.5) is None
        assert queues_of(one) == [sorted(set(range(4)) - {kept})]
        assert broker.groups._locks._locks["g", "T", kept].client_id == one.client_id
        one.ack(held[kept])
        came = one.receive(15.0)
        assert came is not None
        assert came.body == b"%d" % (kept + 4)


def test_a_queue_that_loses_its_end_during_a_commit_moves_the_groups_offset_back(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the next member, or a restart, would skip what is stored there next and not done yet."""
    monkeypatch.setattr(fetcher, "BEYOND_END_S", 0.1)

    def take(count: int) -> list[GroupDelivery]:
        return [each for _ in range(count) if (each := one.receive(15.0)) is not None]

    put(broker, 40)
    with member(broker) as one:
        for each in take(40):
            one.ack(each)
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 10), "all is done")
        put(broker, 1, 40)
        (last,) = take(1)
        broker.state.held = []
        one.ack(last)
        wait_until(lambda: bool(broker.state.held), "its commit is under way")
        broker.store.cut("T", 0, 5)
        wait_until(lambda: "continuing at 5" in caplog.text, "it believes that the queue ends there")
        put(broker, 1, 44)
        (new,) = take(1)
        assert new.body == b"44"
        held, broker.state.held = broker.state.held, None
        for release in held:
            release()
        wait_until(lambda: committed(broker)[0] == 5, "the group's offset goes back, too")
        one.ack(new)
        wait_until(lambda: committed(broker)[0] == 6, "and on from there")


def test_a_seek_during_a_commit_moves_the_groups_offset_back(broker: RemotingHarness) -> None:
    """What the commit said is older than the seek: the next one may go back."""
    put(broker, 40)
    with (
        Consumer([broker.address], group="g", topic="T", start="first", queues=[0], auto_commit_s=None) as one,
        ThreadPoolExecutor(1) as pool,
    ):
        taken = 0
        while taken < 10:
            taken += len(one.poll(10 - taken, 1.0))
        broker.state.held = []
        committing = pool.submit(one.commit)
        wait_until(lambda: bool(broker.state.held), "a commit is under way")
        one.seek(0, 3)
        held, broker.state.held = broker.state.held, None
        for release in held:
            release()
        committing.result()
        assert committed(broker)[0] == 10
        one.commit()
        assert committed(broker)[0] == 3


def test_what_was_pulled_ahead_is_not_skipped_with_a_lost_end(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's offsets were in the lost end, too: what the queue still has, and is not done, comes again."""
    put(broker, 40)
    with member(broker, pending_messages_max=1) as one:
        held = [each for _ in range(4) if (each := one.receive(15.0)) is not None]
        share = next(each.share for each in held if each.message.queue_id == 0)
        wait_until(lambda: share.source.max_offset == 10, "it has pulled ahead")

        async def lose() -> None:  # all at once, as only a restart does it
            broker.store.cut("T", 0, 7)
            broker.state.committed.clear()
            broker.store.incarnation += 1

        monkeypatch.setattr(broker.store, "offset_by_time", lambda *_: 7)

        broker.bridge.run(lose())
        for number in range(100, 120, 4):
            put(broker, 1, number)
        wait_until(lambda: any(chunk.rewinds for chunk in share.source._stock), "it has looked")  # type: ignore[attr-defined]
        wait_until(lambda: set(committed(broker)) == {1, 2, 3}, "all others are committed again")
        for each in held:
            one.ack(each)
        got: list[bytes] = []
        while (came := one.receive(2.0)) is not None:
            if came.message.queue_id == 0:
                got.append(came.body)
            one.ack(came)
    assert set(got) >= {b"%d" % number for number in (*range(4, 28, 4), *range(100, 120, 4))}
