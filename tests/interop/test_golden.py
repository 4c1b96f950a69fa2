"""Stores that the real RocketMQ wrote: we read what it read, make the same bytes from it, and go on writing.

Runs without Java. ``goldens`` says how the files are made.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.errors import IdentityError
from dledger.store.file_store import FileStore
from dledger.types import LogIndex, Magic
from rocketstore.config import DEFAULT_DELAY_LEVELS
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.index.service import IndexService
from rocketstore.message.message import DelayLevels, Message
from rocketstore.message.record import decode_record, encode_record
from rocketstore.message.scan import scan_entries, scan_records
from rocketstore.store.message_store import MessageStore
from rocketstore.types import RecordHead
from tests.interop.goldens import LEDGER, STORES, open_golden
from tests.interop.reports import Report, assert_same, java_report, our_report, record_fields
from tests.interop.stores import (
    INDEX_ENTRIES,
    INDEX_SLOTS,
    QUEUE_FILE_BYTES,
    SEGMENT_BYTES,
    WAIT_S,
    plain_store,
    replicated_store,
)

DELAYS = DelayLevels.parse(DEFAULT_DELAY_LEVELS)
NODE = "dledger-n0"
PLAIN = ("plain", "killed")
INDEX_HEADER_BYTES = 40


class Golden:
    """One of Java's stores, unpacked, and Java's report of it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.root, lines = open_golden(name, directory)
        self.report: Report = java_report(lines)

    def segments(self) -> list[tuple[int, bytes]]:
        """Base and content of every file of the log."""
        directory = self.root / (f"{NODE}/data" if self.name == "dledger" else "commitlog")
        return [(int(path.name), path.read_bytes()) for path in sorted(directory.iterdir())]

    def records(self) -> Iterator[tuple[RecordHead, bytes]]:
        """Every record as the scanner finds it, and its bytes; each file but the last ends with a blank."""
        scan = scan_entries if self.name == "dledger" else scan_records
        segments = [(base, data) for base, data in self.segments() if any(data)]
        for base, data in segments:
            outcome = scan(data, base, check_crc=True, delay_levels=DELAYS)
            if (base, data) != segments[-1]:
                assert outcome.end == "blank" or outcome.consumed == len(data), outcome.reason
            for head in outcome.heads:
                yield head, data[head.offset - base : head.offset - base + head.size]

    def heads(self) -> list[RecordHead]:
        return [head for head, _ in self.records()]


@pytest.fixture(params=list(STORES))
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    return Golden(request.param, tmp_path)


@pytest.fixture(params=PLAIN)
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    return Golden(request.param, tmp_path)


def files(directory: Path) -> dict[str, bytes]:
    """Path below the directory to content."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_the_scanner_finds_the_records_that_java_finds(golden: Golden) -> None:
    found = {head.offset: record_fields(head, decode_record(record)) for head, record in golden.records()}
    assert found == golden.report.records
    assert len(golden.segments()) > 5
    assert {
        (head.topic, head.queue_id): head.queue_offset + 1 for head in golden.heads() if head.queue_offset >= 0
    } == {queue: last for queue, (_, last) in golden.report.bounds.items()}


def test_encoding_a_decoded_record_gives_the_bytes_that_java_wrote(golden: Golden) -> None:
    for head, record in golden.records():
        message = decode_record(record)
        assert encode_record(message, queue_offset=message.queue_offset, physical_offset=head.offset) == record


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_our_consume_queues_are_javas_byte_for_byte(golden: Golden, tmp_path: Path, step: int) -> None:
    table = ConsumeQueueTable(tmp_path / "ours", QUEUE_FILE_BYTES)
    table.load()
    heads = golden.heads()
    for first in range(0, len(heads), step):
        table.append(heads[first : first + step])
    table.flush()
    table.close()
    assert files(tmp_path / "ours") == files(golden.root / "consumequeue")


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_our_index_is_javas_byte_for_byte(golden: Golden, tmp_path: Path, step: int) -> None:
    heads = golden.heads()
    service = IndexService(tmp_path / "ours", INDEX_SLOTS, INDEX_ENTRIES)
    service.load(clean_stop=True, index_timestamp_ms=0)
    for first in range(0, len(heads), step):
        service.append(heads[first : first + step])
    service.flush()
    ours, java = files(tmp_path / "ours"), files(golden.root / "index")
    assert len(java) > 1
    assert [ours[name] for name in sorted(ours)] == [java[name] for name in sorted(java)]


def test_the_hash_edge_cases_are_there(golden: Golden) -> None:
    """-2^31 as the hash of a tag and of a key, which Java's index files as 0."""
    assert -(1 << 31) in {head.tags_code for head in golden.heads()}
    hashes: set[int] = set()
    for content in files(golden.root / "index").values():
        (count,) = struct.unpack_from(">i", content, 36)
        entries = content[INDEX_HEADER_BYTES + 4 * INDEX_SLOTS :]
        hashes |= {struct.unpack_from(">i", entries, 20 * number)[0] for number in range(1, count)}
    assert 0 in hashes
    assert min(hashes) == 0


def check_going_on(store: MessageStore, report: Report) -> None:
    """New messages follow those of Java, in the log and in their queue."""
    offsets = []
    for number in range(60):
        result = store.put(Message("TopicTest", b"ours %d" % number, 1, {"KEYS": f"ours-{number}", "TAGS": "TagC"}))
        assert result.ok, result
        assert result.stored is not None
        assert result.stored.queue_offset == report.bounds["TopicTest", 1][1] + number
        offsets.append(result.stored.offset)
    assert offsets == sorted(offsets)
    assert offsets[0] > max(report.records)
    assert store.wait_dispatched(WAIT_S)
    check_ours(store)


def check_ours(store: MessageStore) -> None:
    """The messages of ``check_going_on`` are found by their keys."""
    for number in range(60):
        (record,) = store.query("TopicTest", f"ours-{number}", 10, 0, 1 << 60)
        assert decode_record(record).body == b"ours %d" % number


def test_a_plain_store_of_java_opens_unchanged_and_goes_on(plain: Golden) -> None:
    before = files(plain.root)
    with plain_store(plain.root) as store:
        assert_same(our_report(store, plain.report), plain.report)
        if plain.name == "plain":  # stopped cleanly, so there was nothing to repair
            after = files(plain.root)
            assert {name for name in before if after.get(name) != before[name]} <= {"checkpoint"}
        check_going_on(store, plain.report)
    with plain_store(plain.root) as store:
        check_ours(store)
        ours = our_report(store, plain.report)
        assert ours.records.items() >= plain.report.records.items()


def test_without_queues_and_index_they_are_built_from_javas_log(plain: Golden, tmp_path: Path) -> None:
    queues = files(plain.root / "consumequeue")
    for kind in ("consumequeue", "index"):
        (plain.root / kind).rename(tmp_path / kind)
    with plain_store(plain.root) as store:
        assert_same(our_report(store, plain.report), plain.report)
    assert files(plain.root / "consumequeue") == queues


def test_a_replicated_store_of_java_opens_only_with_import_unchecked_and_goes_on(tmp_path: Path) -> None:
    golden = Golden("dledger", tmp_path)
    before = files(golden.root)
    with pytest.raises(IdentityError, match="import_unchecked"), replicated_store(golden.root):
        pass
    assert {name: files(golden.root).get(name) for name in before} == before
    with replicated_store(golden.root, import_unchecked=True) as store:
        assert_same(our_report(store, golden.report), golden.report)
        check_going_on(store, golden.report)
    with replicated_store(golden.root, import_unchecked=True) as store:
        check_ours(store)
        ours = our_report(store, golden.report)
        assert ours.records.items() >= golden.report.records.items()


def open_ledger(root: Path, *, import_unchecked: bool) -> FileStore:
    config = StoreConfig(
        root, segment_bytes=SEGMENT_BYTES, index_segment_bytes=32 * 64, import_unchecked=import_unchecked
    )
    return FileStore.open(config, cluster_id="interop", group="interop", node_id="n0", clock=Clock())


def test_a_log_of_the_newest_dledger_opens_only_with_import_unchecked_and_goes_on(tmp_path: Path) -> None:
    root, lines = open_golden(LEDGER, tmp_path)
    entries = [json.loads(line) for line in lines]
    assert {entry["magic"] for entry in entries} == {Magic.NORMAL, Magic.NOOP}
    with pytest.raises(IdentityError, match="import_unchecked"):
        open_ledger(root, import_unchecked=False)
    log = open_ledger(root, import_unchecked=True)
    try:
        assert log.last.index == entries[-1]["index"]
        for entry in entries:
            found = log.read(LogIndex(entry["index"]))
            mine = (found.index, found.term, int(found.magic), found.position, bytes(found.body).hex())
            assert mine == tuple(entry[name] for name in ("index", "term", "magic", "pos", "body"))
        log.append_as_leader(log.last.term, [b"x" * 1000] * 50)
        log.flush()
    finally:
        log.close()
    log = open_ledger(root, import_unchecked=True)
    try:
        assert log.last.index == entries[-1]["index"] + 50
        assert bytes(log.read(log.last.index).body) == b"x" * 1000
    finally:
        log.close()
