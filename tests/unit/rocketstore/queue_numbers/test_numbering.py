"""The next offset of every queue survives whatever is deleted: sets of queue numbers in the log."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError
from dledger.monitoring import ConditionKind, Conditions
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.port import NumberingEncoder, PutDone
from rocketstore.config import MessageStoreConfig
from rocketstore.consume_queue.queue import ConsumeQueue, Repeated
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.message.message import Message
from rocketstore.message.record import HEAD_V4_BYTES, decode_record, encode_record
from rocketstore.queue_numbers import SHARE_OF_LOG, LoggedNumbering, RepeatAlarm, decode_numbering, encode_numbering
from rocketstore.store.message_store import MessageStore
from rocketstore.types import (
    QUEUE_NUMBERS_TOPIC,
    BrokerRole,
    GetMessageStatus,
    PutMessageStatus,
    PutResult,
    QueueKey,
    QueueUnit,
    RecordHead,
    StoredPlace,
)
from tests.unit.rocketstore.bench import WAIT_S, bodies, fill, running, small_config

FILE_BYTES = 1000
ALL = 1 << 60


class Log(PlainCommitLog):
    """A log in memory: ``put`` appends a record, ``covers`` of which is where it was made."""

    is_replicated = True
    min_offset = 0

    def __init__(self, begin: int = 0) -> None:
        self.min_offset = self.end = begin
        self.records: dict[int, bytes] = {}
        self.hidden: set[int] = set()
        self.submitted: list[tuple[list[bytes], PutDone]] = []

    def next_file_offset(self, offset: int) -> int:
        return offset - offset % FILE_BYTES + FILE_BYTES

    def read_record(self, offset: int) -> bytes | None:
        return None if offset in self.hidden else self.records.get(offset)

    def directories(self) -> list[str]:
        return ["log"]

    def submit_numbering(self, encode: NumberingEncoder, done: PutDone) -> None:
        self.submitted.append((list(encode(self.end, {("T", 0): 4}, 1 << 16)), done))


class SetQueue(ConsumeQueue):
    """The queue of sets."""

    min_offset = 0

    def __init__(self) -> None:
        self.of_sets: list[QueueUnit] = []

    @property
    def max_offset(self) -> int:
        return len(self.of_sets)

    def unit(self, offset: int) -> QueueUnit | None:
        return self.of_sets[offset] if offset < len(self.of_sets) else None


class Queues(ConsumeQueueTable):
    """That queue, and what others were raised to."""

    def __init__(self) -> None:
        self.sets = SetQueue()
        self.raised: dict[QueueKey, int] = {}

    @property
    def units(self) -> list[QueueUnit]:
        """Where the sets are."""
        return self.sets.of_sets

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self.sets if (topic, queue_id) == (QUEUE_NUMBERS_TOPIC, 0) and self.units else None

    def raise_to(self, next_offsets: Mapping[QueueKey, int]) -> None:
        self.raised |= next_offsets


class Bench:
    """A numbering over a log of its own, as a store wires it."""

    def __init__(self, begin: int = 0, *, continuous: bool = False) -> None:
        self.log, self.queues = Log(begin), Queues()
        self.deleted: dict[QueueKey, int] = {}
        self.start(continuous=continuous)

    def start(self, *, continuous: bool = True) -> None:
        """Also again, with nothing but log and queues."""
        self.numbering = LoggedNumbering(self.log, self.queues, deleted=lambda: self.deleted)
        self.numbering.begin(continuous=continuous)

    def write(self, bodies: Sequence[bytes], *, dispatch: bool = True) -> list[int]:
        """Messages of the topic; their offsets."""
        heads: list[RecordHead] = []
        for body in bodies:
            message = Message(QUEUE_NUMBERS_TOPIC, body, 0)
            message.queue_offset, message.offset = len(self.queues.units), self.log.end
            record = encode_record(message)
            self.log.records[self.log.end] = record
            self.queues.units.append(QueueUnit(self.log.end, len(record), 0))
            heads.append(
                RecordHead(QUEUE_NUMBERS_TOPIC, 0, self.log.end, len(record), 0, 0, message.queue_offset, 0, 0, b"")
            )
            self.log.end += len(record)
        if dispatch:
            self.numbering.append(heads)
        return [head.offset for head in heads]

    def write_set(self, numbers: Mapping[QueueKey, int], *, set_id: int = 1, bytes_max: int = 1 << 16) -> int:
        """A set, dispatched; what it covers."""
        covers = self.log.end
        self.write(encode_numbering(numbers, covers=covers, set_id=set_id, bytes_max=bytes_max))
        return covers


MANY = {(f"T{number}", 0): number + 1 for number in range(20)}


def test_retention_keeps_a_whole_log_until_its_numbers_are_written_down() -> None:
    """A member that fetches a log that has lost its begin would count from less."""
    bench = Bench()
    assert (bench.numbering.keep_from(ALL), bench.numbering.is_known) == (0, True)
    bench.log.end = 1500

    assert bench.write_set({("T", 0): 4}) == 1500
    assert bench.numbering.keep_from(ALL) == 1500
    assert bench.queues.raised == {("T", 0): 4}
    bench.log.end = 2500
    bench.write_set({("T", 0): 5})
    assert bench.numbering.keep_from(ALL) == 2500


def test_a_log_from_before_there_were_numbers_is_cleaned_as_ever() -> None:
    """Its members may wait long for a master that writes them; and a full disk waits for nothing."""
    assert Bench(500).numbering.keep_from(ALL) is None
    assert Bench(0).numbering.keep_from(ALL, writable=False) is None


def test_a_set_counts_once_all_its_parts_are_there() -> None:
    bench = Bench()
    parts = encode_numbering(MANY, covers=0, set_id=1, bytes_max=150)
    assert len(parts) > 3
    bench.write(parts[:-1])
    assert bench.numbering.keep_from(ALL) == 0
    covers = bench.write_set(MANY, set_id=2, bytes_max=150)
    bench.write(parts[-1:])  # of the first one, which was interrupted
    assert bench.numbering.keep_from(ALL) == covers
    assert bench.queues.raised == MANY


def test_a_part_that_comes_twice_stands_for_no_other() -> None:
    """Dispatch repeats a batch of which the last part could not be taken."""
    bench = Bench()
    first, second, *rest = encode_numbering(MANY, covers=0, set_id=1, bytes_max=100)
    bench.write([first, second])

    bench.write([second, *rest[:-1]])

    assert bench.numbering.keep_from(ALL) == 0
    assert bench.numbering._covered is None


def test_parts_of_two_sets_make_none() -> None:
    """Neither of them says of all queues where they go on, so retention may not go up to either; nor after a start."""
    bench = Bench(500)
    covers = bench.write_set({("T1", 0): 1}, set_id=1)
    first, second = (encode_numbering(MANY, covers=9999, set_id=set_id, bytes_max=150) for set_id in (2, 3))
    bench.write([*first[:-1], second[-1]])
    dispatched = bench.numbering.keep_from(ALL)
    bench.start()

    assert bench.numbering.restore()

    assert (dispatched, bench.numbering.keep_from(ALL)) == (covers, covers)


def test_a_set_with_a_part_that_makes_no_sense_counts_after_no_start() -> None:
    """It does not say of all queues where they go on."""
    bench = Bench(500)
    covers = bench.write_set({("T1", 0): 1}, set_id=1)
    first, _, *rest = encode_numbering(MANY, covers=9999, set_id=2, bytes_max=150)
    bench.write([first, b"of a later version", *rest])
    bench.start()

    assert bench.numbering.restore()

    assert bench.numbering.keep_from(ALL) == covers


@pytest.mark.parametrize("bytes_max", [150, 1 << 16])
def test_a_start_takes_the_newest_whole_set(bytes_max: int) -> None:
    """Raised queues have no files, so nothing else remembers them."""
    bench = Bench(500)
    bench.write_set({("old", 0): 7}, set_id=1)
    covers = bench.write_set(MANY, set_id=2, bytes_max=bytes_max)
    bench.write(encode_numbering(MANY, covers=9999, set_id=3, bytes_max=150)[:-1])
    bench.queues.raised.clear()
    bench.start()

    assert bench.numbering.restore()

    assert (bench.numbering.keep_from(ALL), bench.queues.raised) == (covers, MANY)


def test_numbers_that_may_not_be_read_yet_hold_retention_back_and_are_read_later() -> None:
    """A restarted member has forgotten what is committed; its queues know more."""
    bench = Bench(500)
    covers = bench.write_set(MANY)
    bench.log.hidden.update(bench.log.records)
    bench.start()

    assert not bench.numbering.restore()
    assert bench.numbering.keep_from(ALL) == 0
    with pytest.raises(CorruptLogError, match="cannot read the newest"):
        bench.numbering.require()

    bench.log.hidden.clear()
    bench.numbering.require()
    assert bench.numbering.keep_from(ALL) == covers


def test_a_set_is_not_taken_before_what_lies_before_it_was_dispatched_again() -> None:
    """It raises queues, which then take no message from before it: those would be hidden for good."""
    bench = Bench(500)
    covers = bench.write_set(MANY)
    bench.queues.raised.clear()
    bench.start()
    bench.numbering.restore_behind(3000)

    assert (bench.numbering.keep_from(2999), bench.queues.raised) == (0, {})
    assert (bench.numbering.keep_from(3000), bench.queues.raised) == (covers, MANY)


def test_a_record_that_makes_no_sense_is_passed_over_and_a_damaged_one_is_not() -> None:
    """The one is the same on every member, the other is this disk's."""
    bench = Bench(500)
    covers = bench.write_set(MANY)
    bench.write([b"from a stranger"])
    bench.start()
    assert bench.numbering.restore()
    assert bench.numbering.keep_from(ALL) == covers

    last = max(bench.log.records)
    damaged = bytearray(bench.log.records[last])
    damaged[HEAD_V4_BYTES + 2] ^= 1
    bench.log.records[last] = bytes(damaged)
    bench.start()
    with pytest.raises(CorruptLogError, match="queue numbers"):
        bench.numbering.restore()


def test_queues_that_were_removed_on_purpose_are_not_made_again() -> None:
    """Their numbering is kept beside the log; those that came again and went on are raised."""
    bench = Bench()
    bench.deleted = {("gone", 0): 5, ("again", 0): 5}
    bench.write_set({("gone", 0): 5, ("again", 0): 6})
    assert bench.queues.raised == {("again", 0): 6}


def test_numbers_are_known_again_after_a_jump_once_a_set_came_by(caplog: pytest.LogCaptureFixture) -> None:
    """A new log behind what this member had: what lay between may have been the last of a queue."""
    bench = Bench()
    bench.numbering.jumped()
    assert (bench.numbering.is_known, bench.numbering.keep_from(ALL)) == (False, None)
    bench.numbering.require()
    assert "may restart at 0" in caplog.text
    bench.write_set(MANY)
    assert bench.numbering.is_known


def test_a_set_is_due_when_the_log_has_gone_on_to_another_file() -> None:
    """So that retention, which removes whole files, finds one in the last file or the one before."""
    bench = Bench()
    assert [bench.numbering.is_due(position) for position in (0, 999, 1000)] == [False, False, True]
    assert Bench(500).numbering.is_due(500)  # a log that has none

    bench.numbering.publish()
    assert not bench.numbering.is_due(1000)
    _, done = bench.log.submitted.pop()
    done([PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, None, "not_applied")])
    assert bench.numbering.is_due(1000)

    bench.numbering.publish()
    _, done = bench.log.submitted.pop()
    done([PutResult(PutMessageStatus.PUT_OK, StoredPlace(1100, 100, 0, 0, 0))])
    assert [bench.numbering.is_due(position) for position in (1999, 2000)] == [False, True]


def test_sets_stay_a_small_part_of_the_log() -> None:
    """Also where files are small and queues are many."""
    bench = Bench()
    covers = bench.write_set(MANY)
    assert not bench.numbering.is_due(covers + SHARE_OF_LOG * 300)
    assert bench.numbering.is_due(covers + SHARE_OF_LOG * 600)


def test_messages_without_a_place_are_told_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """Once per queue as an error, and as a condition that holds."""
    conditions = Conditions("n0")
    alarm = RepeatAlarm(conditions)
    for first in (3, 4):
        alarm.repeated(Repeated("T", 1, first, 1, 5, 700))

    (condition,) = conditions.now()
    assert (alarm.count, condition.kind, condition.subject) == (2, ConditionKind.MISNUMBERED, "T/1")
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


# --- a plain broker -------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> MessageStoreConfig:
    return small_config(tmp_path, file_reserved_time=0)


def clean(store: MessageStore) -> int:
    """One round, by request, on this thread alone: the first of the store's own thread may still be to come."""
    assert store._rounds._cleaning.stop(WAIT_S)
    store._rounds.cleaner.request()
    return store._rounds.cleaner.clean()


def expire(store: MessageStore, offset: int) -> None:
    """Fill the log and clean it until the record at ``offset`` is gone."""
    while store.log.min_offset <= offset:
        fill(store, 1, topic="busy", size=5000)
        clean(store)


def put_rare(store: MessageStore, count: int = 5) -> int:
    results = store.put_many([Message("rare", b"x", 0) for _ in range(count)])
    assert results[-1].stored is not None
    return results[-1].stored.offset


@pytest.mark.parametrize("removed", ["consumequeue/rare", "consumequeue", "checkpoint"])
def test_a_plain_broker_goes_on_counting_whatever_somebody_removed(config: MessageStoreConfig, removed: str) -> None:
    """Its own advice for a damaged queue is to remove the directory; the groups' offsets stay."""
    with running(config) as store:
        expire(store, put_rare(store))
    path = config.store_path_root_dir / removed
    shutil.rmtree(path) if path.is_dir() else path.unlink()

    with running(config) as store:
        assert (store.min_offset("rare", 0), store.max_offset("rare", 0)) == (5, 5)
        assert store.get("rare", 0, 5, max_count=1).status is GetMessageStatus.OFFSET_OVERFLOW_ONE
        result = store.put(Message("rare", b"7", 0))
        assert result.stored is not None
        assert result.stored.queue_offset == 5
        assert store.wait_dispatched(WAIT_S)
        assert bodies(store, topic="rare", offset=5) == [7]


def test_a_queue_without_files_is_remembered_over_restarts(config: MessageStoreConfig) -> None:
    """Clean ones, after which nothing of the log is read again."""
    with running(config) as store:
        expire(store, put_rare(store))
    shutil.rmtree(config.consume_queue_dir / "rare")
    for _ in range(3):
        with running(config) as store:
            assert store.max_offset("rare", 0) == 5
            assert ("rare", 0) in store.queues()
    with running(config) as store:
        expire(store, store.log.max_offset)  # the set that said so is gone: another one says it
        assert store.max_offset("rare", 0) == 5


def test_a_plain_broker_of_an_older_version_writes_numbers_before_anything_more_goes(
    config: MessageStoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log has lost its begin and has none yet: its queue files are all that knows."""
    with running(config) as store:
        last = put_rare(store)
        monkeypatch.setattr(store.log, "_keep_from", lambda: None)
        expire(store, last)
        assert store.max_offset(QUEUE_NUMBERS_TOPIC, 0) == 0
    with running(config) as store:
        expire(store, store.log.min_offset)
        assert store.max_offset(QUEUE_NUMBERS_TOPIC, 0) >= 1
    shutil.rmtree(config.consume_queue_dir / "rare")
    with running(config) as store:
        assert store.max_offset("rare", 0) == 5


def test_a_plain_log_that_expires_nothing_holds_messages_only(config: MessageStoreConfig) -> None:
    """Byte for byte what RocketMQ writes."""
    with running(config) as store:
        fill(store, 100, size=1000)
        store._rounds.cleaner.clean()
        assert store.max_offset(QUEUE_NUMBERS_TOPIC, 0) == 0


def test_retention_that_finds_no_numbers_written_waits(
    config: MessageStoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a failed flush: files that hold the last word on a queue stay."""
    with running(config) as store:
        fill(store, 100, size=1000)
        refused = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, None, "not_applied", "full")
        with monkeypatch.context() as patched:
            patched.setattr(store.log, "submit_numbering", lambda _encode, done: done([refused]))
            assert clean(store) == 0
        assert store.log.min_offset == 0
        assert clean(store) > 0


def test_a_slave_writes_no_numbers_and_removes_what_has_expired(config: MessageStoreConfig) -> None:
    """Its log is its master's, byte for byte; a record of its own would end replication. RocketMQ's master writes no
    numbers at all, and its slaves' disks must not fill up for that.
    """
    with running(config) as store:
        fill(store, 100, size=1000)
    with running(replace(config, broker_role=BrokerRole.SLAVE)) as store:
        end = store.log.end_offset
        assert clean(store) > 0
        assert store.log.end_offset == end
        store._rounds.clean()
        assert store.log.end_offset == end


def test_a_slave_writes_no_numbers_for_files_that_its_masters_numbers_hold_back(config: MessageStoreConfig) -> None:
    """They wait for the master's next numbers."""
    with running(config) as store:
        put_rare(store)
        fill(store, 100, size=1000)
        assert clean(store) > 0
        fill(store, 100, size=1000)
    with running(replace(config, broker_role=BrokerRole.SLAVE)) as store:
        begin, end = store.log.min_offset, store.log.end_offset
        clean(store)
        assert store.log.is_held_back(now_ms=store._derived.clock.wall_ms(), immediately=True)
        assert store.log.min_offset >= begin
        assert store.log.end_offset == end


def test_a_promoted_slave_that_has_removed_files_writes_the_numbers(config: MessageStoreConfig) -> None:
    """A new slave gets no message of some queues, and would count them from 0 if it became master."""
    with running(config) as store:
        put_rare(store)
        fill(store, 100, size=1000)
    with running(replace(config, broker_role=BrokerRole.SLAVE)) as store:
        assert clean(store) > 0
    with running(config) as store:
        store._rounds.clean()
        assert store.wait_dispatched(WAIT_S)
        records = store.get(QUEUE_NUMBERS_TOPIC, 0, 0, max_count=32).records
        assert {decode_numbering(decode_record(one).body).next_offsets["rare", 0] for one in records} == {5}


def test_a_slave_keeps_what_its_masters_numbers_do_not_cover() -> None:
    """Once its master has written some, there will be more."""
    bench = Bench()
    bench.write([b""])
    covers = bench.write_set({("T", 0): 4})

    assert bench.numbering.keep_from(ALL, writable=False) == covers


def test_a_removed_topic_keeps_its_numbering_and_stays_removed(config: MessageStoreConfig) -> None:
    """Its end is in the sets as well, which must not bring its queue back."""
    with running(config) as store:
        last = put_rare(store)
        store.wait_dispatched(WAIT_S)
        store.delete_topic("rare")
        expire(store, last)
        assert ("rare", 0) not in store.queues()
    with running(config) as store:
        assert ("rare", 0) not in store.queues()
        result = store.put(Message("rare", b"x", 0))
        assert result.stored is not None
        assert result.stored.queue_offset == 5
