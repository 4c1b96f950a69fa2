"""The checkpoint: what recovery may rely on. A slot file of three slots.

``write`` follows every flush, without a sync, before the flush is reported (so a killed process loses nothing);
``write_durably`` comes now and then (so a power cut loses at most the time since). Neither the last durable slot nor
the one being synced is ever overwritten: hence three.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Final

from dledger.errors import CorruptLogError
from dledger.records import record
from dledger.store.fs import FileSystem
from dledger.store.slots import SlotFile, create_slots, read_slots
from dledger.types import GENESIS, NO_INDEX, Boundary, LogIndex, Position, Term

_SLOTS: Final = 3
_RECORD: Final = Struct(">qqIqqqqqI?")
REPAIR_ADVICE: Final = (
    "Keep the files. If the group's other members hold the log, set this copy aside and fetch the log again: "
    "`dledger serve --repair`; otherwise restore the directory from a backup"
)


@record(frozen=True, slots=True, order=True)
class Mark:
    """An entry (or a boundary) up to which a property holds, with its end and chain CRC."""

    index: int
    position: int
    chain_crc: int


def mark_of(boundary: Boundary) -> Mark:
    """The mark of a log without entries after ``boundary``."""
    return Mark(boundary.index, boundary.position, boundary.chain_crc)


_GENESIS_MARK: Final = mark_of(GENESIS)


@record(frozen=True, slots=True)
class LogCheckpoint:
    """The recorded facts. ``indexed`` is the last entry whose index unit is durable."""

    flushed: Mark = _GENESIS_MARK
    indexed: LogIndex = NO_INDEX
    committed: LogIndex = NO_INDEX
    begin: Boundary = GENESIS
    clean_stop: bool = False

    def encode(self) -> bytes:
        """The slot's payload."""
        return _RECORD.pack(
            self.flushed.index,
            self.flushed.position,
            self.flushed.chain_crc,
            self.indexed,
            self.committed,
            self.begin.index,
            self.begin.term,
            self.begin.position,
            self.begin.chain_crc,
            self.clean_stop,
        )


def decode_checkpoint(payload: bytes) -> LogCheckpoint:
    """Decode a slot's payload. Raises ``struct.error`` for a wrong length."""
    index, position, chain, indexed, committed, begin_index, term, begin_position, crc, clean = _RECORD.unpack(payload)
    begin = Boundary(LogIndex(begin_index), Term(term), Position(begin_position), crc)
    return LogCheckpoint(Mark(index, position, chain), LogIndex(indexed), LogIndex(committed), begin, clean)


def read_checkpoint(path: Path) -> LogCheckpoint:
    """The newest readable checkpoint. Raises ``CorruptLogError`` if there is none."""
    if not path.exists():
        raise CorruptLogError(path, 0, "the checkpoint is missing", REPAIR_ADVICE)
    for slot in read_slots(path, _SLOTS):
        if len(slot.payload) == _RECORD.size:
            return decode_checkpoint(slot.payload)
    raise CorruptLogError(path, 0, "no slot of the checkpoint is readable", REPAIR_ADVICE)


def create_checkpoint(fs: FileSystem, path: Path, checkpoint: LogCheckpoint) -> None:
    """Create or replace the file durably."""
    create_slots(fs, path, _SLOTS, checkpoint.encode())


class LogCheckpointFile:
    """The open checkpoint. Thread-safe: ``_lock`` guards the slot choice, ``_sync_lock`` admits one sync at a time.

    ``current`` is called under ``_lock``, so of two writes the later one never records older facts.
    """

    def __init__(self, fs: FileSystem, path: Path) -> None:
        slots = read_slots(path, _SLOTS)
        self._file = SlotFile(fs, path)
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._sequence = slots[0].sequence if slots else 0
        self._durable = slots[0].number if slots else 0
        self._syncing: int | None = None
        self._durable_checkpoint: LogCheckpoint | None = None
        self._latest: LogCheckpoint | None = None

    def write(self, current: Callable[[], LogCheckpoint]) -> None:
        """Record the facts; they survive the process, but not yet a power cut. Raises ``OSError``."""
        with self._lock:
            self._write(current())

    def write_durably(self, current: Callable[[], LogCheckpoint]) -> None:
        """Record the facts and return when they are durable; does nothing if they already are. Raises ``OSError``."""
        with self._sync_lock:
            with self._lock:
                checkpoint = current()
                if checkpoint == self._durable_checkpoint == self._latest:
                    return
                slot = self._write(checkpoint)
                self._syncing = slot
            self._file.sync()
            with self._lock:
                self._durable, self._syncing = slot, None
                self._durable_checkpoint = checkpoint

    def _write(self, checkpoint: LogCheckpoint) -> int:
        slot = next(one for one in range(_SLOTS) if one not in (self._durable, self._syncing))
        self._sequence += 1
        self._file.write(slot, self._sequence, checkpoint.encode())
        self._latest = checkpoint
        return slot

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
