"""What an export does next, from what it has done and how far the log reaches. No Spark."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from dledger.errors import ConfigError
from dledger.records import ENTRY_HEADER_BYTES
from dledger_spark.errors import JobError
from dledger_spark.jobs.batches import open_batches
from dledger_spark.jobs.export import (
    ExportedBatch,
    ExportOptions,
    FileFact,
    about,
    batches_of,
    chosen_columns,
    planned,
    report,
)
from dledger_spark.jobs.source import Extent, LogSource, extent_of
from tests.support.log_bytes import write_disk_log

SOURCE = LogSource(bootstrap="h:1", group="g")
OPTIONS = ExportOptions(SOURCE, Path("/out"), batch_bytes=1000)


@dataclass
class Entries:
    """Entries of 100 bytes, one per second."""

    def end_within(self, first: int, end: int, size_bytes: int) -> int:
        return min(end, first + max(1, size_bytes // 100))

    def at_time(self, time_ms: int) -> int:
        return time_ms // 1000


def _extent(begin: int, end: int, holds_messages: bool = True) -> Extent:
    return Extent("group g of cluster c", "index", begin, end, holds_messages, Entries())


def _ranges(options: ExportOptions, extent: Extent, *before: ExportedBatch) -> list[tuple[int, int, int, int]]:
    return [(one.number, one.first, one.end, one.lost) for one in planned(options, extent, before)]


def test_a_first_run_takes_everything_in_batches_of_the_wanted_size() -> None:
    """From the begin to the committed end, without a gap."""
    assert _ranges(OPTIONS, _extent(7, 32)) == [(0, 7, 17, 0), (1, 17, 27, 0), (2, 27, 32, 0)]


def test_a_later_run_goes_on_where_the_last_batch_ended() -> None:
    """Nothing if nothing is new."""
    assert _ranges(OPTIONS, _extent(7, 32), ExportedBatch(4, 20, 30)) == [(5, 30, 32, 0)]
    assert _ranges(OPTIONS, _extent(7, 30), ExportedBatch(4, 20, 30)) == []


def test_a_range_is_kept_to() -> None:
    """An index or a time to begin with, an index to end before; the end may be moved later."""
    ranged = replace(OPTIONS, source=replace(SOURCE, from_index=10, to_index=15))

    assert _ranges(ranged, _extent(0, 100)) == [(0, 10, 15, 0)]
    assert _ranges(
        replace(OPTIONS, source=replace(SOURCE, to_index=20)), _extent(0, 100), ExportedBatch(0, 10, 15)
    ) == [(1, 15, 20, 0)]
    assert _ranges(replace(OPTIONS, source=replace(SOURCE, from_time_ms=95_000)), _extent(0, 100)) == [(0, 95, 100, 0)]


def test_an_entry_larger_than_a_batch_is_a_batch() -> None:
    """A job always gets on."""
    assert _ranges(replace(OPTIONS, batch_bytes=1), _extent(0, 2)) == [(0, 0, 1, 0), (1, 1, 2, 0)]


@pytest.mark.parametrize("indexed", [True, False])
def test_no_batch_is_larger_than_wanted_however_sizes_differ(tmp_path: Path, indexed: bool) -> None:
    """Small entries, then large ones, over several segments; with the index, and of files alone."""
    sizes = [*(10 for _ in range(400)), *(9000 for _ in range(20)), 30_000, *(10 for _ in range(50))]
    log = write_disk_log(tmp_path, [bytes([65]) * one for one in sizes])
    if not indexed:
        shutil.rmtree(log.directory / "index")
    source = LogSource(path=str(log.directory))
    wanted = 20_000

    found = list(planned(ExportOptions(source, Path("/out"), batch_bytes=wanted), extent_of(source), []))

    begins = [int(str(row["position"])) for row in log.rows]
    ends = [begin + ENTRY_HEADER_BYTES + size for begin, size in zip(begins, sizes, strict=True)]
    taken = [ends[one.end - 1] - begins[one.first] for one in found]
    assert [one.first for one in found[1:]] == [one.end for one in found[:-1]]
    assert (found[0].first, found[-1].end) == (0, len(sizes))
    assert all(size <= wanted or one.end == one.first + 1 for one, size in zip(found, taken, strict=True))
    for one, after in pairwise(found):  # and no smaller than need be
        assert ends[after.first] - begins[one.first] > wanted


def test_what_was_trimmed_before_it_was_exported_is_not_passed_over_in_silence() -> None:
    """An error that names it; with --skip-lost it stands in the batch's manifest."""
    with pytest.raises(JobError, match=r"^30 to 39 \(index\) is no longer in the log"):
        _ranges(OPTIONS, _extent(40, 45), ExportedBatch(4, 20, 30))

    assert _ranges(replace(OPTIONS, skip_lost=True), _extent(40, 45), ExportedBatch(4, 20, 30)) == [(5, 30, 45, 10)]


def test_a_first_run_begins_where_the_log_does_whatever_was_before() -> None:
    """Retention is no loss to somebody who never asked for it; an index that is gone is."""
    assert _ranges(OPTIONS, _extent(40, 45)) == [(0, 40, 45, 0)]
    with pytest.raises(JobError, match="no longer in the log"):
        _ranges(replace(OPTIONS, source=replace(SOURCE, from_index=30)), _extent(40, 45))


def test_columns_that_jobs_need_are_always_there() -> None:
    """Virtual ones on request; other names are refused."""
    assert chosen_columns(replace(OPTIONS, columns=("body", "topic", "crcOk")), _extent(0, 1)) == (
        "index",
        "topic",
        "storeTimestamp",
        "body",
        "crcOk",
    )
    assert chosen_columns(OPTIONS, _extent(0, 1, holds_messages=False)) == ("index", "term", "position", "body")
    assert "properties" in chosen_columns(OPTIONS, _extent(0, 1))
    with pytest.raises(ConfigError, match="no column bdy"):
        chosen_columns(replace(OPTIONS, columns=("bdy",)), _extent(0, 1))


def test_manifests_tell_all_of_a_batch(tmp_path: Path) -> None:
    """Written and read again; batches that do not follow one another stop the job."""
    files = (FileFact("topic=a%2Fb/date=2026-11-20/part-0.parquet", 100, 7), FileFact("part-1.parquet", 1, 2))
    batches = [ExportedBatch(0, 10, 20, 0, files), ExportedBatch(1, 20, 40, 5)]
    with open_batches(tmp_path, about(OPTIONS, _extent(0, 1))) as out:
        for one in batches:
            out.publish(one.number, out.staging(), one.to_manifest())
        assert batches_of(out) == batches
        assert (files[0].part("topic"), files[0].part("date"), files[1].part("topic")) == ("a/b", "2026-11-20", None)

        out.publish(2, out.staging(), ExportedBatch(2, 41, 50).to_manifest())
        with pytest.raises(JobError, match="not where the previous batch ended"):
            batches_of(out)


def test_a_manifest_of_something_else_stops_the_job(tmp_path: Path) -> None:
    """Another version's, or none of ours."""
    with pytest.raises(JobError, match="another version"):
        ExportedBatch.of_manifest({"version": 99}, tmp_path)
    with pytest.raises(JobError, match="not the manifest of an export"):
        ExportedBatch.of_manifest({"version": 1}, tmp_path)


def test_the_report_adds_up_what_is_new_and_what_is_there() -> None:
    """By topic and date, for tables and charts."""
    files = tuple(FileFact(f"topic={name}/date=2026-11-{day}/p.parquet", 10, 3) for name in "ab" for day in (20, 21))

    found = report("log", Path("/out"), [ExportedBatch(0, 0, 5)], [ExportedBatch(1, 5, 20, 2, files)], 2.0)

    assert (found.fact("new rows"), found.fact("all batches"), found.fact("next"), found.fact("lost")) == (12, 2, 20, 2)
    assert found.fact("rows per second") == 6.0
    assert found.table("New rows by topic").rows == (("a", 6, 2, 20), ("b", 6, 2, 20))
    assert [chart.labels for chart in found.charts] == [("2026-11-20", "2026-11-21"), ("a", "b")]
    assert report("log", Path("/out"), [ExportedBatch(0, 0, 5)], [], 1.0).notes
