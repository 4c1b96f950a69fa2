"""Storing a partition's rows once: reruns, retries, other chunks, and rows that are not the same."""

from __future__ import annotations

from types import TracebackType

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_spark.source.sink import WriterReusedError, store


class MemoryTarget:
    """Rows of one writer, kept over several attempts; fails before row ``fails_at``."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.fails_at: int | None = None

    def begin(self) -> int:
        return len(self.rows)

    def add(self, batch: pa.RecordBatch, first_row: int) -> None:
        assert first_row == len(self.rows), "rows are numbered as they are counted"
        for value in batch.column(0).to_pylist():
            if len(self.rows) == self.fails_at:
                raise ConnectionError
            self.rows.append(value)

    def finish(self) -> None:
        """Everything is stored at once."""

    def __enter__(self) -> MemoryTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""


def chunks(rows: int, size: int) -> list[pa.RecordBatch]:
    """Numbers from 0 on, in batches."""
    return [
        pa.RecordBatch.from_pydict({"n": list(range(first, min(first + size, rows)))}) for first in range(0, rows, size)
    ]


@settings(deadline=None)
@given(st.integers(0, 60), st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=5), st.integers(1, 9))
def test_attempts_add_only_what_is_missing(rows: int, attempts: list[tuple[int, int]], size: int) -> None:
    """However often it fails and however Spark cuts the rows into chunks: in the end each is stored once, in order."""
    target = MemoryTarget()
    for fails_at, chunk in attempts:
        target.fails_at = max(fails_at, len(target.rows))
        if target.fails_at < rows:
            with pytest.raises(ConnectionError):
                store(target, chunks(rows, chunk), 0, "w")
    target.fails_at = None
    known = len(target.rows)

    stored = store(target, chunks(rows, size), 3, "w")

    assert target.rows == list(range(rows))
    assert (stored.partition, stored.rows, stored.known) == (3, rows, known)


def test_writer_that_has_more_rows_than_there_are_is_an_error() -> None:
    """Other rows under the same name would be lost silently."""
    target = MemoryTarget()
    store(target, chunks(10, 4), 0, "w")

    with pytest.raises(WriterReusedError, match=r"writer w has stored 10 rows of partition 2, and now there are 9"):
        store(target, chunks(9, 4), 2, "w")
