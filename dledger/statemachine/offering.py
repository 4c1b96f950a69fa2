"""The snapshots that this member gives to others, whose logs cannot be continued any more (S8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dledger.errors import DamagedSnapshotError, DLedgerError, SnapshotBusyError
from dledger.statemachine.snapshots import SnapshotMeta, SnapshotStore, encode_meta
from dledger.types import LogIndex


class SnapshotOffers:
    """A ``PeerSnapshots``. ``fenced``: why nothing may be given; ``write``: asks for a newer snapshot."""

    def __init__(
        self,
        snapshots: SnapshotStore,
        fenced: Callable[[], DLedgerError | None],
        write: Callable[[], None],
    ) -> None:
        self._snapshots = snapshots
        self._fenced = fenced
        self._write = write

    @contextmanager
    def offered(self, at_least: LogIndex, index: LogIndex) -> Iterator[SnapshotOffer]:
        """See ``PeerSnapshots``."""
        if (refusal := self._fenced()) is not None:
            raise refusal
        known = any(one.index == index for one in self._snapshots.snapshots)
        with self._snapshots.pinned(index if known and index >= at_least else None) as meta:
            if meta.index < at_least:
                self._write()
                raise SnapshotBusyError(f"the newest snapshot here is of entry {meta.index}: retry later")
            yield SnapshotOffer(self._snapshots, meta)

    def doubt(self, index: LogIndex) -> None:
        """See ``PeerSnapshots``."""
        meta = next((one for one in self._snapshots.snapshots if one.index == index), None)
        if meta is None:
            return
        try:
            self._snapshots.verify(meta)
        except DamagedSnapshotError as damage:
            with suppress(OSError):  # it does not count any more, wherever it is
                self._snapshots.set_aside(meta, str(damage))
            self._write()


class SnapshotOffer:
    """An ``OfferedSnapshot``."""

    def __init__(self, snapshots: SnapshotStore, meta: SnapshotMeta) -> None:
        self._snapshots = snapshots
        self._meta = meta

    @property
    def description(self) -> bytes:
        """See ``OfferedSnapshot``."""
        return encode_meta(self._meta)

    def piece(self, file: str, offset: int, bytes_max: int) -> bytes:
        """See ``OfferedSnapshot``."""
        return self._snapshots.piece(self._meta, file, offset, bytes_max)
