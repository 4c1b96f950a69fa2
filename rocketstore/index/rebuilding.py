"""Rebuilds one damaged file of the key index from the log, in place, while the others remain in use.

The neighbouring files determine which records belong in it; for the last file, that is everything indexed, which grows
meanwhile. The result is byte for byte what the file held before the damage, except for records that the log no longer
holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError, DLedgerError
from dledger.store.fs import TMP_SUFFIX
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import MIB
from rocketstore.index.file import ADVICE, IndexFile
from rocketstore.index.keys import TopicHashes, key_hashes
from rocketstore.index.service import IndexService, places_of
from rocketstore.types import ScannedRecords

_SCAN_BYTES: Final = MIB
_RECORD_BYTES_MAX: Final = 64 * MIB


class NotYetReadableError(DLedgerError):
    """Raised if the index extends beyond the readable log: a restarted member does not know yet what is committed."""


def rebuild(index: IndexService, path: Path, log: CommitLog, pause: Callable[[], None] = lambda: None) -> None:
    """Rebuild the file; does nothing if it has expired. ``pause`` is called now and then, and may raise.

    Raises ``OSError``, ``CorruptLogError`` (for the log), ``NotYetReadableError``, without having changed anything.
    """
    file = index.file_at(path)
    if file is None:
        index.forget(path)
        return
    temporary = path.with_name(path.name + TMP_SUFFIX)
    before = index.header_before(file)
    known = -1 if before is None else before.end_offset
    try:
        made = IndexFile.create(index.fs, temporary, index.shape, before)
        filling = _Filling(made, log, max(known, log.min_offset), known)
        while filling.position < index.end_of(file):
            filling.step(index.end_of(file))
            pause()

        def complete() -> None:
            while filling.position < index.end_of(file):
                filling.step(index.end_of(file))

        index.exchange(file, made, complete)
    finally:
        temporary.unlink(missing_ok=True)


class _Filling:
    """A file being filled along the log; ``position`` is the progress."""

    def __init__(self, file: IndexFile, log: CommitLog, position: int, known: int) -> None:
        """Records up to the one at ``known`` are in the previous file."""
        self.position = position
        self._file = file
        self._log = log
        self._known = known
        self._topics = TopicHashes()

    def step(self, end: int) -> None:
        """Add the next records that start before ``end``."""
        scanned = self._scan()
        heads = scanned.heads
        self.position = scanned.next_offset
        if heads and heads[-1].offset >= end:
            self.position = next(head.offset for head in heads if head.offset >= end)
        if heads and (heads[0].offset <= self._known or heads[-1].offset >= end):
            heads = [head for head in heads if self._known < head.offset < end]
        keys, owners = key_hashes(heads, self._topics)
        if not len(keys):
            return
        if len(keys) > self._file.room:
            reason = "the log has more keys between its neighbours than the file can hold"
            raise CorruptLogError(self._file.path, 0, reason, f"Remove the index and start again. {ADVICE}.")
        offsets, store_ms = places_of(heads)
        self._file.put_all(keys, offsets[owners], store_ms[owners])

    def _scan(self) -> ScannedRecords:
        for bytes_max in (_SCAN_BYTES, _RECORD_BYTES_MAX):
            scanned = self._log.scan(self.position, bytes_max)
            if scanned.next_offset > self.position:
                return scanned
        raise NotYetReadableError(f"the log cannot be read beyond {self.position} yet")
