"""The sink of the format ``dledger``: appends rows to a topic, or to a log of plain entries, each exactly once.

The schema is checked once, on the driver, before a task runs. Both our own column names and those of Spark's Kafka sink
are accepted; columns that the source produces but cannot be written (``index``, ``storeTimestamp``, …) are ignored, so
that rows read from the format can be written. Any other column is an error, probably a mistyped name.

The log is append-only, so nothing can be undone; instead, everything can be repeated. A task's rows are written by a
producer of exactly-once append: its name is ``{writerId}/{partition}``, its sequence the row's number in the partition,
and the target remembers what it has stored. A task first asks how many of its rows are there and continues after them.
So writing the same rows again, in the same order and under the same name, adds only the missing ones. Rows stored by a
failed job stay, and a rerun with the same ``writerId`` adds the rest. A stream's batch writes under its query's id and
its own number, so that a batch repeated by Spark after a restart adds nothing twice.

This requires the same rows in the same partitions and order. If a query does not guarantee that (for example because it
repartitions at random), sort or checkpoint before writing. A writer that has stored more rows than there are now is an
error; other differences cannot be detected.
"""

from __future__ import annotations

import difflib
import logging
import re
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from dledger.core.noop_payload import stream_task_name
from dledger_spark.errors import OptionError, PipelineError, SchemaError
from dledger_spark.options import GROUP_DEFAULT, WriteOptions
from dledger_spark.schema import COLUMN_NAMES, KAFKA_COLUMNS
from dledger_spark.source.client_log import shared_client, status_of
from rocketstore.client import Admin, PipelineLimits, Producer, ProducerOptions, RequestNotKnownError, SendResult
from rocketstore.client.aio.admin_requests import BrokerStatus
from rocketstore.message.message import PROPERTY_KEYS, PROPERTY_TAGS, Message

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_BYTES: Final = frozenset({"binary", "string"})
_ACCEPTED: Final = {
    "body": _BYTES,
    "topic": frozenset({"string"}),
    "keys": _BYTES,
    "tags": frozenset({"string"}),
    "queueId": frozenset({"int", "bigint", "smallint", "tinyint"}),
    "properties": frozenset({"map<string,string>"}),
    "headers": frozenset({"array<struct<key:string,value:binary>>"}),
}
"""Accepted types per column, in Spark's names."""
_KAFKA_NAMES: Final = {"value": "body", "key": "keys", "partition": "queueId"}
_NAMES: Final = {name.lower(): name for name in _ACCEPTED} | _KAFKA_NAMES
_LEFT_OUT: Final = frozenset(name.lower() for name in (*COLUMN_NAMES, *(one.name for one in KAFKA_COLUMNS)))


class RowError(PipelineError):
    """Raised for a row that cannot be stored; names the row and the column."""


class SinkRow(NamedTuple):
    """A row's message, and the queue it must go to, if any."""

    message: Message
    queue_id: int | None


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Which input column is which; ``places`` maps our names to column numbers."""

    places: tuple[tuple[str, int], ...]

    def has(self, name: str) -> bool:
        """Whether the input has this column."""
        return any(one == name for one, _ in self.places)

    def column(self, batch: pa.RecordBatch, name: str) -> list[Any] | None:  # Any: each column has a type of its own
        """A column as Python objects; None if the input lacks it."""
        for one, place in self.places:
            if one == name:
                column = batch.column(place)
                if name == "body" and pa.types.is_string(column.type):
                    column = column.cast(pa.binary())
                return column.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
        return None


def row_format(columns: Iterable[tuple[str, str]]) -> RowFormat:
    """The format of input with these columns (name, Spark's type). Raises ``SchemaError`` with every problem."""
    places: dict[str, int] = {}
    problems: list[str] = []
    for place, (given, kind) in enumerate(columns):
        name = _NAMES.get(given.lower())
        if name is None:
            if given.lower() not in _LEFT_OUT:
                problems.append(_unknown(given))
            continue
        if name in places:
            problems.append(f"columns {given} and {name} mean the same: drop one of them")
        elif kind not in _ACCEPTED[name]:
            problems.append(f"column {given} is {kind}: cast it to {' or '.join(sorted(_ACCEPTED[name]))}")
        places[name] = place
    if "body" not in places:
        problems.append("no column body (binary or string): select your payload as body")
    if "properties" in places and "headers" in places:
        problems.append("columns properties and headers mean the same: drop one of them")
    if problems:
        raise SchemaError("; ".join(problems))
    return RowFormat(tuple(places.items()))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), _NAMES, n=1, cutoff=0.7)
    hint = f"did you mean {_NAMES[near[0]]}?" if near else f"drop it, or put it into properties; known: {_known()}"
    return f"column {name} cannot be written: {hint}"


def _known() -> str:
    return ", ".join(_ACCEPTED)


def bodies_of(batch: pa.RecordBatch, form: RowFormat, first_row: int) -> Sequence[bytes]:
    """Only the bodies, for a log of plain entries. ``first_row``: the number of the batch's first row, for errors."""
    bodies: list[bytes] = form.column(batch, "body") or []
    if batch.num_rows and None in bodies:
        raise _null("body", first_row + bodies.index(None))  # type: ignore[arg-type]  # that is what is looked for
    return bodies


def rows_of(
    batch: pa.RecordBatch, form: RowFormat, topic: str, queue_id: int | None, first_row: int
) -> Iterator[SinkRow]:
    """The messages of a batch. The options ``topic``, if any, and ``queue_id`` override the columns."""
    bodies = bodies_of(batch, form, first_row)
    topics = None if topic else form.column(batch, "topic")
    queues = form.column(batch, "queueId") if queue_id is None else None
    properties = _properties(batch, form, first_row)
    for number, body in enumerate(bodies):
        if topics is not None:
            topic = topics[number]
            if not topic:
                raise _null("topic", first_row + number)
        queue = queue_id if queues is None else queues[number]
        message = Message(topic, body)
        if properties is not None:
            message.properties = properties[number]
            message.meant = frozenset(message.properties)  # a copied message keeps what it had
        yield SinkRow(message, queue)


def _properties(batch: pa.RecordBatch, form: RowFormat, first_row: int) -> list[dict[str, str]] | None:
    """Each row's properties, including keys and tags; None if the input has none of these."""
    keys, tags = form.column(batch, "keys"), form.column(batch, "tags")
    given = form.column(batch, "properties") or form.column(batch, "headers")
    if keys is None and tags is None and given is None:
        return None
    rows: list[dict[str, str]] = []
    for number in range(batch.num_rows):
        row: dict[str, str] = {}
        if given is not None and given[number]:
            row = _pairs(given[number], first_row + number)
        if keys is not None and keys[number] is not None:
            row[PROPERTY_KEYS] = _text(keys[number], "keys", first_row + number)
        if tags is not None and tags[number] is not None:
            row[PROPERTY_TAGS] = tags[number]
        rows.append(row)
    return rows


def _pairs(given: list[Any], row: int) -> dict[str, str]:  # Any: pairs of a map, or structs
    pairs = ((one["key"], one["value"]) if isinstance(one, dict) else one for one in given)
    return {name: _text(value, "properties", row) for name, value in pairs if value is not None}


def _text(value: bytes | str, column: str, row: int) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RowError(f"row {row} of the task: column {column} is not valid UTF-8: {error}") from None


def _null(column: str, row: int) -> RowError:
    return RowError(f"row {row} of the task has no {column} (null or empty): filter such rows, or fill them in")


_log = logging.getLogger(__name__)


_CHECK_TIMEOUT_S: Final = 10.0
_LOOK_EVERY_ROWS: Final = 1024
_ENTRY_OVERHEAD_BYTES: Final = 16
"""The cost of an entry in a request besides its body, so that the number of empty ones is limited, too."""


class RowTarget(Protocol):
    """Receives one task's rows, in order. A context manager."""

    def begin(self) -> int:
        """The number of the writer's rows that are already stored."""

    def add(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Send rows; ``first_row`` is the number of the first one. Raises if any previous row failed."""

    def finish(self) -> None:
        """Wait until everything is stored; raises if a row failed."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_target(options: WriteOptions, form: RowFormat, producer: str) -> RowTarget:
    """The target of one task. ``producer``: the name it writes under."""
    if options.topic or form.has("topic"):
        return TopicTarget(options, form, producer)
    return _EntryTarget(options, form, producer)


def check_target(options: WriteOptions, form: RowFormat) -> None:
    """Check before any task runs whether the servers accept such rows. Raises ``OptionError``, ``DLedgerError``."""
    if options.topic or form.has("topic"):
        with Admin(options.servers, timeout_s=_CHECK_TIMEOUT_S, security=options.security.client()) as admin:
            try:
                names = {one.name for one in admin.topics()}
            except RequestNotKnownError as error:
                raise OptionError(
                    "rows of a topic need brokers, and this server is not a broker: name brokers, or leave the topic "
                    f"out to write a log of plain entries ({error})"
                ) from error
            if options.partitioner == "keys" and options.topic and options.topic not in names:
                raise OptionError(
                    f"option partitioner: create topic {options.topic} first: keys choose among its queues"
                )
            _check_group(options, admin)
        return
    if status_of(options.servers, options.group, options.security, _CHECK_TIMEOUT_S).is_broker:
        raise OptionError("the servers are brokers: name the topic of the rows with option topic or a column topic")


def _check_group(options: WriteOptions, admin: Admin) -> None:
    """As for reads: another name means other brokers. Plain brokers are in no group."""
    known = [one.runtime for one in admin.statuses().values() if isinstance(one, BrokerStatus)]
    if any(one.role for one in known):
        status_of(options.servers, options.group, options.security, _CHECK_TIMEOUT_S)
    elif options.group != GROUP_DEFAULT:
        raise OptionError(f"option group: these brokers are in no replication group {options.group!r}: leave it out")


class _EntryTarget:
    """A group of plain entries: each row's body becomes one."""

    def __init__(self, options: WriteOptions, form: RowFormat, producer: str) -> None:
        self._form = form
        self._producer = producer
        self._timeout_s = options.send_timeout_ms / 1000
        self._batch_bytes = options.batch_bytes
        self._client = shared_client(options.servers, options.group, options.security)
        self._sequence = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the connection open for the next task."""

    def begin(self) -> int:
        """See ``RowTarget``."""
        self._sequence = self._client.producer_sequence(self._producer, timeout_s=self._timeout_s)
        return self._sequence

    def add(self, batch: pa.RecordBatch, first_row: int) -> None:
        """See ``RowTarget``."""
        for body in bodies_of(batch, self._form, first_row):
            self._waiting.append(body)
            self._waiting_bytes += len(body) + _ENTRY_OVERHEAD_BYTES
            if self._waiting_bytes >= self._batch_bytes:
                self.finish()

    def finish(self) -> None:
        """See ``RowTarget``."""
        if self._waiting:
            self._client.append_as(self._producer, self._sequence, self._waiting, timeout_s=self._timeout_s)
            self._sequence += len(self._waiting)
            self._waiting, self._waiting_bytes = [], 0


class TopicTarget:
    """Topics of brokers. Pipelined: sends rows while others are in flight."""

    def __init__(self, options: WriteOptions, form: RowFormat, producer: str) -> None:
        self._options = options
        self._form = form
        self._producer = Producer(
            options.servers,
            timeout_s=options.send_timeout_ms / 1000,
            security=options.security.client(),
            options=ProducerOptions(limits=PipelineLimits(batch_bytes_max=options.batch_bytes)),
        )
        self._numbered = self._producer.numbered(producer)
        self._sent: deque[Future[SendResult]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._producer.close()

    def begin(self) -> int:
        """See ``RowTarget``."""
        return self._numbered.next_number()

    def add(self, batch: pa.RecordBatch, first_row: int) -> None:
        """See ``RowTarget``."""
        submit, options = self._numbered.submit, self._options
        rows = rows_of(batch, self._form, options.topic, options.queue_id, first_row)
        by_keys = options.partitioner == "keys"
        for number, (message, queue_id) in enumerate(rows, first_row):
            key = message.properties.get(PROPERTY_KEYS) if by_keys and queue_id is None else None
            future = submit(message, number, key=key, queue=queue_id)
            if number % _LOOK_EVERY_ROWS == 0:
                self._sent.append(future)
        self._sent.append(future)
        self._look()

    def finish(self) -> None:
        """See ``RowTarget``."""
        self._numbered.flush()
        self._look()

    def _look(self) -> None:
        """Raise if a row has failed: the following ones fail, too, so checking the last row of a stretch is enough."""
        while self._sent and self._sent[0].done():
            future = self._sent.popleft()
            if (error := future.exception()) is not None:
                raise error


_WRITER_ID: Final = re.compile(r"[A-Za-z0-9._/:-]{1,112}")
"""Characters allowed in a producer's name, with room for the partition."""
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


class WriterReusedError(PipelineError):
    """Raised when a writer has stored more rows than there are: the same ``writerId`` was used for other rows."""


@dataclass(frozen=True, slots=True)
class _StoredRows(WriterCommitMessage):
    """A task's result: its rows, and how many of them were stored before it ran."""

    partition: int
    rows: int
    known: int


def batch_writer(options: WriteOptions, schema: StructType, *, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of a batch. Checks everything possible before a task runs. Raises ``PipelineError``."""
    return _BatchWriter(options, _checked(options, schema, overwrite=overwrite))


def stream_writer(options: WriteOptions, schema: StructType, *, overwrite: bool) -> DataSourceStreamArrowWriter:
    """The writer of a stream. Raises ``PipelineError``."""
    if options.writer_id:
        raise OptionError(
            "option writerId is for batches only: a stream writes under its query's id and the batch's number"
        )
    return _StreamWriter(options, _checked(options, schema, overwrite=overwrite))


def _checked(options: WriteOptions, schema: StructType, *, overwrite: bool) -> RowFormat:
    if overwrite:
        raise OptionError('a log cannot be overwritten: use mode("append"), or outputMode("append") in a stream')
    if options.writer_id and not _WRITER_ID.fullmatch(options.writer_id):
        raise OptionError(f"option writerId: {options.writer_id!r} is not 1 to 112 of A-Z a-z 0-9 . _ / : -")
    form = row_format((one.name, one.dataType.simpleString()) for one in schema.fields)
    check_target(options, form)
    return form


def store(target: RowTarget, batches: Iterable[pa.RecordBatch], partition: int, writer: str) -> _StoredRows:
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
    return _StoredRows(partition, rows, known)


class _Writer:
    """Common to both writers. Pickled for the tasks."""

    def __init__(self, options: WriteOptions, form: RowFormat) -> None:
        self._options = options
        self._form = form

    def _store(self, batches: Iterator[pa.RecordBatch], name: str, writer: str, partition: int) -> _StoredRows:
        with open_target(self._options, self._form, name) as target:
            return store(target, batches, partition, writer)


class _BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes one job's rows."""

    def __init__(self, options: WriteOptions, form: RowFormat) -> None:
        super().__init__(options, form)
        self._writer = options.writer_id or str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> _StoredRows:
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


class _StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes the batches of a query."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> _StoredRows:
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
    finished = [one for one in messages if isinstance(one, _StoredRows)]
    return sum(one.rows for one in finished), sum(one.known for one in finished)
