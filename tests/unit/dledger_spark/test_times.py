"""Reading only the part of a log in which a query's times are: never a row less, for any filter and any log."""

from __future__ import annotations

import random
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import datasource as spark
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.records import ENTRY
from dledger.store.file_store import FileStore
from dledger.types import Magic, NodeId, Term
from dledger_spark.decode import DecodeContext
from dledger_spark.directory import (
    SplitSizes,
    TimeBounds,
    open_directory,
    plan_splits,
    range_of,
    read_split,
    within_times,
)
from dledger_spark.options import ReadOptions
from dledger_spark.schema import projection_of
from dledger_spark.source.batch import DirectoryReader, directory_reader, pushed, time_bounds
from rocketstore.message.message import Message
from rocketstore.message.record import STORE_TIMESTAMP_AT, encode_record
from tests.support.log_bytes import CLUSTER_ID, DiskLog, place_records, write_disk_log
from tests.unit.rocketstore.bench import fill, running, small_config

COUNT = 600
FIRST_MS = 1_700_000_000_000
STEP_MS = 10
SCHEMA = StructType([StructField("storeTimestamp", TimestampType()), StructField("topic", StringType())])
PROJECTION = projection_of(SCHEMA, "default")


@pytest.fixture(scope="module")
def disk_log(tmp_path_factory: pytest.TempPathFactory) -> DiskLog:
    """Several segments; three messages share a time, some of the same segment and some not."""
    rng = random.Random(9)
    messages = [
        Message("T", rng.randbytes(rng.randrange(900)), store_timestamp=FIRST_MS + number // 3 * STEP_MS)
        for number in range(COUNT)
    ]
    return write_disk_log(tmp_path_factory.mktemp("times"), messages, noop_every=50)


def ms_of(row: object) -> int:
    assert isinstance(row, dict)
    return int(row["storeTimestamp"]) // 1000


MS = st.integers(FIRST_MS - 15, FIRST_MS + COUNT // 3 * STEP_MS + 15)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(since=st.none() | MS, until=st.none() | MS, indexed=st.booleans())
def test_a_part_holds_all_messages_of_its_times_and_begins_and_ends_with_them(
    disk_log: DiskLog, since: int | None, until: int | None, indexed: bool
) -> None:
    """With and without an index: exactly from the first message of these times to the first one after them."""
    log = open_directory(disk_log.directory)
    if not indexed:
        log = type(log)(log.path, log.segments, None, log.begin, log.end, log.committed, log.boundary)
    positions = [int(str(row["position"])) for row in disk_log.rows]
    times = [ms_of(row) for row in disk_log.rows]

    begin, end = within_times(log, log.begin, log.end, TimeBounds(since, until))

    wanted = [
        position
        for position, time in zip(positions, times, strict=True)
        if (since is None or time >= since) and (until is None or time < until)
    ]
    found = [position for position in positions if begin <= position < end]
    assert found == wanted


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("counts", [(3, 5), (3, 900), (3, 400, 2, 900, 1), (2, 400, 400)])
def test_entries_without_a_message_do_not_hide_those_before_them(
    tmp_path: Path, counts: tuple[int, ...], indexed: bool
) -> None:
    """Of elections and snapshots, any number in a row and over whole segments: messages and such entries in turns."""
    times: list[int] = []
    store = FileStore.open(
        StoreConfig(base_dir=tmp_path, segment_bytes=16 * 1024, index_segment_bytes=32 * 1024),
        cluster_id=CLUSTER_ID,
        group="default",
        node_id=NodeId("n0"),
        clock=Clock(),
    )
    store.add_batch_hook(place_records)
    for number, count in enumerate(counts):
        for _ in range(count):
            if number % 2:
                store.append_as_leader(Term(1), [b""], magic=Magic.NOOP)
            else:
                times.append(FIRST_MS + len(times) * STEP_MS)
                store.append_as_leader(Term(1), [encode_record(Message("T", b"", store_timestamp=times[-1]))])
    store.set_committed(store.last.index)
    store.close()
    log = open_directory(store.directory)
    if not indexed:
        log = type(log)(log.path, log.segments, None, log.begin, log.end, log.committed, log.boundary)
    schema = projection_of(SCHEMA, "default").columns

    for time in times[:: max(1, len(times) // 20)]:
        for begin, end, kept in (
            (*within_times(log, log.begin, log.end, TimeBounds(time)), [one for one in times if one >= time]),
            (*within_times(log, log.begin, log.end, TimeBounds(None, time)), [one for one in times if one < time]),
            (*range_of(log, ReadOptions(path="x", starting_ms=time)), [one for one in times if one >= time]),
        ):
            found: list[int] = []
            for split in plan_splits(log, begin, end, SplitSizes(1 << 20)):
                for batch in read_split(split, schema, DecodeContext(content="message"), 1 << 20):
                    found += [int(one.timestamp() * 1000) for one in batch.column(0).to_pylist()]
            assert found == kept


def test_few_bytes_are_planned_for_a_short_time(disk_log: DiskLog) -> None:
    """A tenth of the time is about a tenth of the log."""
    log = open_directory(disk_log.directory)
    begin, end = within_times(log, log.begin, log.end, TimeBounds(FIRST_MS + 500, FIRST_MS + 700))

    planned = sum(one.end - one.begin for one in plan_splits(log, begin, end, SplitSizes(8192)))
    assert 0 < planned < (log.end - log.begin) / 8


def test_a_damaged_entry_on_the_way_makes_all_of_it_be_read(disk_log: DiskLog, tmp_path: Path) -> None:
    """A flipped bit in a time that the search meets must not make messages vanish."""
    copy = tmp_path / "log"
    shutil.copytree(disk_log.directory, copy)
    log = open_directory(copy)
    for segment in log.segments[1:]:  # the search begins with their first entries
        data = bytearray(segment.path.read_bytes())
        data[ENTRY.size + STORE_TIMESTAMP_AT] ^= 0x40
        segment.path.write_bytes(data)

    assert within_times(log, log.begin, log.end, TimeBounds(FIRST_MS + 500)) == (log.begin, log.end)


def test_logs_whose_times_may_go_back_are_read_as_a_whole(disk_log: DiskLog, tmp_path: Path) -> None:
    """Entries that RocketMQ wrote, without checksums, and plain logs; their own options still cut them."""
    copy = tmp_path / "log"
    shutil.copytree(disk_log.directory, copy)
    log = open_directory(copy)
    first = log.segments[0].path
    data = bytearray(first.read_bytes())
    for name in ("chain_crc", "body_crc"):
        data[ENTRY.at(name) : ENTRY.behind(name)] = bytes(ENTRY.behind(name) - ENTRY.at(name))
    first.write_bytes(data)
    config = small_config(tmp_path / "plain")
    with running(config) as store:
        fill(store, 50)
    plain = open_directory(tmp_path / "plain")
    options = ReadOptions(path="x", starting_ms=FIRST_MS + 500)

    for one in (log, plain):
        assert within_times(one, one.begin, one.end, TimeBounds(FIRST_MS + 500, FIRST_MS + 700)) == (one.begin, one.end)
    assert range_of(log, options)[0] > log.begin


def at(ms: float) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


@pytest.mark.parametrize(
    ("found", "bounds"),
    [
        (spark.GreaterThan(("storeTimestamp",), at(5.5)), (5, None)),
        (spark.GreaterThanOrEqual(("storeTimestamp",), at(5)), (5, None)),
        (spark.LessThan(("storeTimestamp",), at(5)), (None, 6)),
        (spark.LessThanOrEqual(("storeTimestamp",), at(5.5)), (None, 6)),
        (spark.EqualTo(("storeTimestamp",), at(5)), (5, 6)),
        (spark.EqualNullSafe(("storeTimestamp",), at(5)), (5, 6)),
        (spark.In(("storeTimestamp",), (at(9), at(5))), (5, 10)),
        (spark.Not(spark.GreaterThan(("storeTimestamp",), at(5))), (None, None)),
        (spark.IsNotNull(("storeTimestamp",)), (None, None)),
        (spark.EqualTo(("topic",), "T"), (None, None)),
        (spark.GreaterThan(("storeTimestamp",), at(-1.5)), (-2, None)),
    ],
)
def test_every_filter_gives_bounds_that_no_kept_row_is_outside_of(
    found: spark.Filter, bounds: tuple[int | None, int | None]
) -> None:
    """Rounded outwards to milliseconds; filters that say nothing of when give none."""
    ours = pushed(found, PROJECTION)
    assert ours is not None
    assert time_bounds([ours]) == TimeBounds(*bounds)


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (spark.In(("keys",), ("a", "c")), ["a"]),
        (spark.EqualTo(("keys",), "a"), ["a"]),
        (spark.GreaterThan(("keys",), "a"), ["b"]),
        (spark.StringContains(("keys",), "a"), ["a"]),
        (spark.EqualNullSafe(("keys",), "a"), ["a"]),
        (spark.EqualNullSafe(("keys",), None), [None]),
        (spark.IsNull(("keys",)), [None]),
    ],
)
def test_a_filter_keeps_the_rows_that_sql_keeps(found: spark.Filter, kept: list[str | None]) -> None:
    """Of a comparison with null neither it nor its opposite; of those that know null, one of them."""
    projection = projection_of(StructType([StructField("keys", StringType())]), "default")
    rows = ["a", None, "b"]
    batch = pa.RecordBatch.from_arrays([pa.array(rows)], names=["keys"])
    knows_null = isinstance(found, spark.EqualNullSafe | spark.IsNull)
    others = [one for one in rows if one not in kept and (one is not None or knows_null)]

    for each, wanted in ((found, kept), (spark.Not(found), others)):
        ours = pushed(each, projection)
        assert ours is not None
        assert [one for one, keep in zip(rows, ours.keeps(batch), strict=True) if keep] == wanted


def test_a_reader_plans_only_the_times_of_its_filters(disk_log: DiskLog) -> None:
    """All filters together; not where the query verifies what it is asked for."""

    def planned(**options: str) -> int:
        given = ReadOptions.parse({"path": str(disk_log.directory), "pushFilters": "true", **options})
        reader = directory_reader(given, PROJECTION)
        filters: list[spark.Filter] = [
            spark.GreaterThanOrEqual(("storeTimestamp",), at(FIRST_MS + 500)),
            spark.LessThan(("storeTimestamp",), at(FIRST_MS + 700)),
        ]
        assert list(getattr(reader, "pushFilters")(filters)) == []  # noqa: B009  # of a subclass
        assert isinstance(reader, DirectoryReader)
        return sum(one.split.end - one.split.begin for one in reader.partitions())

    log = open_directory(disk_log.directory)
    assert 0 < planned() < (log.end - log.begin) / 8
    assert planned(verifyCrc="fail") == sum(
        one.end - one.begin for one in plan_splits(log, log.begin, log.end, SplitSizes(1 << 28))
    )
