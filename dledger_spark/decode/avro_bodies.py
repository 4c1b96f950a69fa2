"""Bodies that are Avro records, each without a header (Avro 1.12, "Binary encoding"); fastavro decodes them."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from dledger.command_line.extras import install_command
from dledger_spark.body_types import DEPTH_MAX, PRECISION_MAX, list_of, struct_of
from dledger_spark.decode.text_bodies import Parser
from dledger_spark.errors import SchemaError

_SIMPLE: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
    "enum": pa.string(),
}
_LOGICAL: Final[dict[str, pa.DataType]] = {
    "int-date": pa.date32(),
    "long-timestamp-millis": pa.timestamp("us", tz="UTC"),
    "long-timestamp-micros": pa.timestamp("us", tz="UTC"),
    "long-local-timestamp-millis": pa.timestamp("us"),
    "long-local-timestamp-micros": pa.timestamp("us"),
}
_DECIMALS: Final = ("bytes-decimal", "fixed-decimal")
_WIDER: Final = {frozenset(("int", "long")): "long", frozenset(("float", "double")): "double"}
"""Unions of two types that one column holds."""


def avro_format(schema: bytes) -> tuple[pa.StructType, Parser]:
    """The columns of records written with this schema (JSON), and their parser. Raises ``SchemaError``."""
    try:
        import fastavro
    except ImportError as error:
        raise SchemaError(f"bodyFormat=avro needs fastavro: run {install_command('spark')}") from error

    try:
        known: Any = fastavro.parse_schema(_without_others(json.loads(schema)), expand=True)
    except (ValueError, TypeError, LookupError, RecursionError, fastavro.schema.SchemaParseException) as error:
        raise SchemaError(f"option bodySchema is not a schema of Avro: {error}") from error
    if not isinstance(known, dict) or known.get("type") != "record":
        raise SchemaError("option bodySchema: the schema of Avro is not of a record, whose fields could be columns")

    def parse(body: bytes) -> dict[str, Any]:
        source = io.BytesIO(body)
        try:
            found: Any = fastavro.schemaless_reader(source, known, None)
        except (EOFError, struct.error) as error:
            raise ValueError(f"it ends too early {error}".rstrip()) from None
        except LookupError:
            raise ValueError("a number of no type of a union, or of no symbol") from None
        if source.tell() != len(body):
            raise ValueError(f"{len(body) - source.tell()} bytes after the record")
        row: dict[str, Any] = found
        return row

    return _struct(known, 1), parse


def _without_others(schema: Any) -> Any:  # noqa: ANN401  # JSON
    """The schema without the logical types that no column has, whose values stay those of the type below."""
    if isinstance(schema, list):
        return [_without_others(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    logical = f"{schema.get('type')}-{schema.get('logicalType')}"
    kept = {} if logical in _LOGICAL or logical in _DECIMALS else {"logicalType"}
    return {
        name: one if name == "default" else _without_others(one) for name, one in schema.items() if name not in kept
    }


def _struct(schema: dict[str, Any], depth: int) -> pa.StructType:
    if not schema["fields"]:
        raise SchemaError(f"option bodySchema: record {schema['name']} has no fields")
    return struct_of([(one["name"], _type(one["type"], one["name"], depth)) for one in schema["fields"]])


def _type(schema: Any, name: str, depth: int) -> pa.DataType:  # noqa: ANN401  # JSON
    """A field's type. ``name``: the field, for errors. Raises ``SchemaError``."""
    if depth > DEPTH_MAX:
        raise SchemaError(f"option bodySchema: field {name} nests more than {DEPTH_MAX} types")
    if isinstance(schema, list):
        return _type(_only(schema, name), name, depth)
    kind = schema if isinstance(schema, str) else schema["type"]
    if isinstance(kind, dict | list):
        return _type(kind, name, depth)
    if isinstance(schema, dict):
        logical = f"{kind}-{schema.get('logicalType')}"
        if logical in _DECIMALS:
            return _decimal(schema, name)
        if logical in _LOGICAL:
            return _LOGICAL[logical]
        if kind == "fixed" and schema["size"] < 1:
            raise SchemaError(f"option bodySchema: field {name} takes no bytes: leave it out of the writer's schema")
        if kind == "record":
            return _struct(schema, depth + 1)
        if kind == "array":
            return list_of(_type(schema["items"], name, depth + 1))
        if kind == "map":
            return pa.map_(pa.string(), _type(schema["values"], name, depth + 1))
    if kind not in _SIMPLE:
        raise SchemaError(
            f"option bodySchema: field {name} is {kind}: no column can hold that, or a type within itself"
        )
    return _SIMPLE[kind]


def _only(union: Sequence[Any], name: str) -> Any:  # noqa: ANN401  # JSON
    """The one type of a union besides null."""
    kinds = [one for one in union if one != "null"]
    if len(kinds) == 1:
        return kinds[0]
    wider = _WIDER.get(frozenset(kinds)) if all(isinstance(one, str) for one in kinds) else None
    if wider is None:
        raise SchemaError(f"option bodySchema: field {name} is a union of several types: no column can hold them all")
    return wider


def _decimal(schema: dict[str, Any], name: str) -> pa.DataType:
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision <= PRECISION_MAX:
        raise SchemaError(
            f"option bodySchema: field {name} is a decimal of {precision} digits: use 1 to {PRECISION_MAX}"
        )
    return pa.decimal128(precision, scale)
