"""Types of columns in bodies: the part of Spark's DDL that they are written in."""

from __future__ import annotations

import pyarrow as pa
import pytest

from dledger_spark.errors import SchemaError
from dledger_spark.schema import DEPTH_MAX, ddl_type, parse_ddl


def test_every_type_is_read_and_written() -> None:
    """With aliases, in any case, with either way of naming a member, and quoted names; comments are skipped."""
    found = parse_ddl(
        "a BOOLEAN, b byte, c short, d int COMMENT 'a, b', e Long, f float, g double, h string, i binary, j date, "
        "k timestamp, l timestamp_ntz, m decimal(12, 2), n dec, `o``p q` array<map<string, struct<r: int, `s` real>>>"
    )

    assert [str(one.type) for one in found][:13] == [
        "bool", "int8", "int16", "int32", "int64", "float", "double", "string", "binary", "date32[day]",
        "timestamp[us, tz=UTC]", "timestamp[us]", "decimal128(12, 2)",
    ]  # fmt: skip
    assert found.field("n").type == pa.decimal128(10, 0)
    assert ddl_type(found.field("o`p q").type) == "array<map<string,struct<`r`:int,`s`:float>>>"
    assert parse_ddl(ddl_type(found).removeprefix("struct<").removesuffix(">")) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "needs the name of a column at its end"),
        ("a int,", "needs the name of a column at its end"),
        ("a", "needs a type at its end"),
        ("a int b int", "needs a comma or its end before 'b int'"),
        ("a array<int", "needs '>' at its end"),
        ("a int>", "needs a comma or its end before '>'"),
        ("a int comment", "needs the text of a comment at its end"),
        ("a interval", "type interval in the schema of the bodies: use boolean"),
        ("a int NOT NULL", "column a of the bodies is NOT NULL"),
        ("a int, A long", "two columns a"),
        ("a map<int, int>", "a map by int: use map<string,…>"),
        ("a decimal(39)", r"decimal\(39,0\): use 1 to 38 digits"),
        ("a decimal(3,4)", r"decimal\(3,4\)"),
        ("a decimal(x)", r"decimal\(39,0\)"),
        ("a " + "array<" * (DEPTH_MAX + 1) + "int" + ">" * (DEPTH_MAX + 1), f"more than {DEPTH_MAX} types"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, problem: str) -> None:
    """Never a Python error, and never a guess."""
    with pytest.raises(SchemaError, match=problem):
        parse_ddl(text)
