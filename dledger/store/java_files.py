"""The Java line's files beside its log, and where its log begins: for directories that a Java node has used.

``currterm`` and (before 0.4) ``checkpoint`` are Java properties files. The latter has our checkpoint's name, and
replaces it when Java opens a directory of ours. Whenever Java replaces one of them, it leaves the old one as ``*.bak``,
which shows that Java was here.

``imported`` is ours: entries before the position in it have no CRCs, until they expire.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Final

from dledger import properties
from dledger.errors import ConfigError, CorruptLogError
from dledger.records import BLANK_MAGIC, ENTRY, INDEX_UNIT_BYTES
from dledger.store.durable_state import MIRROR_FILE
from dledger.store.format import UNIT, EntryHeader, Follow, header_problem
from dledger.store.fs import FileSystem, read_whole, replace_durably
from dledger.store.mmap_file import Found
from dledger.types import GENESIS, NO_INDEX, NO_TERM, Boundary, HardState, LogIndex, Magic, NodeId, Position, Term

IMPORTED_FILE: Final = "imported"
_HEADER: Final = ENTRY.struct("magic", "size", "index", "term")
_ADVICE: Final = "Let the Java node repair it, or copy the log from another member"

_TEXT_BYTES_MAX = 4096
_SECTOR_BYTES: Final = 512
_BACKUPS = (f"{MIRROR_FILE}.bak", "checkpoint.bak")


def was_used_by_java(directory: Path, checkpoint: Path) -> bool:
    """Whether a Java node has written here since ``forget_java``. Raises ``OSError``."""
    return any((directory / name).exists() for name in _BACKUPS) or java_committed(checkpoint) is not None


def forget_java(fs: FileSystem, directory: Path) -> None:
    """Remove the traces that ``was_used_by_java`` looks for, except the checkpoint. Raises ``OSError``."""
    for name in _BACKUPS:
        if (directory / name).exists():
            fs.unlink(directory / name)
    fs.sync_dir(directory)


def java_committed(checkpoint: Path) -> LogIndex | None:
    """The commit index in a checkpoint written by Java; None if it was not. Raises ``OSError``."""
    found = _read(checkpoint)
    if not found or not found.keys() <= {"endIndex", "committedIndex"}:
        return None
    with suppress(ValueError):
        return LogIndex(int(found.get("committedIndex", "-1")))
    return NO_INDEX


def note_imported(fs: FileSystem, directory: Path, end: int) -> None:
    """Remember, durably, that entries before position ``end`` may be Java's, without CRCs. Raises ``OSError``."""
    replace_durably(fs, directory / IMPORTED_FILE, json.dumps({"end": end}).encode() + b"\n")


def imported_end(directory: Path) -> int:
    """The position before which entries may be Java's; 0 if none are known. Raises ``CorruptLogError``, ``OSError``."""
    path = directory / IMPORTED_FILE
    if not path.exists():
        return 0
    try:
        end = json.loads(read_whole(path))["end"]
    except (ValueError, KeyError, TypeError, RecursionError):
        end = None
    if type(end) is not int:
        advice = "Remove the file, and start with import_unchecked=true"
        raise CorruptLogError(path, 0, "it does not say how far the log was imported", advice)
    return end


def is_javas(header: EntryHeader, position: int) -> bool:
    """Whether an entry header at ``position`` is sound but for the CRCs, which Java leaves 0."""
    follow = Follow(header.index - 1, header.term, 0)
    return header.chain_crc == header.body_crc == 0 and not header_problem(header, position, follow)


def may_be_lost(data: mmap | bytes, offset: int) -> bool:
    """Whether a lost sector, which is all zeros, explains the zeros in the CRC fields of the header at ``offset``.

    Only in an entry without a body: otherwise a sector that begins before them also takes the body's length.
    """
    sector = (offset // _SECTOR_BYTES + 1) * _SECTOR_BYTES
    return sector <= offset + ENTRY.at("chain_crc") and not any(memoryview(data)[sector : sector + _SECTOR_BYTES])


def begin_of(data: Found, index: Found, segment_bytes: int) -> Boundary:
    """Where a log begins whose old segments Java may have removed; the chain CRC is unknown.

    The term before it comes from the index, or else from the first entry. Raises ``CorruptLogError``, ``OSError``.
    """
    if not data.segments or data.segments[0].base == 0:
        return GENESIS
    first = data.segments[0]
    with first.path.open("rb") as file:
        skipped = 0
        magic, size, number, term = _HEADER.unpack(file.read(_HEADER.size).ljust(_HEADER.size, b"\0"))
        if magic == BLANK_MAGIC and 0 < size <= segment_bytes - _HEADER.size:  # 0.4 blanks out what a reset drops
            skipped = size
            file.seek(skipped)
            magic, size, number, term = _HEADER.unpack(file.read(_HEADER.size))
    if magic not in tuple(Magic) or number < 0:
        raise CorruptLogError(first.path, skipped, "the log's first entry is unreadable", _ADVICE)
    before = _unit(index, number - 1)
    if number == 0:
        return Boundary(NO_INDEX, NO_TERM, Position(first.base + skipped), 0)
    if before is not None and before[1:] == (number - 1, before[2]) and 0 <= before[2] <= term:
        term = before[2]
    return Boundary(LogIndex(number - 1), Term(term), Position(first.base + skipped), 0)


def _unit(index: Found, number: int) -> tuple[int, int, int] | None:
    """Magic, index and term of an index unit, if its file exists."""
    at = number * INDEX_UNIT_BYTES
    for one in index.segments:
        if one.base <= at < one.base + one.size:
            with one.path.open("rb") as file:
                file.seek(at - one.base)
                unit = file.read(INDEX_UNIT_BYTES)
            if len(unit) == INDEX_UNIT_BYTES:
                magic, _, _, found, term = UNIT.unpack(unit)
                return magic, found, term
    return None


def newest_hard_state(known: HardState, directory: Path, last_term: Term) -> HardState:
    """``known``, or the state implied by Java's term and vote and the log's last term, if that is newer.

    Raises ``OSError``.
    """
    found = _read(directory / MIRROR_FILE)
    with suppress(ValueError):
        java_term = Term(int(found.get("currTerm", "")))
        if java_term > known.term:
            vote = found.get("voteLeader", "")
            known = replace(known, term=java_term, vote=NodeId(vote) if vote else None)
    return known if known.term >= last_term else replace(known, term=last_term, vote=None)


def _read(path: Path) -> dict[str, str]:
    if not path.exists() or path.stat().st_size > _TEXT_BYTES_MAX:
        return {}
    try:
        return {one.key: one.value for one in properties.parse(properties.decode(path.read_bytes()))}
    except ConfigError:
        return {}
