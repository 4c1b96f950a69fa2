"""Stand-ins for the parts that dispatch, reads, recovery and cleaning work with.

They are not initialised as the real ones: what a test does not give them fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.consume_queue.queue import ConsumeQueue
from rocketstore.index.service import IndexHits, IndexService
from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from rocketstore.message.scan import scan_records
from rocketstore.types import QueueUnit, RecordHead, ScannedRecords

FILE_BYTES = 1000


def head(offset: int, *, size: int = 100, topic: str = "T", queue_offset: int = 0, store_ms: int = 1) -> RecordHead:
    """A record as dispatch sees it."""
    return RecordHead(topic, 0, offset, size, 7, store_ms, queue_offset, 0, 0, b"")


@dataclass
class FakeLog(PlainCommitLog):
    """Records of 100 bytes, ten to a file, as far as ``max_offset``."""

    min_offset: int = 0
    max_offset: int = 0
    end_offset: int = 0
    failure: BaseException | None = None
    scans: list[int] = field(default_factory=list)
    times: dict[int, int] = field(default_factory=dict)
    """Store time of the record at an offset."""

    def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
        self.scans.append(offset)
        if self.failure is not None:
            raise self.failure
        end = min(self.max_offset, offset + max(100, bytes_max // 100 * 100))
        offsets = range(max(offset, self.min_offset), end, 100)
        return ScannedRecords([head(at, queue_offset=at // 100, store_ms=self.times.get(at, 1)) for at in offsets], end)

    def next_file_offset(self, offset: int) -> int:
        return offset - offset % FILE_BYTES + FILE_BYTES


@dataclass
class FakeSink:
    """Takes records; fails once for each error in ``errors``."""

    heads: list[RecordHead] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    failed: threading.Event = field(default_factory=threading.Event)

    def append(self, heads: Sequence[RecordHead]) -> None:
        if self.errors:
            self.failed.set()
            raise self.errors.pop(0)
        known = self.heads[-1].offset if self.heads else -1
        self.heads += [one for one in heads if one.offset > known]


class RecordLog(PlainCommitLog):
    """Real records one after the other from ``begin`` on; ``max_offset`` may lie before their end."""

    min_offset = 0
    max_offset = 0

    def __init__(self, begin: int = 0) -> None:
        self.min_offset = begin
        self.max_offset = begin
        self.records: dict[int, bytes] = {}
        self.numbers: dict[tuple[str, int], int] = {}
        self.file_bytes = 1 << 20
        self.is_replicated = False

    @property
    def end_offset(self) -> int:
        return self.max_offset

    @property
    def queue_offsets(self) -> dict[tuple[str, int], int]:
        return self.numbers

    def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
        """All heads from ``offset`` on."""
        assert bytes_max > 0
        offsets = [at for at in sorted(self.records) if offset <= at < self.max_offset]
        heads = [one for at in offsets for one in scan_records(self.records[at], at, check_crc=False).heads]
        return ScannedRecords(heads, self.max_offset)

    def add(self, message: Message) -> QueueUnit:
        """Store a message at the end."""
        record = encode_record(message, queue_offset=message.queue_offset, physical_offset=self.max_offset)
        unit = QueueUnit(self.max_offset, len(record), 0)
        self.records[self.max_offset] = record
        self.max_offset += len(record)
        return unit

    def read(self, offset: int, size: int) -> bytes | None:
        found = self.read_record(offset)
        return found if found is not None and len(found) >= size and offset + size <= self.max_offset else None

    def read_together(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        return [self.read(offset, size) for offset, size in places]

    def read_at_once(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Also what may not be read yet."""
        return [self.records.get(offset) for offset, _ in places]

    def read_record(self, offset: int) -> bytes | None:
        return self.records.get(offset) if offset >= self.min_offset else None

    def next_file_offset(self, offset: int) -> int:
        return offset - offset % self.file_bytes + self.file_bytes


class UnitQueue(ConsumeQueue):
    """A consume queue in memory. ``broken_at``: reads from there on find nothing."""

    min_offset = 0

    def __init__(self, units: Sequence[QueueUnit] = (), *, begin: int = 0) -> None:
        self.all = list(units)
        self.min_offset = begin
        self.broken_at: int | None = None
        self.asked: list[tuple[int, int]] = []
        self.topic = "T"
        self.queue_id = 0

    @property
    def max_offset(self) -> int:
        return len(self.all)

    def rewrite(self, offset: int, unit: QueueUnit) -> None:
        self.all[offset] = unit

    def unit(self, offset: int) -> QueueUnit | None:
        return self.all[offset] if self.min_offset <= offset < len(self.all) else None

    def units(self, offset: int, count: int) -> list[QueueUnit]:
        self.asked.append((offset, count))
        if self.broken_at is not None and offset >= self.broken_at:
            return []
        return self.all[offset : offset + count]

    def units_at_once(self, offset: int, count: int) -> list[QueueUnit]:
        return self.units(offset, count)

    def offset_by_time(self, time_ms: int, store_time_of: Callable[[int, int], int]) -> int:
        times = [store_time_of(unit.offset, unit.size) for unit in self.all]
        return next((at for at, time in enumerate(times) if time >= time_ms), len(times))


class FakeIndex(IndexService):
    """Gives what it is told to, a round at a time, and remembers the questions."""

    def __init__(self, *rounds: list[int]) -> None:
        self.rounds = list(rounds)
        self.asked: list[tuple[int, int, int]] = []
        self.contradictions: list[int] = []

    def query(self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int) -> IndexHits:
        self.asked.append((max_num, begin_ms, end_ms))
        return IndexHits(self.rounds.pop(0) if self.rounds else [], 0, 0)

    def contradicted(self, offset: int) -> None:
        self.contradictions.append(offset)
