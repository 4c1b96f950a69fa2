"""Bodies that are JSON objects or lines of CSV: msgspec checks and converts each against the schema's types."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
from collections.abc import Callable
from typing import Annotated, Any, Final, TypedDict

import msgspec
import pyarrow as pa

from dledger_spark.body_types import PRECISION_MAX
from dledger_spark.errors import SchemaError

Parser = Callable[[bytes], dict[str, Any]]  # Any: each column has its own type
"""The values of a body by name; absent ones are null. Raises ``ValueError`` or one of ``BAD_TEXT``."""
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
