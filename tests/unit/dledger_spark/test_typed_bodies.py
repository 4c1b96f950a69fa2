"""Bodies as columns: JSON and CSV, good and bad ones; no Spark."""

from __future__ import annotations

import datetime
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.types import Magic
from dledger_spark.decode import DecodeContext, batches, decode_stretch, typed_bodies, walk
from dledger_spark.decode.records import CHAIN_BEGIN
from dledger_spark.decode.typed_bodies import ROWS_AT_ONCE, BodiesTooLargeError, TypedBodyFormat, body_format, typed
from dledger_spark.errors import BadBodyError, OptionError, SchemaError
from dledger_spark.options import ReadOptions
from dledger_spark.schema import COLUMNS, body_columns
from rocketstore.message.message import Message
from tests.support.log_bytes import Stretch

UTC = datetime.UTC
ORDER = "id long, total decimal(6,2), item struct<name: string, n: int>, tags array<string>, at timestamp"


def rows_of(
    wanted: TypedBodyFormat, bodies: Sequence[bytes], flags: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """The columns of each body."""
    sys_flags = None if flags is None else np.array(flags, np.int64)
    found = typed(pa.array(bodies, pa.binary()), sys_flags, np.arange(len(bodies)), wanted)
    rows: list[dict[str, Any]] = pa.table(found).to_pylist()
    return rows


def in_json(schema: str, *bodies: bytes) -> list[dict[str, Any]]:
    return rows_of(TypedBodyFormat("json", schema.encode()), bodies)


def in_csv(schema: str, *bodies: bytes, delimiter: str = ",") -> list[dict[str, Any]]:
    return rows_of(TypedBodyFormat("csv", schema.encode(), delimiter=delimiter), bodies)


def test_a_json_object_is_its_members() -> None:
    """Nested ones, too; those that the schema does not name are skipped, absent ones are null."""
    body = (
        b'{"id": 1, "total": 12.5, "item": {"name": "x", "n": 3, "z": {}}, "at": "2026-11-30T12:00:00+02:00", "w": [1]}'
    )

    (row,) = in_json(ORDER, body)

    assert row == {
        "id": 1,
        "total": Decimal("12.50"),
        "item": {"name": "x", "n": 3},
        "tags": None,
        "at": datetime.datetime(2026, 11, 30, 10, tzinfo=UTC),
        "badBody": None,
    }


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "truncated"),
        (b"nope", "malformed"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b'{"id": 1} {"id": 2}', "trailing"),
        (b'{"id": 1}\n,"z": 2}', "trailing"),
        (b'{"id": "1"}', r"at `\$.id`"),
        (b'{"id": 1.5}', r"at `\$.id`"),
        (b'{"id": 9223372036854775808}', r"at `\$.id`"),
        (b'{"item": {"n": 2147483648}}', r"at `\$.item.n`"),
        (b'{"total": 1.234}', "^total: "),
        (b'{"total": "1e-77"}', "not a number of at most 38 digits"),
        (b'{"total": "1e-999999999"}', "not a number of at most 38 digits"),
        (b'{"total": 12345}', "^total: "),
        (b'{"total": "NaN"}', "^total: "),
        (b'{"tags": ["a", 1]}', r"at `\$.tags"),
        (b'{"tags": ["\xff"]}', "utf-8"),
        (b'{"at": "yesterday"}', "RFC3339"),
        (b'{"z": ' + b'{"z": ' * 100_000, "recursion|truncated|malformed"),
    ],
)
def test_a_bad_body_is_nulls_with_the_reason_and_its_neighbours_are_whole(body: bytes, reason: str) -> None:
    """Whatever is wrong with it: damage, other JSON, other types, values that a type cannot hold."""
    rows = in_json(ORDER, b'{"id": 1}', body, b'{"id": 3}')

    assert [row["id"] for row in rows] == [1, None, 3]
    assert all(value is None for name, value in rows[1].items() if name != "badBody")
    assert [row["badBody"] is None for row in rows] == [True, False, True]
    assert re.search(reason, rows[1]["badBody"])


def test_a_line_of_csv_is_its_fields() -> None:
    """Quoted fields may hold delimiters and lines; an empty field is null; the end of the line may be there."""
    schema = "id int, name string, ok boolean, at timestamp"

    rows = in_csv(schema, b'1,"a, ""b""\nc",true,2026-11-30T12:00:00Z\r\n', b",,,")

    assert list(rows[0].values()) == [1, 'a, "b"\nc', True, datetime.datetime(2026, 11, 30, 12, tzinfo=UTC), None]
    assert list(rows[1].values()) == [None] * 5
    assert in_csv("a int, b string", b"1;x,y", delimiter=";") == [{"a": 1, "b": "x,y", "badBody": None}]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "0 fields where the schema has 2 columns"),
        (b"1", "1 fields"),
        (b"1,a,b", "3 fields"),
        (b"1,a\n2,b", "more than one line"),
        (b"1,a\n\n2,b", "more than one line"),
        (b"x,a", "got `str`"),
        (b"99999999999,a", "2147483647"),
        (b'1,"a', "unexpected end"),
        (b'1,"a"b', "expected after"),
        (b"1,\xff", "utf-8"),
    ],
)
def test_a_bad_line_of_csv_is_nulls_with_the_reason(body: bytes, reason: str) -> None:
    """As for JSON."""
    good, bad = in_csv("id int, name string", b"1,a", body)

    assert list(good.values()) == [1, "a", None]
    assert (bad["id"], bad["name"]) == (None, None)
    assert reason in bad["badBody"]


def test_decimals_are_held_by_their_columns_or_bad_wherever_they_are() -> None:
    """Arrow would take an amount of more than 76 places for another one, and crash on one of very many."""
    schema = "m map<string, array<struct<d: decimal(38,38)>>>"
    tiny, zero, far = (b'{"m": {"k": [{"d": %s}]}}' % one for one in (b"1e-38", b"0e-38", b'"1e-999999999"'))
    rows = in_json(schema, tiny, far, zero)

    assert [row["m"] and row["m"][0][1] for row in rows] == [[{"d": Decimal("1e-38")}], None, [{"d": Decimal(0)}]]
    assert [row["d"] for row in in_csv("d decimal(38,2)", b"1e-77", b"1e-2")] == [None, Decimal("0.01")]


def test_compressed_bodies_are_parsed_as_they_were_and_damaged_ones_are_bad() -> None:
    """Each as its own flag says; nothing is decompressed without flags."""
    wanted = TypedBodyFormat("json", b"id int")

    rows = rows_of(wanted, [zlib.compress(b'{"id": 5}'), b'{"id": 6}', b'{"id": 7}'], [1, 0, 1])

    assert [row["id"] for row in rows] == [5, 6, None]
    assert rows[2]["badBody"] == "cannot be decompressed"
    bodies = [b'{"id": 6}'] * ROWS_AT_ONCE + [zlib.compress(b'{"id": 5}')]
    assert rows_of(wanted, bodies, [0] * ROWS_AT_ONCE + [1])[-1] == {"id": 5, "badBody": None}


def test_a_bad_body_fails_the_query_if_it_shall() -> None:
    """The error has its place and the reason, also beyond the first part of a batch."""
    bodies = [b'{"id": 5}'] * ROWS_AT_ONCE + [b"?"]
    with pytest.raises(BadBodyError, match=rf"position {ROWS_AT_ONCE} of the log is not json .*malformed"):
        rows_of(TypedBodyFormat("json", b"id int", fails=True), bodies)


@given(st.lists(st.none() | st.integers(-(1 << 63), (1 << 63) - 1), max_size=40))
def test_a_batch_of_any_size_keeps_the_order(numbers: list[int | None]) -> None:
    """In parts of a few rows: every row stands where its body stood, and bad ones between them."""
    bodies = [b"bad" if one is None else json.dumps({"id": one}).encode() for one in numbers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typed_bodies, "ROWS_AT_ONCE", 7)
        assert [row["id"] for row in in_json("id long", *bodies)] == numbers


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many bytes, all parts of a batch together, no columns are made."""
    bodies = [b'{"id": 1}'] * ROWS_AT_ONCE
    monkeypatch.setattr(typed_bodies, "BATCH_BYTES_MAX", pa.array(bodies, pa.binary()).nbytes * 3 // 2)
    assert len(in_json("id long", *bodies)) == ROWS_AT_ONCE
    with pytest.raises(BodiesTooLargeError):
        in_json("id long", *bodies * 2)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("verify", ["false", "fail"])
def test_bodies_that_are_large_once_they_are_decompressed_are_read_in_several_batches(
    monkeypatch: pytest.MonkeyPatch, verify: Literal["false", "fail"], indexed: bool
) -> None:
    """A producer's few kilobytes stop no query: every row is there, in order, and the checksums are still a chain."""
    monkeypatch.setattr(typed_bodies, "BATCH_BYTES_MAX", 250_000)
    stretch = Stretch()
    for number in range(9):
        body = json.dumps({"id": number, "filler": "x" * (300_000 if number == 4 else 100_000)}).encode()
        stretch.add_message(Message("T", zlib.compress(body), sys_flag=1), number)
    stretch.add(b"", magic=Magic.NOOP)
    wanted = TypedBodyFormat("json", b"id int")
    context = DecodeContext(bodies=wanted, verify_crc=verify, chain_before=CHAIN_BEGIN)
    starts = walk(bytes(stretch.data), "entry").starts
    told = np.array([Magic.NORMAL] * 9 + [Magic.NOOP], np.int64) if indexed else None
    found = list(
        batches(np.frombuffer(stretch.data, np.uint8), starts, body_columns(wanted.columns), context, told=told)
    )
    plain = [one for one in COLUMNS if one.name == "body"]
    whole = list(decode_stretch(bytes(stretch.data), plain, replace(context, bodies=None, decompressed=True)))

    assert [row for batch in found for row in batch.to_pylist()] == [{"id": one, "badBody": None} for one in range(9)]
    assert [json.loads(row["body"])["id"] for batch in whole for row in batch.to_pylist()] == list(range(9))
    assert max(batch.num_rows for batch in (*found, *whole)) == 2


def test_a_time_outside_of_the_years_1_to_9999_is_bad() -> None:
    """Offsets can lead there: neither Spark nor Delta has a text for it, and statistics would lose rows."""
    rows = in_json(
        "at timestamp",
        b'{"at": "0001-01-01T00:00:00+00:01"}',
        b'{"at": "9999-12-31T23:59:00-00:01"}',
        b'{"at": "0001-01-01T00:00:00Z"}',
        b'{"at": "9999-12-31T23:59:59.999999Z"}',
    )

    assert [row["at"] and row["at"].year for row in rows] == [None, None, 1, 9999]
    assert [row["badBody"] for row in rows] == ["at: a time outside of the years 1 to 9999"] * 2 + [None] * 2


def test_columns_of_bodies_stand_beside_those_of_the_log_and_hide_their_names() -> None:
    """A body may have a member ``topic`` or ``position``; the log's is then not read from it."""
    stretch = Stretch()
    stretch.add_message(Message("T", b'{"position": "left", "topic": 7}'), 3)
    stretch.add_message(Message("T", b"bad"), 4)
    wanted = TypedBodyFormat("json", b"position string, topic int")
    columns = (*body_columns(wanted.columns), *(one for one in COLUMNS if one.name == "queueOffset"))

    (batch,) = decode_stretch(bytes(stretch.data), columns, DecodeContext(bodies=wanted))

    first, second = batch.to_pylist()
    assert first == {"position": "left", "topic": 7, "badBody": None, "queueOffset": 3}
    assert (second["position"], second["queueOffset"], second["badBody"] is None) == (None, 4, False)


def options(**given: str) -> ReadOptions:
    return ReadOptions.parse({"path": "/log", **given})


def test_mistakes_in_the_options_are_told_on_the_driver() -> None:
    """Before a task runs."""
    assert body_format(options()) is None
    for asked, problem in (
        ({"bodySchema": "id int"}, "option bodySchema needs bodyFormat"),
        ({"bodyFormat": "json"}, "option bodySchema is missing"),
        ({"bodyFormat": "json", "bodySchema": "id int", "bodyDelimiter": ";"}, "applies to bodyFormat=csv only"),
        ({"bodyFormat": "csv", "bodySchema": "id int", "bodyDelimiter": ";;"}, "invalid delimiter ';;'"),
        ({"bodyFormat": "protobuf", "bodySchema": "CgA="}, "bodyMessage: required for bodyFormat=protobuf"),
        ({"bodyFormat": "json", "bodySchema": "id int", "bodyMessage": "a.B"}, "bodyMessage: .* for no other"),
        ({"bodyFormat": "xml", "bodySchema": "id int"}, "invalid value 'xml'"),
        ({"bodyFormat": "json", "bodySchema": "@/none"}, "cannot read /none: No such file"),
    ):
        with pytest.raises(OptionError, match=problem):
            options(**asked)
    for text, problem in (("badbody int", "badBody"), ("a array<int>", "no nested columns: read a as string")):
        with pytest.raises(SchemaError, match=problem):
            body_format(options(bodyFormat="csv", bodySchema=text))
