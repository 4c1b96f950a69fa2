"""Crash enumeration of the whole message store: cut at changes of the disk, with unsynced changes lost.

For every disk that can result, the store opens by itself, and

- every message that was acknowledged after its flush is in its queue, under its offset;
- a queue holds its messages in order, without gap or repeat, and the index finds each exactly once;
- the next message gets the next offset, and opening once more changes nothing.

Disks that hold the same are opened once: most crashes leave what another one left, and recovery leaves what it made of
another disk. The wall clock stands still for that.
"""

from __future__ import annotations

import operator
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dledger.clock import Clock
from rocketstore.commit_log.recovery import LOG_END_FILE
from rocketstore.config import KIB, MessageStoreConfig
from rocketstore.consume_queue import table
from rocketstore.consume_queue.files import QUEUE_ENDS_FILE
from rocketstore.message.message import Message
from rocketstore.store.message_store import MessageStore
from rocketstore.types import FlushDiskType
from tests.crash.crash_fs import Change, CrashState, RecordingFs, crash_states
from tests.support.sweeps import thinned
from tests.unit.rocketstore.bench import WAIT_S, bodies, make_store, small_config, with_key

QUEUES = 2
SLOTS = 4
EVERY_CRASH = slice(None)
SOME_CRASHES = {FlushDiskType.SYNC_FLUSH: slice(0, None, 4), FlushDiskType.ASYNC_FLUSH: slice(2, None, 4)}
Counts = tuple[int, ...]


def tiny_config(root: Path, kind: FlushDiskType) -> MessageStoreConfig:
    """Every kind of file rolls within a few messages."""
    config = small_config(root, flush_disk_type=kind, mapped_file_size_commit_log=KIB, max_hash_slot_num=SLOTS)
    return replace(config, mapped_file_size_consume_queue=80, max_index_num=12)


class StoppedWallClock(Clock):
    """So that the same messages have the same bytes."""

    def wall_ms(self) -> int:
        return 1_700_000_000_000


class MappedSlotsFs(RecordingFs):
    """Index files keep their slots in a mapping, which no call changes: what is there is recorded at every write."""

    def __init__(self) -> None:
        super().__init__()
        self._slots: dict[int, bytes] = {}

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        self._note_slots(fd)
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._note_slots(fd)
        super().sync(fd)

    def _note_slots(self, fd: int) -> None:
        inode, path = self._open[fd]
        if path.parent.name == "index":
            slots = os.pread(fd, SLOTS * 4, 40)
            if slots != self._slots.get(inode, bytes(SLOTS * 4)):
                self._slots[inode] = slots
                self.changes.append(Change("write", path, inode, 40, slots))


@dataclass
class Recorder:
    """Drives a store on a recorded disk and keeps what was acknowledged when."""

    config: MessageStoreConfig
    fs: RecordingFs = field(default_factory=MappedSlotsFs)
    acked: list[tuple[int, Counts]] = field(default_factory=list)
    """(number of changes, messages per queue) at each acknowledgement."""
    counts: list[int] = field(default_factory=lambda: [0] * QUEUES)

    @contextmanager
    def open(self) -> Iterator[MessageStore]:
        """A running store."""
        store = make_store(self.config, fs=self.fs, clock=StoppedWallClock())
        store.load()
        store.start()
        yield store
        store.shutdown()

    def put(self, store: MessageStore, count: int, *, batch: int = 1) -> None:
        """Messages by turns to each queue; the body is the place in the queue, the key says which queue as well."""
        for _ in range(count):
            messages = []
            for _ in range(batch):
                queue_id = sum(self.counts) % QUEUES
                number = self.counts[queue_id]
                self.counts[queue_id] += 1
                key = f"k{number * QUEUES + queue_id}"
                messages.append(Message("T", str(number).encode().ljust(30, b"."), queue_id, {"KEYS": key}))
            results = store.put_many(messages)
            assert all(result.ok for result in results)
            if all(result.outcome == "stored" for result in results):  # else the flush took too long: no promise
                self.acked.append((len(self.fs.changes), tuple(self.counts)))
        assert store.wait_dispatched(WAIT_S)

    def acked_before(self, change: int) -> Counts:
        """What was acknowledged before that change."""
        return next((counts for at, counts in reversed(self.acked) if at <= change), (0,) * QUEUES)


def _rolling(run: Recorder) -> None:
    with run.open() as store:
        run.put(store, 5)
        store.flush()
        run.put(store, 9)
        store.flush()
        run.put(store, 3)


def _batches(run: Recorder) -> None:
    with run.open() as store:
        run.put(store, 2, batch=4)
        store.flush()
        run.put(store, 3, batch=5)


def _reopened(run: Recorder) -> None:
    with run.open() as store:
        run.put(store, 6)
    with run.open() as store:
        run.put(store, 6)
        store.flush()
        run.put(store, 2)


def _unflushed(run: Recorder) -> None:
    """More files of each queue than are looked at in any case, none of them durable."""
    with run.open() as store:
        run.put(store, 1)
        store.flush()
        for _ in range(4):
            run.put(store, 1, batch=9)


SCENARIOS: list[Callable[[Recorder], None]] = [_rolling, _batches, _reopened, _unflushed]


@dataclass
class Checks:
    """Opens what crashes leave, each disk twice, and sees that all is as promised."""

    config: MessageStoreConfig
    at_most: Counts
    found: dict[bytes, Counts] = field(default_factory=dict)
    """What the disks held that were opened, by their content."""
    settled: set[tuple[bytes, Counts]] = field(default_factory=set)
    """The disks, and what was in the queues, of which the second opening is known to change nothing."""

    def check(self, state: CrashState, source: Path, at_least: Counts) -> None:
        """Of every disk one can tell whether it holds enough; what follows from its content is looked at once."""
        content = state.content
        if content not in self.found:
            root = self.config.store_path_root_dir
            state.write_to(source, root)
            counts = self._first(root)
            self._once_more(root, (counts[0] + 1, *counts[1:]))
            self.found[content] = counts
            shutil.rmtree(root)
        assert all(map(operator.le, at_least, self.found[content]))

    def _first(self, root: Path) -> Counts:
        with self._opened(root) as store:
            counts = self._look(store)
            assert all(map(operator.le, counts, self.at_most))
            key = f"k{counts[0] * QUEUES}"
            result = store.put(Message("T", str(counts[0]).encode().ljust(30, b"."), 0, {"KEYS": key}))
            assert result.stored is not None
            assert result.stored.queue_offset == counts[0]
            assert store.wait_dispatched(WAIT_S)
        return counts

    def _once_more(self, root: Path, counts: Counts) -> None:
        settled = (content_of(root), counts)
        if settled not in self.settled:
            with self._opened(root) as store:
                assert self._look(store) == counts
            self.settled.add(settled)

    @contextmanager
    def _opened(self, root: Path) -> Iterator[MessageStore]:
        store = make_store(replace(self.config, store_path_root_dir=root), clock=StoppedWallClock())
        store.load()
        store.start()
        try:
            yield store
        finally:
            store.shutdown()

    def _look(self, store: MessageStore) -> Counts:
        """How many messages each queue holds, which are in order, and in the index once."""
        counts = []
        for queue_id in range(QUEUES):
            numbers = bodies(store, queue_id)
            assert numbers == list(range(len(numbers)))
            assert max(store.min_offset("T", queue_id), 0) == 0
            assert store.max_offset("T", queue_id) == len(numbers)
            for number in numbers:
                assert with_key(store, number * QUEUES + queue_id) == [number]
            counts.append(len(numbers))
        return tuple(counts)


def content_of(root: Path) -> bytes:
    """As ``CrashState.content``, of what is on the disk; all but when the files were changed, which one tells."""
    files = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for name in (QUEUE_ENDS_FILE, LOG_END_FILE):
        ends = Path("config", name)
        files[ends] = re.sub(rb",\d{19}\]", b"]", files[ends].split(b"\n", 1)[1])
    return CrashState(0, (), files).content


def check_all(
    tmp_path: Path,
    scenario: Callable[[Recorder], None],
    kind: FlushDiskType,
    crashes: slice = EVERY_CRASH,
    **lost: int,
) -> None:
    """Check what these crashes leave, with as many choices of what is lost as ``lost`` tells ``crash_states``."""
    source = tmp_path / "source"
    run = Recorder(tiny_config(source, kind))
    scenario(run)
    changes = run.fs.changes
    checks = Checks(tiny_config(tmp_path / "disk", kind), tuple(run.counts))
    cuts = thinned(range(len(changes) + 1)[crashes], 5)
    for at in cuts:
        promised = run.acked_before(at) if kind is FlushDiskType.SYNC_FLUSH else (0,) * QUEUES
        for state in crash_states(changes, at, **lost):
            try:
                checks.check(state, source, promised)
            except BaseException as error:
                error.add_note(f"crash before change {at} of {len(changes)}, lost {state.lost}: {changes[at : at + 1]}")
                raise
    assert len(checks.found) >= len(cuts)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", list(FlushDiskType))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__.strip("_"))
def test_no_crash_loses_what_was_acknowledged(
    tmp_path: Path, scenario: Callable[[Recorder], None], kind: FlushDiskType
) -> None:
    """Every fourth change of the disk for either kind, with the last, some, all or none of the unsynced lost."""
    check_all(tmp_path, scenario, kind, SOME_CRASHES[kind], lost_max=1, subsets=1)


@pytest.mark.sweep
def test_no_crash_loses_what_was_acknowledged_where_all_queues_are_synced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with thousands of queues: a checkpoint covers units that one sync of the file system made durable."""
    monkeypatch.setattr(table, "_FLUSHED_TOGETHER_MIN", 1)
    check_all(tmp_path, _reopened, FlushDiskType.SYNC_FLUSH, slice(1, None, 3), lost_max=2, subsets=1)


@pytest.mark.soak
@pytest.mark.parametrize("kind", list(FlushDiskType))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__.strip("_"))
def test_no_crash_loses_what_was_acknowledged_whatever_else_is_lost(
    tmp_path: Path, scenario: Callable[[Recorder], None], kind: FlushDiskType
) -> None:
    """Every change of the disk, with more of the unsynced changes lost one by one, and more of any of them."""
    check_all(tmp_path, scenario, kind, lost_max=4, subsets=6)
