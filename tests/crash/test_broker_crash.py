"""Crash enumeration of a plain broker without its service: retention, deleted topics, state, delays, repairs.

As ``test_message_store_crash``, over what happens to a store besides puts. For every disk that can result, the broker
opens by itself, and

- what was acknowledged after its flush is there: messages whose log file retention had not begun to remove, topics,
  offsets of consumers;
- nothing is there that was never put, no queue has a gap, the index finds what the queues hold;
- numbering goes on, also of a deleted topic that comes again, and delayed delivery is noted of what was delivered only.

By default every tenth crash is looked at, and all in which a file came, went or was renamed just before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dledger.clock import Clock
from rocketstore.broker.schedule import ScheduleService
from rocketstore.config import MessageStoreConfig
from rocketstore.index.service import IndexDamagedError
from rocketstore.message.message import DelayLevels, Message
from rocketstore.message.record import decode_record
from rocketstore.state.broker_state import BrokerState, StateSettings
from rocketstore.state.changes import TopicConfig
from rocketstore.store.message_store import MessageStore
from rocketstore.types import FlushDiskType, GetMessageStatus
from tests.crash.crash_fs import Change, CrashState, RecordingFs, crash_states
from tests.crash.test_message_store_crash import MappedSlotsFs, tiny_config
from tests.support.damage import turn
from tests.support.sweeps import fewer, thinned
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import FOREVER_MS, WAIT_S, make_store

QUEUES = 2
LEVEL = 1
AT_ONCE = DelayLevels((0,))
Place = tuple[str, int, int]


class FarClock(Clock):
    """Stands where every file is old."""

    def wall_ms(self) -> int:
        return 4_000_000_000_000


@dataclass(frozen=True, slots=True)
class Put:
    """A message: where it is, what it says, and after how many changes it was acknowledged."""

    place: Place
    body: bytes
    offset: int
    acked: int


@dataclass
class Broker:
    """A store with its state and delayed delivery, as ``BrokerServer`` wires them."""

    store: MessageStore
    state: BrokerState
    schedule: ScheduleService

    def read(self, topic: str, queue: int) -> dict[int, bytes]:
        """What a queue holds, by offset."""
        found: dict[int, bytes] = {}
        at = max(0, self.store.min_offset(topic, queue))
        while (result := self.store.get(topic, queue, at, max_count=32)).status is GetMessageStatus.FOUND:
            for record in result.records:
                message = decode_record(record)
                assert (message.topic, message.queue_id) == (topic, queue)
                found[message.queue_offset] = message.body
            at = result.next_offset
        return found

    def with_key(self, topic: str, key: str) -> list[bytes]:
        """What the index finds, once a damaged file of it is built again."""
        found: list[bytes] = []

        def asked() -> bool:
            try:
                found[:] = [decode_record(one).body for one in self.store.query(topic, key, 64, 0, FOREVER_MS)]
            except IndexDamagedError:
                return False
            return True

        wait_until(asked, "the index is whole", WAIT_S)
        return found


@contextmanager
def broker_on(config: MessageStoreConfig, fs: RecordingFs | None = None, *, delays: bool = False) -> Iterator[Broker]:
    """One that runs."""
    clock = FarClock()
    store = make_store(config, fs=fs, clock=clock)
    state = BrokerState(
        store, config.config_dir, clock=clock, fs=store._derived.fs, settings=StateSettings(accept_incomplete=True)
    )
    schedule = ScheduleService(store, state, AT_ONCE, clock)
    try:
        store.load()
        state.load()
        state.start()
        store.start()
        state.catch_up()
        if delays:
            schedule.start()
        yield Broker(store, state, schedule)
    finally:
        schedule.stop()
        state.shutdown()
        store.shutdown()


@dataclass
class Recorder:
    """Drives a broker on a recorded disk and keeps what was acknowledged when."""

    config: MessageStoreConfig
    fs: RecordingFs = field(default_factory=MappedSlotsFs)
    puts: list[Put] = field(default_factory=list)
    committed: list[tuple[int, int]] = field(default_factory=list)
    """(number of changes, offset) of group g in queue 0 of T, at each acknowledgement."""
    deletions: list[tuple[int, int]] = field(default_factory=list)
    """(number of changes before, after) of each deletion of topic T."""
    topics: list[int] = field(default_factory=list)
    """Number of changes when topic T was made."""

    def put(self, broker: Broker, count: int, topic: str = "T") -> None:
        """By turns to each queue."""
        for _ in range(count):
            number = len(self.puts)
            body, queue = b"%d" % number, number % QUEUES
            result = broker.store.put(Message(topic, body.ljust(40, b"."), queue, {"KEYS": f"k{number}"}))
            assert result.stored is not None
            assert result.ok
            place = (topic, queue, result.stored.queue_offset)
            self.puts.append(Put(place, body.ljust(40, b"."), result.stored.offset, len(self.fs.changes)))
        assert broker.store.wait_dispatched(WAIT_S)

    def make_topic(self, broker: Broker) -> None:
        """Topic T."""
        assert broker.state.wait(lambda done: broker.state.put_topic(TopicConfig("T", QUEUES, QUEUES), done)).ok
        self.topics.append(len(self.fs.changes))

    def commit(self, broker: Broker, offset: int) -> None:
        """Of group g."""
        assert broker.state.wait(lambda done: broker.state.commit_offsets("g", [("T", 0, offset)], done=done)).ok
        self.committed.append((len(self.fs.changes), offset))

    def delete_topic(self, broker: Broker) -> None:
        """Topic T."""
        before = len(self.fs.changes)
        assert broker.state.wait(lambda done: broker.state.delete_topic("T", done)).ok
        broker.store.delete_topic("T")
        self.deletions.append((before, len(self.fs.changes)))

    def expire(self, broker: Broker) -> None:
        """Until the log begins later."""
        before = broker.store.log.min_offset

        def gone() -> bool:
            broker.store.request_clean()
            return broker.store.log.min_offset > before

        wait_until(gone, "a file goes", WAIT_S)

    def damage(self, path: Path, at: int) -> None:
        """A bit turns, on the disk."""
        turn(path, at)
        inode, turned = self.fs.inode(path), path.read_bytes()[at : at + 1]
        self.fs.changes += [Change("write", path, inode, at, turned), Change("sync", path, inode)]

    def removed_before(self, at: int) -> set[int]:
        """Where the log files began that were removed, or were about to be, before that change."""
        gone = [one.path for one in self.fs.changes[: at + 1] if one.kind == "unlink"]
        return {int(path.name) for path in gone if path.parent.name == "commitlog" and path.name.isdecimal()}


def _retention(run: Recorder) -> None:
    with broker_on(run.config, run.fs) as broker:
        run.make_topic(broker)
        run.put(broker, 14)
        broker.store.flush()
        run.put(broker, 4)
        broker.state.flush()
        run.expire(broker)
        run.put(broker, 3)
    with broker_on(run.config, run.fs) as broker:
        run.put(broker, 8)
        run.expire(broker)
        run.put(broker, 2)


def _deleted_topic(run: Recorder) -> None:
    with broker_on(run.config, run.fs) as broker:
        run.make_topic(broker)
        run.put(broker, 7)
        broker.store.flush()
        run.put(broker, 2)
        run.commit(broker, 3)
        run.delete_topic(broker)
        run.put(broker, 2, "U")
        run.make_topic(broker)
        run.put(broker, 5)
        broker.store.flush()


def _state(run: Recorder) -> None:
    with broker_on(run.config, run.fs) as broker:
        run.make_topic(broker)
        run.put(broker, 6)
        run.commit(broker, 1)
        broker.state.flush()
        run.commit(broker, 2)
        broker.store.flush()
        run.commit(broker, 3)
    with broker_on(run.config, run.fs) as broker:
        run.put(broker, 2)
        run.commit(broker, 4)
        broker.state.flush()


def _delayed(run: Recorder) -> None:
    with broker_on(run.config, run.fs, delays=True) as broker:
        run.make_topic(broker)
        for number in range(6):
            assert broker.store.put(Message("D", b"late %d" % number, 0, {"DELAY": str(LEVEL)})).ok
            wait_until(lambda count=number: len(broker.read("D", 0)) > count, "delivery", WAIT_S)  # type: ignore[misc]
            if number == 2:
                broker.store.flush()
                broker.state.flush()


def _repair(run: Recorder) -> None:
    with broker_on(run.config, run.fs) as broker:
        run.make_topic(broker)
        run.put(broker, 12)
        broker.store.flush()
        for queue in range(QUEUES):
            run.damage(run.config.consume_queue_dir / "T" / str(queue) / f"{0:020d}", 25 + queue)
        first = min(run.config.index_dir.iterdir())
        run.damage(first, first.stat().st_size - 30)
        assert all(len(broker.read("T", queue)) == 6 for queue in range(QUEUES))
        assert all(len(broker.with_key("T", f"k{number}")) == 1 for number in range(12))
        run.put(broker, 3)
        broker.store.flush()


SCENARIOS: list[Callable[[Recorder], None]] = [_retention, _deleted_topic, _state, _delayed, _repair]


def _look(run: Recorder, broker: Broker, at: int) -> None:
    """Compare with what had to survive a crash before change ``at``."""
    removed = run.removed_before(at)
    size = run.config.mapped_file_size_commit_log
    kept = [one for one in run.puts if one.acked <= at and one.offset - one.offset % size not in removed]
    deleted = [before for before, _ in run.deletions if before <= at]
    for topic in ("T", "U"):
        for queue in range(QUEUES):
            bodies = {one.place[2]: one.body for one in run.puts if one.place[:2] == (topic, queue)}
            found = broker.read(topic, queue)
            begin = min(found, default=0)
            assert list(found) == list(range(begin, begin + len(found)))
            assert all(bodies[offset] == body for offset, body in found.items())
            needed = [one for one in kept if one.place[:2] == (topic, queue)]
            if topic == "T":  # of a topic that was deleted the old messages may be there or not
                needed = [one for one in needed if not any(one.acked <= before for before in deleted)]
            assert {one.place[2] for one in needed} <= set(found)
            for one in needed[:2] + needed[-1:]:
                number = one.body.rstrip(b".").decode()
                assert broker.with_key(topic, f"k{number}") == [one.body]
            acked = [one.place[2] for one in run.puts if one.acked <= at and one.place[:2] == (topic, queue)]
            _put_next(broker, topic, queue, max(acked, default=-1) + 1, len(bodies))
    _look_at_state(run, broker, at, deleted)


def _put_next(broker: Broker, topic: str, queue: int, at_least: int, at_most: int) -> None:
    """The next message gets an offset that nobody was told."""
    result = broker.store.put(Message(topic, b"next", queue))
    assert result.stored is not None
    assert at_least <= result.stored.queue_offset <= at_most


def _look_at_state(run: Recorder, broker: Broker, at: int, deleted: list[int]) -> None:
    offset, known = broker.state.offset("g", "T", 0), [one for when, one in run.committed if when <= at]
    if not deleted:
        assert offset >= max(known, default=-1)
        if any(when <= at for when in run.topics):
            assert broker.state.topic("T") == TopicConfig("T", QUEUES, QUEUES)
    assert offset <= max((one for _, one in run.committed), default=-1)
    delivered = broker.read("D", 0)
    assert broker.state.delay_offset(LEVEL) <= len(delivered)
    assert all(body == b"late %d" % number for number, body in delivered.items())


def _crashes(changes: list[Change], *, thorough: bool) -> Iterator[int]:
    for at in range(len(changes) + 1):
        if thorough or at % 10 == 0 or (at and changes[at - 1].kind in ("rename", "unlink", "create")):
            yield at


def check_all(tmp_path: Path, scenario: Callable[[Recorder], None], *, thorough: bool) -> int:
    """Check what crashes leave; gives how many disks were opened."""
    source, disk = tmp_path / "source", tmp_path / "disk"
    config = replace(tiny_config(source, FlushDiskType.SYNC_FLUSH), file_reserved_time=0, message_delay_level="1s")
    run = Recorder(config)
    scenario(run)
    changes = run.fs.changes
    seen: set[tuple[bytes, int]] = set()
    for at in thinned(list(_crashes(changes, thorough=thorough)), 5):
        known = sum(one.acked <= at for one in run.puts) + sum(when <= at for when, _ in run.committed)
        for state in crash_states(changes, at, lost_max=2 if thorough else 1, subsets=2 if thorough else 0):
            if (state.content, known) in seen:
                continue
            seen.add((state.content, known))
            try:
                _check(run, state, source, disk)
            except BaseException as error:
                error.add_note(f"crash before change {at} of {len(changes)}, lost {state.lost}: {changes[at : at + 1]}")
                raise
    return len(seen)


def _check(run: Recorder, state: CrashState, source: Path, disk: Path) -> None:
    state.write_to(source, disk)
    disk.mkdir(exist_ok=True)
    with broker_on(replace(run.config, store_path_root_dir=disk)) as broker:
        _look(run, broker, state.at)
    shutil.rmtree(disk)


@pytest.mark.sweep
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__.strip("_"))
def test_no_crash_loses_what_a_broker_acknowledged(tmp_path: Path, scenario: Callable[[Recorder], None]) -> None:
    """Whatever it was doing."""
    assert check_all(tmp_path, scenario, thorough=False) > fewer(20, 5)


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__.strip("_"))
def test_no_crash_at_any_change_loses_what_a_broker_acknowledged(
    tmp_path: Path, scenario: Callable[[Recorder], None]
) -> None:
    """All of them, with more of what was not synced lost."""
    assert check_all(tmp_path, scenario, thorough=True) > 50
