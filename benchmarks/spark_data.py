"""Logs for measuring the pipeline: a node's directory full of messages, as a broker would have written it.

A pool of some thousand messages with random bodies is created once and written repeatedly; in each round every record
gets its own position, times, queue offset and checksums. Nearly all of that is done for whole rounds at once, so
gigabytes take seconds. The result is an ordinary log: the store opens it, and RocketMQ's readers can read it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.records import ENTRY_HEADER_BYTES, INDEX_UNIT_BYTES, MIN_BLANK_BYTES
from dledger.store.durable_state import LogCheckpoint, Mark, create_checkpoint
from dledger.store.file_store import FileStore
from dledger.store.format import CHAIN_CRC_END, CHAIN_CRC_OFFSET, HEADERS, UNITS, blank_head, segment_name
from dledger.store.fs import FileSystem
from dledger.types import LogIndex, NodeId
from dledger.values import MIB
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import HEAD_V4, PHYSICAL_OFFSET_AT, QUEUE_OFFSET_AT, STORE_TIMESTAMP_AT, encode_record

Ints = NDArray[np.int64]
_TERM: Final = 1
_COMPLETE: Final = "complete.json"
ORDER: Final = "id bigint, item string, total decimal(8,2), note string"
"""The columns of JSON bodies."""


@dataclass(frozen=True, slots=True)
class LogSpec:
    """The parameters of a log. Equal ones give equal logs."""

    log_bytes: int = 3 * 1024 * MIB
    segment_bytes: int = 1024 * MIB
    index_segment_bytes: int = 160 * MIB
    body_bytes_min: int = 200
    body_bytes_max: int = 4096
    """Sizes are log-uniform between the two."""
    json_bodies: bool = False
    """Bodies are JSON objects of four members, ``ORDER``, one of which is as long as the rest of the body."""
    pool: int = 4096
    topics: int = 20
    queues: int = 8
    tags: int = 16
    start_ms: int = 1_760_000_000_000
    records_per_ms: int = 5
    seed: int = 7
    cluster_id: str = "default/n0"
    group: str = "default"
    node_id: str = "n0"


@dataclass(frozen=True, slots=True)
class WrittenLog:
    """A generated log."""

    directory: Path
    """The node's own directory."""
    records: int
    log_bytes: int


@dataclass(slots=True)
class _Pool:
    """One round of messages, joined, with room for an entry header before each."""

    template: NDArray[np.uint8]
    starts: Ints
    sizes: Ints
    per_queue: Ints
    """For each message, how many of the pool's messages go to its queue."""
    ranks: Ints
    """For each message, how many of these precede it."""


def _make_pool(spec: LogSpec) -> _Pool:
    rng = np.random.default_rng(spec.seed)
    low, high = np.log(spec.body_bytes_min), np.log(spec.body_bytes_max)
    lengths = np.exp(rng.uniform(low, high, spec.pool)).astype(int)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789 ,.:{}", np.uint8)
    text = letters[rng.integers(0, len(letters), int(lengths.sum()))].tobytes()  # compresses about as well as JSON
    records: list[bytes] = []
    queues: list[int] = []
    at = 0
    for number, length in enumerate(lengths.tolist()):
        topic, queue, tag = rng.integers(0, (spec.topics, spec.queues, spec.tags)).tolist()
        message = Message(
            f"bench-topic-{topic}",
            _order(number, text[at : at + length], length) if spec.json_bodies else text[at : at + length],
            queue,
            {
                "TAGS": f"tag-{tag}",
                "KEYS": f"order-{number}",
                "UNIQ_KEY": f"{spec.seed:08X}{number:024X}",
                "WAIT": "true",
            },
            born_host=HostAddress(bytes((10, 0, topic, tag)), 40_000 + queue),
            store_host=HostAddress(bytes((10, 1, 0, 1)), 10_911),
        )
        records.append(b"\0" * ENTRY_HEADER_BYTES + encode_record(message))
        queues.append(topic * spec.queues + queue)
        at += length
    sizes = np.array([len(one) for one in records], np.int64)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    of = np.array(queues)
    ranks = np.zeros(spec.pool, np.int64)
    for queue in np.unique(of):
        mine = np.flatnonzero(of == queue)
        ranks[mine] = np.arange(len(mine))
    template = np.frombuffer(b"".join(records), np.uint8)
    return _Pool(template, starts, sizes, np.bincount(of)[of], ranks)


def _order(number: int, text: bytes, length: int) -> bytes:
    """A body of ``ORDER``."""
    head = b'{"id":%d,"item":"item-%d","total":%d.%02d,"note":"' % (number, number % 97, number % 5000, number % 100)
    return head + text[: length - len(head) - 2] + b'"}'


class _Writer:
    """Writes rounds of the pool into segments and index files."""

    def __init__(self, directory: Path, spec: LogSpec) -> None:
        self._spec = spec
        self._pool = _make_pool(spec)
        self._directory = directory
        self.end = 0
        self.last_end = 0  # of the last entry, which a blank may follow
        self.index = 0
        self.chain = 0

    def write(self) -> None:
        """Write rounds until the log has the requested length; ends with a whole round or a full segment."""
        spec, pool = self._spec, self._pool
        segment: BinaryIO | None = None
        first, done = 0, 0
        with _IndexWriter(self._directory / "index", spec.index_segment_bytes) as index:
            while self.end < spec.log_bytes:
                if segment is None:
                    segment = (self._directory / "data" / segment_name(self.end)).open("wb")
                room = spec.segment_bytes - self.end % spec.segment_bytes - MIN_BLANK_BYTES
                ends = np.cumsum(pool.sizes[first:])
                count = min(int(np.searchsorted(ends, room, side="right")), len(ends))
                if count:
                    data, units = self._encoded(first, count, done)
                    segment.write(data.data)
                    index.write(units)
                    first += count
                if first == len(pool.sizes):
                    first, done = 0, done + 1
                else:
                    rest = spec.segment_bytes - self.end % spec.segment_bytes
                    segment.write(blank_head(rest))
                    segment.truncate(spec.segment_bytes)
                    segment.close()
                    segment = None
                    self.end += rest
            if segment is not None:
                segment.truncate(spec.segment_bytes)
                segment.close()

    def _encoded(self, first: int, count: int, done: int) -> tuple[NDArray[np.uint8], NDArray[np.void]]:
        """Records of the pool from ``first`` on as entries at the log's end, with their index units."""
        pool, spec = self._pool, self._spec
        rows = slice(first, first + count)
        base = int(pool.starts[first])
        sizes = pool.sizes[rows]
        starts = pool.starts[rows] - base
        data = pool.template[base : base + int(sizes.sum())].copy()
        positions = starts + self.end
        numbers = np.arange(self.index, self.index + count)
        times = spec.start_ms + numbers // spec.records_per_ms
        message = starts + ENTRY_HEADER_BYTES
        _scatter(data, message + QUEUE_OFFSET_AT, pool.ranks[rows] + done * pool.per_queue[rows])
        _scatter(data, message + PHYSICAL_OFFSET_AT, positions + ENTRY_HEADER_BYTES)
        _scatter(data, message + HEAD_V4.at("born_timestamp"), times - 3)
        _scatter(data, message + STORE_TIMESTAMP_AT, times)
        heads = np.zeros(count, HEADERS)
        heads["magic"], heads["term"], heads["size"] = 1, _TERM, sizes
        heads["index"], heads["position"] = numbers, positions
        heads["body_length"] = sizes - ENTRY_HEADER_BYTES
        with data.data as view:
            heads["body_crc"] = [
                crc32c(view[start + ENTRY_HEADER_BYTES : start + size])
                for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
            ]
        heads["chain_crc"] = self._chained(heads)
        np.ndarray((len(data) - ENTRY_HEADER_BYTES + 1,), f"V{ENTRY_HEADER_BYTES}", data.data, strides=(1,))[starts] = (
            heads.view(f"V{ENTRY_HEADER_BYTES}")
        )
        units = np.zeros(count, UNITS)
        units["magic"], units["term"], units["size"] = 1, _TERM, sizes
        units["index"], units["position"] = numbers, positions
        self.end = self.last_end = self.end + len(data)
        self.index += count
        return data, units

    def _chained(self, heads: NDArray[np.void]) -> list[int]:
        raw, chain, chains = memoryview(heads.tobytes()), self.chain, []
        for at in range(0, len(raw), ENTRY_HEADER_BYTES):
            chain = crc32c(
                raw[at + CHAIN_CRC_END : at + ENTRY_HEADER_BYTES], crc32c(raw[at : at + CHAIN_CRC_OFFSET], chain)
            )
            chains.append(chain)
        self.chain = chain
        return chains


def _scatter(data: NDArray[np.uint8], places: Ints, values: Ints) -> None:
    """Write 64-bit numbers at places that need not be aligned."""
    view = np.ndarray((len(data) - 7,), "V8", data.data, strides=(1,))
    view[places] = values.astype(">i8").view("V8")


class _IndexWriter:
    """Index files of a given size, filled one after the other."""

    def __init__(self, directory: Path, file_bytes: int) -> None:
        self._directory = directory
        self._file_bytes = file_bytes
        self._at = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> _IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, units: NDArray[np.void]) -> None:
        """Add units."""
        raw = memoryview(units.tobytes())
        while raw:
            if self._file is None:
                self._file = (self._directory / segment_name(self._at)).open("wb")
            room = self._file_bytes - self._at % self._file_bytes
            self._file.write(raw[:room])
            self._at += len(raw[:room])
            raw = raw[room:]
            if self._at % self._file_bytes == 0:
                self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.truncate(self._file_bytes)
            self._file.close()
            self._file = None


def write_log(base_directory: Path, spec: LogSpec) -> WrittenLog:
    """Create a node's directory below ``base_directory``, like that of a stopped node. Raises ``OSError``."""
    if spec.index_segment_bytes % INDEX_UNIT_BYTES:
        raise ValueError(f"index files hold whole units of {INDEX_UNIT_BYTES} bytes")
    config = StoreConfig(
        base_dir=base_directory, segment_bytes=spec.segment_bytes, index_segment_bytes=spec.index_segment_bytes
    )
    store = FileStore.open(
        config, cluster_id=spec.cluster_id, group=spec.group, node_id=NodeId(spec.node_id), clock=Clock()
    )
    directory = store.directory
    store.close()  # it has written its identity; the log itself is written here
    for part in ("data", "index"):
        shutil.rmtree(directory / part, ignore_errors=True)
        (directory / part).mkdir()
    writer = _Writer(directory, spec)
    writer.write()
    last = LogIndex(writer.index - 1)
    mark = Mark(last, writer.last_end, writer.chain)
    checkpoint = LogCheckpoint(mark, indexed=last, committed=last, clean_stop=True)
    create_checkpoint(FileSystem(), directory / "checkpoint", checkpoint)
    return WrittenLog(directory, writer.index, writer.last_end)


def cached_log(directory: Path, spec: LogSpec) -> WrittenLog:
    """The log for ``spec`` below ``directory``, created if missing. Raises ``OSError``."""
    key = sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()[:16]
    place = directory / f"spark-log-{key}"
    complete = place / _COMPLETE
    if complete.is_file():
        facts = json.loads(complete.read_text(encoding="utf-8"))
        return WrittenLog(place / facts["directory"], facts["records"], facts["log_bytes"])
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    written = write_log(place, spec)
    facts = {"directory": written.directory.name, "records": written.records, "log_bytes": written.log_bytes}
    complete.write_text(json.dumps(facts), encoding="utf-8")
    return written
