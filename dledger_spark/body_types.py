"""Types of the columns in bodies: from a text in Spark's DDL to Arrow, and back.

Spark parses DDL only in its JVM, which the processes that plan a Python source cannot call. This covers the types that
a body can hold; the Arrow types are exactly those that Spark maps its own to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NoReturn

import pyarrow as pa

from dledger_spark.errors import SchemaError

DEPTH_MAX: Final = 32
"""Of types within types."""
PRECISION_MAX: Final = 38
_PRECISION_DEFAULT: Final = 10
_PRECISION_CHARS: Final = 2
_SHOWN_CHARS: Final = 40
_SIGNS: Final = frozenset("<>(),:")
_WORD: Final = re.compile(r"`(?:[^`]|``)+`|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s<>(),:`'\"]+|\S")
_SIMPLE: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_ALIASES: Final = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "dec": "decimal",
    "numeric": "decimal",
}
_NAMES: Final = {kind: name for name, kind in _SIMPLE.items()}
_KNOWN: Final = f"{', '.join(_SIMPLE)}, decimal(p,s), array<…>, map<string,…> or struct<…>"


def struct_of(fields: Sequence[tuple[str, pa.DataType]]) -> pa.StructType:
    """A struct whose fields may all be null. Raises ``SchemaError`` for names that differ in case only, as in SQL."""
    names = [name.lower() for name, _ in fields]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SchemaError(f"the schema of the bodies has two columns {twice}")
    return pa.struct([pa.field(name, kind) for name, kind in fields])


def list_of(kind: pa.DataType) -> pa.ListType:
    """An array, with the name that Spark has for its elements."""
    return pa.list_(pa.field("element", kind))


def ddl_type(kind: pa.DataType) -> str:
    """The type in Spark's DDL."""
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{quoted(one.name)}:{ddl_type(one.type)}' for one in kind)}>"
    if pa.types.is_map(kind):
        return f"map<{ddl_type(kind.key_type)},{ddl_type(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"array<{ddl_type(kind.value_type)}>"
    return _NAMES[kind]


def quoted(name: str) -> str:
    """A name in DDL, whatever its characters are."""
    return f"`{name.replace('`', '``')}`"


def parse_ddl(text: str) -> pa.StructType:
    """The columns of ``id long, item struct<name: string>``. Raises ``SchemaError``."""
    return _Words(text).columns("")


class _Words:
    """The words of a DDL text, read from left to right; the last one is empty."""

    def __init__(self, text: str) -> None:
        self._words = [*(match[0] for match in _WORD.finditer(text)), ""]
        self._depth = 0

    def columns(self, end: str) -> pa.StructType:
        """Names and types up to ``end``, which is read, too."""
        fields = [self._column()]
        while self._next_is(","):
            fields.append(self._column())
        self._take(end)
        return struct_of(fields)

    def _column(self) -> tuple[str, pa.DataType]:
        word = self._word("the name of a column")
        self._next_is(":")
        kind = self._type()
        if self._words[0].lower() == "not":
            raise SchemaError(f"column {word} of the bodies is NOT NULL: every column is null where a body is bad")
        if self._words[0].lower() == "comment":
            del self._words[0]
            self._word("the text of a comment")
        return (word[1:-1].replace("``", "`") if word.startswith("`") else word), kind

    def _type(self) -> pa.DataType:
        name = self._word("a type").lower()
        name = _ALIASES.get(name, name)
        if name in _SIMPLE:
            return _SIMPLE[name]
        if name == "decimal":
            return self._decimal()
        if name not in ("struct", "array", "map"):
            raise SchemaError(f"type {name} in the schema of the bodies: use {_KNOWN}")
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise SchemaError(f"the schema of the bodies nests more than {DEPTH_MAX} types")
        self._take("<")
        kind = self.columns(">") if name == "struct" else self._array() if name == "array" else self._map()
        self._depth -= 1
        return kind

    def _array(self) -> pa.DataType:
        kind = list_of(self._type())
        self._take(">")
        return kind

    def _map(self) -> pa.DataType:
        if (keys := self._type()) != pa.string():
            raise SchemaError(f"the schema of the bodies has a map by {ddl_type(keys)}: use map<string,…>")
        self._take(",")
        kind = pa.map_(keys, self._type())
        self._take(">")
        return kind

    def _decimal(self) -> pa.DataType:
        digits = [_PRECISION_DEFAULT, 0]
        if self._next_is("("):
            digits[0] = self._number()
            if self._next_is(","):
                digits[1] = self._number()
            self._take(")")
        if not digits[1] <= digits[0] <= PRECISION_MAX or not digits[0]:
            raise SchemaError(f"decimal({digits[0]},{digits[1]}): use 1 to {PRECISION_MAX} digits and no more decimals")
        return pa.decimal128(*digits)

    def _number(self) -> int:
        word = self._word("a number of digits")
        return int(word) if word.isascii() and word.isdigit() and len(word) <= _PRECISION_CHARS else PRECISION_MAX + 1

    def _next_is(self, sign: str) -> bool:
        """Reads the sign if it is next."""
        found = self._words[0] == sign
        if found:
            del self._words[0]
        return found

    def _take(self, sign: str) -> None:
        if self._words[0] != sign:
            self._refuse(f"{sign!r}" if sign else "a comma or its end")
        del self._words[:1]

    def _word(self, wanted: str) -> str:
        word = self._words[0]
        if not word or word in _SIGNS:
            self._refuse(wanted)
        del self._words[0]
        return word

    def _refuse(self, wanted: str) -> NoReturn:
        there = " ".join(self._words)[:_SHOWN_CHARS].strip()
        where = f"before {there!r}" if there else "at its end"
        raise SchemaError(f"the schema of the bodies needs {wanted} {where}")
