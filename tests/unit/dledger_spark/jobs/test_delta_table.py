"""A table's rows and its position are one commit, of one run at a time; no Spark, no log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dledger.errors import ConfigError
from dledger_spark.jobs.delta_files import write_file
from dledger_spark.jobs.delta_table import LogTable, TableOrigin, open_table
from dledger_spark.jobs.errors import JobBusyError, JobError

SCHEMA = pa.schema([("index", pa.int64()), ("body", pa.binary())])
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
    table.append([written], first, first + count)


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


def test_a_position_alone_is_committed_too(tmp_path: Path) -> None:
    """Entries that have no rows are not read again."""
    table = opened(tmp_path / "t")
    table.append([], 3, 40)

    assert (opened(tmp_path / "t").position, indexes(tmp_path / "t")) == (40, [])


def test_entries_that_are_there_are_never_added_again(tmp_path: Path) -> None:
    """Even if the log, and so the reader, has gone back."""
    table = opened(tmp_path / "t")
    add(table, 0, 10)
    for first, count in ((0, 10), (9, 3)):
        with pytest.raises(JobError, match="another or older one"):
            add(table, first, count)
    with pytest.raises(JobError, match="another or older one"):
        table.append([], 10, 10)

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
        "minValues": {"index": 4, "at": "1970-01-01T00:00:00.001Z", "topic": "a"},
        "maxValues": {"index": 9, "at": "2023-11-14T22:13:20.123Z", "topic": "b"},
        "nullCount": {"index": 2, "at": 0, "topic": 2, "long": 0, "none": 6, "body": 0},
    }
