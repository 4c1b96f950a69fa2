"""Pop's rules (P1 to P12) as a broker keeps them: read, written, waited for and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dledger.access.quota import Quota
from dledger.clock import Clock
from dledger.errors import InvalidRequestError
from dledger.rpc.clients.connections import Leases
from rocketstore.broker.popping.copies import origin_of
from rocketstore.broker.popping.driver import CLIENT_WAITS_MAX
from rocketstore.broker.popping.requests import MESSAGES_MAX, Ack, ChangeInvisible, PoppedRecord, PopResult, Receive
from rocketstore.broker.reading import SQL92, QueueReading
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.message.record import QueuePlace
from rocketstore.pop.engine import PopEngine
from rocketstore.pop.operations import Handle, Loading, Origin, PopDelivery, PopWish, Settling, Verdict, encode_handle
from rocketstore.pop.tables import LeaseWindow, PopPlace
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.types import GetResult
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.popping.harness import GROUP, TOPIC, PopBroker, bodies, running_loop

_T = TypeVar("_T")
RETRY, DEAD = f"%RETRY%{GROUP}_{TOPIC}", f"%DLQ%{GROUP}"


@pytest.fixture
def pop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PopBroker]:
    """Whose waiting receives look by themselves too late for any test: they must be woken. Those that do not wait look
    at all queues, however slow this machine is.
    """
    monkeypatch.setattr("rocketstore.broker.popping.receiving.SCAN_S_MAX", 60.0)
    monkeypatch.setattr("rocketstore.broker.popping.receiving.LOOK_S", 60.0)
    monkeypatch.setattr("rocketstore.broker.popping.driver.SLEEP_S_MAX", 60.0)
    with PopBroker(tmp_path) as running:
        yield running


class TestReceives:
    """Who gets which messages, and when."""

    def test_what_is_answered_is_reserved(self, pop: PopBroker) -> None:
        """P1: a later leader must know each message that may be out."""
        pop.send([b"a", b"b", b"c"])
        got = pop.receive(max_messages=2)
        assert bodies(got.messages) == [b"a", b"b"]
        assert (pop.window().reserved, pop.window().commit) == (2, 0)
        assert pop.window().leased_until_ms >= got.messages[0].visible_at_ms
        assert got.rest == 1

    def test_who_waits_for_one_queue_only_does_not_keep_others_from_being_woken(self, pop: PopBroker) -> None:
        """By the messages of another queue, that is, though they came later."""
        one = pop.broker.popping.await_message(GROUP, TOPIC, 1, 30_000, "a")
        first = asyncio.run_coroutine_threadsafe(one, pop.run(running_loop()))
        wait_until(lambda: pop.broker.counters().pop.waiting == 1, "somebody waits for queue 1")
        second = pop.begin()
        pop.send([b"a"])
        assert bodies(second.result(60).messages) == [b"a"]
        pop.send([b"b"], 1)
        assert first.result(60)

    def test_limits_hold_for_those_who_come_together(self, tmp_path: Path) -> None:
        """Windows that are being made count until they are there."""
        with PopBroker(tmp_path / "limited", offsets_max="3") as pop:
            room, queues = pop.broker.state.pop.room, [(TOPIC, 0), (TOPIC, 1)]
            with room("a", queues), pytest.raises(InvalidRequestError, match="offsets_max"), room("b", queues):
                pass
            with room("b", queues):
                pass

    def test_one_client_that_asks_for_news_leaves_others_theirs(self, pop: PopBroker) -> None:
        """P10: each may have so many requests that wait."""

        async def ask_while_one_has_all_of_its_own() -> tuple[str, bool]:
            ask = partial(pop.broker.popping.await_message, GROUP, TOPIC, 1)
            waiting = [asyncio.create_task(ask(30_000, "a")) for _ in range(CLIENT_WAITS_MAX)]
            while pop.broker.counters().pop.waiting < CLIENT_WAITS_MAX:
                await asyncio.sleep(0)
            try:
                with pytest.raises(Refusal) as refused:
                    await ask(0, "a")
                return str(refused.value), await ask(0, "b")
            finally:
                for one in waiting:
                    one.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

        why, found = pop.run(ask_while_one_has_all_of_its_own())
        assert ("client a has" in why, found) == (True, False)

    def test_windows_are_taken_up_in_turns_of_the_loop(self, pop: PopBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        """A full one takes 20 ms, and after a failover all may be full."""
        happened: list[int] = []  # the queue; -1: a turn of the loop
        take_up = PopEngine.take_up

        def noting(engine: PopEngine, loading: Loading, queue_id: int, now_ms: int) -> None:
            happened.append(queue_id)
            take_up(engine, loading, queue_id, now_ms)

        async def received_while_others_wait() -> None:
            pop.broker.popping._driver.end()
            receiving = asyncio.create_task(pop.received(Receive(GROUP, TOPIC, client_id="c")))
            while not receiving.done():
                happened.append(-1)
                await asyncio.sleep(0)

        pop.receive()
        monkeypatch.setattr(PopEngine, "take_up", noting)
        pop.run(received_while_others_wait())
        assert [one for one in happened if one >= 0] == [0, 1]
        assert -1 in happened[happened.index(0) : happened.index(1)]

    def test_consumers_share_a_queue_message_by_message(self, pop: PopBroker) -> None:
        """However many there are: none is given out twice while it is invisible."""
        pop.send([b"%d" % number for number in range(10)])
        got = [one for number in range(5) for one in pop.receive(max_messages=2, client_id=f"c{number}").messages]
        assert sorted(bodies(got)) == [b"%d" % number for number in range(10)]
        assert not pop.receive().messages

    def test_all_queues_are_asked_unless_one_is_named(self, pop: PopBroker) -> None:
        """P7: a queue that is named gives its own messages only."""
        pop.send([b"zero"], 0)
        pop.send([b"one"], 1)
        assert bodies(pop.receive(queue_id=1).messages) == [b"one"]
        assert not pop.receive(queue_id=1).messages
        assert bodies(pop.receive().messages) == [b"zero"]

    def test_a_look_that_takes_too_long_goes_on_at_once(self, pop: PopBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        """P7: it has let others look, and does not wait for news of the queues that it did not come to."""
        monkeypatch.setattr("rocketstore.broker.popping.receiving.SCAN_S_MAX", -1.0)
        pop.send([b"%d" % number for number in range(8)], 1)
        for number in range(8):
            assert bodies(pop.receive(max_messages=1, wait_ms=10_000).messages) == [b"%d" % number]

    def test_a_waiting_receive_is_answered_by_an_arrival(self, pop: PopBroker) -> None:
        """In whichever queue, at once: not when its wait ends."""
        for queue_id in (0, 1):
            waiting = pop.begin()
            pop.send([b"new"], queue_id)
            assert bodies(waiting.result(60).messages) == [b"new"]

    def test_an_arrival_wakes_as_many_as_there_are_messages(self, pop: PopBroker) -> None:
        """Those that wait are woken in turn, each by the one before that got something."""
        waiting = [pop.begin(max_messages=1, client_id=f"c{number}") for number in range(8)]
        pop.send([b"%d" % number for number in range(8)])
        assert sorted(one for each in waiting for one in bodies(each.result(60).messages)) == [
            b"%d" % number for number in range(8)
        ]

    def test_what_does_not_match_is_settled_at_once(self, pop: PopBroker) -> None:
        """P7: for the group, so a selective one has no lag for ever; by tags and by conditions."""
        pop.send([b"no"] * 50, properties={"TAGS": "B", "n": "1"})
        pop.send([b"yes"], properties={"TAGS": "A", "n": "2"})
        pop.send([b"no"] * 50, properties={"TAGS": "B", "n": "1"})
        assert bodies(pop.receive(expression="A").messages) == [b"yes"]
        assert bodies(pop.receive("sql", kind=SQL92, expression="n > 1").messages) == [b"yes"]
        for group, wish in ((GROUP, {"expression": "A"}), ("sql", {"kind": SQL92, "expression": "n > 1"})):
            assert not pop.receive(group, **wish).messages
            assert pop.window(group=group).reserved == 101
            assert pop.window(group=group).commit == 50

    def test_a_new_group_begins_at_the_end_of_each_queue(self, pop: PopBroker) -> None:
        """P9: and from then on, also if it got nothing at first."""
        pop.send([b"old"])
        assert not pop.receive(from_first=False).messages
        assert pop.window().commit == 1
        pop.send([b"new"])
        assert bodies(pop.receive(from_first=False).messages) == [b"new"]

    def test_a_new_group_begins_when_it_subscribed(self, pop: PopBroker) -> None:
        """P9: nothing sent since is skipped, whenever the first receive comes; what is older is."""
        pop.send([b"old"])
        since_ms = wall_ms_after(pop.stored(TOPIC)[-1].store_timestamp)
        pop.send([b"new", b"newer"])
        assert bodies(pop.receive(from_first=False, since_ms=since_ms).messages) == [b"new", b"newer"]
        assert not pop.receive("late", from_first=False, since_ms=since_ms + 3_600_000).messages
        assert pop.window(group="late").commit == 3

    def test_a_large_answer_is_cut(self, pop: PopBroker) -> None:
        """By bytes, too: what was not read is left for others."""
        pop.send([b"x" * 300_000] * 8)
        first = pop.receive().messages
        assert 0 < len(first) < 8
        rest = pop.receive_all(8 - len(first))
        assert len({one.handle for one in [*first, *rest]}) == 8

    def test_the_bytes_of_an_answer_are_accounted_for(self, pop: PopBroker) -> None:
        """As those of a pull: the room is what was read, not what might have been."""
        pop.send([b"x" * 1000])

        async def room() -> tuple[int, Quota]:
            broker = pop.broker
            quota = broker.shares.quotas.of("@test", "test", "test")
            with Leases(broker.shares.room, quota) as leases:
                wish = Receive(GROUP, TOPIC, client_id="c", from_first=True)
                (message,) = (await broker.popping.receive(wish, leases, "")).messages
                assert quota.answer_bytes == len(message.record)
                return len(message.record), quota

        _, quota = pop.run(room())
        assert quota.answer_bytes == 0

    @pytest.mark.parametrize(
        "wish",
        [
            {"max_messages": 0},
            {"max_messages": MESSAGES_MAX + 1},
            {"invisible_ms": 0},
            {"invisible_ms": 13 * 3_600_000},
            {"attempt_id": "x" * 65},
            {"client_id": "x" * 256},
            {"client_id": "", "auto_renew": True},
            {"queue_id": -2},
            {"group": "g" * 60, "topic": TOPIC, "queue_id": 0},
        ],
    )
    def test_impossible_wishes_are_refused(self, pop: PopBroker, wish: dict[str, Any]) -> None:
        """With what is wrong; nothing is reserved."""
        if "group" in wish:
            pop.run(pop.broker.topics.put([_topic("t" * 66)]))
            wish = wish | {"topic": "t" * 66}
        with pytest.raises(Refusal) as refused:
            pop.receive(**wish)
        assert refused.value.kind is RefusalKind.INVALID

    def test_topics_and_groups_must_permit_it(self, pop: PopBroker) -> None:
        """As for pulls: the topic exists and has the queue, the group may consume, the expression can be read."""
        pop.put_group(GroupConfig("closed", consume_enable=False))
        for kind, group, topic, wish in (
            (RefusalKind.NO_TOPIC, GROUP, "missing", {}),
            (RefusalKind.NO_QUEUE, GROUP, TOPIC, {"queue_id": 9}),
            (RefusalKind.NOT_PERMITTED, "closed", TOPIC, {}),
            (RefusalKind.WRONG_FILTER, GROUP, TOPIC, {"kind": SQL92, "expression": "a >"}),
            (RefusalKind.INVALID, GROUP, "SCHEDULE_TOPIC_XXXX", {}),
        ):
            with pytest.raises((Refusal, InvalidRequestError)) as refused:
                pop.receive(group, topic, **wish)
            assert isinstance(refused.value, Refusal), refused
            assert refused.value.kind is kind

    def test_one_client_cannot_wait_without_end(self, pop: PopBroker) -> None:
        """P10: others still can."""
        waiting = pop.broker.popping._receiving._waiting  # a thousand receives take seconds
        waiting._clients["@test c"] = CLIENT_WAITS_MAX
        with pytest.raises(Refusal, match="1024 waiting receives") as refused:
            pop.receive(wait_ms=1)
        assert refused.value.kind is RefusalKind.TOO_MANY
        assert not pop.receive(wait_ms=1, client_id="other").messages
        del waiting._clients["@test c"]


class TestAnswers:
    """Acknowledgements, changes of invisibility, dead letters."""

    def test_an_ack_is_answered_when_it_is_stored(self, pop: PopBroker) -> None:
        """P2: the group's offset, which other tools see, moves over what is settled."""
        pop.send([b"a", b"b", b"c"])
        first, second, third = pop.receive().messages
        assert pop.ack([second]) == [PopResult.OK]
        assert (pop.window().commit, pop.window().is_settled(1)) == (0, True)
        assert pop.ack([first]) == [PopResult.OK]
        assert pop.window().commit == 2
        assert pop.broker.state.offset(GROUP, TOPIC, 0) == 2
        assert pop.ack([third]) == [PopResult.OK]
        assert pop.ack([third, first]) == [PopResult.INVALID_HANDLE] * 2

    def test_acknowledgements_for_two_topics_are_all_answered_after_a_failover(self, pop: PopBroker) -> None:
        """P2: the second topic is loaded while what the first one's acknowledgements wait for is applied."""
        pop.run(pop.broker.topics.put([TopicConfig("bills", 1, 1)]))
        pop.send([b"a"])
        pop.send([b"b"], topic="bills")
        acks = [Ack(GROUP, one, pop.receive(topic=one).messages[0].handle) for one in (TOPIC, "bills")]
        pop.run(_end_leadership(pop))
        pop.receive(max_messages=1)
        assert list(pop.run(pop.broker.popping.ack(acks))) == [PopResult.OK] * 2

    def test_more_dead_letters_than_a_new_master_looks_at_are_refused(
        self, pop: PopBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """P4: of the refused ones nothing is stored."""
        pop.send([b"a"])
        (message,) = pop.receive().messages
        with monkeypatch.context() as patch:
            patch.setattr("rocketstore.pop.engine.COPIES_MAX", 0)
            with pytest.raises(Refusal, match="try again later") as refused:
                pop.give_up(message)
        assert refused.value.kind is RefusalKind.TOO_MANY
        assert pop.give_up(message) is PopResult.OK

    def test_acknowledgements_that_wait_are_bounded(self, pop: PopBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        """P10: in all, and an owner has at most half; who was answered, or refused, makes room."""
        monkeypatch.setattr("rocketstore.broker.popping.service.AT_ONCE_MAX", 4)
        pop.send([b"a", b"b", b"c"])
        found = pop.receive().messages
        nowhere = encode_handle(
            Handle(GROUP, "nowhere", is_retry=False, queue_id=0, offset=0, attempt=1, number=1, generation=1)
        )
        popping = pop.broker.popping
        acks = [Ack(GROUP, TOPIC, one.handle) for one in found]
        for count, owner in ((3, "a"), (5, "")):
            with pytest.raises(Refusal) as refused:
                pop.run(popping.ack((acks * 2)[:count], owner))
            assert refused.value.kind is RefusalKind.TOO_MANY
        for _ in range(3):
            with pytest.raises(Refusal) as refused:
                pop.run(popping.ack([Ack(GROUP, "nowhere", nowhere)] * 2, "a"))
            assert refused.value.kind is RefusalKind.NO_TOPIC
        assert pop.run(popping.ack(acks[:2], "a")) == [PopResult.OK] * 2
        assert pop.run(popping.ack(acks[2:], "a")) == [PopResult.OK]

    def test_many_acknowledgements_of_one_call_let_others_in_between(
        self, pop: PopBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """P10: a call of thousands holds the loop for no longer than one of a few."""
        monkeypatch.setattr("rocketstore.broker.popping.service.ACKED_AT_ONCE", 2)
        happened: list[int] = []  # handles at a time; 0: a turn of the loop
        asked = PopEngine.ack

        def counted(engine: PopEngine, group: str, topic: str, handles: Sequence[str], now_ms: int) -> list[Settling]:
            happened.append(len(handles))
            return asked(engine, group, topic, handles, now_ms)

        async def acked_while_others_wait(acks: Sequence[Ack]) -> Sequence[PopResult]:
            acking = asyncio.create_task(pop.broker.popping.ack(acks))
            while not acking.done():
                happened.append(0)
                await asyncio.sleep(0)
            return await acking

        monkeypatch.setattr(PopEngine, "ack", counted)
        pop.send([b"%d" % number for number in range(5)])
        acks = [Ack(GROUP, TOPIC, one.handle) for one in pop.receive_all(5)]
        assert pop.run(acked_while_others_wait(acks)) == [PopResult.OK] * 5
        assert [one for one in happened if one] == [2, 2, 1]
        assert 0 in happened[happened.index(2) + 1 : happened.index(1)]
        assert pop.window().commit == 5

    def test_handles_of_others_are_refused(self, pop: PopBroker) -> None:
        """P5: no handle, another group's, another topic's."""
        pop.send([b"a"])
        (message,) = pop.receive().messages
        pop.receive("other")
        assert pop.ack([message], group="other") == [PopResult.INVALID_HANDLE]
        assert pop.ack([message._replace(handle="nonsense")]) == [PopResult.INVALID_HANDLE]
        assert pop.ack([message], topic="another") == [PopResult.INVALID_HANDLE]
        assert pop.ack([message], topic=RETRY) == [PopResult.OK]

    def test_a_message_that_was_not_acknowledged_comes_again(self, pop: PopBroker) -> None:
        """P4: as a copy in the group's retry topic, which names its origin; the handle of before is refused."""
        pop.send([b"a"], properties={"KEYS": "k"})
        (first,) = pop.receive(invisible_ms=1000).messages
        (second,) = pop.receive_all(1)
        assert bodies([second]) == [b"a"]
        assert (first.attempt, second.attempt) == (1, 2)
        assert second.visible_at_ms > first.visible_at_ms
        (copy,) = pop.stored(RETRY)
        assert (copy.reconsume_times, copy.properties["RETRY_TOPIC"], copy.keys) == (1, TOPIC, ["k"])
        generation = pop.window().generation
        assert origin_of(second.record) == Origin(PopPlace(GROUP, TOPIC, 0), 0, generation)
        wait_until(lambda: pop.window().commit == 1, "the original is settled")
        assert pop.ack([first]) == [PopResult.INVALID_HANDLE]
        assert pop.ack([second]) == [PopResult.OK]
        assert pop.window(topic=RETRY).commit == 1

    def test_after_enough_attempts_it_is_a_dead_letter(self, pop: PopBroker) -> None:
        """P4: that says where it came from; no copy of it comes again."""
        pop.put_group(GroupConfig(GROUP, retry_times_max=1))
        pop.send([b"poison"], properties={"UNIQ_KEY": "U1"})
        pop.receive(invisible_ms=1000)
        (second,) = pop.receive_all(1, invisible_ms=1000)
        assert second.attempt == 2
        wait_until(lambda: pop.broker.store.max_offset(DEAD, 0) == 1, "the dead letter")
        (dead,) = pop.stored(DEAD)
        assert dead.body == b"poison"
        assert (dead.properties["DLQ_ORIGIN_TOPIC"], dead.properties["DLQ_ORIGIN_MESSAGE_ID"]) == (TOPIC, "U1")
        wait_until(lambda: pop.window(topic=RETRY).commit == 1, "the copy is settled")
        assert not pop.receive().messages
        assert pop.broker.counters().pop.dead == 1

    def test_a_message_can_be_given_back(self, pop: PopBroker) -> None:
        """P6: at once, with or without counting as an attempt; the handle of before is not valid any more."""
        pop.send([b"a"])
        (first,) = pop.receive().messages
        changed = pop.change(first, 0, suspend=True)
        assert changed.result is PopResult.OK
        assert pop.ack([first]) == [PopResult.INVALID_HANDLE]
        (second,) = pop.receive_all(1)
        assert second.attempt == 1
        pop.change(second, 0)
        assert pop.receive_all(1)[0].attempt == 2

    def test_a_message_can_be_kept_longer(self, pop: PopBroker) -> None:
        """P6: by the new handle; for more than a minute it is parked, and the offset passes it."""
        pop.send([b"a", b"b"])
        first, second = pop.receive(invisible_ms=60_000).messages
        changed = pop.change(first, 3_600_000)
        pop.change(second, 0)
        assert changed.visible_at_ms > second.visible_at_ms + 3_500_000
        assert pop.window().parked.keys() == {0}
        assert bodies(pop.receive_all(1)) == [b"b"]
        wait_until(lambda: pop.window().commit == 2, "the offset passes it")
        assert pop.ack([first._replace(handle=changed.handle)]) == [PopResult.OK]
        assert not pop.window().parked

    def test_push_consumers_wait_a_second(self, pop: PopBroker) -> None:
        """Some clients err in the unit of their pauses."""
        pop.send([b"a"])
        (message,) = pop.receive().messages
        before_ms = pop.broker.loop.clock.wall_ms()
        assert pop.change(message, 1, push=True).visible_at_ms >= before_ms + 950  # its clocks round

    def test_a_consumer_can_give_a_message_up(self, pop: PopBroker) -> None:
        """With its reason, without what cannot be printed."""
        pop.send([b"a"])
        (message,) = pop.receive().messages
        assert pop.give_up(message, "no\nsense" + "x" * 500) is PopResult.OK
        (dead,) = pop.stored(DEAD)
        assert dead.properties["DLQ_REASON"] == ("nosense" + "x" * 500)[:200]
        assert pop.window().commit == 1
        assert pop.give_up(message) is PopResult.INVALID_HANDLE

    def test_leases_of_a_client_that_is_gone_end(self, pop: PopBroker) -> None:
        """Those that the broker prolongs for it; while it is there they do not end."""
        pop.send([b"a"])
        (first,) = pop.receive(auto_renew=True, client_id="gone").messages

        async def end_ms_without(owner: str) -> int:
            pop.broker.popping.client_gone("gone", owner)
            queues = pop.broker.popping._driver.leadership().engine._queues.values()
            return next(one.visible_at_ms for queue in queues for one in queue.leases.values())

        assert pop.run(end_ms_without("@another")) == first.visible_at_ms  # who only uses its id
        pop.broker.loop.bridge.post(lambda: pop.broker.popping.client_gone("gone", "@test"))
        (second,) = pop.receive_all(1)
        assert second.attempt == 2
        assert pop.ack([first]) == [PopResult.INVALID_HANDLE]

    def test_an_answer_that_did_not_arrive_is_given_back(self, pop: PopBroker) -> None:
        """In a second, whatever the lease; that was no attempt. Other groups' handles do not count."""
        pop.send([b"a", b"b"])
        first, second = pop.receive(invisible_ms=3_600_000).messages
        assert pop.ack([second]) == [PopResult.OK]

        async def give_back(group: str) -> None:
            pop.broker.popping.give_back(group, TOPIC, [first.handle, second.handle, "none"])

        pop.run(give_back("other"))
        pop.run(give_back(GROUP))
        pop.run(give_back(GROUP))
        (again,) = pop.receive(wait_ms=10_000).messages
        assert (bodies([again]), again.attempt) == ([b"a"], 1)
        assert pop.ack([first, again]) == [PopResult.INVALID_HANDLE, PopResult.OK]

    def test_a_forged_handle_makes_no_group_begin_in_another_topic(self, pop: PopBroker) -> None:
        """P5, P9: the topic that a client may consume is the one it names, not that of the handle."""
        pop.run(pop.broker.topics.put([TopicConfig("secret", 1, 1)]))
        handle = encode_handle(Handle(GROUP, "secret", False, 0, 0, 1, 1, 1))
        for result in pop.run(pop.broker.popping.ack([Ack(GROUP, TOPIC, handle)])):
            assert result is PopResult.INVALID_HANDLE
        assert pop.broker.state.pop.pop_window(PopPlace(GROUP, "secret", 0)) is None

    def test_a_receive_that_is_cancelled_leaves_nothing_behind(self, pop: PopBroker) -> None:
        """What it had reserved is soon visible, and that was no attempt; nobody waits any more."""
        waiting = pop.begin()
        waiting.cancel()
        wait_until(lambda: pop.broker.counters().pop.waiting == 0, "it is gone")
        assert pop.broker.pulling.waiting.watches == 0
        pop.send([b"a"])
        (message,) = pop.receive_all(1)
        assert message.attempt == 1

    def test_a_receive_that_is_cancelled_anywhere_keeps_nothing(self, pop: PopBroker) -> None:
        """P4: at each of its steps; what it had is given out to others, and was no attempt."""
        count = 60
        pop.send([b"%d" % number for number in range(count)])
        wish = Receive(GROUP, TOPIC, max_messages=2, client_id="c", from_first=True, auto_renew=True)

        async def cancelled(steps: int) -> Sequence[PoppedRecord]:
            task = asyncio.ensure_future(pop.received(wish))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return () if task.cancelled() else task.result().messages

        held = list(pop.receive(max_messages=1).messages)
        for steps in (*range(12), 20, 40, 80, 160):
            held += pop.run(cancelled(steps))
        assert pop.broker.counters().pop.waiting == 0
        assert pop.broker.shares.quotas.of("@test", "test", "test").answer_bytes == 0
        found = pop.receive_all(count - len(held))
        assert {one.attempt for one in found} == {1}
        assert len({*bodies(found), *bodies(held)}) == count


class TestOrder:
    """P8: ordered groups."""

    @pytest.fixture
    def ordered(self, pop: PopBroker) -> PopBroker:
        pop.put_group(GroupConfig(GROUP, ordered=True))
        return pop

    def test_a_queue_is_locked_until_its_batch_is_settled(self, ordered: PopBroker) -> None:
        """Nothing behind it is given out; then what follows."""
        ordered.send([b"1", b"2", b"3"])
        batch = ordered.receive(queue_id=0, max_messages=2, attempt_id="A").messages
        assert bodies(batch) == [b"1", b"2"]
        assert not ordered.receive(queue_id=0, attempt_id="B").messages
        again = ordered.receive(queue_id=0, max_messages=2, attempt_id="A").messages
        assert [one.handle for one in again] == [one.handle for one in batch]
        assert ordered.ack([batch[0]]) == [PopResult.OK]
        assert not ordered.receive(queue_id=0, attempt_id="B").messages
        assert ordered.ack([batch[1]]) == [PopResult.OK]
        assert bodies(ordered.receive(queue_id=0, attempt_id="B").messages) == [b"3"]

    def test_an_ack_wakes_who_waits_for_the_queue(self, ordered: PopBroker) -> None:
        """The lock ends before its time."""
        ordered.send([b"1", b"2"])
        (first,) = ordered.receive(queue_id=0, max_messages=1, attempt_id="A").messages
        waiting = ordered.begin(queue_id=0, attempt_id="B")
        ordered.ack([first])
        assert bodies(waiting.result(60).messages) == [b"2"]

    def test_a_batch_comes_again_in_its_place(self, ordered: PopBroker) -> None:
        """Not as a copy behind the others: in order, with one more attempt."""
        ordered.send([b"1", b"2", b"3"])
        ordered.receive(queue_id=0, max_messages=2, attempt_id="A", invisible_ms=1000)
        again = ordered.receive_all(2, queue_id=0, attempt_id="B")
        assert (bodies(again), [one.attempt for one in again]) == ([b"1", b"2"], [2, 2])
        assert ordered.broker.topics.find(RETRY) is None


class TestMixedUse:
    """P11: one group, one way."""

    def pull(self, pop: PopBroker, group: str = GROUP) -> None:
        def pulled() -> None:
            pop.broker.popping.use.pulled(group, TOPIC)

        pop.run(_called(pulled))

    def test_who_comes_second_is_refused(self, pop: PopBroker) -> None:
        """With the first's client ids, and what to do."""
        pop.receive(client_id="popper-1")
        with pytest.raises(Refusal, match="clients popper-1") as refused:
            self.pull(pop)
        assert refused.value.kind is RefusalKind.NOT_PERMITTED
        self.pull(pop, "pulling")
        with pytest.raises(Refusal, match="by pulls, and cannot be by pop"):
            pop.receive("pulling")

    def test_what_is_parked_is_not_left_behind(self, pop: PopBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        """The offset has passed it: pulls would never get it."""
        monkeypatch.setattr("rocketstore.broker.popping.service.RECENT_S", 0.0)
        pop.send([b"a"])
        pop.receive(invisible_ms=3_600_000)
        with pytest.raises(Refusal, match="1 of its messages are invisible"):
            self.pull(pop)

    def test_other_groups_and_what_was_sent_back_are_pulled(self, pop: PopBroker) -> None:
        """RocketMQ's clients that pop pull their retry topic all the same; its tools pull for no group."""
        pop.receive()
        self.pull(pop, "other")
        for group, topic in (("TOOLS_CONSUMER", TOPIC), ("", TOPIC), (GROUP, f"%RETRY%{GROUP}")):
            pop.run(_called(partial(pop.broker.popping.use.pulled, group, topic)))


class TestRoles:
    """Who leads answers."""

    def test_who_waits_is_told_when_the_role_is_lost(self, pop: PopBroker) -> None:
        """At once: its client asks the new master then."""
        waiting = pop.begin()
        pop.broker.store.become_slave()
        pop.broker.loop.bridge.post(pop.broker.popping.role_changed)
        with pytest.raises(Refusal) as refused:
            waiting.result(60)
        assert refused.value.kind is RefusalKind.UNAVAILABLE

    def test_who_is_about_to_get_messages_when_the_role_is_lost_is_told_so(
        self, pop: PopBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """P1: nobody would reserve them any more, nor answer."""
        read, store = QueueReading.read, pop.broker.store

        async def lost_meanwhile(self: QueueReading, topic: str, *where: Any) -> GetResult:  # noqa: ANN401  # as given
            found = await read(self, topic, *where)
            if topic == TOPIC:
                await asyncio.to_thread(store.become_slave)
                pop.broker.popping.role_changed()
            return found

        pop.send([b"a"])
        monkeypatch.setattr(QueueReading, "read", lost_meanwhile)
        asked = pop.received(Receive(GROUP, TOPIC, client_id="c", from_first=True))
        with pytest.raises(Refusal) as refused:
            asyncio.run_coroutine_threadsafe(asked, pop.run(running_loop())).result(60)
        assert refused.value.kind is RefusalKind.UNAVAILABLE

    def test_copies_end_with_their_leadership(self, pop: PopBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        """P4: the next one looks which are stored before it makes its own, and must not be told of those of before."""
        copies = pop.broker.popping._driver.copies
        sent: list[object] = []

        def never(*batch: object) -> None:
            sent.append(batch)

        pop.send([b"a"])
        monkeypatch.setattr(pop.broker.sending, "submit", never)
        pop.receive(invisible_ms=1000)
        wait_until(lambda: len(sent) == 1, "it is being stored")
        role = pop.broker.store.role
        pop.broker.store.become_slave()
        pop.run(_called(pop.broker.popping.role_changed))
        wait_until(lambda: len(copies) == 0, "that has ended")
        pop.broker.store.become_master(role)

    def test_a_later_leadership_knows_what_is_out(self, pop: PopBroker) -> None:
        """P3, P5: it takes the handles of the one before, and gives out nothing that may be with somebody."""
        pop.send([b"a", b"b", b"c"])
        messages = pop.receive(max_messages=2).messages
        role = pop.broker.store.role
        pop.broker.store.become_slave()
        pop.broker.store.become_master(role)
        assert bodies(pop.receive().messages) == [b"c"]
        assert pop.ack(messages) == [PopResult.OK] * 2
        assert pop.ack(messages) == [PopResult.INVALID_HANDLE] * 2

    @pytest.mark.slow  # for the time of a lease
    def test_a_restarted_broker_goes_on(self, tmp_path: Path) -> None:
        """P13: nothing acknowledged comes again; what was out does, when its lease is over."""
        with PopBroker(tmp_path) as pop:
            pop.send([b"a", b"b"])
            first, _ = pop.receive(invisible_ms=8000).messages
            assert pop.ack([first]) == [PopResult.OK]
        with PopBroker(tmp_path) as pop:
            (again,) = pop.receive_all(1)
            assert bodies([again]) == [b"b"]
            assert pop.ack([again]) == [PopResult.OK]


def test_a_stopping_broker_has_nobody_wait(pop: PopBroker) -> None:
    """Those that wait are answered with nothing."""
    waiting = pop.begin()
    pop.broker.loop.bridge.post(pop.broker.stop_waiting)
    assert not waiting.result(60).messages


def test_groups_whose_retry_topics_have_one_name_get_their_own_messages(pop: PopBroker) -> None:
    """Group ``a`` with topic ``b_c``, and ``a_b`` with ``c``: each gets what it gave back, and settles nothing else."""
    subscribed = (("a", "b_c"), ("a_b", "c"))
    for group, topic in subscribed:
        pop.run(pop.broker.topics.put([TopicConfig(topic, 1, 1)]))
        pop.send([topic.encode()], topic=topic)
        (one,) = pop.receive(group, topic).messages
        back = ChangeInvisible(group, topic, one.handle, 0)
        assert pop.run(pop.broker.popping.change_invisible(back)).result is PopResult.OK
    wait_until(lambda: pop.broker.store.max_offset("%RETRY%a_b_c", 0) == 2, "both are copied")

    for group, topic in subscribed:
        (one,) = pop.receive(group, topic, wait_ms=10_000).messages
        assert (bodies([one]), one.attempt) == ([topic.encode()], 2)
        assert pop.ack([one], group, topic) == [PopResult.OK]
        assert not pop.receive(group, topic).messages


def test_poison_does_not_hold_up_others(pop: PopBroker) -> None:
    """P4: one message that nobody can consume, among many: the others come once, and the window moves on."""
    pop.put_group(GroupConfig(GROUP, retry_times_max=2))
    sent = [b"poison", *(b"%d" % number for number in range(999))]
    for start in range(0, 1000, 100):
        pop.send(sent[start : start + 100])
    taken: list[bytes] = []
    tries = 0
    while len(taken) < 999 or tries < 3:
        got = pop.receive(invisible_ms=60_000, wait_ms=20_000).messages
        assert got, (len(taken), tries)
        good = [one for one in got if bodies([one]) != [b"poison"]]
        pop.end_together([one for one in got if one not in good])
        tries += len(got) - len(good)
        taken += bodies(good)
        assert pop.ack(good) == [PopResult.OK] * len(good)
    wait_until(lambda: pop.broker.store.max_offset(DEAD, 0) == 1, "the dead letter")
    assert (sorted(taken), tries) == (sorted(sent[1:]), 3)
    wait_until(lambda: pop.window().commit == 1000, "everything is settled")


def test_who_waits_in_vain_looks_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: ten thousand receives of an empty topic must leave the loop to others."""
    looks: list[object] = []
    begin = PopEngine.begin

    def noted(engine: PopEngine, wish: PopWish, now_ms: int) -> PopDelivery:
        looks.append(wish)
        return begin(engine, wish, now_ms)

    with PopBroker(tmp_path) as pop:
        pop.receive()
        monkeypatch.setattr(PopEngine, "begin", noted)
        pop.receive(wait_ms=1500)
    assert len(looks) == 2  # when it comes, and when its time is over


@pytest.mark.parametrize("step_ms", [3_600_000, -3_600_000])
def test_a_clock_that_is_set_changes_no_lease(pop: PopBroker, monkeypatch: pytest.MonkeyPatch, step_ms: int) -> None:
    """P3: leases last as long as they were to, and clients are told their ends by the clock as it is: Java's throw away
    messages whose time is over by it.
    """
    pop.send([b"a", b"b"])
    (first,) = pop.receive(max_messages=1, invisible_ms=20_000).messages
    place = QueuePlace(TOPIC, 0, 0)
    right = Clock.wall_ms
    monkeypatch.setattr(Clock, "wall_ms", lambda self: right(self) + step_ms)
    clock = pop.broker.loop.clock
    (second,) = pop.receive(invisible_ms=20_000).messages
    assert 10_000 < second.visible_at_ms - clock.wall_ms() <= 20_000
    changed = pop.change(first, 30_000)
    assert 20_000 < changed.visible_at_ms - clock.wall_ms() <= 30_000
    assert (
        pop.run(_called(partial(pop.broker.popping.handle_at, GROUP, place, changed.visible_at_ms))) == changed.handle
    )
    assert not pop.receive().messages


def _topic(name: str) -> TopicConfig:
    return TopicConfig(name, 1, 1)


async def _called(function: Callable[[], _T]) -> _T:
    return function()


@pytest.mark.slow
def test_all_leases_of_a_killed_consumer_are_given_out_once_more(pop: PopBroker) -> None:
    """P4: more than are copied at a time; none is lost, none comes twice, and the window moves on."""
    count = 2000
    for start in range(0, count, 500):
        pop.send([b"%d" % number for number in range(start, start + 500)])
    held = pop.receive_all(count, auto_renew=True, client_id="killed")
    pop.broker.loop.bridge.post(lambda: pop.broker.popping.client_gone("killed", "@test"))
    again = pop.receive_all(count, client_id="other")
    assert sorted(bodies(again)) == sorted(bodies(held))
    assert {one.attempt for one in again} == {2}
    for start in range(0, count, 1000):
        assert set(pop.ack(again[start : start + 1000])) == {PopResult.OK}
    wait_until(lambda: pop.window().commit == count and pop.window(topic=RETRY).commit == count, "all is settled")
    assert pop.ack(held[:1000]) == [PopResult.INVALID_HANDLE] * 1000
    assert not pop.receive().messages


def wall_ms_after(time_ms: int) -> int:
    """The time, once it is later than that."""
    clock = Clock()
    wait_until(lambda: clock.wall_ms() > time_ms, "the clock ticks")
    return clock.wall_ms()


def test_what_an_ended_leadership_has_to_write_is_not_written(pop: PopBroker) -> None:
    """P3: another master has led since, whose rows it would undo; who waits is told that the outcome is unknown."""
    pop.send([b"a"])
    (message,) = pop.receive().messages

    async def acked_by_the_former() -> tuple[Verdict | None, LeaseWindow]:
        driver, before = pop.broker.popping._driver, pop.window()
        former = driver.leadership()
        (acked,) = former.engine.ack(GROUP, TOPIC, [message.handle], former.now_ms())
        role = pop.broker.store.role
        pop.broker.store.become_slave()
        pop.broker.store.become_master(role)
        rows = driver.rows
        driver.look(former)
        assert (driver.rows, pop.window()) == (rows, before)
        return acked.verdict, before

    verdict, before = pop.run(acked_by_the_former())
    assert (verdict, before.commit) == (Verdict.FAILED, 0)
    assert pop.ack([message]) == [PopResult.OK]


async def _end_leadership(pop: PopBroker) -> None:
    """Another one begins with the next request."""
    pop.broker.popping._driver.end()  # a plain broker has no other way
