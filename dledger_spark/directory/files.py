"""The files of a log directory, and the kind of records in each segment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dledger.layout import BLANK_MAGIC as ENTRY_BLANK_MAGIC
from dledger.layout import ENTRY_HEADER_BYTES, INDEX_UNIT_BYTES
from dledger.store.format import BLANK as ENTRY_BLANK
from dledger.store.format import HEADER, UNITS, EntryHeader, is_magic, parse_segment_name
from dledger_spark.decode import Framing
from dledger_spark.errors import LogDirectoryError
from rocketstore.message.record import BLANK, BLANK_MAGIC, MESSAGE_MAGICS

DATA: Final = "data"
INDEX: Final = "index"
CHECKPOINT: Final = "checkpoint"
PLAIN_LOG: Final = "commitlog"
NODE_PREFIX: Final = "dledger-"
_PLAIN_MAGICS: Final = MESSAGE_MAGICS | {BLANK_MAGIC}
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class LogSegment:
    """One non-empty file of the log. ``base`` is the position of its first byte."""

    path: Path
    base: int
    size: int
    framing: Framing

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.base + self.size

    def read(self, position: int, length: int) -> bytes:
        """Up to ``length`` bytes from a position on. Raises ``OSError``."""
        with self.path.open("rb") as file:
            file.seek(position - self.base)
            return file.read(max(0, min(length, self.end - position)))

    def header(self, position: int) -> EntryHeader | None:
        """The header of the entry starting there; None if there is none."""
        head = self.read(position, ENTRY_HEADER_BYTES)
        if len(head) < ENTRY_HEADER_BYTES:
            return None
        header = EntryHeader(*HEADER.unpack(head))
        return header if is_magic(header.magic) and header.position == position else None


@dataclass(frozen=True, slots=True)
class LogPlaces:
    """Paths of a log's files: a plain log, a node's directory, or both after an upgrade."""

    segments: tuple[LogSegment, ...]
    node: Path | None
    """The directory with ``index`` and ``checkpoint``; None if there is no replicated log, or only its data exist."""


def find(path: Path) -> LogPlaces:
    """The segments below a path. Raises ``LogDirectoryError`` if it is not a log directory."""
    if not path.is_dir():
        raise LogDirectoryError(
            f"{path} is not a directory{' on this machine' if not path.exists() else ''}: name a node's "
            "directory, a broker's storePathRootDir, or a directory of segments"
        )
    own = _segments(path)
    if own:
        node = path.parent if path.name == DATA and (path.parent / CHECKPOINT).is_file() else None
        return LogPlaces(_checked(path, own), node)
    if (path / DATA).is_dir():
        return LogPlaces(_checked(path, _segments(path / DATA)), path)
    plain = _segments(path / PLAIN_LOG) if (path / PLAIN_LOG).is_dir() else []
    nodes = sorted(one for one in path.glob(f"{NODE_PREFIX}*") if (one / DATA).is_dir())
    if len(nodes) > 1:
        names = ", ".join(one.name for one in nodes[:_SHOWN])
        raise LogDirectoryError(f"{path} holds the logs of several nodes ({names}): name one of them, they are copies")
    node = nodes[0] if nodes else None
    if node is None and not (path / PLAIN_LOG).is_dir():
        raise LogDirectoryError(
            f"{path} holds no log: neither segments (files named by 20 digits), nor {DATA}/, {PLAIN_LOG}/ or "
            f"{NODE_PREFIX}<node>/"
        )
    return LogPlaces(_checked(path, plain + (_segments(node / DATA) if node else [])), node)


def _segments(directory: Path) -> list[LogSegment]:
    """The non-empty segments, oldest first."""
    found: list[LogSegment] = []
    for entry in os.scandir(directory):
        base = parse_segment_name(entry.name)
        if base is None or not entry.is_file():
            continue
        path = Path(entry.path)
        framing = _framing(path)
        if framing is not None:
            found.append(LogSegment(path, base, entry.stat().st_size, framing))
    return sorted(found, key=lambda one: one.base)


def _framing(path: Path) -> Framing | None:
    """The kind of records in a segment; None if it is empty. Raises ``LogDirectoryError``."""
    with path.open("rb") as file:
        head = file.read(BLANK.size)
    if not any(head):
        return None
    head = head.ljust(BLANK.size, b"\0")
    if BLANK.unpack(head)[1] in _PLAIN_MAGICS:  # in an entry, this field is the size, which is never negative
        return "plain"
    magic = ENTRY_BLANK.unpack(head)[0]
    if is_magic(magic) or magic == ENTRY_BLANK_MAGIC:
        return "entry"
    raise LogDirectoryError(f"{path} starts with neither an entry nor a message: it is not a segment, or it is damaged")


def _checked(path: Path, segments: Sequence[LogSegment]) -> tuple[LogSegment, ...]:
    """The segments, which must be contiguous. Raises ``LogDirectoryError``."""
    for before, after in pairwise(segments):
        if after.base < before.end:
            raise LogDirectoryError(
                f"segments {before.path} and {after.path} overlap, so they belong to different logs: name the "
                "directory of one of them"
            )
        if after.base > before.end:
            raise LogDirectoryError(
                f"{path}: a segment is missing: {before.name} ends at {before.end}, the next one is {after.name}"
            )
        if before.framing == "entry" and after.framing == "plain":
            raise LogDirectoryError(
                f"{after.path} belongs to a plain log, but follows the segments of a replicated one"
            )
    return tuple(segments)


class IndexFiles:
    """The index of a node's log: 32 bytes per entry, in files named by the position of their first byte."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: list[tuple[int, int, Path]] = []
        if directory.is_dir():
            for entry in os.scandir(directory):
                base = parse_segment_name(entry.name)
                if base is not None and entry.is_file():
                    self._files.append((base, entry.stat().st_size, Path(entry.path)))
        self._files.sort()

    def units(self, first_index: int, count: int) -> NDArray[np.void]:
        """Up to ``count`` units from an entry on; fewer if a file is missing or short. Raises ``OSError``."""
        parts: list[NDArray[np.void]] = []
        at, left = first_index * INDEX_UNIT_BYTES, count
        for base, size, path in self._files:
            if not left:
                break
            if base <= at < base + size:
                wanted = min(left, (base + size - at) // INDEX_UNIT_BYTES)
                part = np.fromfile(path, UNITS, wanted, offset=at - base)
                parts.append(part)
                at += len(part) * INDEX_UNIT_BYTES
                left -= len(part)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, UNITS)

    def place(self, index: int) -> tuple[int, int] | None:
        """The position and size of one entry; None if the index does not have it."""
        if index < 0:
            return None
        units = self.units(index, 1)
        if not len(units) or int(units["index"][0]) != index or not is_magic(int(units["magic"][0])):
            return None
        return int(units["position"][0]), int(units["size"][0])
