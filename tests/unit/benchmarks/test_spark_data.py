"""Logs made for measuring are logs like any other."""

from __future__ import annotations

from pathlib import Path

from benchmarks.spark_data import LogSpec, cached_log, write_log
from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.store.file_store import FileStore
from dledger.store.inspect import problems
from dledger.types import LogIndex, NodeId
from dledger.values import MIB
from dledger_spark.decode import DecodeContext, named_columns
from dledger_spark.directory import SplitSizes, open_directory, plan_splits, read_split
from rocketstore.message.record import decode_record

SPEC = LogSpec(log_bytes=3 * MIB, segment_bytes=MIB, index_segment_bytes=32 * 1024, pool=300)


def test_the_store_opens_a_made_log_and_verifies_every_record(tmp_path: Path) -> None:
    """Checksums, chain, index, blanks and checkpoint are right; the messages in it are RocketMQ's."""
    written = write_log(tmp_path, SPEC)

    assert list(problems(written.directory)) == []
    config = StoreConfig(base_dir=tmp_path, segment_bytes=MIB, index_segment_bytes=32 * 1024)
    store = FileStore.open(config, cluster_id="default/n0", group="default", node_id=NodeId("n0"), clock=Clock())
    try:
        assert (store.last.index, store.end_position) == (written.records - 1, written.log_bytes)
        assert store.recovery_report.clean_stop
        assert store.committed_index == store.last.index
        messages = [decode_record(store.read(LogIndex(index)).body) for index in (0, 1, 450, store.last.index)]
    finally:
        store.close()
    assert all(200 <= len(one.body) <= 4096 for one in messages)
    assert messages[0].tags.startswith("tag-")


def test_queue_offsets_in_a_made_log_have_neither_gaps_nor_repeats(tmp_path: Path) -> None:
    """So that consume queues can be built from it."""
    log = open_directory(write_log(tmp_path, SPEC).directory)
    context = DecodeContext()
    columns = named_columns(("topic", "queueId", "queueOffset"), context)
    found: dict[tuple[str, int], list[int]] = {}
    for split in plan_splits(log, log.begin, log.end, SplitSizes(MIB)):
        for batch in read_split(split, columns, context):
            for row in batch.to_pylist():
                found.setdefault((row["topic"], row["queueId"]), []).append(row["queueOffset"])

    assert all(offsets == list(range(len(offsets))) for offsets in found.values())
    assert len(found) > 100


def test_a_cached_log_is_made_once_and_anew_after_it_was_cut_off(tmp_path: Path) -> None:
    """A run that was killed while it wrote leaves nothing that passes for a log."""
    first = cached_log(tmp_path, SPEC)
    made = (first.directory / "checkpoint").stat().st_mtime_ns

    assert cached_log(tmp_path, SPEC) == first
    assert (first.directory / "checkpoint").stat().st_mtime_ns == made
    (first.directory.parent / "complete.json").unlink()
    assert cached_log(tmp_path, SPEC) == first
    assert (first.directory / "checkpoint").stat().st_mtime_ns != made
