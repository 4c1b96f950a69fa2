"""A table's rows and its position are one commit, of one run at a time; no Spark, no log."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from dledger.errors import ConfigError
from dledger_spark.errors import JobBusyError, JobError
from dledger_spark.jobs import delta_files
from dledger_spark.jobs.delta_files import RowCollector, newest, rows_of, write_file
from dledger_spark.jobs.delta_table import (
    UNKNOWN,
    CompactionResult,
    Compactor,
    EntrySpan,
    LogTable,
    TableOrigin,
    compact,
    open_table,
)
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("index", pa.int64()), ("body", pa.binary())])
KEYED = pa.schema([("index", pa.int64()), ("Key", pa.string()), ("body", pa.binary())])
EXACT = Context(prec=38)
ORIGIN = TableOrigin("c1", "G", {"topics": ["orders"]})


def opened(path: Path, schema: pa.Schema = SCHEMA, origin: TableOrigin = ORIGIN) -> LogTable:
    """The table, as a run opens it."""
    return open_table(path, schema, origin)


def add(table: LogTable, first: int, count: int, schema: pa.Schema = SCHEMA) -> None:
    """Write and commit entries whose bodies are their numbers."""
    columns: Mapping[str, list[object]] = {
        "index": list(range(first, first + count)),
        "body": [b"%d" % number for number in range(first, first + count)],
        "colour": ["red"] * count,
    }
    batch = pa.RecordBatch.from_arrays([pa.array(columns[one.name], one.type) for one in schema], schema=schema)
    written = write_file(table.path, iter([batch]))
    assert written is not None
    table.append([written], EntrySpan(first, first + count))


def indexes(path: Path) -> list[int]:
    """The entries that a reader sees."""
    return sorted(DeltaTable(path).to_pyarrow_table(columns=["index"])["index"].to_pylist())


def test_a_run_continues_where_the_last_commit_ended(tmp_path: Path) -> None:
    """With nothing but the table."""
    table = opened(tmp_path / "t")
    before = table.position
    add(table, 0, 10)
    add(table, 10, 5)
    again = opened(tmp_path / "t")

    assert (before, table.position, again.position) == (None, 15, 15)
    add(again, 15, 1)
    assert indexes(tmp_path / "t") == list(range(16))


def test_of_two_runs_the_one_that_commits_second_is_refused(tmp_path: Path) -> None:
    """Both have opened the same version, both have written the same rows: they are there once."""
    first, second = opened(tmp_path / "t"), opened(tmp_path / "t")
    add(first, 0, 10)
    with pytest.raises(JobBusyError, match="changed by another run"):
        add(second, 0, 10)

    assert indexes(tmp_path / "t") == list(range(10))
    assert opened(tmp_path / "t").position == 10


def test_a_restored_table_continues_after_the_rows_that_it_has(tmp_path: Path) -> None:
    """By version or time, of a restored one too; the position noted last is beyond rows that are gone."""
    path = tmp_path / "t"
    table = opened(path)
    for first in range(4):
        add(table, first, 1)
    now = int(time.time())
    for number in range(5):  # a version's time is that of its file, which a busy machine writes late
        os.utime(path / "_delta_log" / f"{number:020d}.json", (now - 10 + number,) * 2)
    at = now - 10 + 3
    found = []
    for version in (2, 1, 5, datetime.fromtimestamp(at, UTC), 4):
        DeltaTable(path).restore(version)
        found.append((opened(path).position, indexes(path)))
    with pytest.raises(JobBusyError):
        add(table, 4, 1)
    add(opened(path), 4, 1)
    DeltaTable(path).optimize.compact()
    found.append((opened(path).position, indexes(path)))
    DeltaTable(path).restore(1)
    again = opened(path)
    for first in range(1, 6):
        add(again, first, 1)

    assert found == [
        (2, [0, 1]),
        (1, [0]),
        (2, [0, 1]),
        (3, [0, 1, 2]),
        (4, [0, 1, 2, 3]),
        (5, [0, 1, 2, 3, 4]),
    ]
    assert (opened(path).position, indexes(path)) == (6, list(range(6)))


def test_a_restored_table_is_of_the_log_that_its_version_was_of(tmp_path: Path) -> None:
    """The checksum is that of the log up to the position, and not of a later one."""
    table = opened(tmp_path / "t")
    for first in range(3):
        table.append([], EntrySpan(first, first + 1, chain_crc=100 + first))
    DeltaTable(tmp_path / "t").restore(2)

    assert (opened(tmp_path / "t").position, opened(tmp_path / "t").chain_crc) == (2, 101)


def test_a_table_restored_to_a_version_that_is_gone_is_refused(tmp_path: Path) -> None:
    """Its rows are there; how far they reach is not known."""
    path = tmp_path / "t"
    table = opened(path)
    for first in range(3):
        add(table, first, 1)
    DeltaTable(path).restore(2)
    DeltaTable(path).create_checkpoint()
    for version in range(4):
        (path / "_delta_log" / f"{version:020d}.json").unlink()

    with pytest.raises(JobError, match="into a new directory"):
        opened(path)


def test_a_position_alone_is_committed_too(tmp_path: Path) -> None:
    """Entries that have no rows are not read again."""
    table = opened(tmp_path / "t")
    table.append([], EntrySpan(3, 40))

    assert (opened(tmp_path / "t").position, indexes(tmp_path / "t")) == (40, [])


def test_the_checksum_of_the_log_is_committed_with_the_position(tmp_path: Path) -> None:
    """It belongs to that position: if it is not known, an older one does not stay."""
    table = opened(tmp_path / "t")
    before = table.chain_crc
    table.append([], EntrySpan(0, 10, term=3, chain_crc=0xFFFF_FFFF))
    first = opened(tmp_path / "t").chain_crc
    table.append([], EntrySpan(10, 20))

    assert (before, first, opened(tmp_path / "t").chain_crc) == (UNKNOWN, 0xFFFF_FFFF, UNKNOWN)
    assert [one.get("dledger.term") for one in DeltaTable(tmp_path / "t").history()][:2] == ["-1", "3"]


def test_entries_that_are_there_are_never_added_again(tmp_path: Path) -> None:
    """Even if the log, and so the reader, has gone back."""
    table = opened(tmp_path / "t")
    add(table, 0, 10)
    for first, count in ((0, 10), (9, 3)):
        with pytest.raises(JobError, match="another or older one"):
            add(table, first, count)
    with pytest.raises(JobError, match="another or older one"):
        table.append([], EntrySpan(10, 10))

    assert indexes(tmp_path / "t") == list(range(10))


def test_a_commit_beside_another_programs_stands(tmp_path: Path) -> None:
    """Compaction by someone else moves rows, and adds none: it is no second run."""
    table = opened(tmp_path / "t")
    add(table, 0, 10)
    add(table, 10, 10)
    DeltaTable(tmp_path / "t").optimize.compact()
    add(table, 20, 10)

    assert indexes(tmp_path / "t") == list(range(30))


@pytest.mark.parametrize(
    ("origin", "named"),
    [
        (TableOrigin("c2", "G", {"topics": ["orders"]}), "cluster was 'c1', is 'c2'"),
        (TableOrigin("c1", "G", {"topics": ["payments"]}), "topics was"),
        (TableOrigin("c1", "G", {"topics": ["orders"], "options": {"verifycrc": "skip"}}), "options was None"),
    ],
)
def test_a_table_is_of_one_log_and_one_selection(tmp_path: Path, origin: TableOrigin, named: str) -> None:
    """Another one would mix rows, and its positions mean nothing here."""
    opened(tmp_path / "t")
    with pytest.raises(ConfigError, match=named):
        opened(tmp_path / "t", origin=origin)


def test_what_is_no_such_table_is_left_alone(tmp_path: Path) -> None:
    """A directory with files, a table of something else, a damaged one."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "precious").touch()
    with pytest.raises(ConfigError, match="not a Delta table"):
        opened(tmp_path / "files")
    write_deltalake(tmp_path / "other", pa.table({"index": [1]}))
    with pytest.raises(ConfigError, match="not written from a log"):
        opened(tmp_path / "other")
    opened(tmp_path / "t")
    (tmp_path / "t" / "_delta_log" / f"{0:020d}.json").write_text("no log")
    with pytest.raises(JobError, match="cannot be opened"):
        opened(tmp_path / "t")

    assert [one.name for one in (tmp_path / "files").iterdir()] == ["precious"]


def test_added_columns_are_null_in_older_rows_and_left_out_ones_in_newer(tmp_path: Path) -> None:
    """The schema only grows."""
    wide = SCHEMA.append(pa.field("colour", pa.string()))
    add(opened(tmp_path / "t"), 0, 2)
    add(opened(tmp_path / "t", wide), 2, 2, wide)
    add(opened(tmp_path / "t"), 4, 2)

    rows = DeltaTable(tmp_path / "t").to_pyarrow_table().sort_by("index")
    assert rows["colour"].to_pylist() == [None, None, "red", "red", None, None]
    assert rows["index"].to_pylist() == list(range(6))


def test_a_column_keeps_its_type(tmp_path: Path) -> None:
    """Rows of two types could not be read together."""
    opened(tmp_path / "t")
    with pytest.raises(ConfigError, match=r"column body is .* a type cannot change"):
        opened(tmp_path / "t", pa.schema([("index", pa.int64()), ("body", pa.string())]))
    with pytest.raises(ConfigError, match="column Body is body there"):
        opened(tmp_path / "t", pa.schema([("index", pa.int64()), ("Body", pa.binary())]))


def test_a_part_of_a_column_keeps_its_type(tmp_path: Path) -> None:
    """Of a map or a list, too."""
    for number, (old, new) in enumerate(
        (
            (pa.map_(pa.string(), pa.string()), pa.map_(pa.string(), pa.int64())),
            (pa.list_(pa.string()), pa.list_(pa.int64())),
        )
    ):
        opened(tmp_path / str(number), pa.schema([("index", pa.int64()), ("part", old)]))
        with pytest.raises(ConfigError, match="a type cannot change"):
            opened(tmp_path / str(number), pa.schema([("index", pa.int64()), ("part", new)]))


def test_maps_lists_and_times_are_the_same_types_when_a_table_is_opened_again(tmp_path: Path) -> None:
    """Delta names their parts in its own way."""
    from dledger_spark.schema import COLUMNS, HEADERS, arrow_schema

    schema = arrow_schema(COLUMNS).append(pa.field("headers", HEADERS))
    opened(tmp_path / "t", schema)

    assert opened(tmp_path / "t", schema).version == 0


def test_a_range_without_rows_leaves_no_file(tmp_path: Path) -> None:
    """Nor does a writer that fails leave one that counts."""
    empty = pa.RecordBatch.from_arrays([pa.array([], one.type) for one in SCHEMA], schema=SCHEMA)

    assert write_file(tmp_path, iter([])) is None
    assert write_file(tmp_path, iter([empty])) is None
    assert list(tmp_path.iterdir()) == []


def test_statistics_are_those_of_the_rows(tmp_path: Path) -> None:
    """Readers skip files by them: they may be missing, and never be wrong."""
    schema = pa.schema(
        [
            ("index", pa.int64()),
            ("at", pa.timestamp("us", tz="UTC")),
            ("topic", pa.string()),
            ("long", pa.string()),
            ("none", pa.string()),
            ("body", pa.binary()),
        ]
    )
    columns = [
        [4, 9, None],
        [1_000, 1_700_000_000_123_000, 2_000],
        ["b", "a", None],
        ["x" * 33] * 3,
        [None] * 3,
        [b"x"] * 3,
    ]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(values, one.type) for values, one in zip(columns, schema, strict=True)], schema=schema
    )
    written = write_file(tmp_path, iter([batch, batch]))
    assert written is not None

    assert written.rows == 6
    assert json.loads(written.stats) == {
        "numRecords": 6,
        "minValues": {"index": 4, "at": "1970-01-01T00:00:00.001Z", "topic": "a", "long": "x" * 32},
        "maxValues": {"index": 9, "at": "2023-11-14T22:13:20.123Z", "topic": "b", "long": "x" * 32 + "\U0010ffff"},
        "nullCount": {"index": 2, "at": 0, "topic": 2, "long": 0, "none": 6},
    }


def test_a_file_of_several_groups_has_each_row_once_and_the_ends_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are as large as two batches here; the least value is in the first, the greatest in the second."""
    values = [[3, 1], [2, 5], [9, 2], [4, 4], [3, 3]]
    schema = pa.schema([("index", pa.int64())])
    rows = [pa.RecordBatch.from_arrays([pa.array(one)], schema=schema) for one in values]
    monkeypatch.setattr(delta_files, "_GROUP_BYTES", 2 * rows[0].nbytes)
    written = write_file(tmp_path, iter(rows))
    assert written is not None

    found = pq.ParquetFile(tmp_path / written.path)
    assert (found.read()["index"].to_pylist(), found.num_row_groups) == ([one for some in values for one in some], 3)
    stats = json.loads(written.stats)
    assert (stats["numRecords"], stats["minValues"], stats["maxValues"]) == (10, {"index": 1}, {"index": 9})


VALUES: Mapping[pa.DataType, Sequence[object]] = {
    pa.string(): ["x" * 33, "x" * 32 + "\U0010ffff\U0010ffff", "y", "z" * 5000],
    pa.float64(): [0.1, -1e300, 2.5, math.inf],
    pa.float32(): [0.1, -1e30, 2.5],
    pa.date32(): [date(2023, 11, 14), date(1, 1, 1), date(9999, 12, 31)],
    pa.timestamp("us"): [
        datetime.fromisoformat(one) for one in ("2023-11-14T22:13:20.123456", "2000-01-01", "2040-01-01")
    ],
    pa.timestamp("us", "UTC"): [datetime(2023, 11, 14, 22, 13, 20, 123999, UTC), datetime(1969, 1, 1, tzinfo=UTC)],
    pa.decimal128(38, 10): [Decimal(10**37 + 1).scaleb(-10, EXACT), Decimal("1e-10"), Decimal("0E-10")],
    pa.decimal128(20, 0): [Decimal(2**64 - 1), Decimal(2**64 - 2)],
    pa.decimal128(15, 2): [Decimal("9999999999999.99"), Decimal("-9999999999999.97"), Decimal("0.01")],
    pa.bool_(): [True, False],
}
"""Some of each type that a body's column can have."""


@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_a_reader_that_skips_files_finds_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType
) -> None:
    """By the ends of each column, wherever the table was written, and after the library has merged its files."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    schema = pa.schema([("index", pa.int64()), ("value", kind)])
    table = opened(tmp_path / "t", schema)
    try:
        for number, value in enumerate(VALUES[kind]):
            add_values(table, number, [value])
    finally:
        monkeypatch.undo()
        time.tzset()
    for merged in (False, True):
        if merged:
            DeltaTable(tmp_path / "t").optimize.compact()
        ours = DeltaTable(tmp_path / "t")
        for number, value in enumerate(VALUES[kind]):
            exact = pa.scalar(value, kind)
            for sign in ("=", "<=", ">="):
                rows = ours.to_pyarrow_table(filters=[("value", sign, exact)], columns=["index"])["index"].to_pylist()
                assert number in rows, (sign, value, merged)
            assert len(ours.to_pyarrow_table(filters=[("value", "!=", exact)])) == len(VALUES[kind]) - 1


def test_a_name_with_a_point_is_that_of_a_column(tmp_path: Path) -> None:
    """And not of a member of one; neither has statistics, which the library would mix up."""
    member = pa.struct([("b", pa.int64())])
    schema = pa.schema([("index", pa.int64()), ("a.b", pa.int64()), ("a", member)])
    table = opened(tmp_path / "t", schema)
    batch = pa.RecordBatch.from_arrays([pa.array([0]), pa.array([5]), pa.array([{"b": 7}], member)], schema=schema)
    written = write_file(table.path, iter([batch]))
    assert written is not None
    table.append([written], EntrySpan(0, 1))

    assert json.loads(written.stats)["minValues"] == {"index": 0}
    assert DeltaTable(tmp_path / "t").to_pyarrow_dataset().to_table(filter=pc.field("a.b") == 5).num_rows == 1


ODD: Mapping[tuple[str, pa.DataType], object] = {
    ("bornTimestamp", pa.timestamp("us", tz="UTC")): 300_000_000_000_000_000,
    ("at", pa.timestamp("us", tz="UTC")): 300_000_000_000_000_000,
    ("at", pa.timestamp("us")): -300_000_000_000_000_000,
    ("value", pa.float64()): math.nan,
    ("value", pa.float32()): math.inf,
}
"""By a column: a value that no statistics can hold."""


@pytest.mark.parametrize("column", ODD, ids=str)
def test_a_value_that_statistics_cannot_hold_hides_no_other_row(
    tmp_path: Path, column: tuple[str, pa.DataType]
) -> None:
    """Any producer's clock or number: it stops no batch, and the rows of its file are found."""
    name, kind = column
    table = opened(tmp_path / "t", pa.schema([("index", pa.int64()), (name, kind)]))
    add_values(table, 0, [ODD[column], 0])
    add_values(table, 2, [0])

    wanted = [(name, "=", pa.scalar(0, kind))]
    found = [DeltaTable(tmp_path / "t").to_pyarrow_table(filters=wanted, columns=["index"])["index"].to_pylist()]
    if name != "at":  # such times are bad bodies
        DeltaTable(tmp_path / "t").optimize.compact()
        found.append(
            DeltaTable(tmp_path / "t").to_pyarrow_table(filters=wanted, columns=["index"])["index"].to_pylist()
        )
    assert [sorted(one) for one in found] == [[1, 2]] * len(found)


def test_columns_that_are_added_later_have_statistics_too(tmp_path: Path) -> None:
    """Of the types whose values all have ends: the table names them."""
    path = tmp_path / "t"
    opened(path)
    more = [("price", pa.float64()), ("total", pa.decimal128(8, 2)), ("tags", pa.list_(pa.string()))]
    opened(path, pa.schema([*SCHEMA, *more]))

    assert DeltaTable(path).metadata().configuration["delta.dataSkippingStatsColumns"] == "index,total"


def add_values(table: LogTable, first: int, values: Sequence[object]) -> None:
    """Write and commit entries with these values."""
    schema = pa.schema(DeltaTable(table.path).schema().to_arrow())
    numbers = pa.array(range(first, first + len(values)), pa.int64())
    batch = pa.RecordBatch.from_arrays([numbers, pa.array(values, schema.field(1).type)], schema=schema)
    written = write_file(table.path, iter([batch]))
    assert written is not None
    table.append([written], EntrySpan(first, first + len(values)))


def upsert(table: LogTable, first: int, keys: Sequence[str | None]) -> None:
    """Entries with these keys, whose bodies are their numbers."""
    numbers = list(range(first, first + len(keys)))
    rows = pa.table([numbers, keys, [b"%d" % number for number in numbers]], schema=KEYED)
    table.upsert(rows, "Key", EntrySpan(first, first + len(keys)))


def bodies_by_key(path: Path) -> dict[str | None, list[int]]:
    """The bodies that a reader sees for each key."""
    found: dict[str | None, list[int]] = {}
    for row in DeltaTable(path).to_pyarrow_table().sort_by("index").to_pylist():
        found.setdefault(row["Key"], []).append(int(row["body"]))
    return found


def test_the_last_message_of_a_key_is_its_row(tmp_path: Path) -> None:
    """Within a commit and over several; messages without a key are all kept."""
    table = opened(tmp_path / "t", KEYED)
    upsert(table, 0, ["a", "b", "a", None])
    upsert(opened(tmp_path / "t", KEYED), 4, ["c", "b", None, "it's"])

    assert bodies_by_key(tmp_path / "t") == {"a": [2], None: [3, 6], "c": [4], "b": [5], "it's": [7]}
    assert opened(tmp_path / "t", KEYED).position == 8


def test_the_row_of_a_key_of_many_digits_is_replaced(tmp_path: Path) -> None:
    """The library skips files by statistics whose decimals it takes for doubles: 64 bits of a number are too many."""
    schema = pa.schema([("index", pa.int64()), ("id", pa.decimal128(20, 0))])
    for first in range(0, 6, 2):
        rows = pa.table([[first, first + 1], [Decimal(2**64 - 1), Decimal(2**64 - 2)]], schema=schema)
        opened(tmp_path / "t", schema).upsert(rows, "id", EntrySpan(first, first + 2))

    assert indexes(tmp_path / "t") == [4, 5]


@pytest.mark.parametrize("rows", [True, False])
def test_of_two_runs_that_replace_rows_the_second_is_refused(tmp_path: Path, rows: bool) -> None:
    """Also if the first has committed no more than its position."""
    first, second = opened(tmp_path / "t", KEYED), opened(tmp_path / "t", KEYED)
    if rows:
        upsert(first, 0, ["a", None])
    else:
        first.append([], EntrySpan(0, 2))
    with pytest.raises(JobBusyError, match="changed by another run"):
        upsert(second, 0, ["a", None])

    assert bodies_by_key(tmp_path / "t") == ({"a": [0], None: [1]} if rows else {})


def test_the_newest_rows_of_keys_keep_their_order() -> None:
    """Of the log: a row that replaces another stands where it is itself."""
    rows = pa.table({"key": ["b", "a", None, "b", None], "row": [0, 1, 2, 3, 4]})

    assert newest(rows, "key")["row"].to_pylist() == [1, 2, 3, 4]
    assert newest(rows.slice(0, 0), "key").num_rows == 0


def test_rows_of_several_ranges_are_put_together_in_order() -> None:
    """As collectors have sent them: each the last rows of its own range."""
    schema = pa.schema([("key", pa.string()), ("row", pa.int64())])

    class Reader:
        """Ranges of the log, by number."""

        def read(self, rows: list[tuple[str | None, int]]) -> Iterator[pa.RecordBatch]:
            for key, row in rows:
                yield pa.RecordBatch.from_arrays([pa.array([key], pa.string()), pa.array([row])], schema=schema)

    collect = RowCollector("key", Reader())  # type: ignore[arg-type]  # as far as it is used
    ranges: tuple[list[tuple[str | None, int]], ...] = ([("a", 0), ("b", 1), ("a", 2)], [], [("b", 3), (None, 4)])
    found = rows_of([stream for rows in ranges for stream in collect(rows)])  # type: ignore[arg-type]  # likewise

    assert found is not None
    assert found["row"].to_pylist() == [1, 2, 3, 4]
    assert rows_of([]) is None


def test_compaction_merges_files_and_removes_those_of_dead_runs(tmp_path: Path) -> None:
    """Beside a run that goes on; the lock and files younger than the limit stay."""
    path = tmp_path / "t"
    table = opened(path)
    for number in range(4):
        add(table, number * 10, 10)
    (path / "_state").mkdir()
    for name in ("part-dead.parquet", "part-young.parquet", "_state/lock"):
        (path / name).touch()
    for name in ("part-dead.parquet", "_state/lock"):
        os.utime(path / name, (1_000_000_000, 1_000_000_000))

    done = compact(path, keep_hours=1)
    add(table, 40, 10)

    assert (done.merged, done.made, done.removed) == (4, 1, 1)
    assert indexes(path) == list(range(50))
    left = {one.name for one in path.iterdir()}
    assert {"part-young.parquet", "_state"} < left
    assert "part-dead.parquet" not in left


def test_a_compactor_works_at_its_times(tmp_path: Path) -> None:
    """Not before; then in its own thread or, if asked, with the caller waiting; what fails is said."""
    add(opened(tmp_path / "t"), 0, 10)
    with Compactor(tmp_path / "t", 3600, 1) as later:
        assert later.step(beside=False) is None
    with Compactor(tmp_path / "t", 0, 1) as now:
        assert now.step(beside=False) == CompactionResult(0, 0, 0)
        begun = now.step(beside=True)
        wait_until(lambda: begun is not None or now.step(beside=True) is not None, "it has ended")
    with pytest.raises(JobError, match="could not be compacted"), Compactor(tmp_path / "none", 0, 1) as failing:
        failing.step(beside=False)


def test_commits_and_their_files_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote them: rows that are appended, replaced, and merged by compaction, and the changes of those."""
    path = tmp_path / "t"
    synced: set[str] = set()
    monkeypatch.setattr(delta_files, "_sync", lambda one: synced.add(one.relative_to(path).as_posix()))
    table = opened(path, KEYED)
    add(table, 0, 4, KEYED.remove(1))
    assert f"_delta_log/{1:020d}.json" in synced  # before anything else is written
    add(table, 4, 4, KEYED.remove(1))
    DeltaTable(path).optimize.compact()
    upsert(table, 8, ["a", "b"])
    upsert(table, 10, ["b", "c"])
    assert compact(path, 1).made == 1

    written = {one.relative_to(path).as_posix() for one in path.rglob("*.parquet")}
    commits = {f"_delta_log/{number:020d}.json" for number in range(1, 7)}
    assert len([one for one in written if one.startswith("_change_data/")]) >= 1
    assert written | commits | {"_delta_log"} <= synced
