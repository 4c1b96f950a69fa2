"""Delayed messages: what is delivered, when, and what a failover repeats."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, ShutdownError
from rocketstore.broker.schedule import BATCH, RETRY_MS, RETRY_MS_MAX, SLEEP_MS_MAX, ScheduleService
from rocketstore.config import DEFAULT_DELAY_LEVELS
from rocketstore.message.message import LOOPBACK, DelayLevels, HostAddress, Message
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import DeleteTopic, PutTopic, QueueOffset, TopicConfig
from rocketstore.state.publisher import StateDone
from rocketstore.state.tables import Tables
from rocketstore.types import SCHEDULE_TOPIC, BrokerRole, GetResult, PutMessageStatus, PutResult
from tests.support.fake_store import FakeStore
from tests.support.waiting import ManualClock, wait_until

DELAYS = DelayLevels.parse(DEFAULT_DELAY_LEVELS)
BUSY = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied")
ILLEGAL = PutResult(PutMessageStatus.MESSAGE_ILLEGAL, outcome="not_applied", reason="too large")
LEVEL_1_MS = 1000


class MemoryState(BrokerState):
    """Progress that outlives a broker."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.progress: dict[int, int] = {}
        self.commits = 0
        self.refuse = False

    def place_for(self, name: str, queue_id: int, waited: QueueOffset) -> int | None:
        return self.tables.place_for(name, queue_id, waited)

    def delay_offset(self, level: int) -> int:
        return self.progress.get(level, 0)

    def commit_delay_offsets(self, offsets: Mapping[int, int], done: StateDone) -> None:
        self.commits += 1
        if self.refuse:
            done(BUSY)
        else:
            self.progress.update(offsets)
            done(PutResult(PutMessageStatus.PUT_OK))

    def wake(self) -> None:
        pass


class SkewedClock(ManualClock):
    """Whose wall clock can be set."""

    skew_ms = 0

    def wall_ms(self) -> int:
        return self.now_ms + self.skew_ms


class Broker:
    """A store with delayed delivery, stepped by hand: its own thread is asleep for as long as nobody wakes it."""

    def __init__(self, clock: SkewedClock) -> None:
        self.clock = clock
        self.store = FakeStore(clock=clock, delay_levels=DELAYS)
        self.state = MemoryState()
        self.schedule = ScheduleService(self.store, self.state, DELAYS, clock)

    def send(self, level: int = 1, body: bytes = b"", topic: str = "T", **properties: str) -> None:
        message = Message(topic, body, 3, {"DELAY": str(level), **properties}, flag=9, reconsume_times=2)
        assert self.store.put(message).ok

    def settle(self) -> None:
        for _ in range(1000):
            before = (self.store.log.end, self.state.commits, self.schedule.progress())
            due_ms = self.schedule.step()
            if (self.store.log.end, self.state.commits, self.schedule.progress()) == before and (
                due_ms is None or due_ms > self.clock.now_ms
            ):
                return
        raise AssertionError("delivery never comes to rest")

    def advance(self, ms: int) -> None:
        self.clock.now_ms += ms
        self.settle()

    def delivered(self, topic: str = "T", queue_id: int = 3) -> list[Message]:
        records: list[bytes] = []
        while found := self.store.get(topic, queue_id, len(records), max_count=1000).records:
            records += found
        return [decode_record(record) for record in records]

    def bodies(self) -> list[bytes]:
        return [message.body for message in self.delivered()]


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker(SkewedClock())
    yield broker
    broker.schedule.stop()


def test_a_message_is_delivered_when_it_is_due_and_not_before(broker: Broker) -> None:
    broker.schedule.start()
    broker.send(1)
    broker.settle()
    broker.advance(LEVEL_1_MS - 1)
    assert broker.bodies() == []

    broker.advance(1)
    assert broker.bodies() == [b""]


@pytest.mark.parametrize("level", range(1, 19))
def test_every_level_waits_for_its_own_delay(broker: Broker, level: int) -> None:
    broker.send(level)
    broker.schedule.start()
    broker.settle()
    broker.advance(DELAYS.delay_ms(level) - 1)
    assert broker.bodies() == []

    broker.advance(1)
    assert broker.bodies() == [b""]


def test_the_real_message_is_delivered_without_its_delay(broker: Broker) -> None:
    """RocketMQ leaves DELAY in the stored properties: a consumer that sends the message back delays it again."""
    broker.send(1, b"body", KEYS="k", TAGS="tag", UNIQ_KEY="id", WAIT="false")
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)

    (message,) = broker.delivered()
    assert (message.topic, message.queue_id, message.body) == ("T", 3, b"body")
    assert message.properties == {"KEYS": "k", "TAGS": "tag", "UNIQ_KEY": "id"}
    assert (message.flag, message.reconsume_times, message.born_host) == (9, 2, LOOPBACK)


def test_a_delivered_record_names_the_broker_that_has_it(broker: Broker) -> None:
    host = HostAddress(b"\x0a\0\0\1", 10911)
    schedule = ScheduleService(broker.store, broker.state, DELAYS, broker.clock, store_host=host)
    broker.send(1)
    broker.schedule = schedule
    schedule.start()
    broker.advance(LEVEL_1_MS)

    assert broker.delivered()[0].store_host == host


def test_messages_of_a_level_are_delivered_in_order(broker: Broker) -> None:
    broker.schedule.start()
    for number in range(3 * BATCH):
        broker.send(1, b"%d" % number)
        broker.clock.now_ms += 1
    broker.settle()
    broker.advance(LEVEL_1_MS)

    assert broker.bodies() == [b"%d" % number for number in range(3 * BATCH)]


def test_a_level_with_much_to_do_leaves_the_others_their_turn(broker: Broker) -> None:
    for _ in range(10 * BATCH):
        broker.send(1, topic="Many")
    broker.send(2, b"lonely")
    broker.clock.now_ms += DELAYS.delay_ms(2)
    broker.schedule.start()

    wait_until(lambda: broker.bodies() == [b"lonely"], "the message of the other level")
    order = [one.head.topic for one in broker.store.log.records if one.head.topic != SCHEDULE_TOPIC]
    assert order.index("T") <= BATCH


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_message_whose_topic_was_deleted_while_it_waited_is_dropped_with_a_word(
    broker: Broker, caplog: pytest.LogCaptureFixture, is_made_anew: bool
) -> None:
    """A topic begins anew: what was sent to a deleted one of its name is not for it. Later messages are."""
    apply = broker.state.tables.apply
    apply(PutTopic(TopicConfig("T")))
    broker.send(1, b"of the deleted topic")
    broker.send(1, b"other", topic="Other")
    apply(DeleteTopic("T", waits=(QueueOffset(SCHEDULE_TOPIC, 0, 2),)))
    if is_made_anew:
        apply(PutTopic(TopicConfig("T")))
        broker.send(1, b"new")
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)
    assert broker.bodies() == ([b"new"] if is_made_anew else [])
    assert [one.body for one in broker.delivered("Other")] == [b"other"]
    assert broker.schedule.dropped == {"T": 1}
    assert "topic T was deleted: 1 delayed messages for it are dropped" in caplog.text
    assert broker.schedule.progress()[1] == ((3, 3) if is_made_anew else (2, 2))


@pytest.mark.parametrize(("read", "write", "gets"), [(8, 2, 3), (2, 2, 1), (2, 8, 3), (1, 2, 0)])
def test_a_message_whose_queue_was_removed_while_it_waited_gets_into_one_that_consumers_read(
    broker: Broker, read: int, write: int, gets: int
) -> None:
    """A queue that may still be read, or may be soon, is kept."""
    broker.send(1, b"x")  # for queue 3
    broker.state.tables.apply(PutTopic(TopicConfig("T", read, write)))
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)
    assert [one.body for one in broker.delivered(queue_id=gets)] == [b"x"]


def test_what_waits_in_a_level_that_the_settings_name_no_longer_is_delivered(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """After the delay of the last level that there is, and with a word."""
    broker.send(1, b"one")
    broker.send(3, b"three")
    two = DelayLevels.parse("1s 2s")
    broker.schedule = ScheduleService(broker.store, broker.state, two, broker.clock)
    broker.schedule.start()
    broker.settle()
    broker.advance(1999)
    assert broker.bodies() == [b"one"]
    broker.advance(1)
    assert broker.bodies() == [b"one", b"three"]
    assert broker.schedule.progress() == {1: (1, 1), 2: (0, 0), 3: (1, 1)}
    assert "delay level 3 is not in messageDelayLevel any more" in caplog.text


def test_a_wall_clock_put_back_delays_nothing_by_more_than_the_level(broker: Broker) -> None:
    """The due time lies further ahead than the level's delay: it counts from now (RocketMQ's clamp)."""
    broker.send(1)
    broker.clock.now_ms -= 500_000
    broker.schedule.start()
    broker.settle()
    broker.advance(LEVEL_1_MS)

    assert broker.bodies() == [b""]


def test_a_wall_clock_that_is_put_back_while_a_message_waits_delays_it_by_no_more(broker: Broker) -> None:
    """Nor does one that is put forward keep it: at the latest, it comes after the whole delay from then on."""
    broker.schedule.start()
    broker.send(1)
    broker.settle()
    broker.clock.skew_ms = -3_600_000
    broker.advance(1)
    broker.advance(LEVEL_1_MS)
    assert broker.bodies() == [b""]
    broker.send(2, b"next")
    broker.clock.skew_ms = 3_600_000
    broker.advance(SLEEP_MS_MAX)
    assert broker.bodies() == [b"", b"next"]


def test_progress_advances_only_after_success_and_a_refused_put_is_repeated(broker: Broker) -> None:
    broker.send(1)
    broker.store.refusals = [BUSY, BUSY]
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)
    assert broker.bodies() == []
    assert broker.schedule.progress()[1] == (0, 1)

    broker.advance(100)
    assert broker.bodies() == []
    broker.advance(199)
    assert broker.bodies() == []
    broker.advance(1)

    assert broker.bodies() == [b""]
    assert broker.schedule.progress()[1] == (1, 1)


def test_each_run_of_refusals_is_told_once_and_begins_with_the_shortest_pause(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """A delivery between them says that the store takes messages again."""
    broker.schedule.start()
    for run in (1, 2):
        broker.send(1)
        broker.store.refusals = [BUSY, BUSY, BUSY]
        broker.advance(LEVEL_1_MS)
        for wait_ms in (RETRY_MS, 2 * RETRY_MS, 4 * RETRY_MS):
            assert len(broker.bodies()) == run - 1
            broker.advance(wait_ms)

        assert len(broker.bodies()) == run
        assert caplog.text.count("was refused") == run


def test_a_put_whose_outcome_is_unknown_is_repeated(broker: Broker) -> None:
    """It may not have been stored: a message too often is better than one that is lost."""
    broker.send(1)
    broker.store.refusals = [PutResult(PutMessageStatus.UNKNOWN_ERROR, outcome="unknown")]
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)
    assert broker.schedule.progress()[1] == (0, 1)

    broker.advance(300)

    assert broker.bodies() == [b""]
    assert broker.schedule.progress()[1] == (1, 1)


def test_a_slow_answer_is_waited_for(broker: Broker) -> None:
    broker.send(1)
    broker.schedule.start()
    broker.store.hold_results = True
    broker.advance(LEVEL_1_MS)
    broker.advance(LEVEL_1_MS)
    assert broker.bodies() == [b""]  # stored, and not stored twice
    assert broker.schedule.progress()[1] == (0, 1)

    broker.store.release_results()
    broker.settle()

    assert broker.bodies() == [b""]
    assert broker.schedule.progress()[1] == (1, 1)


def test_progress_is_written_at_most_once_a_second(broker: Broker) -> None:
    broker.schedule.start()
    for _ in range(40):
        broker.send(1)
        broker.advance(100)
    broker.advance(LEVEL_1_MS)
    broker.advance(LEVEL_1_MS)

    assert broker.state.progress == {1: 40}
    assert broker.state.commits <= 7


def test_progress_that_was_refused_is_written_again(broker: Broker) -> None:
    broker.send(1)
    broker.schedule.start()
    broker.state.refuse = True
    broker.advance(LEVEL_1_MS)
    broker.advance(LEVEL_1_MS)
    broker.state.refuse = False
    broker.advance(LEVEL_1_MS)

    assert broker.state.progress == {1: 1}


def test_stop_writes_progress_and_start_goes_on_there(broker: Broker) -> None:
    for number in range(3):
        broker.send(1, b"%d" % number)
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)
    broker.send(1, b"3")
    broker.schedule.stop()
    assert broker.state.progress == {1: 3}
    broker.schedule.stop()

    broker.schedule.start()
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)

    assert broker.bodies() == [b"0", b"1", b"2", b"3"]


def test_stop_waits_for_the_answer_to_what_is_under_way(broker: Broker) -> None:
    """A clean stop repeats nothing, however late the store answers (here: once it is waited for)."""
    broker.send(1)
    broker.schedule.start()
    broker.store.hold_results = True
    broker.advance(LEVEL_1_MS)
    stopping = threading.Thread(target=broker.schedule.stop)
    stopping.start()
    wait_until(lambda: broker.schedule.step() is None, "the stop to begin")
    assert broker.state.progress == {}

    broker.store.release_results()
    stopping.join(60)
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)

    assert broker.state.progress == {1: 1}
    assert broker.bodies() == [b""]


def test_stop_lands_an_answer_that_no_step_has_seen(broker: Broker) -> None:
    """The answer is there, and the thread has not come to it."""
    broker.send(1)
    broker.schedule.start()
    broker.store.hold_results = True
    broker.advance(LEVEL_1_MS)
    broker.store.release_results()

    broker.schedule.stop()

    assert broker.state.progress == {1: 1}


def test_stop_goes_on_without_an_answer_that_never_comes(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The message may come again then, which is said."""
    monkeypatch.setattr("rocketstore.broker.schedule.FLUSH_TIMEOUT_S", 0.01)
    broker.send(1)
    broker.schedule.start()
    broker.store.hold_results = True
    broker.advance(LEVEL_1_MS)

    broker.schedule.stop()

    assert broker.state.progress == {}
    assert "may be delivered twice" in caplog.text


def test_stop_counts_only_what_the_store_took(broker: Broker) -> None:
    """What was refused late is delivered by the next run."""
    broker.send(1)
    broker.schedule.start()
    broker.store.refusals = [BUSY]
    broker.advance(LEVEL_1_MS)
    broker.schedule.stop()
    assert broker.state.progress == {}

    broker.schedule.start()
    broker.advance(LEVEL_1_MS)

    assert broker.bodies() == [b""]


def test_nothing_is_delivered_after_stop(broker: Broker) -> None:
    broker.send(1)
    broker.schedule.start()
    broker.schedule.stop()
    broker.clock.now_ms += LEVEL_1_MS

    assert broker.schedule.step() is None
    assert broker.bodies() == []


def test_a_deposed_master_writes_no_progress(broker: Broker) -> None:
    broker.send(1)
    broker.schedule.start()
    broker.state.refuse = True
    broker.advance(LEVEL_1_MS)
    broker.store.role = BrokerRole.SLAVE
    broker.state.refuse = False
    broker.schedule.stop()

    assert broker.state.progress == {}


@pytest.mark.parametrize(("noted", "begin"), [(0, 2), (1, 2), (2, 2), (3, 3), (9, 5)])
def test_replicated_progress_is_brought_within_the_queue_and_what_is_missing_is_told(
    broker: Broker, caplog: pytest.LogCaptureFixture, noted: int, begin: int
) -> None:
    """The log of a member that had to make room may begin later than its master's did."""
    for number in range(5):
        broker.send(1, b"%d" % number)
    broker.store.expire(SCHEDULE_TOPIC, 0, 2)
    broker.state.progress = {1: noted}
    broker.schedule.start()
    broker.settle()
    assert broker.schedule.progress()[1] == (begin, 5)
    missing = f"delayed message {noted} of level 1 cannot be delivered: messages up to 1 have expired"
    assert (missing in caplog.text) == (noted < 2)
    assert broker.schedule.skipped == (noted < 2)
    assert ("its progress 9 is beyond its queue's end 5" in caplog.text) == (noted == 9)
    broker.advance(LEVEL_1_MS)
    broker.advance(LEVEL_1_MS)

    assert broker.bodies() == [b"%d" % number for number in range(begin, 5)]
    assert broker.state.progress == {1: 5}


def test_messages_that_expire_before_they_are_delivered_do_not_stop_the_level(broker: Broker) -> None:
    for number in range(5):
        broker.send(1, b"%d" % number)
    broker.schedule.start()
    broker.settle()
    broker.store.expire(SCHEDULE_TOPIC, 0, 2)
    broker.advance(LEVEL_1_MS)

    assert broker.bodies() == [b"2", b"3", b"4"]


def put_waiting(broker: Broker, properties: dict[str, str]) -> None:
    broker.store.put(Message(SCHEDULE_TOPIC, b"odd", 0, properties))


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"REAL_TOPIC": "T"},
        {"REAL_TOPIC": "T", "REAL_QID": "x"},
        {"REAL_TOPIC": "T", "REAL_QID": "-1"},
        {"REAL_TOPIC": "T", "REAL_QID": "99999999999"},
        {"REAL_TOPIC": "RMQ_SYS_TRANS_HALF_TOPIC", "REAL_QID": "0"},
        {"REAL_TOPIC": SCHEDULE_TOPIC, "REAL_QID": "0"},
    ],
)
def test_a_message_that_belongs_nowhere_does_not_stop_the_level(broker: Broker, properties: dict[str, str]) -> None:
    put_waiting(broker, properties)
    broker.send(1, b"next")
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)

    assert broker.bodies() == [b"next"]
    assert broker.schedule.skipped == 1


def test_a_message_that_the_store_never_takes_is_skipped_alone(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = broker.store.submit

    def picky(messages: Sequence[Message], done: Callable[[Sequence[PutResult]], None]) -> None:
        if any(message.body == b"2" for message in messages):
            done([ILLEGAL for _ in messages])
        else:
            submit(messages, done)

    for number in range(5):
        broker.send(1, b"%d" % number)
    monkeypatch.setattr(broker.store, "submit", picky)
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)

    assert broker.bodies() == [b"0", b"1", b"3", b"4"]
    assert broker.schedule.skipped == 1


def test_a_damaged_record_is_skipped_alone(broker: Broker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    get = broker.store.get

    def damaged_get(topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        if topic == SCHEDULE_TOPIC and offset <= 1 < offset + max_count:
            raise CorruptLogError(tmp_path, 1, "planted", "none")
        return get(topic, queue_id, offset, max_count=max_count)

    for number in range(4):
        broker.send(1, b"%d" % number)
    monkeypatch.setattr(broker.store, "get", damaged_get)
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)

    assert broker.bodies() == [b"0", b"2", b"3"]


def test_what_could_not_be_read_yet_is_read_later(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is about to run, or stopping: the message that waits at the level's head is not forgotten."""
    get = broker.store.get

    def not_running(topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        raise ShutdownError("the store is not running")

    broker.send(1, b"waits")
    broker.advance(LEVEL_1_MS)
    monkeypatch.setattr(broker.store, "get", not_running)
    broker.schedule.start()
    broker.schedule.step()
    monkeypatch.setattr(broker.store, "get", get)
    broker.advance(SLEEP_MS_MAX)

    assert broker.bodies() == [b"waits"]


@pytest.mark.parametrize("is_repaired", [True, False])
def test_a_damaged_entry_is_waited_for_if_it_is_repaired(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_repaired: bool
) -> None:
    """It was acknowledged, and other members have it: it is delivered late rather than never."""
    get, damaged = broker.store.get, True

    def damaged_get(topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        if damaged and topic == SCHEDULE_TOPIC and offset <= 1 < offset + max_count:
            raise CorruptLogError(tmp_path, 1, "planted", "none", 7)
        return get(topic, queue_id, offset, max_count=max_count)

    for number in range(4):
        broker.send(1, b"%d" % number)
    broker.store.log.is_repaired = is_repaired
    monkeypatch.setattr(broker.store, "get", damaged_get)
    broker.schedule.start()
    broker.advance(LEVEL_1_MS)
    if is_repaired:
        assert broker.bodies() == [b"0"]
        assert broker.schedule.skipped == 0
    damaged = False
    broker.advance(RETRY_MS_MAX)

    assert broker.bodies() == ([b"0", b"1", b"2", b"3"] if is_repaired else [b"0", b"2", b"3"])


def test_an_idle_service_reads_nothing(broker: Broker) -> None:
    broker.schedule.start()
    broker.settle()
    before = broker.store.gets
    for _ in range(10):
        broker.schedule.step()

    assert broker.store.gets == before


def test_its_thread_delivers_by_itself() -> None:
    """With the machine's clock: woken by the arrival, asleep until the message is due."""
    levels = DelayLevels((20,))
    store = FakeStore(delay_levels=levels, clock=None)
    schedule = ScheduleService(store, MemoryState(), levels, store._clock)
    clock = store._clock
    assert isinstance(clock, ManualClock)
    schedule.start()
    store.put(Message("T", b"", 0, {"DELAY": "1"}))
    clock.now_ms += 20
    store.put(Message("T", b"", 0, {"DELAY": "1"}))
    wait_until(lambda: store.max_offset("T", 0) == 1, "delivery")
    schedule.stop()


def test_the_next_master_goes_on_where_this_one_was(tmp_path: Path) -> None:
    """With the real broker state: progress is a message of the log."""
    clock = ManualClock()
    first = FakeStore(role=BrokerRole.SLAVE, clock=clock, delay_levels=DELAYS)
    second = FakeStore(first.log, role=BrokerRole.SLAVE, clock=clock, delay_levels=DELAYS)
    states = [BrokerState(store, tmp_path / name, clock=clock) for store, name in ((first, "1"), (second, "2"))]
    for state in states:
        state.load()
    states[0].catch_up()
    first.role = BrokerRole.SYNC_MASTER
    schedule = ScheduleService(first, states[0], DELAYS, clock)
    schedule.start()
    for number in range(3):
        first.put(Message("T", b"%d" % number, 0, {"DELAY": "1"}))
    clock.now_ms += LEVEL_1_MS
    wait_until(lambda: schedule.step() is not None and first.max_offset("T", 0) == 3, "delivery")
    clock.now_ms += LEVEL_1_MS
    wait_until(lambda: (schedule.step(), states[0].step()) and states[0].delay_offset(1) == 3, "progress")
    first.role = BrokerRole.SLAVE
    schedule.stop()

    states[1].catch_up()
    second.role = BrokerRole.SYNC_MASTER
    successor = ScheduleService(second, states[1], DELAYS, clock)
    successor.start()
    second.put(Message("T", b"3", 0, {"DELAY": "1"}))
    clock.now_ms += LEVEL_1_MS
    wait_until(lambda: successor.step() is not None and second.max_offset("T", 0) == 4, "delivery")
    second.role = BrokerRole.SLAVE  # nobody steps its state, which would store progress
    successor.stop()

    assert [decode_record(record).body for record in second.get("T", 0, 0, max_count=9).records] == [
        b"0", b"1", b"2", b"3",
    ]  # fmt: skip
    assert successor.runtime_info()["scheduleMessageOffset_1"] == "3,4"


def test_runtime_info_names_every_level(broker: Broker) -> None:
    broker.send(2)

    info = broker.schedule.runtime_info()

    assert len(info) == 18
    assert info["scheduleMessageOffset_2"] == "0,1"
