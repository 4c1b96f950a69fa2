"""The targets of a task's rows: a topic of brokers, or a log of plain entries. Both remember what a writer has stored.

A writer is a producer of exactly-once append: its name is ``{writerId}/{partition}``, its sequence the row's number in
the partition. So writing the same rows again, in the same order and under the same name, adds only the missing ones.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from types import TracebackType
from typing import Final, Protocol, Self

import pyarrow as pa

from dledger_spark.errors import OptionError
from dledger_spark.options import GROUP_DEFAULT, WriteOptions
from dledger_spark.source.client_log import shared_client, status_of
from dledger_spark.source.sink_rows import RowFormat, bodies_of, rows_of
from rocketstore.client import Admin, PipelineLimits, Producer, ProducerOptions, RequestNotKnownError, SendResult
from rocketstore.client.aio.admin_records import BrokerStatus
from rocketstore.message.message import PROPERTY_KEYS

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
    return EntryTarget(options, form, producer)


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


class EntryTarget:
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
