"""Reads the records of a stopped broker's log in order: of files of a plain log, or of a node's entries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from dledger.errors import CorruptLogError
from rocketstore.config import MIB
from rocketstore.message.message import DelayLevels
from rocketstore.message.scan import RecordScanOutcome, scan_entries, scan_records
from rocketstore.store.dispatch import RECORD_BYTES_MAX
from rocketstore.verification.verify import LogPart

_CHUNK_BYTES: Final = 8 * MIB
_SMALLEST: Final = 8
_ADVICE: Final = "Export another member, whose copy is sound, or start this one with --repair and stop it again"


class LogPiece(NamedTuple):
    """Bytes of the log, where they start, and the records in them."""

    position: int
    data: bytes
    outcome: RecordScanOutcome


def read_log(part: LogPart, *, entries: bool, levels: DelayLevels) -> Iterator[LogPiece]:
    """All records up to the part's end; ``entries``: of a replicated log.

    Raises ``CorruptLogError`` where one is missing or damaged, ``OSError``.
    """
    scan = scan_entries if entries else scan_records
    position, wanted = part.begin, _CHUNK_BYTES
    while position < part.end:
        base = position - position % part.segment_bytes
        path = part.segments.get(base)
        if path is None:
            raise CorruptLogError(Path(f"{base:020d}"), 0, "the segment is missing", _ADVICE)
        end = min(base + part.segment_bytes, part.end)
        data = read_at(path, position - base, min(wanted, end - position))
        outcome = scan(data, position, check_crc=True, delay_levels=levels)
        yield LogPiece(position, data, outcome)
        is_all = len(data) == end - position
        position += outcome.consumed
        if outcome.end == "blank" and outcome.needed == base + part.segment_bytes - position:
            position, wanted = base + part.segment_bytes, _CHUNK_BYTES
        elif outcome.end == "more" and outcome.consumed:
            wanted = max(_CHUNK_BYTES, outcome.needed)
        elif outcome.end == "more" and not is_all:
            wanted = max(wanted + 1, outcome.needed, RECORD_BYTES_MAX)
        elif outcome.end == "more" and end - position < _SMALLEST:  # a file that was filled to the last byte
            position = base + part.segment_bytes
        else:
            raise CorruptLogError(path, position - base, outcome.reason, _ADVICE)


def read_at(path: Path, offset: int, size: int) -> bytes:
    """Bytes of a file. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)
