"""A file store as ``dledger.watch`` sees it: verified, repaired and compared in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dledger.errors import CorruptLogError, IndexBeforeBeginError, IndexOutOfRangeError
from dledger.store.file_store import FileStore
from dledger.store.format import parse_segment_name
from dledger.store.mending import ReadSegment, Repaired
from dledger.store.scrub import ScrubStep
from dledger.types import LogIndex


class WatchedStore:
    """The node's own log for ``LogWatch``. Used by its thread only, except ``base_of``."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._scrub = store.scrub()
        self._mender = store.mender()

    def verify(self, max_bytes: int) -> ScrubStep:
        """See ``Scrub.step``."""
        return self._scrub.step(max_bytes)

    def repair(self, base: int, read: ReadSegment, pause: Callable[[], None]) -> Repaired:
        """See ``Mender.repair``."""
        return self._mender.repair(base, read, pause)

    def find(self, base: int, pause: Callable[[], None]) -> CorruptLogError | None:
        """See ``Mender.find``."""
        return self._mender.find(base, pause)

    def base_of(self, path: Path) -> int | None:
        """The segment that a data file holds; None for any other file."""
        base = parse_segment_name(path.name)
        return base if base is not None and path.parent in self._store.segment_directories else None

    def chain_crcs(self, indexes: Sequence[LogIndex]) -> dict[LogIndex, int]:
        """The chain CRCs of those committed entries that are kept and valid."""
        found: dict[LogIndex, int] = {}
        for index in indexes:
            if self._store.begin.index <= index <= self._store.committed_index:
                try:
                    found[index] = self._store.chain_crc_at(index)
                except (CorruptLogError, IndexBeforeBeginError, IndexOutOfRangeError):  # damage is reported by reads
                    continue
        return found

    @property
    def committed_index(self) -> LogIndex:
        """See ``FileStore``."""
        return self._store.committed_index
