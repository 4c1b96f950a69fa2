"""Bodies as columns (``bodyFormat``): each is parsed against one schema, whichever of its columns are read.

A body that does not fit the schema is a *bad* one: all its columns are null, and the column ``badBody`` says why. So a
row is good or bad whatever a query selects of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

from dledger_spark.body_types import parse_ddl
from dledger_spark.decode.bodies import BATCH_BYTES_MAX, decompressed
from dledger_spark.decode.layout import Ints
from dledger_spark.decode.text_bodies import BAD_TEXT, Parser, csv_parser, json_parser
from dledger_spark.errors import BadBodyError, OptionError, SchemaError
from dledger_spark.options import ReadOptions

BAD_BODY: Final = "badBody"
"""The column of reasons."""
ROWS_AT_ONCE: Final = 1024
"""How many bodies are held as Python objects."""
REASON_CHARS_MAX: Final = 300
_BAD: Final = (ValueError, ArithmeticError, TypeError, *BAD_TEXT)
_NOT_ARROW: Final = (pa.ArrowException, OverflowError, TypeError, ValueError)
_UNREADABLE: Final = "cannot be decompressed"


@dataclass(frozen=True, slots=True)
class TypedBodyFormat:
    """How bodies are parsed. Pickles."""

    name: str
    schema: bytes
    message: str = ""
    delimiter: str = ","
    fails: bool = False
    """Whether a bad body is an error."""

    @property
    def columns(self) -> pa.StructType:
        """The columns in a body. Raises ``SchemaError``."""
        return _compiled(self)[0]

    @property
    def parser(self) -> Parser:
        return _compiled(self)[1]


@lru_cache(maxsize=8)
def _compiled(wanted: TypedBodyFormat) -> tuple[pa.StructType, Parser]:
    if wanted.name == "avro":
        from dledger_spark.decode.avro_bodies import avro_format  # as below: few queries need what it loads

        return avro_format(wanted.schema)
    if wanted.name == "protobuf":
        from dledger_spark.decode.protobuf_bodies import protobuf_format

        return protobuf_format(wanted.schema, wanted.message)
    columns = parse_ddl(_text(wanted.schema))
    return columns, csv_parser(columns, wanted.delimiter) if wanted.name == "csv" else json_parser(columns)


def _text(schema: bytes) -> str:
    try:
        return schema.decode()
    except UnicodeDecodeError as error:
        raise SchemaError(f"option bodySchema is not a text in UTF-8: {error}") from error


def body_format(options: ReadOptions) -> TypedBodyFormat | None:
    """The format that the options ask for; None if bodies stay bytes. Raises ``SchemaError``."""
    if not options.body_format:
        return None
    found = TypedBodyFormat(
        options.body_format,
        options.body_schema,
        options.body_message,
        options.body_delimiter,
        fails=options.bad_bodies == "fail",
    )
    assert_readable(found)
    return found


def assert_readable(wanted: TypedBodyFormat) -> None:
    """Compiles the schema, where the user sees its errors. Raises ``SchemaError``."""
    if any(one.name.lower() == BAD_BODY.lower() for one in wanted.columns):
        raise SchemaError(f"the schema of the bodies has a column {BAD_BODY}: that name is taken")


def typed(bodies: pa.Array, sys_flags: Ints | None, positions: Ints, wanted: TypedBodyFormat) -> dict[str, pa.Array]:
    """The columns in bodies, by name, and ``badBody``; a message's body is decompressed as its flags say.

    Raises ``BadBodyError`` for a bad one if the format says so; ``OptionError`` if they take too much memory together.
    """
    parts: list[pa.StructArray] = []
    reasons: list[str | None] = []
    total = 0
    for first in range(0, len(bodies), ROWS_AT_ONCE):
        some = bodies.slice(first, ROWS_AT_ONCE)
        if sys_flags is not None:
            some = decompressed(some, sys_flags[first : first + ROWS_AT_ONCE])
        total += some.nbytes
        if total > BATCH_BYTES_MAX:
            raise OptionError(f"option bodyFormat: the bodies of one batch take more than {BATCH_BYTES_MAX >> 20} MiB")
        part, why = _parsed(some.to_pylist(), wanted)
        if wanted.fails and any(why):
            row = next(row for row, reason in enumerate(why) if reason)
            raise BadBodyError(
                f"the body at position {positions[first + row]} of the log is not {wanted.name} of bodySchema: "
                f"{why[row]}. badBodies=column reads it as nulls, with this reason"
            )
        parts.append(part)
        reasons += why
    whole = pa.concat_arrays(parts) if parts else pa.array([], wanted.columns)
    names = [*(one.name for one in wanted.columns), BAD_BODY]
    return dict(zip(names, [*whole.flatten(), pa.array(reasons, pa.string())], strict=True))


def _parsed(bodies: Sequence[bytes | None], wanted: TypedBodyFormat) -> tuple[pa.StructArray, list[str | None]]:
    parse, kind = wanted.parser, wanted.columns
    reasons: list[str | None] = [None] * len(bodies)
    rows: list[dict[str, Any] | None] = []  # Any: as in Parser
    for number, body in enumerate(bodies):
        try:
            rows.append(None if body is None else parse(body))
        except _BAD as error:
            rows.append(None)
            reasons[number] = _reason(error)
        if body is None:
            reasons[number] = _UNREADABLE
    try:
        return pa.array(rows, kind), reasons
    except _NOT_ARROW:
        pass
    for number, row in enumerate(rows):
        if row is not None and (misfit := _misfit(row, kind)):
            rows[number], reasons[number] = None, misfit
    return pa.array(rows, kind), reasons


def _misfit(row: Mapping[str, Any], kind: pa.StructType) -> str:  # Any: as above
    """Which column's value its type cannot hold, and why; empty if there is none."""
    for one in kind:
        try:
            pa.array([row.get(one.name)], one.type)
        except _NOT_ARROW as error:
            return _reason(error, f"{one.name}: ")
    return ""


def _reason(error: Exception, where: str = "") -> str:
    return f"{where}{str(error) or type(error).__name__}"[:REASON_CHARS_MAX]
