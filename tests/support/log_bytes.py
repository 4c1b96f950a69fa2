"""Stretches of log and whole directories for tests of their readers, and a naive reader to compare them with."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.records import ENTRY_HEADER_BYTES
from dledger.store.file_store import FileStore
from dledger.store.format import decode_entry, encode_record
from dledger.types import NO_INDEX, Boundary, LogIndex, Magic, NodeId, Position, Term
from rocketstore.message import record as records
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.properties import tags_code

CLUSTER_ID = "default/n0"
Row = Mapping[str, object]


@dataclass
class Stretch:
    """Entries one after the other, as a node stores them."""

    base: int = 0
    data: bytearray = field(default_factory=bytearray)
    starts: list[int] = field(default_factory=list)
    index: int = 0
    chain: int = 0

    def add(self, body: bytes, *, term: int = 1, magic: int = 1, channel: int = 0) -> None:
        """One more entry."""
        raw, self.chain = encode_record(term, self.index, self.end, body, self.chain, magic, channel)
        self.starts.append(len(self.data))
        self.data += raw
        self.index += 1

    def add_message(self, message: Message, queue_offset: int = 0, *, term: int = 1) -> None:
        """One more entry with a message in it."""
        record = records.encode_record(
            message, queue_offset=queue_offset, physical_offset=self.end + ENTRY_HEADER_BYTES
        )
        self.add(record, term=term)

    @property
    def end(self) -> int:
        """The position behind the last entry."""
        return self.base + len(self.data)


def host_text(host: HostAddress) -> str:
    """A host as the column has it."""
    address = ipaddress.ip_address(host.ip)
    return f"{address}:{host.port}" if address.version == 4 else f"[{address}]:{host.port}"


def message_row(record: bytes) -> dict[str, object]:
    """What a message's columns must hold, by the store's own codec."""
    message = records.decode_record(record)
    return {
        "topic": message.topic,
        "queueId": message.queue_id,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "reconsumeTimes": message.reconsume_times,
        "queueOffset": message.queue_offset,
        "physicalOffset": message.offset,
        "preparedTransactionOffset": message.prepared_offset,
        "bornTimestamp": message.born_timestamp * 1000,
        "storeTimestamp": message.store_timestamp * 1000,
        "bornHost": host_text(message.born_host),
        "storeHost": host_text(message.store_host),
        "keys": message.properties.get("KEYS"),
        "tags": message.properties.get("TAGS"),
        "body": message.body,
        "properties": message.properties,
        "size": len(record),
        "bodyLength": len(message.body),
        "tagsCode": tags_code(message.tags),
        "crcOk": True,
    }


def entry_rows(stretch: Stretch, segment: str = "") -> list[dict[str, object]]:
    """Every column of every message in a stretch, one record after the other."""
    rows: list[dict[str, object]] = []
    for start in stretch.starts:
        raw = bytes(stretch.data[start:])
        entry = decode_entry(raw)
        if entry.magic is Magic.NORMAL:
            place = {"index": entry.index, "term": entry.term, "position": entry.position, "segment": segment}
            rows.append(place | message_row(entry.body) | {"raw": raw[: len(entry.body) + ENTRY_HEADER_BYTES]})
    return rows


@dataclass(frozen=True)
class DiskLog:
    """A node's directory that was written by the store, and all messages in it."""

    directory: Path
    rows: tuple[Row, ...]
    segment_bytes: int


def place_records(positions: Sequence[int], bodies: Sequence[bytes | bytearray]) -> Sequence[bytes | bytearray]:
    """A store's hook: every message learns where it is."""
    placed = []
    for position, body in zip(positions, bodies, strict=True):
        record = bytearray(body)
        records.OFFSETS.pack_into(record, records.QUEUE_OFFSET_AT, len(record), position + ENTRY_HEADER_BYTES)
        placed.append(record)
    return placed


def write_disk_log(
    base: Path,
    messages: Sequence[Message | bytes],
    *,
    segment_bytes: int = 64 * 1024,
    committed: int | None = None,
    noop_every: int = 0,
    batch: int = 16,
    begin: int = 0,
) -> DiskLog:
    """Append messages (or raw bodies) through the store; ``committed``: the last committed index, all by default.

    ``begin``: the position of the first entry, as of a log that goes on from a plain one.
    """
    config = StoreConfig(base_dir=base, segment_bytes=segment_bytes, index_segment_bytes=32 * 1024)
    store = FileStore.open(config, cluster_id=CLUSTER_ID, group="default", node_id=NodeId("n0"), clock=Clock())
    if begin:
        store.reset(Boundary(NO_INDEX, Term(0), Position(begin), 0))
    if any(isinstance(one, Message) for one in messages):
        store.add_batch_hook(place_records)
    bodies = [records.encode_record(one) if isinstance(one, Message) else one for one in messages]
    for first in range(0, len(bodies), batch):
        if noop_every and first % noop_every == 0:
            store.append_as_leader(Term(1), [b"a snapshot of producers"], magic=Magic.NOOP)
        store.append_as_leader(Term(1), bodies[first : first + batch])
    store.set_committed(store.last.index if committed is None else LogIndex(committed))
    store.flush()
    directory, rows = store.directory, []
    for index in range(store.committed_index + 1):
        entry = store.read(LogIndex(index))
        if entry.magic is Magic.NORMAL:
            base_position = Position(entry.position - entry.position % segment_bytes)
            place = {
                "index": entry.index,
                "term": entry.term,
                "position": entry.position,
                "segment": f"{base_position:020d}",
            }
            is_message = isinstance(messages[0], Message)
            rows.append(place | (message_row(entry.body) if is_message else {"body": entry.body}))
    store.close()
    return DiskLog(directory, tuple(rows), segment_bytes)
