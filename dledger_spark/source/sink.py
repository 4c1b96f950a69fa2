"""The sink of the format ``dledger``: appends rows to a topic, or to a log of plain entries, each exactly once.

The log is append-only, so nothing can be undone; instead, everything can be repeated. A task first asks how many of its
rows are already stored and continues after them; see ``sink_targets``. Rows stored by a failed job stay, and a rerun
with the same ``writerId`` adds the rest. A stream's batch writes under its query's id and its own number, so that a
batch repeated by Spark after a restart adds nothing twice.

This requires the same rows in the same partitions and order. If a query does not guarantee that (for example because it
repartitions at random), sort or checkpoint before writing. A writer that has stored more rows than there are now is an
error; other differences cannot be detected.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from dledger.core.noop_payload import stream_task_name
from dledger_spark.errors import OptionError, PipelineError
from dledger_spark.options import WriteOptions
from dledger_spark.source.sink_rows import RowFormat, row_format
from dledger_spark.source.sink_targets import RowTarget, check_target, open_target

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_log = logging.getLogger(__name__)
_WRITER_ID: Final = re.compile(r"[A-Za-z0-9._/:-]{1,112}")
"""Characters allowed in a producer's name, with room for the partition."""
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


class WriterReusedError(PipelineError):
    """Raised when a writer has stored more rows than there are: the same ``writerId`` was used for other rows."""


@dataclass(frozen=True, slots=True)
class StoredRows(WriterCommitMessage):
    """A task's result: its rows, and how many of them were stored before it ran."""

    partition: int
    rows: int
    known: int


def batch_writer(options: WriteOptions, schema: StructType, *, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of a batch. Checks everything possible before a task runs. Raises ``PipelineError``."""
    return BatchWriter(options, _checked(options, schema, overwrite=overwrite))


def stream_writer(options: WriteOptions, schema: StructType, *, overwrite: bool) -> DataSourceStreamArrowWriter:
    """The writer of a stream. Raises ``PipelineError``."""
    if options.writer_id:
        raise OptionError(
            "option writerId is for batches only: a stream writes under its query's id and the batch's number"
        )
    return StreamWriter(options, _checked(options, schema, overwrite=overwrite))


def _checked(options: WriteOptions, schema: StructType, *, overwrite: bool) -> RowFormat:
    if overwrite:
        raise OptionError('a log cannot be overwritten: use mode("append"), or outputMode("append") in a stream')
    if options.writer_id and not _WRITER_ID.fullmatch(options.writer_id):
        raise OptionError(f"option writerId: {options.writer_id!r} is not 1 to 112 of A-Z a-z 0-9 . _ / : -")
    form = row_format((one.name, one.dataType.simpleString()) for one in schema.fields)
    check_target(options, form)
    return form


def store(target: RowTarget, batches: Iterable[pa.RecordBatch], partition: int, writer: str) -> StoredRows:
    """Store those of one partition's rows that the target lacks. Raises the target's errors."""
    known = target.begin()
    rows = 0
    for batch in batches:
        first_new = max(known - rows, 0)
        if first_new < batch.num_rows:
            target.add(batch.slice(first_new), rows + first_new)
        rows += batch.num_rows
    target.finish()
    if known > rows:
        raise WriterReusedError(
            f"writer {writer} has stored {known} rows of partition {partition}, and now there are {rows}: the "
            "rows or partitions changed. Use another writerId for other rows; for the same rows, sort or "
            "checkpoint them before writing, and keep the number of partitions"
        )
    return StoredRows(partition, rows, known)


class _Writer:
    """Common to both writers. Pickled for the tasks."""

    def __init__(self, options: WriteOptions, form: RowFormat) -> None:
        self._options = options
        self._form = form

    def _store(self, batches: Iterator[pa.RecordBatch], name: str, writer: str, partition: int) -> StoredRows:
        with open_target(self._options, self._form, name) as target:
            return store(target, batches, partition, writer)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes one job's rows."""

    def __init__(self, options: WriteOptions, form: RowFormat) -> None:
        super().__init__(options, form)
        self._writer = options.writer_id or str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredRows:
        """Store a partition, in a task."""
        partition = _context().partitionId()
        return self._store(iterator, f"{self._writer}/{partition}", self._writer, partition)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Everything is stored: nothing to do."""
        rows, known = _sums(messages)
        _log.info("writer %s has stored %d rows, %d of them before", self._writer, rows, known)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing can be undone: say how to continue."""
        rows, _ = _sums(messages)
        _log.warning(
            "the job failed; at least %d of its rows are stored and stay there. To add only the missing ones, "
            "run it again with option writerId=%s and the same rows",
            rows,
            self._writer,
        )


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes the batches of a query."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredRows:
        """Store a partition of a batch, in a task."""
        context = _context()
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if not query or not batch:
            raise PipelineError(f"Spark did not tell the task which batch it writes ({_QUERY_ID}, {_BATCH_ID})")
        partition = context.partitionId()
        name = stream_task_name(query, int(batch), partition)
        return self._store(iterator, name, f"{query}-{batch}", partition)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Everything is stored."""
        rows, known = _sums(messages)
        _log.info("batch %d has stored %d rows, %d of them before", batchId, rows, known)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing can be undone, nor needs to be: the batch is retried under the same name."""
        rows, _ = _sums(messages)
        _log.warning("batch %d failed; at least %d of its rows are stored and will not be stored again", batchId, rows)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise PipelineError("rows can be written only by Spark's tasks")
    return context


def _sums(messages: Sequence[WriterCommitMessage | None]) -> tuple[int, int]:
    """Rows, and those stored before, of the finished tasks."""
    finished = [one for one in messages if isinstance(one, StoredRows)]
    return sum(one.rows for one in finished), sum(one.known for one in finished)
