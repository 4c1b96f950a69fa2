"""Building one damaged file of the key index again, out of the log, in its place, while the others go on.

The files before and after it say which records belong into it; for the last one that is all that is indexed, which
grows meanwhile. What is made is byte for byte what was there before it was damaged, but for records that the log no
longer holds.
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
    """Raised where the index goes on behind what may be read: a member that does not know again what is committed."""


def rebuild(index: IndexService, path: Path, log: CommitLog, pause: Callable[[], None] = lambda: None) -> None:
    """Build the file again; nothing to do if it has expired. ``pause`` is called now and then, and may raise.

    Raises ``OSError``, ``CorruptLogError`` (of the log), ``NotYetReadableError``; then nothing has changed.
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
    """A file on its way along the log; ``position`` is where it has come to."""

    def __init__(self, file: IndexFile, log: CommitLog, position: int, known: int) -> None:
        """Records up to the one at ``known`` are in the file before it."""
        self.position = position
        self._file = file
        self._log = log
        self._known = known
        self._topics = TopicHashes()

    def step(self, end: int) -> None:
        """Add the next records that begin before ``end``."""
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
