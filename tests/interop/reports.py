"""What a store holds, in comparable form: as Java's program prints it, and as our store gives it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rocketstore.commit_log.port import CommitLog
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import decode_record
from rocketstore.store.message_store import MessageStore
from rocketstore.types import HIDDEN_TOPICS, GetMessageStatus, RecordHead

Fields = dict[str, Any]
Queue = tuple[str, int]
Key = tuple[str, str]
FOREVER_MS = 1 << 60
UNITS_PER_FILE = 20


@dataclass
class Report:
    """Records by physical offset, queues, and which records a query finds; hidden topics are left out."""

    records: dict[int, Fields] = field(default_factory=dict)
    bounds: dict[Queue, tuple[int, int]] = field(default_factory=dict)
    units: dict[Queue, list[tuple[int, int, int]]] = field(default_factory=dict)
    got: dict[Queue, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Queue offset, physical offset, body CRC of what a consumer gets."""
    later: dict[Queue, list[tuple[int, int]]] = field(default_factory=dict)
    """Times asked for and the store time of the message found, as several may be stored at one time. Only of queues of
    one file: Java chooses the file by the time it was changed, which says nothing about messages of another clock."""
    queries: dict[Key, list[int]] = field(default_factory=dict)

    def time_of(self, queue: Queue, queue_offset: int) -> int:
        """When a message of a queue was stored."""
        first, _ = self.bounds[queue]
        time_ms: int = self.records[self.got[queue][queue_offset - first][1]]["storeTimestamp"]
        return time_ms

    def keys_of(self, offset: int) -> set[str]:
        """The keys of a record."""
        properties = self.records[offset]["properties"]
        return {*properties.get("KEYS", "").split(" "), properties.get("UNIQ_KEY", "")} - {""}


def java_report(lines: Iterable[str]) -> Report:
    """What the Java program printed. Queries lose what only has the same hash: consumers check that, and we do."""
    report = Report()
    for line in lines:
        fields: Fields = json.loads(line)
        kind = fields.pop("kind")
        fields.pop("replicated", None)
        if fields.get("topic") in HIDDEN_TOPICS:
            continue
        if kind == "record":
            report.records[fields["offset"]] = fields
        elif kind == "queue" and fields["max"]:  # looking for a queue creates an empty one
            queue = fields["topic"], fields["queueId"]
            report.bounds[queue] = fields["min"], fields["max"]
            report.units[queue] = [(offset, size, code) for offset, size, code in fields["units"]]
            report.got[queue] = [(number, offset, crc) for number, offset, crc in fields["got"]]
            if fields["max"] <= UNITS_PER_FILE:
                found = [(time, report.time_of(queue, offset)) for time, offset in fields["offsetsOfTimes"]]
                # RocketMQ 4.9 takes the nearest message, and we the first that is not older: the same if it is later
                report.later[queue] = [(time, stored) for time, stored in found if stored >= time]
        elif kind == "query":
            key = fields["key"]
            offsets = [offset for offset in fields["offsets"] if key in report.keys_of(offset)]
            report.queries[fields["topic"], key] = sorted(set(offsets))  # once for each time the key was given
    return report


def our_report(store: MessageStore, like: Report) -> Report:
    """What our running store gives, with the times and keys of ``like`` asked for."""
    report = Report()
    heads = heads_of(store.log)
    for head in heads:
        record = store.read_record(head.offset)
        assert record is not None, head
        report.records[head.offset] = record_fields(head, decode_record(record))
    for topic, queue_id in store.queues():
        queue = topic, queue_id
        bounds = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        if topic not in HIDDEN_TOPICS and bounds[1]:
            report.bounds[queue] = bounds
            report.got[queue] = _consume(store, topic, queue_id)
            if queue in like.later:
                report.later[queue] = [
                    (time_ms, report.time_of(queue, store.offset_by_time(topic, queue_id, time_ms)))
                    for time_ms, _ in like.later[queue]
                ]
    for topic, key in like.queries:
        found = store.query(topic, key, 64, 0, FOREVER_MS)
        report.queries[topic, key] = [decode_record(record).offset for record in found]
    codes = {head.offset: head.tags_code for head in heads}
    for queue, got in report.got.items():
        report.units[queue] = [(offset, report.records[offset]["size"], codes[offset]) for _, offset, _ in got]
    return report


def heads_of(log: CommitLog) -> list[RecordHead]:
    """Every record of a log but those of hidden topics."""
    heads: list[RecordHead] = []
    offset = log.min_offset
    while True:
        scanned = log.scan(offset, 1 << 20)
        heads += [head for head in scanned.heads if head.topic not in HIDDEN_TOPICS]
        if scanned.next_offset == offset:
            return heads
        offset = scanned.next_offset


def record_fields(head: RecordHead, message: Message) -> Fields:
    """One record as Java's program prints it."""
    assert (head.offset, head.size) == (message.offset, message.size)
    return {
        "offset": message.offset,
        "size": message.size,
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "bornTimestamp": message.born_timestamp,
        "bornHost": _host(message.born_host),
        "storeTimestamp": message.store_timestamp,
        "storeHost": _host(message.store_host),
        "reconsumeTimes": message.reconsume_times,
        "preparedOffset": message.prepared_offset,
        "bodyCrc": message.body_crc,
        "body": message.body.hex(),
        "properties": message.properties,
        "messageId": offset_message_id(message.store_host, message.offset),
        "tagsCode": head.tags_code,
        "indexed": message.sys_flag != 0xC,
    }


def differences(ours: Report, java: Report) -> list[str]:
    """Where two reports differ, in words; what only one of them has comes first."""
    found: list[str] = []
    for name in ("records", "bounds", "units", "got", "later", "queries"):
        mine, theirs = getattr(ours, name), getattr(java, name)
        found += [
            f"{name} {key}: ours {mine.get(key)!r:.2000}, Java's {theirs.get(key)!r:.2000}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]
    return found


def assert_same(ours: Report, java: Report) -> None:
    """Fail with the first differences, or if there is nothing to compare."""
    found = differences(ours, java)
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:10])
    assert java.records
    assert java.units
    assert java.queries


def _host(host: HostAddress) -> str:
    return f"{host.ip.hex()}:{host.port}"


def _consume(store: MessageStore, topic: str, queue_id: int) -> list[tuple[int, int, int]]:
    got: list[tuple[int, int, int]] = []
    offset = store.min_offset(topic, queue_id)
    while (result := store.get(topic, queue_id, offset, max_count=7)).status is GetMessageStatus.FOUND:
        for record in result.records:
            message = decode_record(record)
            got.append((message.queue_offset, message.offset, message.body_crc))
        offset = result.next_offset
    assert all(one[0] + 1 == two[0] for one, two in pairwise(got)), got
    return got
