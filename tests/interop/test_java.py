"""Both directions with the real RocketMQ 4.9.8 and DLedger 0.3.1.2 and 0.4.3: ``make interop``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.store.file_store import FileStore
from dledger.types import NOOP_CHANNEL, LogIndex, Magic, Term
from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from rocketstore.store.message_store import MessageStore
from rocketstore.types import TERM_START_TOPIC
from tests.interop import content, java
from tests.interop.goldens import LEDGER, STORES, copy_store, open_golden, write_golden
from tests.interop.reports import Report, assert_same, java_report, our_report
from tests.interop.stores import INDEX_ENTRIES, SEGMENT_BYTES, plain_store, replicated_store

pytestmark = pytest.mark.interop

KINDS = ("plain", "dledger")


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    java.build()


def files(directory: Path) -> dict[str, bytes]:
    """Path below the directory to content."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def queue_files(root: Path) -> dict[str, bytes]:
    """The consume queues but those of our NOOPs, which Java takes for messages."""
    return {name: data for name, data in files(root / "consumequeue").items() if not name.startswith("RMQ_SYS_TERM")}


def index_entries(root: Path) -> list[bytes]:
    """Hash and physical offset of every index entry, in order; files may begin at other records."""
    entries: list[bytes] = []
    for _, data in sorted(files(root / "index").items()):
        first = len(data) - 20 * INDEX_ENTRIES
        count = int.from_bytes(data[36:40])
        entries += [data[at : at + 12] for at in range(first + 20, first + 20 * count, 20)]
    return entries


class Pair:
    """A store directory that both sides use by turns."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.root = directory / "store"
        self._directory = directory
        self._copies = 0

    def ours(self) -> AbstractContextManager[MessageStore]:
        """Our running store. What Java appended to a replicated log has no CRCs."""
        if self.kind == "plain":
            return plain_store(self.root)
        return replicated_store(self.root, import_unchecked=True)

    def copy(self) -> Path:
        self._copies += 1
        return copy_store(self.root, self._directory / f"copy-{self._copies}")

    def read_by_java(self, root: Path | None = None) -> Report:
        """What Java reads in a copy, so that the store stays as it is."""
        return java_report(java.run_store(f"read-{self.kind}", root or self.copy()))

    def compare(self) -> Report:
        """Both read the same."""
        report = self.read_by_java()
        with self.ours() as store:
            assert_same(our_report(store, report), report)
        return report


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return Pair(request.param, tmp_path)


def test_java_reads_what_we_wrote_and_both_go_on_by_turns(pair: Pair) -> None:
    with pair.ours() as store:
        content.put_all(store)
    reports = [pair.compare()]
    for _ in range(2):
        java.run_store(f"append-{pair.kind}", pair.root)
        reports.append(pair.compare())
        with pair.ours() as store:
            content.put_many(store, 60)
            content.put_many(store, 20, topic=f"Later-{len(reports)}")
        reports.append(pair.compare())
    counts = [len(report.records) for report in reports]
    assert counts == sorted(set(counts)), "each turn adds messages"
    for earlier, later in pairwise(reports):
        assert later.records.items() >= earlier.records.items()


def test_java_builds_the_same_queues_and_index_from_our_log(pair: Pair) -> None:
    with pair.ours() as store:
        content.put_all(store)
    report, rebuilt = pair.read_by_java(), pair.copy()
    for derived in ("consumequeue", "index"):
        shutil.rmtree(rebuilt / derived)
    assert pair.read_by_java(rebuilt) == report
    assert {name: data for name, data in queue_files(rebuilt).items() if any(data)} == queue_files(pair.root)
    assert index_entries(rebuilt) == index_entries(pair.root)
    assert len(index_entries(rebuilt)) > INDEX_ENTRIES


def test_java_recovers_what_a_killed_process_of_ours_left(pair: Pair) -> None:
    with pair.ours() as store:
        content.put_all(store)
        killed = pair.copy()
        assert (killed / "abort").exists() or pair.kind == "dledger"
        report = pair.read_by_java(killed)
        ours = our_report(store, report)
        if pair.kind == "dledger":  # here Java drops the index after a crash and never builds it again
            assert not any(report.queries.values())
            report.queries = ours.queries
        assert_same(ours, report)


def test_we_recover_what_a_killed_java_left_in_a_store_of_ours(pair: Pair) -> None:
    with pair.ours() as store:
        content.put_many(store, 50)
    java.run_store(f"kill-{pair.kind}", pair.root)
    assert (pair.root / "abort").exists()
    report = pair.read_by_java()
    assert {"TopicTest", "Later"} <= {topic for topic, _ in report.bounds}
    with pair.ours() as store:
        ours = our_report(store, report)
        assert all(key in ours.keys_of(offset) for (_, key), found in ours.queries.items() for offset in found)
        if pair.kind == "dledger":
            report.queries = ours.queries
        assert_same(ours, report)
        assert all(ours.queries["TopicTest", f"order-{number}"] for number in range(0, 10, 2))


@pytest.mark.parametrize("name", [*STORES, LEDGER])
def test_the_golden_files_are_what_java_writes(name: str, tmp_path: Path) -> None:
    """Byte for byte where no clock and no election has a say."""
    root, lines = write_golden(name, tmp_path / "new")
    golden, golden_lines = open_golden(name, tmp_path / "golden")
    assert _timeless(lines) == _timeless(golden_lines)
    if name in ("plain", "killed"):
        for part in ("commitlog", "consumequeue"):
            assert files(root / part) == files(golden / part)
        assert _in_order(root / "index") == _in_order(golden / "index")


def _in_order(directory: Path) -> list[bytes]:
    """Index files are named by the time."""
    return [data for _, data in sorted(files(directory).items())]


def _timeless(lines: Iterable[str]) -> list[Any]:
    """What Java printed without times, also those that are tags codes, and without what depends on elections."""
    found = []
    for line in lines:
        fields = json.loads(line)
        if "magic" in fields:
            if fields["magic"] == Magic.NORMAL:
                found.append(fields["body"])
            continue
        for name in ("storeTimestamp", "offsetsOfTimes"):
            fields.pop(name, None)
        if str(fields.get("topic")).startswith("SCHEDULE_TOPIC"):
            fields.pop("tagsCode", None)
            fields["units"] = [unit[:2] for unit in fields.pop("units", [])]
        found.append(fields)
    return found


def open_ledger(root: Path) -> FileStore:
    config = StoreConfig(root, segment_bytes=SEGMENT_BYTES, index_segment_bytes=32 * 64, import_unchecked=True)
    return FileStore.open(config, cluster_id="interop", group="interop", node_id="n0", clock=Clock())


def entries_of(log: FileStore) -> list[tuple[Any, ...]]:
    """As the Java program prints them."""
    return [
        (one.index, one.term, int(one.magic), one.position, bytes(one.body).hex())
        for one in log.read_range(LogIndex(0), log.last.index, 1 << 24)
    ]


def read_by_newest_dledger(root: Path, copy: Path) -> list[tuple[Any, ...]]:
    lines = java.run_ledger("read", copy_store(root, copy))
    names = ("index", "term", "magic", "pos", "body")
    return [tuple(fields[name] for name in names) for fields in map(json.loads, lines)]


def test_the_newest_dledger_reads_our_log_and_goes_on_and_so_do_we(tmp_path: Path) -> None:
    root = tmp_path / "ledger"
    with closing(open_ledger(root)) as log:
        log.append_as_leader(Term(1), [b""], Magic.NOOP)
        log.append_as_leader(Term(1), [bytes([i]) * (i * 31 % 1500) for i in range(100)])
        log.append_as_leader(Term(2), [b"for old readers"], Magic.NORMAL, channel=NOOP_CHANNEL)
        log.append_as_leader(Term(2), [b"more"] * 20)
        log.flush()
        ours = entries_of(log)
    as_java_has_them = [(*one[:2], 1 if one[4] == b"for old readers".hex() else one[2], *one[3:]) for one in ours]
    assert read_by_newest_dledger(root, tmp_path / "copy-1") == as_java_has_them
    java.run_ledger("append", root)
    together = read_by_newest_dledger(root, tmp_path / "copy-2")
    assert together[: len(ours)] == as_java_has_them
    assert len(together) >= len(ours) + 60
    with closing(open_ledger(root)) as log:
        assert entries_of(log)[len(ours) :] == together[len(ours) :]
        log.append_as_leader(Term(log.last.term + 1), [b"ours again"] * 10)
        log.flush()
        assert entries_of(log)[: len(ours)] == ours
    assert len(read_by_newest_dledger(root, tmp_path / "copy-3")) == len(together) + 10


@pytest.mark.parametrize(("magic", "readable"), [(Magic.NORMAL, 1), (Magic.NOOP, 0)])
def test_for_the_old_line_a_log_ends_at_a_noop_of_magic_2(tmp_path: Path, magic: Magic, readable: int) -> None:
    """It would cut everything from there on: so a broker's log has none."""
    root = tmp_path / "store"
    config = StoreConfig(root, segment_bytes=SEGMENT_BYTES)
    with closing(FileStore.open(config, cluster_id="interop", group="interop", node_id="n0", clock=Clock())) as log:
        start = encode_record(Message(TERM_START_TOPIC, b""))
        log.append_as_leader(Term(1), [start], magic, channel=NOOP_CHANNEL if magic is Magic.NORMAL else 0)
        offset = log.end_position + 48
        log.append_as_leader(Term(1), [encode_record(Message("T", b"message"), physical_offset=offset)])
        log.flush()
    assert len(java_report(java.run_store("read-dledger", root)).records) == readable
