"""Merges the small files of a Delta table that is written at the same time, and removes files that no version needs.

It runs in a thread of its own, on a table of its own: it moves rows, and neither adds any nor changes a position, so
appends go on beside it. Upserts rewrite files themselves, so they wait for it.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from dledger_spark.jobs.delta_files import sync_versions
from dledger_spark.jobs.errors import JobError

FILE_BYTES: Final = 128 << 20
"""The size of merged files; larger ones are left alone."""


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The files of one compaction."""

    merged: int
    made: int
    removed: int
    """Files that no version of the last ``keep_hours`` needs, among them those of runs that died."""


def compact(path: Path, keep_hours: int) -> CompactionResult:
    """Merge small files; remove those unused for ``keep_hours``: versions older than that cannot be read any more.

    Raises ``JobError``; the table is whole then, too.
    """
    try:
        table = DeltaTable(path)
        before = table.version()
        done = table.optimize.compact(target_size=FILE_BYTES, max_concurrent_tasks=1)
        sync_versions(path, before + 1, table.version())
        removed = table.vacuum(keep_hours, dry_run=False, enforce_retention_duration=False, full=True)
    except DeltaError as error:
        raise JobError(f"{path} could not be compacted: {error}") from error
    return CompactionResult(int(done["numFilesRemoved"]), int(done["numFilesAdded"]), len(removed))


class Compactor:
    """Compacts every ``every_s`` seconds while a table is written. A context manager, which waits for the thread."""

    def __init__(self, path: Path, every_s: float, keep_hours: int) -> None:
        self._path = path
        self._every_s = every_s
        self._keep_hours = keep_hours
        self._next_at = time.monotonic() + every_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compaction")
        self._running: Future[CompactionResult] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if error is None and self._running is not None:
            self._running.result()

    def step(self, *, beside: bool) -> CompactionResult | None:
        """Start a compaction if one is due; the result of one that has ended. Raises ``JobError`` if that failed.

        ``beside``: whether the caller goes on meanwhile; else it waits for the end.
        """
        if self._running is None and time.monotonic() >= self._next_at:
            self._running = self._thread.submit(compact, self._path, self._keep_hours)
        if self._running is None or (beside and not self._running.done()):
            return None
        ended, self._running = self._running, None
        self._next_at = time.monotonic() + self._every_s
        return ended.result()
