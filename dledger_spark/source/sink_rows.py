"""Converts the sink's rows to messages or entries, and validates their columns.

The schema is checked once, on the driver, before a task runs. Both our own column names and those of Spark's Kafka sink
are accepted; columns that the source produces but cannot be written (``index``, ``storeTimestamp``, …) are ignored, so
that rows read from the format can be written. Any other column is an error, probably a mistyped name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa

from dledger_spark.errors import PipelineError, SchemaError
from dledger_spark.schema import COLUMN_NAMES, KAFKA_COLUMNS
from rocketstore.message.message import PROPERTY_KEYS, PROPERTY_TAGS, Message

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
