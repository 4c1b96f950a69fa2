"""What the store's tests share: small configurations, a settable clock, opening."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.core.ports import Log
from dledger.monitoring import SILENT, Instruments
from dledger.store.file_store import FileStore
from dledger.store.fs import FileSystem
from dledger.types import EntryRun, LogIndex, Term

SEGMENT_BYTES = 4096
INDEX_SEGMENT_BYTES = 320


class UnsyncedFs(FileSystem):
    """Syncs nothing: for tests that are not about durability."""

    def sync(self, fd: int) -> None:
        pass

    def sync_dir(self, path: Path) -> None:
        pass


class TwoDisksFs(UnsyncedFs):
    """Whatever is in a directory with the given name, or below it, is on a disk of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def device(self, path: Path) -> int:
        return int(self._name in path.parts)

    def rename(self, source: Path, target: Path) -> None:
        if self.device(source) != self.device(target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        super().rename(source, target)


class FakeClock(Clock):
    """A clock that stands still until it is moved."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


def small_config(base_dir: Path, **changes: Any) -> StoreConfig:  # noqa: ANN401 - one keyword per setting
    """Segments of a few entries, and no cleaning unless a test wants it."""
    config = StoreConfig(
        base_dir=base_dir,
        segment_bytes=SEGMENT_BYTES,
        index_segment_bytes=INDEX_SEGMENT_BYTES,
        warm_bytes=1024,
        recovery_verify_bytes=0,
        disk_check_ratio=1.0,
        disk_clean_ratio=1.0,
        disk_full_ratio=1.0,
        delete_hour=(),
    )
    return replace(config, **changes)


def open_store(
    config: StoreConfig,
    fs: FileSystem | None = None,
    clock: FakeClock | None = None,
    *,
    mend: bool = False,
    instruments: Instruments = SILENT,
    first_position: int = 0,
) -> FileStore:
    """Open node n0 of group g."""
    return FileStore.open(
        config,
        cluster_id="c",
        group="g",
        node_id="n0",
        clock=clock or FakeClock(),
        fs=fs or UnsyncedFs(),
        mend=mend,
        instruments=instruments,
        first_position=first_position,
    )


def abandon(store: FileStore) -> None:
    """Leave a store as a kill would: nothing flushed or recorded, only the directory let go."""
    store._state.poison = "abandoned"
    store.close()


def bodies_of(log: Log) -> list[bytes]:
    """Every entry's body, read one by one."""
    return [log.read(LogIndex(index)).body for index in range(log.begin.index + 1, log.last.index + 1)]


def fill(log: Log, count: int, size: int = 100, term: int = 1, batch: int = 5) -> list[bytes]:
    """Append ``count`` distinct bodies in batches; returns them."""
    start = log.last.index + 1
    bodies = [(b"%d/%d-" % (term, number)).ljust(size, b".") for number in range(start, start + count)]
    for at in range(0, count, batch):
        log.append_as_leader(Term(term), bodies[at : at + batch])
    return bodies


def runs_of(log: Log, first: int = 0, max_bytes: int = 1 << 20) -> list[EntryRun]:
    """The log from ``first`` on as a leader would push it."""
    runs: list[EntryRun] = []
    index = LogIndex(first)
    while index <= log.last.index:
        last = log.slice_run(index, max_bytes)
        runs.append(log.read_run(index, last))
        index = LogIndex(last + 1)
    return runs


def copy_log(source: Log, target: Log, max_bytes: int = 1 << 20) -> None:
    """Replicate by runs whatever ``target`` lacks."""
    for run in runs_of(source, target.last.index + 1, max_bytes):
        target.append_run(target.check_run(run), run.first_index)


def same(left: Sequence[object], right: Sequence[object]) -> bool:
    """Compare without pytest's costly diff of long lists."""
    return list(left) == list(right)


def spoil(monkeypatch: pytest.MonkeyPatch, path: Path, offset: int) -> None:
    """Let a sector of a file be unreadable, whatever name the file has later."""
    read, bad, sector = os.pread, path.stat().st_ino, offset - offset % 512

    def pread(fd: int, length: int, start: int) -> bytes:
        if start < sector + 512 and start + length > sector and os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, length, start)

    monkeypatch.setattr(os, "pread", pread)
