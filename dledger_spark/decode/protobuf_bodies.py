"""Bodies that are Protocol Buffers messages of a type in a descriptor set (``protoc --descriptor_set_out``)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from dledger_spark.body_types import DEPTH_MAX, list_of, struct_of
from dledger_spark.decode.text_bodies import Parser
from dledger_spark.errors import SchemaError

_SET_BEGINS: Final = b"\n"
"""The tag of a descriptor set's first file."""
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_SIMPLE: Final[dict[int, pa.DataType]] = {
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
    return _SIMPLE[field.cpp_type], _same


def _same(found: Any) -> Any:  # noqa: ANN401  # a value of any type
    return found
