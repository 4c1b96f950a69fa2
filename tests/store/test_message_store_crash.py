"""Crash enumeration of the whole message store: cut at every change of the disk, with unsynced changes lost.

For every disk that can result, the store opens by itself, and

- every message that was acknowledged after its flush is in its queue, under its offset;
- a queue holds its messages in order, without gap or repeat, and the index finds each exactly once;
- the next message gets the next offset, and opening once more changes nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rocketstore.config import KIB, MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.message_store import MessageStore
from rocketstore.types import FlushDiskType
from tests.store.crash_fs import Change, RecordingFs, crash_states
from tests.unit.rocketstore.bench import WAIT_S, bodies, make_store, small_config, with_key

QUEUES = 2
SLOTS = 4
Counts = tuple[int, ...]


def tiny_config(root: Path, kind: FlushDiskType) -> MessageStoreConfig:
    """Every kind of file rolls within a few messages."""
    config = small_config(root, flush_disk_type=kind, mapped_file_size_commit_log=KIB, max_hash_slot_num=SLOTS)
    return replace(config, mapped_file_size_consume_queue=80, max_index_num=12)


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
        store = make_store(self.config, fs=self.fs)
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


def check(root: Path, config: MessageStoreConfig, at_least: Counts, at_most: Counts) -> None:
    """Open what the crash left, twice, and see that all is as promised."""
    config = replace(config, store_path_root_dir=root)
    found: list[int] = []
    for again in range(2):
        store = make_store(config)
        store.load()
        store.start()
        try:
            now = [len(bodies(store, queue_id)) for queue_id in range(QUEUES)]
            for queue_id, count in enumerate(now):
                assert bodies(store, queue_id) == list(range(count))
                assert max(store.min_offset("T", queue_id), 0) == 0
                assert store.max_offset("T", queue_id) == count
                assert at_least[queue_id] <= count <= at_most[queue_id] + again
                for number in range(count):
                    assert with_key(store, number * QUEUES + queue_id) == [number]
            assert not again or now == found
            found = now
            if not again:
                key = f"k{found[0] * QUEUES}"
                result = store.put(Message("T", str(found[0]).encode().ljust(30, b"."), 0, {"KEYS": key}))
                assert result.stored is not None
                assert result.stored.queue_offset == found[0]
                found[0] += 1
                assert store.wait_dispatched(WAIT_S)
        finally:
            store.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(FlushDiskType))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__.strip("_"))
def test_no_crash_loses_what_was_acknowledged(
    tmp_path: Path, scenario: Callable[[Recorder], None], kind: FlushDiskType
) -> None:
    """Reliability L4 (a): every prefix of the disk's changes, with one, some, all or none of the unsynced ones lost."""
    source = tmp_path / "source"
    run = Recorder(tiny_config(source, kind))
    scenario(run)
    changes = run.fs.changes
    tried: set[tuple[bytes, Counts]] = set()
    crashes = 0
    for at in range(len(changes) + 1):
        promised = run.acked_before(at) if kind is FlushDiskType.SYNC_FLUSH else (0,) * QUEUES
        for state in crash_states(changes, at, lost_max=2, subsets=2):
            crashes += 1
            if (state.content, promised) in tried:
                continue  # many crashes leave the same disk
            tried.add((state.content, promised))
            target = tmp_path / "disk"
            target.mkdir()
            state.write_to(source, target)
            try:
                check(target, run.config, promised, tuple(run.counts))
            except BaseException as error:
                error.add_note(f"crash before change {at} of {len(changes)}, lost {state.lost}: {changes[at : at + 1]}")
                raise
            shutil.rmtree(target)
    assert crashes > len(changes)
