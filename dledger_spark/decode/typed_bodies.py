"""Bodies as columns (``bodyFormat``): each is parsed against one schema, whichever of its columns are read.

A body that does not fit the schema is a *bad* one: all its columns are null, and the column ``badBody`` says why. So a
row is good or bad whatever a query selects of it.

Bodies that producers have compressed are decompressed first (``decompressed=true``). Those that are JSON objects or
lines of CSV are checked and converted against the schema's types by msgspec.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, TypedDict

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_spark.decode.layout import Ints
from dledger_spark.errors import BadBodyError, SchemaError
from dledger_spark.options import ReadOptions
from dledger_spark.schema import PRECISION_MAX, Parser, parse_ddl
from rocketstore.message.message import SYS_FLAG_COMPRESSED

BAD_TEXT: Final = (msgspec.DecodeError, csv.Error, RecursionError)
FIELD_CHARS_MAX: Final = 64 * 1024 * 1024
"""Of one field of CSV: as much as a body may have."""
_SIMPLE: Final[dict[pa.DataType, Any]] = {
    pa.bool_(): bool,
    pa.float32(): float,
    pa.float64(): float,
    pa.string(): str,
    pa.binary(): bytes,
    pa.date32(): datetime.date,
    pa.timestamp("us", tz="UTC"): datetime.datetime,
    pa.timestamp("us"): Annotated[datetime.datetime, msgspec.Meta(tz=False)],
}


def json_parser(columns: pa.StructType) -> Parser:
    """Parses objects with these members; others are skipped."""
    return _with_sane_decimals(columns, msgspec.json.Decoder(_object(columns)).decode)


def csv_parser(columns: pa.StructType, delimiter: str) -> Parser:
    """Parses records of exactly these columns; an empty field is null. Raises ``SchemaError`` for nested columns."""
    if nested := [one.name for one in columns if pa.types.is_nested(one.type)]:
        raise SchemaError(f"bodyFormat=csv has no nested columns: read {', '.join(nested)} as string")
    names = [one.name for one in columns]
    kind = _object(columns)
    csv.field_size_limit(FIELD_CHARS_MAX)

    def parse(body: bytes) -> dict[str, Any]:
        lines = csv.reader(io.StringIO(body.decode(), newline=""), delimiter=delimiter, strict=True)
        fields = next(lines, [])
        if len(fields) != len(names):
            raise ValueError(f"{len(fields)} fields where the schema has {len(names)} columns")
        if any(lines):
            raise ValueError("more than one line")
        values = {name: text or None for name, text in zip(names, fields, strict=True)}
        found: dict[str, Any] = msgspec.convert(values, kind, strict=False)
        return found

    return _with_sane_decimals(columns, parse)


def _with_sane_decimals(columns: pa.StructType, parse: Parser) -> Parser:
    """The parser, which refuses decimals of more places than any column has: Arrow's conversion crashes on some."""
    if "decimal" not in str(columns):
        return parse

    def parse_sane(body: bytes) -> dict[str, Any]:
        found = parse(body)
        left: list[Any] = [found]  # Any: of any column
        while left:
            one = left.pop()
            if isinstance(one, decimal.Decimal):
                if one.is_finite() and abs(int(one.as_tuple().exponent)) > PRECISION_MAX:
                    raise ValueError(f"{str(one)[:PRECISION_MAX]} is not a number of at most {PRECISION_MAX} digits")
            elif isinstance(one, dict):
                left += one.values()
            elif isinstance(one, list):
                left += one
        return found

    return parse_sane


def _object(columns: pa.StructType) -> Any:  # noqa: ANN401  # a type made at run time
    members = {one.name: _value(one.type) | None for one in columns}
    return TypedDict("object", members, total=False)  # type: ignore[operator]  # likewise


def _value(kind: pa.DataType) -> Any:  # noqa: ANN401  # a type
    if pa.types.is_struct(kind):
        return _object(kind)
    if pa.types.is_map(kind):
        return dict[str, _value(kind.item_type) | None]  # type: ignore[misc]  # as above
    if pa.types.is_list(kind):
        return list[_value(kind.value_type) | None]  # type: ignore[misc]  # as above
    if pa.types.is_decimal(kind):
        return decimal.Decimal
    if pa.types.is_integer(kind):
        limit = 1 << kind.bit_width - 1
        return Annotated[int, msgspec.Meta(ge=-limit, le=limit - 1)]
    return _SIMPLE[kind]


BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""A longer body is null, as one that is damaged."""
BATCH_BYTES_MAX: Final = 256 * 1024 * 1024
"""Of all bodies of a batch; a few small ones exceed it, decompressed, and are then decoded in several batches."""
_METHODS: Final = 0x700
_ZLIB: Final = (0, 0x300)
"""RocketMQ 4 sets no method."""
_STREAMS: Final = {0x100: "lz4", 0x200: "zstd"}


class BodiesTooLargeError(Exception):
    """Raised for several bodies that take too much memory together."""


def decompressed(bodies: pa.Array, sys_flags: Ints) -> pa.Array:
    """The bodies, of which those that are marked as compressed are not any more; null for what cannot be read.

    Raises ``BodiesTooLargeError`` if they take too much memory together.
    """
    rows = np.flatnonzero(sys_flags & SYS_FLAG_COMPRESSED)
    if not len(rows):
        return bodies
    values = bodies.to_pylist()
    total = 0
    for row in rows.tolist():
        plain = values[row] = _plain(values[row], int(sys_flags[row]) & _METHODS)
        total += 0 if plain is None else len(plain)
        if total > BATCH_BYTES_MAX and len(bodies) > 1:
            raise BodiesTooLargeError
    return pa.array(values, pa.binary())


def _plain(body: bytes, method: int) -> bytes | None:
    if method in _ZLIB:
        inflating = zlib.decompressobj()
        try:
            found = inflating.decompress(body, BODY_BYTES_MAX)
        except zlib.error:
            return None
        return found if inflating.eof else None
    codec = _STREAMS.get(method)
    if codec is None or not body:
        return None
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
            read: bytes = stream.read(BODY_BYTES_MAX + 1)
    except (pa.ArrowException, OSError):
        return None
    return read if len(read) <= BODY_BYTES_MAX else None


BAD_BODY: Final = "badBody"
"""The column of reasons."""
ROWS_AT_ONCE: Final = 1024
"""How many bodies are held as Python objects."""
REASON_CHARS_MAX: Final = 300
_BAD: Final = (ValueError, ArithmeticError, TypeError, *BAD_TEXT)
_NOT_ARROW: Final = (pa.ArrowException, OverflowError, TypeError, ValueError)
_TIMES_US: Final = range(-62_135_596_800_000_000, 253_402_300_800_000_000)
"""The years 1 to 9999."""
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
        from dledger_spark.decode.binary_bodies import avro_format  # as below: few queries need what it loads

        return avro_format(wanted.schema)
    if wanted.name == "protobuf":
        from dledger_spark.decode.binary_bodies import protobuf_format

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

    Raises ``BadBodyError`` for a bad one if the format says so; ``BodiesTooLargeError`` if they take too much memory
    together.
    """
    parts: list[pa.StructArray] = []
    reasons: list[str | None] = []
    total = 0
    for first in range(0, len(bodies), ROWS_AT_ONCE):
        some = bodies.slice(first, ROWS_AT_ONCE)
        if sys_flags is not None:
            some = decompressed(some, sys_flags[first : first + ROWS_AT_ONCE])
        total += some.nbytes
        if total > BATCH_BYTES_MAX and len(bodies) > 1:
            raise BodiesTooLargeError
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
        found = pa.array(rows, kind)
    except _NOT_ARROW:
        for number, row in enumerate(rows):
            if row is not None and (misfit := _misfit(row, kind)):
                rows[number], reasons[number] = None, misfit
        found = pa.array(rows, kind)
    if misdated := _misdated(found):
        for number, name in misdated.items():
            rows[number], reasons[number] = None, f"{name}: a time outside of the years 1 to 9999"
        found = pa.array(rows, kind)
    return found, reasons


def _misdated(found: pa.StructArray) -> dict[int, str]:
    """The rows with a time that Spark and Delta have no text for, and its column."""
    rows: dict[int, str] = {}
    for one, column in zip(found.type, found.flatten(), strict=True):
        if pa.types.is_timestamp(one.type):
            at = column.cast(pa.int64())
            wrong = pc.or_(pc.less(at, _TIMES_US.start), pc.greater_equal(at, _TIMES_US.stop))
            rows |= dict.fromkeys(pc.indices_nonzero(wrong).to_pylist(), one.name)
    return rows


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
