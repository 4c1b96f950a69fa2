"""Writes the files of a plain commit log, and remembers where half messages went."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import chain
from pathlib import Path
from typing import Final

from dledger.store.format import segment_name
from dledger.store.fs import FileSystem
from rocketstore.config import MIB
from rocketstore.message.record import BLANK, BLANK_MAGIC

_WRITE_BYTES: Final = 4 * MIB
_PAIR_BYTES: Final = 16
_PAIRS_IN_MEMORY: Final = 1 << 16


class PlainLogWriter:
    """Appends records as RocketMQ does: one that would leave no room for a blank begins the next file."""

    def __init__(self, fs: FileSystem, directory: Path, file_bytes: int, begin: int) -> None:
        """The first file starts at ``begin``, a multiple of ``file_bytes``."""
        self._fs = fs
        self._directory = directory
        self._file_bytes = file_bytes
        self._base = begin
        self._used = 0
        self._fd: int | None = None
        self._pending = bytearray()
        self._written = 0
        self.count = 0
        """Files so far."""

    @property
    def end(self) -> int:
        """The end of the last record."""
        return self._base + self._used

    def place(self, size: int) -> int:
        """Where the next record, of ``size`` bytes, goes. Raises ``OSError``."""
        room = self._file_bytes - self._used
        if size + BLANK.size > room:
            self._pending += BLANK.pack(room, BLANK_MAGIC)
            self._finish()
            self._base, self._used, self._written = self._base + self._file_bytes, 0, 0
        return self._base + self._used

    def append(self, record: bytearray) -> None:
        """Add it at its place. Raises ``OSError``."""
        self._pending += record
        self._used += len(record)
        if len(self._pending) >= _WRITE_BYTES:
            self._write()

    def close(self) -> None:
        """Make everything durable. A log without records that begins later than at 0 is an empty file: it says where.

        Raises ``OSError``.
        """
        if self._pending or self._fd is not None or (self._base and not self.count):
            self._finish()
        self._fs.sync_dir(self._directory)

    def abandon(self) -> None:
        """Close without writing more."""
        if self._fd is not None:
            self._fs.close(self._fd)
            self._fd = None

    def _write(self) -> None:
        if self._fd is None:
            self._fd = self._fs.create(self._directory / segment_name(self._base))
            self._fs.allocate(self._fd, self._file_bytes)
            self.count += 1
        self._fs.write(self._fd, self._pending, self._written)
        self._written += len(self._pending)
        self._pending.clear()

    def _finish(self) -> None:
        self._write()
        fd = self._fd
        if fd is not None:
            self._fs.sync(fd)
            self._fs.close(fd)
            self._fd = None


class HalfPlaces:
    """Half messages' offsets in the old log and in the new one: a file of pairs, because there may be very many."""

    def __init__(self, fs: FileSystem, path: Path) -> None:
        self._fs = fs
        self._path = path
        self._fd = fs.create(path)
        self._stored = 0
        self._old, self._new = array("q"), array("q")

    def add(self, old: int, new: int) -> None:
        """Offsets come in rising order. Raises ``OSError``."""
        if len(self._old) == _PAIRS_IN_MEMORY:
            pairs = array("q", chain.from_iterable(zip(self._old, self._new, strict=True)))
            self._fs.write(self._fd, pairs.tobytes(), self._stored * _PAIR_BYTES)
            self._stored += len(self._old)
            self._old, self._new = array("q"), array("q")
        self._old.append(old)
        self._new.append(new)

    def find(self, old: int) -> int | None:
        """The new offset of the half message; None if none was there. Raises ``OSError``."""
        at = bisect_left(self._old, old)
        if at < len(self._old) and self._old[at] == old:
            return self._new[at]
        with self._path.open("rb") as file:
            low, high = 0, self._stored
            while low < high:
                middle = (low + high) // 2
                file.seek(middle * _PAIR_BYTES)
                there, new = array("q", file.read(_PAIR_BYTES))
                if there == old:
                    return new
                low, high = (middle + 1, high) if there < old else (low, middle)
        return None

    def close(self) -> None:
        """Remove the file."""
        self._fs.close(self._fd)
        self._fs.unlink(self._path)
