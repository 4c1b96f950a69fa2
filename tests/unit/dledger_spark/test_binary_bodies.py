"""Bodies of Avro and of Protocol Buffers as columns: every type, damage, and schemas that no columns can follow."""

from __future__ import annotations

import base64
import datetime
import io
import json
import random
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

from dledger_spark.decode.typed_bodies import TypedBodyFormat, typed
from dledger_spark.errors import SchemaError

AT = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)
EXACTLY = AT + datetime.timedelta(microseconds=123_456)
LINE = {
    "type": "record",
    "name": "Line",
    "fields": [
        {"name": "n", "type": "int"},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
    ],
}
AVRO = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "total", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 8, "scale": 2}]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "time", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "uid", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "first", "type": LINE},
        {"name": "lines", "type": {"type": "array", "items": "Line"}},
        {"name": "prices", "type": {"type": "map", "values": "double"}},
        {"name": "wide", "type": ["int", "long", "null"]},
        {"name": "mark", "type": {"type": "fixed", "name": "Mark", "size": 2}},
    ],
}
ORDER = {
    "id": 5,
    "total": Decimal("12.50"),
    "at": AT,
    "day": AT.date(),
    "time": 3_723_000,
    "uid": "f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
    "first": {"n": 1, "kind": "B"},
    "lines": [{"n": 2, "kind": "A"}],
    "prices": {"x": 1.5},
    "wide": 1 << 40,
    "mark": b"ok",
}


def rows_of(wanted: TypedBodyFormat, bodies: Sequence[bytes]) -> list[dict[str, Any]]:
    """The columns of each body."""
    rows: list[dict[str, Any]] = pa.table(
        typed(pa.array(bodies, pa.binary()), None, np.arange(len(bodies)), wanted)
    ).to_pylist()
    return rows


def avro(schema: object) -> TypedBodyFormat:
    return TypedBodyFormat("avro", json.dumps(schema).encode())


def avro_body(row: Mapping[str, object]) -> bytes:
    """As a producer writes it."""
    out = io.BytesIO()
    time = {"time": datetime.time(1, 2, 3)} if "time" in row else {}
    fastavro.schemaless_writer(out, fastavro.parse_schema(AVRO), {**row, **time})
    return out.getvalue()


def test_an_avro_record_is_its_fields() -> None:
    """Logical types that a column has are converted; times of day and the like stay numbers and texts."""
    (row,) = rows_of(avro(AVRO), [avro_body(ORDER)])

    assert row == {**ORDER, "prices": [("x", 1.5)], "badBody": None}
    few = {"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 1}
    amounts = avro({"type": "record", "name": "R", "fields": [{"name": "amount", "type": few}]})
    fits, too_long = rows_of(amounts, [b"\x02\x63", b"\x04\x03\xe7"])
    assert (fits["amount"], too_long["amount"]) == (Decimal("9.9"), None)
    assert too_long["badBody"].startswith("amount: ")
    (endless,) = rows_of(amounts, [b"\x80\x89\x7a" + b"\x7f" * 1_000_000])
    assert endless["badBody"] == "a decimal of 1000000 bytes"


def test_a_damaged_avro_body_is_nulls_or_another_record_and_never_an_error() -> None:
    """Cut, longer, or with any bytes changed; its neighbours are whole."""
    good, rng = avro_body(ORDER), random.Random(7)
    damaged = [b"", good[:-1], good + b"x", b"\xff" * 40]
    for _ in range(2000):
        some = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            some[rng.randrange(len(some))] = rng.randrange(256)
        damaged.append(bytes(some[: rng.randrange(1, len(some) + 1)]))

    rows = rows_of(avro(AVRO), [good, *damaged, good])

    assert rows[0] == rows[-1]
    assert rows[0]["badBody"] is None
    assert all(row["badBody"] for row in rows[1:5])
    assert all(row["id"] is None for row in rows if row["badBody"])
    assert sum(1 for row in rows if row["badBody"]) > 1000


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("int", "not of a record"),
        ([], "not of a record"),
        (5, "not a schema of Avro"),
        ({"type": "record", "name": "R", "fields": []}, "has no fields"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "none"}]}, "not a schema of Avro"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": ["int", "string"]}]}, "field a is a union"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": ["null", "R"]}]}, "a type within itself"),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "null"}]}, "field a is null"),
        (
            {"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": "array", "items": "null"}}]},
            "field a is null",
        ),
        (
            {
                "type": "record",
                "name": "R",
                "fields": [{"name": "a", "type": {"type": "fixed", "name": "F", "size": 0}}],
            },
            "field a takes no bytes",
        ),
        (
            {
                "type": "record",
                "name": "R",
                "fields": [{"name": "a", "type": {"type": "bytes", "logicalType": "decimal", "precision": 39}}],
            },
            "39 digits",
        ),
    ],
)
def test_a_schema_of_avro_that_no_columns_can_follow_is_refused(schema: object, problem: str) -> None:
    """Also types without bytes, of which a damaged body could claim any number."""
    with pytest.raises(SchemaError, match=problem):
        _ = avro(schema).columns


def proto_set() -> descriptor_pb2.FileDescriptorSet:
    """What ``protoc --include_imports --descriptor_set_out`` makes of the messages ``Order`` and ``Loop``."""
    file = descriptor_pb2.FileDescriptorProto(
        name="shop.proto", package="shop", syntax="proto3", dependency=["google/protobuf/timestamp.proto"]
    )
    file.enum_type.add(name="Kind").value.extend(
        [descriptor_pb2.EnumValueDescriptorProto(name=name, number=number) for number, name in enumerate("AB")]
    )
    line = file.message_type.add(name="Line")
    line.field.add(name="name", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
    order = file.message_type.add(name="Order")
    entry = order.nested_type.add(name="ByNumberEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, type=Field.TYPE_INT32, label=Field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=Field.TYPE_MESSAGE, type_name=".shop.Line", label=Field.LABEL_OPTIONAL)
    order.oneof_decl.add(name="of")
    one, many = Field.LABEL_OPTIONAL, Field.LABEL_REPEATED
    for number, (name, kind, label, type_name) in enumerate(
        (
            ("id", Field.TYPE_INT64, one, ""),
            ("big", Field.TYPE_UINT64, one, ""),
            ("small", Field.TYPE_UINT32, one, ""),
            ("raw", Field.TYPE_BYTES, one, ""),
            ("ok", Field.TYPE_BOOL, one, ""),
            ("kind", Field.TYPE_ENUM, one, ".shop.Kind"),
            ("kinds", Field.TYPE_ENUM, many, ".shop.Kind"),
            ("first", Field.TYPE_MESSAGE, one, ".shop.Line"),
            ("lines", Field.TYPE_MESSAGE, many, ".shop.Line"),
            ("by_number", Field.TYPE_MESSAGE, many, ".shop.Order.ByNumberEntry"),
            ("at", Field.TYPE_MESSAGE, one, ".google.protobuf.Timestamp"),
        ),
        1,
    ):
        order.field.add(name=name, number=number, type=kind, label=label, type_name=type_name or None)
    order.field.add(name="text", number=20, type=Field.TYPE_STRING, label=one, oneof_index=0)
    order.field.add(name="count", number=21, type=Field.TYPE_INT32, label=one, oneof_index=0)
    loop = file.message_type.add(name="Loop")
    loop.field.add(name="next", number=1, type=Field.TYPE_MESSAGE, type_name=".shop.Loop", label=one)
    file.message_type.add(name="Empty")
    needs = descriptor_pb2.FileDescriptorProto(name="old.proto", package="old", syntax="proto2")
    needs.message_type.add(name="Needs").field.add(
        name="id", number=1, type=Field.TYPE_INT32, label=Field.LABEL_REQUIRED
    )
    imported = descriptor_pb2.FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    return descriptor_pb2.FileDescriptorSet(file=[imported, file, needs])


SET = proto_set().SerializeToString()


def proto(message: str = "shop.Order", schema: bytes = SET) -> TypedBodyFormat:
    return TypedBodyFormat("protobuf", schema, message)


def order_body() -> bytes:
    """As a producer writes it."""
    pool = descriptor_pool.DescriptorPool()
    for file in proto_set().file:
        pool.Add(file)
    order: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))(  # Any: made at run time
        id=5, big=(1 << 64) - 1, small=(1 << 32) - 1, raw=b"\xff", ok=True, kind=1, kinds=[0, 7], text="t"
    )
    order.first.SetInParent()
    order.lines.add(name="l")
    order.by_number[3].name = "three"
    order.at.FromDatetime(EXACTLY)
    found: bytes = order.SerializeToString()
    return found


def test_a_protobuf_message_is_its_fields() -> None:
    """What is absent and can tell is null, all else has its default; enums are names, or numbers that have none."""
    full, empty, bad = rows_of(proto(), [order_body(), b"", b"\xff\xff"])

    assert full == {
        "id": 5,
        "big": Decimal((1 << 64) - 1),
        "small": (1 << 32) - 1,
        "raw": b"\xff",
        "ok": True,
        "kind": "B",
        "kinds": ["A", "7"],
        "first": {"name": ""},
        "lines": [{"name": "l"}],
        "by_number": [(3, {"name": "three"})],
        "at": EXACTLY,
        "text": "t",
        "count": None,
        "badBody": None,
    }
    assert (empty["id"], empty["kind"], empty["first"], empty["lines"], empty["at"]) == (0, "A", None, [], None)
    assert (bad["id"], bad["lines"]) == (None, None)
    assert "corrupt" in bad["badBody"] or "Error parsing" in bad["badBody"]
    (late,) = rows_of(proto(), [b"\x5a\x07\x08\x80\xf0\x92\xcb\xdd\x08"])  # in 11476
    assert late["badBody"] == "at: a time outside of the years 1 to 9999"
    (missing,) = rows_of(proto("old.Needs"), [b""])
    assert missing["badBody"] == "required fields are missing: id"


def test_a_damaged_protobuf_body_is_nulls_or_another_message_and_never_an_error() -> None:
    """With any bytes changed or cut."""
    good, rng = order_body(), random.Random(8)
    damaged = []
    for _ in range(2000):
        some = bytearray(good)
        some[rng.randrange(len(some))] = rng.randrange(256)
        damaged.append(bytes(some[: rng.randrange(1, len(some) + 1)]))

    rows = rows_of(proto(), [good, *damaged, good])

    assert rows[0] == rows[-1]
    assert sum(1 for row in rows if row["badBody"]) > 1000
    assert all(row["id"] is None for row in rows if row["badBody"])


def test_a_descriptor_set_is_given_as_bytes_or_in_base64() -> None:
    """An option is a text, a file is what protoc wrote."""
    assert proto(schema=base64.b64encode(SET)).columns == proto().columns
    for schema, message, problem in (
        (SET, "Order", "no message 'Order' in bodySchema; it has .*shop.Order, shop.Loop"),
        (SET, "shop.Loop", "shop.Loop is within itself"),
        (SET, "shop.Empty", "shop.Empty has no fields"),
        (b"message Order {}", "shop.Order", "not a descriptor set"),
        (b"\nxx", "shop.Order", "not a descriptor set"),
        (proto_set().file[1].SerializeToString(), "shop.Order", "not a descriptor set|no message"),
    ):
        with pytest.raises(SchemaError, match=problem):
            _ = proto(message, schema).columns
    alone = descriptor_pb2.FileDescriptorSet(file=[proto_set().file[1]]).SerializeToString()
    with pytest.raises(SchemaError, match="include_imports"):
        _ = proto(schema=alone).columns
