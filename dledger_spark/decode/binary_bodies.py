"""Bodies that are Avro records, each without a header (Avro 1.12, "Binary encoding"), or messages of Protocol Buffers.

fastavro decodes the former; the latter are of a type in a descriptor set (``protoc --descriptor_set_out``).
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from dledger.command_line.flag_values import install_command
from dledger_spark.errors import SchemaError
from dledger_spark.schema import DEPTH_MAX, PRECISION_MAX, Parser, list_of, struct_of

_AVRO_SIMPLE: Final[dict[str, pa.DataType]] = {
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
_SHORT_DECIMAL: Final = "dledger-short-decimal"
"""The logical type by which fastavro finds ``_short_decimal``: its own reader takes minutes for some 100 KB."""
_DECIMAL_BYTES_MAX: Final = 64
_EXACT: Final = Context(prec=8 * _DECIMAL_BYTES_MAX)
_WIDER: Final = {frozenset(("int", "long")): "long", frozenset(("float", "double")): "double"}
"""Unions of two types that one column holds."""


def avro_format(schema: bytes) -> tuple[pa.StructType, Parser]:
    """The columns of records written with this schema (JSON), and their parser. Raises ``SchemaError``."""
    try:
        import fastavro
    except ImportError as error:
        raise SchemaError(f"bodyFormat=avro needs fastavro: run {install_command('spark')}") from error

    for kind in _DECIMALS:
        fastavro.read.LOGICAL_READERS[kind.replace("decimal", _SHORT_DECIMAL)] = _short_decimal
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
    found = {
        name: one if name == "default" else _without_others(one) for name, one in schema.items() if name not in kept
    }
    return found | ({"logicalType": _SHORT_DECIMAL} if logical in _DECIMALS else {})


def _short_decimal(data: bytes, writer_schema: dict[str, Any] | None, _: object) -> Decimal:  # Any: JSON
    """A decimal's value. Raises ``ValueError``."""
    if len(data) > _DECIMAL_BYTES_MAX:
        raise ValueError(f"a decimal of {len(data)} bytes")
    return Decimal(int.from_bytes(data, "big", signed=True)).scaleb(-(writer_schema or {}).get("scale", 0), _EXACT)


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
        if schema.get("logicalType") == _SHORT_DECIMAL:
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
    if kind not in _AVRO_SIMPLE:
        raise SchemaError(
            f"option bodySchema: field {name} is {kind}: no column can hold that, or a type within itself"
        )
    return _AVRO_SIMPLE[kind]


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


_SET_BEGINS: Final = b"\n"
"""The tag of a descriptor set's first file."""
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_PROTOBUF_SIMPLE: Final[dict[int, pa.DataType]] = {
    FieldDescriptor.CPPTYPE_BOOL: pa.bool_(),
    FieldDescriptor.CPPTYPE_INT32: pa.int32(),
    FieldDescriptor.CPPTYPE_INT64: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT32: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT64: pa.decimal128(20, 0),
    FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
    FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(),
    FieldDescriptor.CPPTYPE_ENUM: pa.string(),
}

_Convert = Callable[[Any], Any]  # Any: a field's value, and a column's


def protobuf_format(schema: bytes, message: str) -> tuple[pa.StructType, Parser]:
    """The columns of messages of this type, and their parser. Raises ``SchemaError``.

    ``schema``: a descriptor set with all imports, or the Base64 of one.
    """
    pool = descriptor_pool.DescriptorPool()
    names: list[str] = []
    try:
        raw = schema if schema.startswith(_SET_BEGINS) else base64.b64decode(schema, validate=True)
        for file in descriptor_pb2.FileDescriptorSet.FromString(raw).file:
            pool.Add(file)
            names += [f"{file.package}.{one.name}".lstrip(".") for one in file.message_type]
    except (binascii.Error, DecodeError, TypeError) as error:
        raise SchemaError(
            f"option bodySchema is not a descriptor set of Protocol Buffers ({error}): make one with "
            "protoc --include_imports --descriptor_set_out=FILE, and give @FILE"
        ) from error
    try:
        descriptor = pool.FindMessageTypeByName(message)
    except KeyError:
        raise SchemaError(
            f"option bodyMessage: no message {message!r} in bodySchema; it has {', '.join(names)}"
        ) from None
    columns, convert = _message(descriptor, ())
    decode: Any = message_factory.GetMessageClass(descriptor).FromString  # Any: a class made at run time

    def parse(body: bytes) -> dict[str, Any]:
        try:
            found = decode(body)
        except DecodeError as error:
            raise ValueError(str(error)) from None
        if not found.IsInitialized():
            raise ValueError(f"required fields are missing: {', '.join(found.FindInitializationErrors())}")
        row: dict[str, Any] = convert(found)
        return row

    return columns, parse


def _message(descriptor: Descriptor, above: tuple[str, ...]) -> tuple[pa.StructType, _Convert]:
    """A message as a struct. ``above``: the messages that it is in. Raises ``SchemaError``."""
    if descriptor.full_name in above or len(above) >= DEPTH_MAX:
        raise SchemaError(f"option bodyMessage: {descriptor.full_name} is within itself: no column can hold that")
    if not descriptor.fields:
        raise SchemaError(f"option bodyMessage: {descriptor.full_name} has no fields")
    fields = {one.name: _field(one, (*above, descriptor.full_name)) for one in descriptor.fields}
    readers = {name: read for name, (_, read) in fields.items()}

    def convert(found: Any) -> dict[str, Any]:  # noqa: ANN401  # a message made at run time
        return {name: read(found) for name, read in readers.items()}

    return struct_of([(name, kind) for name, (kind, _) in fields.items()]), convert


def _field(field: FieldDescriptor, above: tuple[str, ...]) -> tuple[pa.DataType, _Convert]:
    """A field's type, and how its value is read from its message."""
    name = field.name
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        parts: Mapping[str, FieldDescriptor] = field.message_type.fields_by_name
        (key_type, _), (value_type, value) = (_single(parts[one], above) for one in ("key", "value"))
        return pa.map_(key_type, value_type), lambda found: [
            (key, value(one)) for key, one in getattr(found, name).items()
        ]
    kind, convert = _single(field, above)
    if field.is_repeated:
        return list_of(kind), lambda found: [convert(one) for one in getattr(found, name)]
    if field.has_presence:
        return kind, lambda found: convert(getattr(found, name)) if found.HasField(name) else None
    return kind, attrgetter(name) if convert is _same else lambda found: convert(getattr(found, name))


def _single(field: FieldDescriptor, above: tuple[str, ...]) -> tuple[pa.DataType, _Convert]:
    """The type of one value of a field, and how it is converted."""
    if field.message_type is not None:
        if field.message_type.full_name == _TIMESTAMP:
            return pa.timestamp("us", tz="UTC"), lambda found: found.seconds * 1_000_000 + found.nanos // 1000
        return _message(field.message_type, above)
    if field.enum_type is not None:
        names = {number: one.name for number, one in field.enum_type.values_by_number.items()}
        return pa.string(), lambda found: names.get(found, str(found))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return (pa.binary() if field.type == FieldDescriptor.TYPE_BYTES else pa.string()), _same
    return _PROTOBUF_SIMPLE[field.cpp_type], _same


def _same(found: Any) -> Any:  # noqa: ANN401  # a value of any type
    return found
