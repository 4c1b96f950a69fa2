"""Timed messages at a master: what is delivered, when, what a failover repeats, what a recall keeps back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.timed import listing, run
from rocketstore.broker.timed.listing import list_timed
from rocketstore.broker.timed.run import BATCH, LOAD_RETRY_MS, PROGRESS_INTERVAL_MS, RETRY_MS_MAX
from rocketstore.broker.timed.service import TimedService
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.port import PutDone
from rocketstore.config import MIB
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.message.timed import RecallHandle, decode_handle, make_timed, rolled_message
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import DeleteTopic, PutTopic, QueueOffset, TopicConfig
from rocketstore.state.publisher import StateDone
from rocketstore.state.tables import Tables
from rocketstore.timer.hours import NOTHING_DELIVERED, TimedEntry, TimedProgress
from rocketstore.types import TIMED_TOPIC, BrokerRole, PutMessageStatus, PutResult
from tests.support.fake_store import FakeLog, FakeStore
from tests.support.waiting import ManualClock

CONFIG = BrokerConfig()
NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
BUSY = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied")
UNKNOWN = BUSY._replace(outcome="unknown")
ILLEGAL = PutResult(PutMessageStatus.MESSAGE_ILLEGAL, outcome="not_applied", reason="too large")


class MemoryState(BrokerState):
    """Progress that outlives a broker."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.progress = NOTHING_DELIVERED
        self.notes = 0
        self.refused = 0
        """So many of the next notes are not stored."""
        self.holds = False
        self._held: list[tuple[TimedProgress, StateDone]] = []

    @property
    def timed_progress(self) -> TimedProgress:
        return self.progress

    def place_for(self, name: str, queue_id: int, waited: QueueOffset) -> int | None:
        return self.tables.place_for(name, queue_id, waited)

    def note_timed_progress(self, progress: TimedProgress, done: StateDone) -> None:
        assert progress.includes(self.progress)
        self.notes += 1
        if self.refused:
            self.refused -= 1
            done(BUSY)
            return
        if self.holds:
            self._held.append((progress, done))
            return
        self.progress = progress
        done(PutResult(PutMessageStatus.PUT_OK))

    def release(self) -> None:
        """The notes that were held are stored."""
        self.holds = False
        for progress, done in self._held:
            self.progress = progress
            done(PutResult(PutMessageStatus.PUT_OK))


class WallClock(ManualClock):
    """Whose wall clock can be set."""

    skew_ms = 0

    def wall_ms(self) -> int:
        return self.now_ms + self.skew_ms


class Broker:
    """A store with timed delivery, stepped by hand."""

    def __init__(self, clock: WallClock, log: FakeLog | None = None, state: MemoryState | None = None) -> None:
        self.clock = clock
        self.store = FakeStore(log, clock=clock)
        self.state = state or MemoryState()
        self.config = replace(CONFIG, store=replace(CONFIG.store, file_reserved_time=2))
        self.timed = TimedService(self.config, self.store, self.state, clock)
        self.successors: list[Broker] = []

    def stop(self) -> None:
        """With those that came after it: a thread that is left keeps a failed test from ending."""
        self.timed.stop()
        for one in self.successors:
            one.stop()

    def send(self, due_ms: int, body: bytes = b"", topic: str = "T", key: str = "") -> str:
        """Returns its recall handle."""
        message = Message(topic, body, 3, {"UNIQ_KEY": key or body.hex().upper() or "0A"}, flag=9)
        make_timed(message, due_ms)
        stored = self.store.put(message).stored
        assert stored is not None
        return RecallHandle(topic, CONFIG.name, due_ms, key or body.hex().upper() or "0A", stored.queue_offset).encode()

    def settle(self) -> None:
        for _ in range(1000):
            before = (self.store.log.end, self.state.progress)
            due_ms = self.timed.step()
            if (self.store.log.end, self.state.progress) == before and (due_ms is None or due_ms > self.clock.now_ms):
                return
        raise AssertionError("delivery never comes to rest")

    def advance(self, ms: int) -> None:
        self.clock.now_ms += ms
        self.settle()

    def recall(self, handle: str, topic: str = "T") -> PutResult:
        found: list[PutResult] = []
        self.timed.recall(topic, handle, found.append)
        return found[0]

    def delivered(self, topic: str = "T") -> list[Message]:
        found = self.store.get(topic, 3, 0, max_count=10_000).records
        return [decode_record(record) for record in found]

    def bodies(self) -> list[bytes]:
        return [message.body for message in self.delivered()]

    def fail_over(self, damaged: int = -1) -> Broker:
        """This broker dies; another member becomes the master, at which the file of one hour is damaged."""
        self.store.role = BrokerRole.SLAVE
        successor = Broker(self.clock, self.store.log, self.state)
        if damaged >= 0:
            successor.store.timers.harm(damaged)
        self.timed.stop()
        successor.timed.start()
        self.successors.append(successor)
        return successor


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker(WallClock(NOW_MS))
    broker.timed.start()
    yield broker
    broker.stop()


def test_a_message_is_delivered_when_it_is_due_and_not_before(broker: Broker) -> None:
    """T3."""
    broker.send(NOW_MS + 1500, b"x")
    broker.settle()
    broker.advance(1499)
    assert broker.bodies() == []
    broker.advance(1)
    (found,) = broker.delivered()
    assert (found.topic, found.queue_id, found.body, found.flag) == ("T", 3, b"x", 9)
    assert found.properties == {"UNIQ_KEY": "78", "TIMER_OUT_MS": str(NOW_MS + 1500)}


def test_what_was_sent_before_the_start_and_what_is_late_comes_in_order(broker: Broker) -> None:
    """T3, T4: by due time; one that is stored when its time has passed comes at once."""
    for due_ms, body in ((3000, b"c"), (1000, b"a"), (2000, b"b")):
        broker.send(NOW_MS + due_ms, body)
    broker.advance(2500)
    assert broker.bodies() == [b"a", b"b"]
    broker.send(NOW_MS + 1500, b"late")
    broker.settle()
    assert broker.bodies() == [b"a", b"b", b"late"]
    broker.advance(500)
    assert broker.bodies() == [b"a", b"b", b"late", b"c"]


def test_the_next_hours_are_loaded_before_they_begin(broker: Broker) -> None:
    """T3: no message waits for the file of its hour."""
    for hours in (1, 2, 30):
        broker.send(NOW_MS + hours * HOUR_MS, str(hours).encode())
    for _ in range(31 * 60):
        broker.advance(60_000)
    assert broker.bodies() == [b"1", b"2", b"30"]
    assert broker.timed.counts().late == 0


def test_a_failover_repeats_at_most_what_was_delivered_since_the_last_note(broker: Broker) -> None:
    """T4: progress is noted once a second."""
    for number in range(50):
        broker.send(NOW_MS + number * 100, b"%d" % number)
    broker.settle()
    for _ in range(30):
        broker.advance(100)
    before = len(broker.delivered())
    successor = broker.fail_over()
    successor.settle()
    repeated = len(successor.delivered()) - before
    assert 0 <= repeated <= PROGRESS_INTERVAL_MS // 100
    for _ in range(30):
        successor.advance(100)
    assert sorted(set(map(int, successor.bodies()))) == list(range(50))
    successor.timed.stop()


def test_a_note_that_was_refused_is_written_again(broker: Broker) -> None:
    """T4: though nothing else is due, for otherwise a failover hours later would repeat what was delivered last."""
    broker.send(NOW_MS + 1000, b"x")
    broker.settle()
    broker.state.refused = 2
    broker.advance(1000)
    for _ in range(4):
        broker.advance(PROGRESS_INTERVAL_MS)
    assert (broker.bodies(), broker.state.notes) == ([b"x"], 3)
    successor = broker.fail_over()
    successor.advance(1000)
    assert successor.bodies() == [b"x"]
    successor.timed.stop()


def test_what_is_delivered_while_a_note_is_on_its_way_is_noted_next(broker: Broker) -> None:
    """T4: the answer says of no more than was asked, though nothing else is due."""
    for number in range(2):
        broker.send(NOW_MS + 1000 + number, b"%d" % number)
    broker.settle()
    broker.state.holds = True
    broker.advance(1000)
    broker.advance(1)
    assert (broker.bodies(), broker.state.notes) == ([b"0", b"1"], 1)
    broker.state.release()
    broker.advance(PROGRESS_INTERVAL_MS)
    assert broker.state.notes == 2
    successor = broker.fail_over()
    successor.advance(1000)
    assert successor.bodies() == [b"0", b"1"]


def test_a_run_that_has_ended_recalls_nothing(broker: Broker) -> None:
    """T5: the next one may have the message on its way, and does not know of this recall."""
    handle = broker.send(NOW_MS + 5000, b"x")
    broker.settle()
    run = broker.timed._run
    assert run is not None
    broker.timed.stop()
    with pytest.raises(Refusal) as refused:
        run.recall("T", handle, lambda _: None)
    assert refused.value.kind is RefusalKind.UNAVAILABLE
    broker.timed.start()
    broker.advance(5000)
    assert broker.bodies() == [b"x"]


def test_a_stop_notes_what_was_delivered_so_that_nothing_is_repeated(broker: Broker) -> None:
    """T4: a clean hand-over."""
    for number in range(10):
        broker.send(NOW_MS + 100 + number, b"%d" % number)
    broker.advance(105)
    broker.timed.stop()
    successor = Broker(broker.clock, broker.store.log, broker.state)
    successor.timed.start()
    successor.advance(100)
    assert [int(one) for one in successor.bodies()] == list(range(10))
    successor.timed.stop()


def test_a_recalled_message_is_not_delivered_by_anybody(broker: Broker) -> None:
    """T5: in memory, in the file of a later hour, and after a failover."""
    near, far = broker.send(NOW_MS + 1000, b"near"), broker.send(NOW_MS + 3 * HOUR_MS, b"far")
    broker.send(NOW_MS + 1000, b"other")
    broker.settle()
    assert broker.recall(near).ok
    assert broker.recall(far).ok
    for handle in (near, far):
        with pytest.raises(Refusal) as refused:
            broker.recall(handle)
        assert refused.value.kind is RefusalKind.NO_MESSAGE
    broker.advance(2000)
    successor = broker.fail_over()
    successor.advance(4 * HOUR_MS)
    assert set(successor.bodies()) == {b"other"}
    successor.timed.stop()


def test_a_delivered_message_cannot_be_recalled_nor_one_by_another_handle(broker: Broker) -> None:
    """T5: 40401; a handle of another topic, broker or message recalls nothing."""
    handle = broker.send(NOW_MS + 1000, b"x")
    waiting = broker.send(NOW_MS + 9000, b"y", key="AB")
    broker.advance(1000)
    with pytest.raises(Refusal) as refused:
        broker.recall(handle)
    assert refused.value.kind is RefusalKind.NO_MESSAGE
    for wrong, topic, kind in (
        (waiting, "U", RefusalKind.INVALID),
        ("nonsense", "T", RefusalKind.INVALID),
        (RecallHandle("T", "other", NOW_MS + 9000, "AB", 1).encode(), "T", RefusalKind.INVALID),
        (RecallHandle("U", CONFIG.name, NOW_MS + 9000, "AB", 1).encode(), "U", RefusalKind.NO_MESSAGE),
        (RecallHandle("T", CONFIG.name, NOW_MS + 9000, "AC", 1).encode(), "T", RefusalKind.NO_MESSAGE),
        (RecallHandle("T", CONFIG.name, NOW_MS + 9000, "AB", 7).encode(), "T", RefusalKind.NO_MESSAGE),
    ):
        with pytest.raises(Refusal) as refused:
            broker.recall(wrong, topic)
        assert refused.value.kind is kind
    broker.advance(9000)
    assert broker.bodies() == [b"x", b"y"]


def test_a_recall_reads_no_hours_while_the_first_record_is_there(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T5: an hour may have a million entries; nor does a forged handle, or the place of a copy."""
    handle = decode_handle(broker.send(NOW_MS + 20 * HOUR_MS, b"far"))
    again = decode_handle(broker.send(NOW_MS + 20 * HOUR_MS, b"again"))
    for _ in range(90):
        broker.advance(run.LOOK_MS)
    copies = [one.head.queue_offset for one in broker.store.log.records if b"TIMER_ORIGIN" in one.head.properties]

    def unread(*_: object) -> None:
        raise AssertionError("an hour was read")

    for name in ("entries", "find"):
        monkeypatch.setattr(broker.store.timers, name, unread)
    forged = [handle._replace(origin=at) for at in (handle.origin + 1, *copies)]
    for wrong in (handle._replace(message_id="other"), *forged):
        with pytest.raises(Refusal) as refused:
            broker.recall(wrong.encode())
        assert refused.value.kind is RefusalKind.NO_MESSAGE
    for one in (handle, again):
        assert broker.recall(one.encode()).ok
        broker.settle()
        with pytest.raises(Refusal) as refused:
            broker.recall(one.encode())
        assert refused.value.kind is RefusalKind.NO_MESSAGE


def test_delivery_goes_on_while_a_far_hour_is_searched(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5: a message whose first record has expired is found in the file of its hour, or of one beside it."""
    handles = [decode_handle(broker.send(NOW_MS + 20 * HOUR_MS, b"%d" % number)) for number in range(3)]
    for _ in range(90):
        broker.advance(run.LOOK_MS)
    broker.store.expire(TIMED_TOPIC, 0, 3)
    broker.send(broker.clock.now_ms + 1000, b"near")
    broker.settle()
    find = broker.store.timers.find

    def found_late(hour: int, origin: int) -> TimedEntry | None:
        stepping = threading.Thread(target=broker.advance, args=(1000,), daemon=True)
        stepping.start()
        stepping.join(60)
        assert not stepping.is_alive()
        return find(hour, origin)

    monkeypatch.setattr(broker.store.timers, "find", found_late)
    early = handles[1]._replace(due_ms=NOW_MS + 20 * HOUR_MS - HOUR_MS // 2)
    assert [broker.recall(one.encode()).ok for one in (handles[0], early)] == [True, True]
    assert broker.bodies() == [b"near"]
    broker.settle()
    with pytest.raises(Refusal):
        broker.recall(handles[0].encode())
    broker.advance(20 * HOUR_MS)
    assert broker.bodies() == [b"near", b"2"]


def test_a_client_whose_clock_is_behind_recalls_a_message_of_the_next_hour(broker: Broker) -> None:
    """T5: its handle says a time in a loaded hour; the record says when the message is due, or its hour does."""
    handles = [decode_handle(broker.send(NOW_MS + HOUR_MS, b"%d" % number)) for number in range(3)]
    broker.settle()
    behind = [one._replace(due_ms=NOW_MS + 1000) for one in handles]
    assert broker.recall(behind[0].encode()).ok
    broker.store.expire(TIMED_TOPIC, 0, 3)
    assert broker.recall(behind[1].encode()).ok
    broker.advance(HOUR_MS)
    assert broker.bodies() == [b"2"]


def test_a_delivered_message_cannot_be_recalled_by_a_handle_that_says_a_later_time(broker: Broker) -> None:
    """T5: 40401, also if its first record has expired and its hour's file is still there."""
    handle = decode_handle(broker.send(NOW_MS + 1000, b"x"))
    broker.advance(1000)
    broker.store.expire(TIMED_TOPIC, 0, 1)
    for late_ms in (0, HOUR_MS):
        with pytest.raises(Refusal) as refused:
            broker.recall(handle._replace(due_ms=handle.due_ms + late_ms).encode())
        assert refused.value.kind is RefusalKind.NO_MESSAGE


def test_an_hour_whose_file_is_damaged_waits_and_the_others_do_not(broker: Broker) -> None:
    """T2: nothing is lost, and progress does not pass the hour; recalls, also in it, hold."""
    hour = (NOW_MS + HOUR_MS) // HOUR_MS
    base_ms = hour * HOUR_MS
    broker.send(NOW_MS + 1000, b"before")
    broker.settle()
    broker.store.timers.harm(hour)
    handles = [broker.send(base_ms + number, b"%d" % number) for number in range(3)]
    broker.send(base_ms + HOUR_MS, b"after")
    broker.advance(1000)
    assert broker.bodies() == [b"before"]
    broker.advance(base_ms + 5000 - broker.clock.now_ms)
    broker.send(broker.clock.now_ms - 10_000, b"late")
    assert broker.recall(handles[1]).ok
    broker.advance(LOAD_RETRY_MS)
    assert broker.bodies() == [b"before", b"late"]
    assert broker.state.progress.due_ms < base_ms
    with pytest.raises(Refusal) as refused:
        list_timed(broker.store, broker.state, CONFIG.name)
    assert refused.value.kind is RefusalKind.BUSY
    broker.store.timers.mend(hour)
    broker.advance(LOAD_RETRY_MS)
    broker.advance(LOAD_RETRY_MS)
    assert broker.bodies() == [b"before", b"late", b"0", b"2"]
    broker.advance(2 * HOUR_MS)
    assert broker.bodies()[4:] == [b"after"]


def test_a_master_whose_hour_is_damaged_delivers_nothing_twice_and_denies_recalls_of_what_was_delivered(
    broker: Broker,
) -> None:
    """T4, T5: the hour in which its predecessor was."""
    first = broker.send(NOW_MS + 1000, b"0")
    waiting, recalled = broker.send(NOW_MS + 60_000, b"1"), broker.send(NOW_MS + 60_000, b"2")
    broker.advance(1000)
    broker.advance(PROGRESS_INTERVAL_MS)
    successor = broker.fail_over(damaged=NOW_MS // HOUR_MS)
    successor.advance(1000)
    with pytest.raises(Refusal) as refused:
        successor.recall(first)
    assert refused.value.kind is RefusalKind.NO_MESSAGE
    assert successor.recall(recalled).ok
    successor.advance(60_000)
    assert successor.bodies() == [b"0"]
    successor.store.timers.mend(NOW_MS // HOUR_MS)
    successor.advance(LOAD_RETRY_MS)
    assert successor.bodies() == [b"0", b"1"]
    with pytest.raises(Refusal):
        successor.recall(waiting)
    successor.timed.stop()


def test_what_a_damaged_file_alone_knows_is_asked_for_again(broker: Broker) -> None:
    """T5, T6: recalls of messages whose first record has expired, and the storing again of old ones."""
    handle = broker.send(NOW_MS + 20 * HOUR_MS, b"far")
    for _ in range(90):
        broker.advance(run.LOOK_MS)
    broker.store.expire(TIMED_TOPIC, 0, 1)
    hour = (NOW_MS + 20 * HOUR_MS) // HOUR_MS
    broker.store.timers.harm(hour)
    with pytest.raises(Refusal, match="built again") as refused:
        broker.recall(handle)
    assert refused.value.kind is RefusalKind.BUSY
    count = len(broker.store.log.records)
    for _ in range(90):
        broker.advance(run.LOOK_MS)
    assert len(broker.store.log.records) == count
    broker.store.timers.mend(hour)
    broker.advance(run.LOOK_MS)
    assert len(broker.store.log.records) == count + 1
    assert broker.recall(handle).ok


def test_a_message_waits_while_its_recall_is_on_its_way_and_comes_if_that_fails(broker: Broker) -> None:
    """T5: a recall that was answered is never overtaken; one that was refused holds nothing back."""
    handle = broker.send(NOW_MS + 1000, b"x")
    broker.settle()
    broker.store.hold_results = True
    broker.store.dispatched_to = len(broker.store.log.records)
    found: list[PutResult] = []
    broker.timed.recall("T", handle, found.append)
    broker.advance(2000)
    broker.store.dispatched_to = None
    broker.store.release_results()
    broker.store.dispatch()
    broker.advance(1000)
    assert (found[0].ok, broker.bodies()) == (True, [])

    other = broker.send(NOW_MS + 9000, b"y")
    broker.settle()
    broker.store.refusals.append(BUSY)
    assert broker.recall(other) == BUSY
    broker.advance(9000)
    assert broker.bodies() == [b"y"]


def test_a_message_that_may_be_delivered_already_is_not_recalled(broker: Broker) -> None:
    """T5: no quorum has answered in time, so the message may be in its topic before the recall is in the log."""
    handle = broker.send(NOW_MS + 1000, b"doubtful")
    broker.store.refusals.append(UNKNOWN)
    broker.advance(1000)
    with pytest.raises(Refusal) as refused:
        broker.recall(handle)
    assert refused.value.kind is RefusalKind.NO_MESSAGE
    broker.advance(RETRY_MS_MAX)
    assert broker.bodies() == [b"doubtful"]

    refused_before = broker.send(broker.clock.now_ms + 1000, b"refused")
    broker.store.refusals.append(BUSY)
    broker.advance(1000)
    assert broker.recall(refused_before).ok
    broker.advance(RETRY_MS_MAX)
    assert broker.bodies() == [b"doubtful"]


def test_a_recall_is_put_before_delivery_is_stopped_or_not_at_all(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T5: this broker may be the master again, and another one have delivered the message in between."""
    handle = broker.send(NOW_MS + 9000, b"x")
    broker.settle()
    run, submit, held = broker.timed._run, broker.store.submit, []
    assert run is not None

    def observed(messages: Sequence[Message], done: PutDone) -> None:
        held.append(run._stepping.locked())  # ``stop`` waits for it
        submit(messages, done)

    monkeypatch.setattr(broker.store, "submit", observed)
    assert broker.recall(handle).ok
    assert held == [True]


def test_a_copy_on_its_way_while_its_hour_is_loaded_is_not_delivered_after_a_recall(broker: Broker) -> None:
    """T5, T6: the recall was dispatched, and is not in memory with the message, which it ended."""
    handle = broker.send(NOW_MS + 3 * HOUR_MS, b"recalled")
    for _ in range(60):
        broker.advance(run.LOOK_MS)
    broker.settle()
    assert broker.recall(handle).ok
    broker.store.dispatched_to = len(broker.store.log.records)
    first = decode_record(broker.store.log.records[0].record)
    assert broker.store.put(rolled_message(first, decode_handle(handle).origin, None)).ok
    broker.clock.now_ms += 2 * HOUR_MS - run.LOOK_MS
    broker.settle()  # loads the hour
    broker.store.dispatched_to = None
    broker.store.dispatch()
    broker.advance(2 * HOUR_MS)
    assert broker.bodies() == []


def test_a_message_that_waits_longer_than_half_the_retention_is_stored_again(broker: Broker) -> None:
    """T6: the copy counts, the old record is needed no more, and a recall by the first handle finds it."""
    kept, recalled = broker.send(NOW_MS + 20 * HOUR_MS, b"kept"), broker.send(NOW_MS + 20 * HOUR_MS, b"recalled")
    for _ in range(3 * 60):
        broker.advance(run.LOOK_MS)
    copies = [one for one in broker.store.log.records if b"TIMER_ORIGIN" in one.head.properties]
    assert len(copies) == 4  # each message twice in three hours, with a retention of two
    broker.store.timers._count_again()
    assert broker.store.timers.needed_from(1 << 60) == copies[-2].head.offset
    assert broker.recall(recalled).ok
    successor = broker.fail_over()
    successor.advance(21 * HOUR_MS)
    assert successor.bodies() == [b"kept"]
    with pytest.raises(Refusal):
        successor.recall(kept)
    successor.timed.stop()


def test_what_is_loaded_meanwhile_is_not_stored_again(broker: Broker) -> None:
    """T4, T6: a copy of a message that is on its way, or delivered, would be delivered, too."""
    count = 3 * run.ROLLED_AT_ONCE
    for number in range(count):
        broker.send(NOW_MS + 20 * HOUR_MS, b"%d" % number)
    broker.clock.now_ms += 2 * HOUR_MS

    def copies() -> int:
        return sum(b"TIMER_ORIGIN" in one.head.properties for one in broker.store.log.records)

    while not copies():
        broker.timed.step()
    assert copies() == run.ROLLED_AT_ONCE
    broker.advance(18 * HOUR_MS)
    broker.advance(run.LOOK_MS)
    assert copies() == run.ROLLED_AT_ONCE
    assert sorted(broker.bodies()) == sorted(b"%d" % number for number in range(count))


def test_what_the_store_refuses_for_now_comes_later_and_what_it_never_takes_is_skipped(broker: Broker) -> None:
    for number in range(3):
        broker.send(NOW_MS + 1000, b"%d" % number)
    broker.settle()
    broker.store.refusals += [BUSY, BUSY, ILLEGAL, ILLEGAL]
    for _ in range(8):
        broker.advance(RETRY_MS_MAX)
    assert broker.bodies() == [b"1", b"2"]
    assert (broker.timed.counts().delivered, broker.timed.counts().skipped) == (2, 1)


def test_messages_of_a_topic_that_was_deleted_meanwhile_are_dropped(broker: Broker) -> None:
    broker.send(NOW_MS + 1000, b"old")
    broker.state.tables.apply(DeleteTopic("T", (), (QueueOffset(TIMED_TOPIC, 0, 1),)))
    broker.state.tables.apply(PutTopic(TopicConfig("T")))
    broker.send(NOW_MS + 1000, b"new")
    broker.advance(1000)
    assert (broker.bodies(), broker.timed.counts().dropped) == ([b"new"], 1)


def test_many_are_delivered_in_batches_and_no_faster_than_is_set() -> None:
    """T3: at most ``timed_bytes_per_s_max``, so that sends have their share of the disk."""
    broker = Broker(WallClock(NOW_MS))
    broker.timed = TimedService(replace(CONFIG, timed_bytes_per_s_max=MIB), broker.store, broker.state, broker.clock)
    broker.timed.start()
    for number in range(3 * BATCH):
        broker.send(NOW_MS + 1000, b"%06d" % number + bytes(10_000), key="AB")
    broker.settle()
    took = [0]
    while len(broker.delivered()) < 3 * BATCH:
        broker.advance(100)
        took[0] += 100
        assert took[0] < 60_000
    assert 1000 + 2000 <= took[0] <= 1000 + 6000
    assert broker.bodies() == sorted(broker.bodies())
    broker.timed.stop()


def test_a_clock_that_was_set_back_takes_nothing_back(broker: Broker) -> None:
    """T9: nothing is delivered again, and what is sent for a time that was reached before comes at once."""
    broker.send(NOW_MS + 10_000, b"a")
    broker.clock.skew_ms = 2 * HOUR_MS
    broker.advance(1000)
    assert broker.bodies() == [b"a"]
    broker.send(NOW_MS + 2 * HOUR_MS + 500, b"b")
    broker.advance(1000)
    broker.clock.skew_ms = 0
    broker.send(NOW_MS + HOUR_MS, b"c")
    broker.advance(1000)
    broker.advance(PROGRESS_INTERVAL_MS)
    successor = broker.fail_over()
    successor.send(NOW_MS + HOUR_MS, b"d")
    successor.advance(1000)
    assert successor.bodies() == [b"a", b"b", b"c", b"d"]
    successor.timed.stop()


def test_what_waits_is_listed_by_due_time_on_any_member(broker: Broker) -> None:
    """Those delivered and recalled are not; an answer goes on where the one before ended."""
    for number in range(6):
        broker.send(NOW_MS + 1000 + number // 2 * HOUR_MS, b"%d" % number, topic="TU"[number % 2])
    gone = broker.send(NOW_MS + HOUR_MS, b"gone")
    broker.advance(1000)
    broker.advance(PROGRESS_INTERVAL_MS)
    assert broker.recall(gone).ok
    store, state = broker.store, broker.state
    found = list_timed(store, state, CONFIG.name, count=1)
    assert ([one.message_id for one in found.messages], found.next_ms) == (["32"], NOW_MS + 1000 + HOUR_MS)
    rest = list_timed(store, state, CONFIG.name, begin=(found.next_ms, found.next_offset))
    assert ([one.message_id for one in rest.messages], rest.next_ms) == (["33", "34", "35"], -1)
    assert [one.due_ms for one in list_timed(store, state, CONFIG.name, topic="U").messages] == [
        NOW_MS + 1000 + HOUR_MS,
        NOW_MS + 1000 + 2 * HOUR_MS,
    ]
    (one,) = list_timed(store, state, CONFIG.name, key="34").messages
    assert broker.recall(one.handle).ok
    assert list_timed(store, state, CONFIG.name, key="34").messages == []


def test_a_list_is_bounded_also_if_all_are_due_at_once(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are asked for and looked at; half a million may be due at one moment."""
    monkeypatch.setattr(listing, "LISTED_MAX", 4)
    monkeypatch.setattr(listing, "LOOKED_AT_MAX", 5)
    for number in range(12):
        broker.send(NOW_MS + HOUR_MS, b"%d" % number, topic="TU"[number % 2])
    for topic, counts in (("", [4, 4, 4]), ("U", [2, 3, 1])):
        found, begin, sizes = list[str](), (0, 0), list[int]()
        while begin[0] >= 0:
            page = list_timed(broker.store, broker.state, CONFIG.name, topic=topic, begin=begin, count=999)
            begin = page.next_ms, page.next_offset
            found += [one.message_id for one in page.messages]
            sizes.append(len(page.messages))
        assert sizes == counts
        assert found == [(b"%d" % number).hex().upper() for number in range(12) if not topic or number % 2]
    assert list_timed(broker.store, broker.state, CONFIG.name, count=-5).next_offset == 1
