"""Stores the next queue offsets in the log.

The next offset of a queue is one more than the offset of its last message. Once that message has expired, only the
queue's own files still contain it: a member with a new disk, one whose log was fetched again or that was away for
longer than the retention time, and a broker whose queue files were removed would count too low and assign offsets
twice. So from time to time a master writes the next offset of every queue into the log (a *set*), and retention keeps
the log from where the newest set starts counting, on every member. The set and the following records give the next
offsets, whatever happened to the files.

1. A set is written by a master whose table is exact, in the table's term, so it never counts more than was assigned
   before its own place in the log. In a group this happens whenever the log has reached another file since the newest
   set, so that retention hardly ever waits for it; on a plain broker when retention wants to remove something.
2. A set counts once all its parts are dispatched (committed, in a group); then retention may proceed up to it.
3. Dispatching a set raises queues that are behind it (``ConsumeQueue.raise_to``). A queue raised like this has no
   files, so a start reads the newest set again if it lies before what is dispatched again.

A log from before sets existed has none: its members count from their queue files, as before, until the first master of
this version writes one. Until then, retention in a group is not held back, except in a log that is complete, because it
may take long until a member of this version leads. A plain broker writes a set before it removes anything.

A set describes all queues, in one message of ``QUEUE_NUMBERS_TOPIC`` or in several parts, one after the other in the
log. All integers are big-endian; the CRC32C covers all before it:

    0        4         6      8       10       12       20       28
    +--------+---------+------+-------+--------+--------+--------+---------------------------+-------+
    | "RSQN" | version | part | parts | zero 2 | covers | set id | topics …                  | crc 4 |
    +--------+---------+------+-------+--------+--------+--------+---------------------------+-------+
    a topic: | name bytes 1 | name | queues 4 | per queue: queue id 4, next queue offset 8 |

``covers``: every record of the log before this offset is counted. So the next offsets at the end of a log are those of
a set, or what the records from ``covers`` on say, whichever is higher. A set may count more than ``covers`` says, never
more than the log holds before its own first message.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from struct import error as StructError  # noqa: N812  # it is an exception
from typing import Final, Protocol

from crc32c import crc32c

from dledger.errors import CorruptLogError, InvalidRequestError
from dledger.monitoring import ConditionKind, Conditions
from rocketstore.commit_log.port import CommitLog, PutDone, PutWaiter
from rocketstore.consume_queue.queue import Repeated
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.message.columns import topics_of
from rocketstore.message.record import decode_record
from rocketstore.types import QUEUE_NUMBERS_TOPIC, PutResult, QueueKey, RecordHead

VERSION: Final = 1
NEXT_OFFSET_MAX: Final = 1 << 56
"""At 20 bytes per message, the position in the queue still fits a file offset."""
_MAGIC: Final = b"RSQN"
_HEAD: Final = Struct(">4sHHHHqq")
_COUNT: Final = Struct(">I")
_QUEUE: Final = Struct(">Iq")
_CRC: Final = Struct(">I")


@dataclass(frozen=True, slots=True)
class NumberingPart:
    """One message of a set."""

    covers: int
    set_id: int
    part: int
    parts: int
    next_offsets: Mapping[QueueKey, int]


def encode_numbering(next_offsets: Mapping[QueueKey, int], *, covers: int, set_id: int, bytes_max: int) -> list[bytes]:
    """The bodies of a set, of at most about ``bytes_max`` bytes each; at least one."""
    chunks: list[list[bytes]] = [[]]
    used = _HEAD.size + _CRC.size
    for packed in _topics(next_offsets, bytes_max - used):
        if chunks[-1] and used + len(packed) > bytes_max:
            chunks.append([])
            used = _HEAD.size + _CRC.size
        chunks[-1].append(packed)
        used += len(packed)
    bodies = []
    for part, chunk in enumerate(chunks):
        body = b"".join((_HEAD.pack(_MAGIC, VERSION, part, len(chunks), 0, covers, set_id), *chunk))
        bodies.append(body + _CRC.pack(crc32c(body)))
    return bodies


def _topics(next_offsets: Mapping[QueueKey, int], bytes_max: int) -> Iterator[bytes]:
    """Each topic with its queues; one with very many queues in several pieces."""
    topics: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for (topic, queue_id), offset in next_offsets.items():
        if offset > 0:
            topics[topic].append((queue_id, offset))
    for topic, queues in sorted(topics.items()):
        name = topic.encode()
        at_once = max(1, (bytes_max - 1 - len(name) - _COUNT.size) // _QUEUE.size)
        queues.sort()
        for first in range(0, len(queues), at_once):
            piece = queues[first : first + at_once]
            head = bytes([len(name)]) + name + _COUNT.pack(len(piece))
            yield head + b"".join(_QUEUE.pack(*queue) for queue in piece)


def decode_numbering(body: bytes) -> NumberingPart:
    """Parse a body. Raises ``InvalidRequestError`` if it is not part of a set readable by this version."""
    end = len(body) - _CRC.size
    if end < _HEAD.size or crc32c(body[:end]) != _CRC.unpack_from(body, end)[0]:
        raise InvalidRequestError("queue numbers: too short, or the checksum is wrong")
    magic, version, part, parts, _, covers, set_id = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != VERSION:
        raise InvalidRequestError(f"queue numbers: {magic!r} version {version}; this version supports {VERSION}")
    if not part < parts or covers < 0:
        raise InvalidRequestError(f"queue numbers: part {part} of {parts}, covering {covers}")
    try:
        found = dict(_queues(body, end))
    except (StructError, IndexError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"queue numbers: {error}") from error
    if any(not 0 < offset <= NEXT_OFFSET_MAX for offset in found.values()):
        raise InvalidRequestError("queue numbers: a queue offset is out of range")
    return NumberingPart(covers, set_id, part, parts, found)


def _queues(body: bytes, end: int) -> Iterator[tuple[QueueKey, int]]:
    at = _HEAD.size
    while at < end:
        length = body[at]
        topic = body[at + 1 : at + 1 + length].decode()
        at += 1 + length
        (count,) = _COUNT.unpack_from(body, at)
        at += _COUNT.size
        if count * _QUEUE.size > end - at:
            raise IndexError("a topic's queues extend beyond the end")
        for queue_id, offset in _QUEUE.iter_unpack(body[at : at + count * _QUEUE.size]):
            yield (topic, queue_id), offset
        at += count * _QUEUE.size


SHARE_OF_LOG: Final = 64
"""How many times a set's own bytes must follow in the log before the next one."""
WAIT_S: Final = 5.0
TOLD_MAX: Final = 1000
_UNREADABLE: Final = "start with --repair (in a group), or restore the file from a copy"

_log = logging.getLogger("rocketstore")


class LoggedNumbering:
    """The sets in one store's log: a ``RecordSink`` after the queues. Thread-safe."""

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueueTable,
        *,
        deleted: Callable[[], Mapping[QueueKey, int]] = dict,
    ) -> None:
        """``deleted``: the ends of queues removed on purpose, which a set does not recreate."""
        self._log = log
        self._queues = queues
        self._deleted = deleted
        self._lock = threading.Lock()  # guards the fields up to the blank line
        self._collected: list[NumberingPart] = []
        self._covered: int | None = None  # by the newest complete set; None: no set is known
        self._waits = False  # retention, for the first set
        self._unread = False  # there is a set before what was dispatched here, and it could not be read yet
        self._unread_until = 0  # the set may be read once dispatch has passed this offset
        self._set_bytes = 0

        self._due_at = 0
        self._publishing = False
        self.is_known = True
        """Whether the dispatched log, with its sets, determines every queue's next offset."""

    # -- what the log says ---------------------------------------------------------------------------------------

    def begin(self, *, continuous: bool) -> None:
        """Before anything is dispatched. ``continuous``: the queues contain everything before the log's begin."""
        whole = self._log.min_offset == 0
        self._waits = whole or not self._log.is_replicated
        self.is_known = whole or continuous
        self._plan()

    def jumped(self) -> None:
        """Dispatch continues at the begin of a log that was replaced, after what this member had."""
        with self._lock:
            self._waits = self.is_known = False

    def append(self, heads: Sequence[RecordHead]) -> None:
        """Read the sets among the records just added to the queues.

        Raises ``CorruptLogError`` for one that is damaged here, ``DiskError``.
        """
        if QUEUE_NUMBERS_TOPIC not in topics_of(heads):
            return
        for head in heads:
            if head.topic == QUEUE_NUMBERS_TOPIC:
                record = self._log.read_record(head.offset)
                if record is not None:
                    self._take(self._part_of(record, head.offset))

    @property
    def _path(self) -> Path:
        return Path(next(iter(self._log.directories()), ""))

    def _part_of(self, record: bytes, offset: int) -> tuple[NumberingPart, int] | None:
        """The parsed record and its length; None, on every member alike, if it is malformed.

        Raises ``CorruptLogError`` if the bytes are not those that were written.
        """
        try:
            body = decode_record(record).body
        except InvalidRequestError as error:
            raise CorruptLogError(self._path, offset, f"queue numbers: {error}", _UNREADABLE) from error
        try:
            return decode_numbering(body), len(record)
        except InvalidRequestError as error:
            _log.error("the record at %d is skipped: %s", offset, error)
            return None

    def _take(self, found: tuple[NumberingPart, int] | None) -> None:
        if found is None:
            return
        part, size = found
        self._raise(part)
        with self._lock:
            if part.part == 0:
                self._collected, self._set_bytes = [], 0
            previous = [(one.set_id, one.parts) for one in self._collected[-1:]] or [(part.set_id, part.parts)]
            if part.part != len(self._collected) or previous != [(part.set_id, part.parts)]:
                self._collected = []
                return
            self._collected.append(part)
            self._set_bytes += size
            if len(self._collected) == part.parts:
                self._collected = []
                self._covers(part.covers)

    def _raise(self, part: NumberingPart) -> None:
        deleted = self._deleted()
        self._queues.raise_to({key: end for key, end in part.next_offsets.items() if deleted.get(key, 0) < end})

    def _covers(self, position: int) -> None:
        """Record a complete set. Requires the lock."""
        self._covered, self.is_known, self._unread = max(position, self._covered or 0), True, False
        self._plan()

    def restore_behind(self, position: int) -> None:
        """Read the newest dispatched set again once dispatch has passed ``position``."""
        self._unread, self._unread_until = True, position

    def restore(self) -> bool:
        """Apply the newest dispatched set; False if it may not be read yet (retry later).

        After dispatching everything in the log: a raised queue accepts no more messages from before the set. Raises
        ``CorruptLogError``, ``DiskError``.
        """
        self._unread = True
        queue = self._queues.find(QUEUE_NUMBERS_TOPIC, 0)
        parts: list[NumberingPart] = []
        sizes = 0
        at, first = (queue.max_offset, queue.min_offset) if queue is not None else (0, 0)
        while queue is not None and at > first:
            at -= 1
            unit = queue.unit(at)
            if unit is None:
                continue
            if unit.offset < self._log.min_offset:
                break
            record = self._log.read_record(unit.offset)
            if record is None:
                return False
            found = self._part_of(record, unit.offset)
            if found is None:
                continue
            part, size = found
            self._raise(part)
            if part.part == part.parts - 1:
                parts, sizes = [part], size
            elif parts and (parts[-1].set_id, parts[-1].part) == (part.set_id, part.part + 1):
                parts.append(part)
                sizes += size
            else:
                parts = []
            if parts and part.part == 0:
                with self._lock:
                    self._set_bytes = sizes
                    self._covers(part.covers)
                return True
        self._unread = False
        return True

    def require(self) -> None:
        """Called before a master counts, when everything in the log is dispatched.

        Raises ``CorruptLogError`` if a set in the log is unreadable.
        """
        if self._unread and not self.restore():
            raise CorruptLogError(self._path, 0, "cannot read the newest queue numbers", _UNREADABLE)
        if not self.is_known:
            _log.error(
                "the log does not record where queue numbering stood, and this member started after that: "
                "queues whose messages have expired may restart at 0. Let an older member lead"
            )

    # -- retention -----------------------------------------------------------------------------------------------

    def keep_from(self, dispatched: int, *, writable: bool = True) -> int | None:
        """The offset from which the log must be kept for the numbering; None: no limit.

        ``dispatched`` is how far the log is dispatched. ``writable``: whether a first set could be written, as it
        cannot to a full disk, nor by a slave.
        """
        if self._unread and dispatched >= self._unread_until:
            try:
                self.restore()
            except CorruptLogError as error:
                _log.error("retention waits: %s", error)
        with self._lock:
            if self._unread:
                return 0
            if self._covered is None and self._waits and writable:
                return 0
            return self._covered

    # -- writing sets --------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        covered = self._covered if self._covered is not None else 0 if self._waits else None
        self._due_at = (
            0 if covered is None else max(self._log.next_file_offset(covered), covered + SHARE_OF_LOG * self._set_bytes)
        )

    def is_due(self, position: int) -> bool:
        """Whether a master that has dispatched up to ``position`` should write a set now. Cheap."""
        return position >= self._due_at and not self._publishing

    @property
    def is_missing(self) -> bool:
        """Whether the log has lost its begin, and no set says where the numbers stood: a copy would count from less."""
        with self._lock:
            return (self._covered or 0) < self._log.min_offset

    def publish(self, done: PutDone = lambda _results: None) -> None:
        """Write a set, as master; ``done`` gets the results. The next call retries after a failure."""
        self._publishing = True

        def landed(results: Sequence[PutResult]) -> None:
            self._publishing = False
            last = results[-1]
            if last.stored is not None:
                self._due_at = self._log.next_file_offset(last.stored.offset)  # until it is dispatched
            if not last.ok:
                _log.info("cannot write queue numbers, retrying later: %s", last.reason)
            done(results)

        self._log.submit_numbering(_encode, landed)


def _encode(end: int, next_offsets: Mapping[QueueKey, int], bytes_max: int) -> list[bytes]:
    return encode_numbering(next_offsets, covers=end, set_id=secrets.randbits(62), bytes_max=bytes_max)


class Dispatched(Protocol):
    """How far the log is dispatched."""

    @property
    def position(self) -> int:
        """The dispatched end."""

    def wait_dispatched(self, timeout_s: float) -> bool:
        """Wait until everything now in the log is dispatched; False on timeout."""


class NumberWriter:
    """Writes sets when needed."""

    def __init__(
        self, log: CommitLog, numbering: LoggedNumbering, dispatch: Dispatched, is_master: Callable[[], bool]
    ) -> None:
        self._log = log
        self._numbering = numbering
        self._dispatch = dispatch
        self._is_master = is_master

    def look(self) -> None:
        """As master of a group, write a set early enough that retention need not wait for one on any member. Cheap.

        A plain master writes one only if its log has lost its begin without: it was a slave, of RocketMQ for example.
        """
        if not self._is_master() or not self._numbering.is_due(self._dispatch.position):
            return
        if self._log.is_replicated or self._numbering.is_missing:
            self._numbering.publish()

    def write_and_wait(self) -> None:
        """On a plain master: write a set when retention wants to remove something, and wait for it.

        A slave's log has nothing but what its master wrote: the sets of a master of ours, and none of RocketMQ's.
        """
        if not self._is_master():
            return
        waiter = PutWaiter()
        self._numbering.publish(waiter.done)
        if waiter.wait(WAIT_S) is None or not self._dispatch.wait_dispatched(WAIT_S):
            _log.warning("retention is waiting: the queue numbers were not written in time")


class RepeatAlarm:
    """Reports messages without a place in their queues because their queue offsets were assigned twice."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._told: set[QueueKey] = set()
        self.count = 0
        """The number of such messages so far."""

    def repeated(self, found: Repeated) -> None:
        """Called on the dispatch thread."""
        self.count += found.lost
        key = (found.topic, found.queue_id)
        if key not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(key)
            _log.error(
                "%s. The master at that time counted from too low a number; the messages can still be read by id", found
            )
        self._conditions.set(ConditionKind.MISNUMBERED, str(found), subject=f"{found.topic}/{found.queue_id}")
