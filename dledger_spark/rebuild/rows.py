"""The rows that carry derived data from the tasks that read the log to those that write the files.

One row holds thousands of messages, because a row per message would cost more than the work: a row of ``queues`` holds
a run of units, a row of ``index`` a block of keys, regardless of topic.

Consume queues follow the rules of ``rocketstore.consume_queue.queue``, for whole arrays. Fillers take places without
messages: before the first unit of a queue that starts inside a file, and for queue offsets missing in the log. A
repeated offset is ignored, as by the broker.

Index files follow the rules of ``rocketstore.index``. A file's chains link each entry to the previous one in the same
slot, so one writer writes a file in log order; it keeps the slots in memory (4 bytes each) and streams the entries. A
record's keys are never split between two files.

A broker's files are replaced while its directory is locked: a directory is swapped by two renames. If the process is
killed between them, the broker finds no queues (or no index) at its next start and builds them itself: slow once, never
wrong.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dledger.store.format import parse_segment_name, segment_name
from dledger_spark.decode.layout import Ints
from dledger_spark.decode.records import Records
from dledger_spark.errors import PipelineError
from dledger_spark.rebuild import INDEX, INDEX_DIR, QUEUES, QUEUES_DIR
from dledger_spark.rebuild.derive import Details, as_units, keys_of, runs, unit_columns
from rocketstore.consume_queue.files import FILLER, FILLER_BYTES, UNIT, UNIT_BYTES
from rocketstore.index.file import IndexShape
from rocketstore.index.format import ENTRIES, HEADER, KEY, SLOT, IndexHeader, TopicHashes, chained, seconds_since
from rocketstore.message.message import DelayLevels

_GAP_FILES_MAX: Final = 16
"""As in the broker: a longer gap is damage, and must not fill the disk."""
_FILLERS_AT_ONCE: Final = 1 << 16


class QueueWriter:
    """Writes one queue into its directory, from its first unit on. ``close`` makes the files durable."""

    def __init__(self, directory: Path, file_bytes: int) -> None:
        """``file_bytes`` is a multiple of 20. Raises ``OSError``."""
        self._directory = directory
        self._file_bytes = file_bytes
        self._next: int | None = None
        self._fd = -1
        self._at = 0
        self.units = 0
        """Messages written."""
        self.repeated = 0
        """Messages ignored because their offset was taken."""
        directory.mkdir(parents=True)

    def append(self, offsets: Ints, units: NDArray[np.void]) -> None:
        """Append units at these queue offsets, in log order. Raises ``PipelineError`` for an implausible gap."""
        per_file = self._file_bytes // UNIT_BYTES
        for first, last in _consecutive(offsets):
            offset = int(offsets[first])
            if self._next is None:
                self._next = offset - offset % per_file
                self._at = self._next * UNIT_BYTES
            skipped = min(max(self._next - offset, 0), last - first)
            self.repeated += skipped
            first, offset = first + skipped, offset + skipped
            if first == last:
                continue
            gap = offset - self._next
            if gap > _GAP_FILES_MAX * per_file:
                raise PipelineError(
                    f"{self._directory.parent.name}, queue {self._directory.name}: after queue offset {self._next - 1} "
                    f"comes {offset}, of the record at {int(units['offset'][first])}: the log is damaged there"
                )
            for missing in range(gap, 0, -_FILLERS_AT_ONCE):
                self._write(FILLER_BYTES * min(missing, _FILLERS_AT_ONCE))
            self._write(units[first:last].tobytes())
            self._next = offset + last - first
            self.units += last - first

    def close(self) -> None:
        """Make the last file durable."""
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        done = 0
        with memoryview(data) as view:
            while done < len(data):
                inside = self._at % self._file_bytes
                if self._fd < 0 or not inside:
                    self._open_next()
                count = os.pwrite(self._fd, view[done : done + self._file_bytes - inside], inside)
                done += count
                self._at += count

    def _open_next(self) -> None:
        self.close()
        path = self._directory / segment_name(self._at - self._at % self._file_bytes)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.truncate(self._fd, self._file_bytes)


def _consecutive(offsets: Ints) -> list[tuple[int, int]]:
    """Runs of consecutive offsets, as (first, end) positions in the array."""
    if not len(offsets):
        return []
    cuts = (np.flatnonzero(np.diff(offsets) != 1) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(offsets)], strict=True))


class IndexWriter:
    """Writes index files into a directory; keys are added in log order, all those of a record in one call."""

    def __init__(self, directory: Path, shape: IndexShape) -> None:
        """Raises ``OSError``."""
        self._directory = directory
        self._shape = shape
        self._file: _File | None = None
        self._last_name = 0
        self.files = 0
        """Files started."""
        self.entries = 0
        """Keys written."""
        directory.mkdir(parents=True, exist_ok=True)

    def append(self, keys: NDArray[np.void]) -> None:
        """Add keys, starting the next file if a record's keys no longer fit."""
        offsets = keys["offset"]
        start = 0
        while start < len(keys):
            file = self._file or self._roll(keys, start)
            end = start + file.room
            if end < len(keys):
                end = int(np.searchsorted(offsets, offsets[end]))
                if end <= start:
                    if not file.is_empty:
                        self._roll(keys, start)
                        continue
                    end = start + file.room  # more keys than fit into a file: only these are split
            end = min(end, len(keys))
            file.put(keys[start:end])
            self.entries += end - start
            start = end

    def close(self) -> None:
        """Finish the last file and make it durable."""
        if self._file is not None:
            self._file.finish()
            self._file = None

    def _roll(self, keys: NDArray[np.void], start: int) -> _File:
        """Start the next file. RocketMQ names files by creation time; here it is the time of the first record."""
        self.close()
        stored = datetime.fromtimestamp(max(int(keys["store_ms"][start]), 0) / 1000)  # noqa: DTZ006  # as the broker does
        self._last_name = max(int(stored.strftime("%Y%m%d%H%M%S%f")[:17]), self._last_name + 1)
        self._file = _File(self._directory / f"{self._last_name:017d}", self._shape)
        self.files += 1
        return self._file


class _File:
    """A file being written: slots and header are written at the end."""

    def __init__(self, path: Path, shape: IndexShape) -> None:
        self._shape = shape
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.truncate(self._fd, shape.file_bytes)
        self._slots = np.zeros(shape.slots, np.int32)
        self._header = IndexHeader(0, 0, 0, 0, 0, 1)

    @property
    def room(self) -> int:
        """How many more entries fit."""
        return self._shape.entries - self._header.next_entry

    @property
    def is_empty(self) -> bool:
        """Whether it has no entry."""
        return self._header.next_entry <= 1

    def put(self, keys: NDArray[np.void]) -> None:
        """Add entries, which must fit."""
        old = self._header
        offsets, store_ms = keys["offset"], keys["store_ms"]
        if self.is_empty:
            old = old._replace(begin_ms=int(store_ms[0]), begin_offset=int(offsets[0]))
        first, count = old.next_entry, len(keys)
        places = keys["hash"] % np.int32(self._shape.slots)
        numbers = np.arange(first, first + count, dtype=np.int32)
        previous = chained(self._slots, places, numbers)
        block = np.empty(count, ENTRIES)
        block["hash"], block["offset"], block["previous"] = keys["hash"], offsets, previous
        block["seconds"] = seconds_since(store_ms, old.begin_ms)
        _write(self._fd, block.tobytes(), self._shape.entries_at + first * block.itemsize)
        self._header = old._replace(
            end_ms=int(store_ms[-1]),
            end_offset=int(offsets[-1]),
            used_slots=old.used_slots + int(np.count_nonzero(previous == 0)),
            next_entry=first + count,
        )

    def finish(self) -> None:
        """Write slots and header durably."""
        _write(self._fd, HEADER.pack(*self._header) + self._slots.astype(SLOT).tobytes(), 0)
        os.fsync(self._fd)
        os.close(self._fd)


def _write(fd: int, data: bytes, at: int) -> None:
    done = 0
    with memoryview(data) as view:
        while done < len(data):
            done += os.pwrite(fd, view[done:], at + done)


SCHEMA: Final = "part string, topic string, queueId int, position long, offsets binary, data binary"
ORDER: Final = ("part", "topic", "queueId", "position")
"""The sort order of rows; rows equal but for the position belong to one task."""
KEYS_FILE: Final = "keys"
"""A file with all keys in log order, written instead of index files for comparison."""
_ARROW: Final = pa.schema(
    [
        ("part", pa.string()),
        ("topic", pa.string()),
        ("queueId", pa.int32()),
        ("position", pa.int64()),
        ("offsets", pa.binary()),
        ("data", pa.binary()),
    ]
)
COLUMNS: Final = tuple(_ARROW.names)


class RebuildRow(NamedTuple):
    """One row; ``position`` is the physical offset of its first record."""

    part: str
    topic: str
    queue_id: int
    position: int
    offsets: bytes
    """For queues: the queue offsets of the units, little-endian int64."""
    data: bytes
    """Units or keys."""


@dataclass(frozen=True, slots=True)
class FileShapes:
    """How to write files. ``keys_only``: write ``KEYS_FILE`` instead of index files."""

    queue_file_bytes: int
    index: IndexShape
    keys_only: bool


@dataclass(frozen=True, slots=True)
class Written:
    """The number of units and keys in the files."""

    units: int = 0
    keys: int = 0


def rows_of(found: Iterable[Records], parts: Collection[str], levels: DelayLevels) -> Iterator[pa.RecordBatch]:
    """The data derived from intact records in log order."""
    topics = TopicHashes()
    for records in found:
        details = Details(records)
        rows: list[RebuildRow] = []
        if INDEX in parts and len(keys := keys_of(details, topics)):
            rows.append(RebuildRow(INDEX, "", 0, int(keys["offset"][0]), b"", keys.tobytes()))
        if QUEUES in parts:
            rows += (RebuildRow(QUEUES, *run) for run in runs(unit_columns(details, levels)))
        if rows:
            columns = zip(zip(*rows, strict=True), _ARROW, strict=True)
            yield pa.RecordBatch.from_arrays([pa.array(one, field.type) for one, field in columns], schema=_ARROW)


def write_rows(directory: Path, shapes: FileShapes, batches: Iterable[pa.RecordBatch]) -> Written:
    """Write the files of these rows to ``directory``, durably. Raises ``PipelineError`` unless the rows are sorted."""
    sink: _Sink | None = None
    last: RebuildRow | None = None
    units = keys = 0
    for batch in batches:
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            row = RebuildRow(*values)
            if last is not None and row[:4] <= last[:4]:
                raise PipelineError(f"rows must be sorted by {', '.join(ORDER)}")
            if sink is None or last is None or row[:3] != last[:3]:
                if sink is not None:
                    sink.close()
                sink = _open(directory, shapes, row)
            written = sink.append(row)
            units, keys = (units + written, keys) if row.part == QUEUES else (units, keys + written)
            last = row
    if sink is not None:
        sink.close()
    return Written(units, keys)


class _Sink(Protocol):
    """Writes the rows that are equal but for their position."""

    def append(self, row: RebuildRow) -> int: ...

    def close(self) -> None: ...


def _open(directory: Path, shapes: FileShapes, row: RebuildRow) -> _Sink:
    if row.part == QUEUES:
        return _QueueSink(QueueWriter(directory / QUEUES_DIR / row.topic / str(row.queue_id), shapes.queue_file_bytes))
    if row.part != INDEX:
        raise PipelineError(f"there is no part {row.part!r}")
    if shapes.keys_only:
        return _KeySink(directory / INDEX_DIR)
    return _IndexSink(IndexWriter(directory / INDEX_DIR, shapes.index))


class _QueueSink:
    def __init__(self, writer: QueueWriter) -> None:
        self._writer = writer

    def append(self, row: RebuildRow) -> int:
        before = self._writer.units
        self._writer.append(np.frombuffer(row.offsets, "<i8"), as_units(row.data))
        return self._writer.units - before

    def close(self) -> None:
        self._writer.close()


class _IndexSink:
    def __init__(self, writer: IndexWriter) -> None:
        self._writer = writer

    def append(self, row: RebuildRow) -> int:
        keys = np.frombuffer(row.data, KEY)
        self._writer.append(keys)
        return len(keys)

    def close(self) -> None:
        self._writer.close()


class _KeySink:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._file: BinaryIO = (directory / KEYS_FILE).open("wb")

    def append(self, row: RebuildRow) -> int:
        self._file.write(row.data)
        return len(row.data) // KEY.itemsize

    def close(self) -> None:
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())


STAGING: Final = ".rebuild-"
"""Prefix of directories in which a rebuild is in progress."""


def keep_expired_queues(built: Path, old: Path, begin: int) -> list[str]:
    """Copy queues whose messages have all expired, because their files hold the next queue offset.

    ``begin`` is the start of the log. Returns the names, as topic/queue.
    """
    kept: list[str] = []
    for queue in sorted(old.glob("*/*")):
        name = f"{queue.parent.name}/{queue.name}"
        if queue.is_dir() and not (built / name).exists() and _is_expired(queue, begin):
            shutil.copytree(queue, built / name)
            kept.append(name)
    return kept


def _is_expired(queue: Path, begin: int) -> bool:
    """Whether a queue has units, all of them for records before ``begin``."""
    files = sorted(one for one in queue.iterdir() if parse_segment_name(one.name) is not None)
    found = False
    for one in files:
        units = np.fromfile(one, UNIT)
        real = units[(units["size"] > 0) & (units["size"] != FILLER.size)]
        found = found or len(real) > 0
        if np.any(real["offset"] >= begin):
            return False
    return found


def exchange(root: Path, staging: Path, name: str) -> None:
    """Replace ``root/name`` by ``staging/name``, and move the old files to ``staging``. Raises ``OSError``."""
    if (root / name).exists():
        os.rename(root / name, staging / f"old-{name}")
    os.rename(staging / name, root / name)
    sync_directory(root)


def remove_left_overs(root: Path) -> None:
    """Remove the remains of interrupted rebuilds; requires the broker's lock."""
    for one in root.glob(f"{STAGING}*"):
        shutil.rmtree(one, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Make a directory's entries durable. Raises ``OSError``."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
