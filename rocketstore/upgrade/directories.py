"""The two directories of an export: a stopped broker's, which is read, and a plain broker's, which is written.

Read are the records in order, of a plain log's files or of a node's entries, and the state: topics, groups, consumer
offsets and progress of delayed delivery, from a snapshot and what the committed log says since.

Written are the files of a plain commit log, and queue files that tell where the numbering of a queue goes on whose
messages have expired. RocketMQ counts on from a queue's last unit, so a queue without messages needs one all the same:
it names a record before the log's begin, as the units of expired messages do. (A filler as the last unit would not do:
RocketMQ would take its size for the end of the log.)
"""

from __future__ import annotations

import logging
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from dledger.errors import CorruptLogError, DLedgerError, InvalidRequestError
from dledger.store.format import parse_segment_name, segment_name
from dledger.store.fs import FileSystem, create_durably, make_dirs_durably
from rocketstore.config import MIB
from rocketstore.consume_queue.files import FILLER_BYTES, UNIT, UNIT_BYTES, pack_unit
from rocketstore.message.message import DelayLevels
from rocketstore.message.record import BLANK, BLANK_MAGIC, decode_record
from rocketstore.message.scan import RecordScanOutcome, scan_entries, scan_records
from rocketstore.queue_numbers import decode_numbering
from rocketstore.state.applier import BrokerSnapshot, StateApplier
from rocketstore.state.files import stored_state
from rocketstore.state.tables import Tables
from rocketstore.store.dispatch import RECORD_BYTES_MAX
from rocketstore.types import GetMessageStatus, GetResult, QueueKey, QueueUnit, RecordHead
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


_NOT_ALL: Final = (
    "changes of topics, groups or offsets are missing in this member's directory. Export another member, or start the "
    "group, wait until it has a master, and stop it again"
)


class StateRecords:
    """The messages of the state topic in a log, as an applier reads them."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._positions = array("q")
        self._sizes = array("l")
        self._parts: list[LogPart] = []
        self.next_offset = 0
        """The topic's next queue offset, which may be beyond the last one here: messages expire."""

    def add_part(self, part: LogPart) -> None:
        """Records added from now on are in this part of the log."""
        self._parts.append(part)

    def add(self, head: RecordHead) -> None:
        """The next one in the log."""
        if head.queue_offset < self.next_offset:
            return  # repeated: it has no place in the queue
        self._numbers.append(head.queue_offset)
        self._positions.append(head.offset)
        self._sizes.append(head.size)
        self.next_offset = head.queue_offset + 1

    @property
    def numbers_known(self) -> bool:
        """Whether it would be known that there were messages which are gone: the queue's end tells."""
        return True

    def min_offset(self, _topic: str, _queue_id: int) -> int:
        """The first one's queue offset."""
        return self._numbers[0] if self._numbers else self.next_offset

    def max_offset(self, _topic: str, _queue_id: int) -> int:
        """The next one's queue offset."""
        return self.next_offset

    def get(self, topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        """Some from a queue offset on. Raises ``OSError``."""
        least, most = self.min_offset(topic, queue_id), self.next_offset
        at = bisect_left(self._numbers, offset)
        if offset < least or at == len(self._numbers):
            status = GetMessageStatus.OFFSET_TOO_SMALL if offset < least else GetMessageStatus.OFFSET_OVERFLOW_ONE
            return GetResult(status, max(offset, least), least, most)
        end = min(at + max_count, len(self._numbers))
        records = tuple(map(self._record, self._positions[at:end], self._sizes[at:end]))
        return GetResult(GetMessageStatus.FOUND, self._numbers[end - 1] + 1, least, most, records)

    def _record(self, position: int, size: int) -> bytes:
        part = next(part for part in self._parts if position < part.end)
        base = position - position % part.segment_bytes
        return read_at(part.segments[base], position - base, size)


def tables_of(config_dir: Path, records: StateRecords, end_of: Callable[[str, int], int]) -> Tables:
    """The tables at the end of the log; ``end_of`` tells where queues end, beyond which no offset may lie.

    Raises ``CorruptLogError``, ``DLedgerError`` if changes are missing or of a newer version.
    """
    snapshot, _ = stored_state(config_dir, has_log=records.next_offset > 0)
    applier = StateApplier(records)
    applier.restore(snapshot or BrokerSnapshot())
    while applier.step():
        pass
    if applier.blocked:
        raise DLedgerError(applier.blocked)
    if applier.next_offset < records.next_offset or not applier.is_complete:
        raise CorruptLogError(config_dir, 0, _NOT_ALL, "")
    applier.forget_what_is_not_there(end_of)
    return applier.tables


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


GONE: Final = QueueUnit(0, 1, 0)
"""A message that expired; the log must begin later."""
_log = logging.getLogger("rocketstore")


class NextOffsets:
    """The next queue offset of every queue, collected in log order."""

    def __init__(self) -> None:
        self.of: dict[QueueKey, int] = {}

    def take(self, head: RecordHead) -> None:
        """Count a message."""
        key, following = (head.topic, head.queue_id), head.queue_offset + 1
        if following > self.of.get(key, 0):
            self.of[key] = following

    def take_set(self, record: bytes) -> None:
        """Count what a master wrote of all queues (see ``queue_numbers``)."""
        try:
            part = decode_numbering(decode_record(record).body)
        except InvalidRequestError as error:
            _log.error("a record of queue numbers is skipped: %s", error)
            return
        self.raise_to(part.next_offsets)

    def raise_to(self, ends: Mapping[QueueKey, int]) -> None:
        """At least these."""
        for key, end in ends.items():
            if end > self.of.get(key, 0):
                self.of[key] = end


def stored_ends(queues_dir: Path) -> dict[QueueKey, int]:
    """The ends of a cleanly stopped broker's queues according to their files. Raises ``OSError``."""
    found: dict[QueueKey, int] = {}
    for directory in queues_dir.glob("*/*"):
        if not directory.name.isdecimal() or not directory.is_dir():
            continue
        bases = [base for one in directory.iterdir() if (base := parse_segment_name(one.name)) is not None]
        for base in sorted(bases, reverse=True):
            content = (directory / segment_name(base)).read_bytes()
            sizes = np.frombuffer(content, UNIT, len(content) // UNIT_BYTES)["size"]
            used = np.flatnonzero(sizes > 0)
            if len(used):
                found[directory.parent.name, int(directory.name)] = base // UNIT_BYTES + int(used[-1]) + 1
                break
    return found


def write_expired(fs: FileSystem, queues_dir: Path, file_bytes: int, ends: Mapping[QueueKey, int]) -> None:
    """Make a file for each of these queues, whose numbering goes on at these offsets. Raises ``OSError``."""
    units = file_bytes // UNIT_BYTES
    for (topic, queue_id), end in ends.items():
        directory = queues_dir / topic / str(queue_id)
        make_dirs_durably(fs, directory)
        before = (end - 1) % units

        def fill(fd: int, before: int = before) -> None:
            os.ftruncate(fd, file_bytes)
            fs.write(fd, FILLER_BYTES * before + pack_unit(GONE), 0)

        create_durably(fs, directory / segment_name((end - 1 - before) * UNIT_BYTES), fill)


def without_messages(ends: Mapping[QueueKey, int], have: Collection[QueueKey]) -> dict[QueueKey, int]:
    """Those of queues that have no message in the log."""
    return {key: end for key, end in ends.items() if key not in have and end > 0}
