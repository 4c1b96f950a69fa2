"""The columns of the format ``dledger``: names, Spark types, Arrow types, and the validation of users' schemas.

Spark passes a user's schema to the reader, so it acts as a projection: only its columns are computed, and bodies that
are not requested are never read. Spark requires exactly the Arrow types that it maps its own to; both are listed side
by side. This module imports pyspark only inside functions: the decoder and its tests do not need it.

The types of columns in bodies are given as a text in Spark's DDL, which becomes Arrow, and back. Spark parses DDL only
in its JVM, which the processes that plan a Python source cannot call. This covers the types that a body can hold.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pyarrow as pa

from dledger_spark.errors import SchemaError
from dledger_spark.options import PropertiesFormat, SchemaStyle

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Parser = Callable[[bytes], dict[str, Any]]  # Any: each column has its own type
"""The values of a body by name; absent ones are null. Raises ``ValueError`` or an error of the format's decoder."""
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


TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
MAP: Final = pa.map_(pa.string(), pa.string())
HEADERS: Final = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
)


@dataclass(frozen=True, slots=True)
class SchemaColumn:
    """One column. ``virtual``: computed only if a schema names it."""

    name: str
    ddl: str
    arrow: pa.DataType
    virtual: bool = False
    source: str = ""
    """For a Kafka-style column: the corresponding column of ours."""
    of_body: bool = False
    """Whether its values are in the bodies (``bodyFormat``)."""

    def __hash__(self) -> int:
        """By name: Arrow types are slow to hash, and schemas are looked up by their columns for every batch."""
        return hash(self.name)


COLUMNS: Final = (
    SchemaColumn("index", "bigint", pa.int64()),
    SchemaColumn("term", "bigint", pa.int64()),
    SchemaColumn("position", "bigint", pa.int64()),
    SchemaColumn("topic", "string", pa.string()),
    SchemaColumn("queueId", "int", pa.int32()),
    SchemaColumn("flag", "int", pa.int32()),
    SchemaColumn("sysFlag", "int", pa.int32()),
    SchemaColumn("reconsumeTimes", "int", pa.int32()),
    SchemaColumn("queueOffset", "bigint", pa.int64()),
    SchemaColumn("physicalOffset", "bigint", pa.int64()),
    SchemaColumn("preparedTransactionOffset", "bigint", pa.int64()),
    SchemaColumn("bornTimestamp", "timestamp", TIMESTAMP),
    SchemaColumn("storeTimestamp", "timestamp", TIMESTAMP),
    SchemaColumn("bornHost", "string", pa.string()),
    SchemaColumn("storeHost", "string", pa.string()),
    SchemaColumn("keys", "string", pa.string()),
    SchemaColumn("tags", "string", pa.string()),
    SchemaColumn("body", "binary", pa.binary()),
    SchemaColumn("properties", "map<string,string>", MAP),
    SchemaColumn("size", "int", pa.int32(), virtual=True),
    SchemaColumn("bodyLength", "int", pa.int32(), virtual=True),
    SchemaColumn("tagsCode", "bigint", pa.int64(), virtual=True),
    SchemaColumn("crcOk", "boolean", pa.bool_(), virtual=True),
    SchemaColumn("segment", "string", pa.string(), virtual=True),
    SchemaColumn("raw", "binary", pa.binary(), virtual=True),
)
KAFKA_COLUMNS: Final = (
    SchemaColumn("key", "binary", pa.binary(), source="keys"),
    SchemaColumn("value", "binary", pa.binary(), source="body"),
    SchemaColumn("topic", "string", pa.string(), source="topic"),
    SchemaColumn("partition", "int", pa.int32(), source="queueId"),
    SchemaColumn("offset", "bigint", pa.int64(), source="queueOffset"),
    SchemaColumn("timestamp", "timestamp", TIMESTAMP, source="storeTimestamp"),
    SchemaColumn("timestampType", "int", pa.int32()),
    SchemaColumn("headers", "array<struct<key:string,value:binary>>", HEADERS, virtual=True, source="properties"),
)
RAW_PROPERTIES: Final = SchemaColumn("properties", "string", pa.string())
COLUMN_NAMES: Final = tuple(one.name for one in COLUMNS)
BAD_BODY: Final = SchemaColumn("badBody", "string", pa.string(), of_body=True)
"""Why a body is not of its format; null if it is."""
BIG_COLUMNS: Final = frozenset({"body", "raw", "value"})
"""Columns that make a row about as large as its record."""


def body_columns(types: pa.StructType) -> tuple[SchemaColumn, ...]:
    """The columns of bodies of these types, and ``badBody``."""
    return (*(SchemaColumn(one.name, ddl_type(one.type), one.type, of_body=True) for one in types), BAD_BODY)


def columns_of(style: SchemaStyle, properties: PropertiesFormat = "map") -> tuple[SchemaColumn, ...]:
    """Every column available in this style, without those of bodies."""
    if style == "kafka":
        return KAFKA_COLUMNS + tuple(one for one in COLUMNS if one.name != "topic")
    if properties == "raw":
        return tuple(RAW_PROPERTIES if one.name == "properties" else one for one in COLUMNS)
    return COLUMNS


def beside(bodies: Sequence[SchemaColumn], columns: Sequence[SchemaColumn]) -> tuple[SchemaColumn, ...]:
    """The columns of bodies, then those of the log, of which they hide any with the same name."""
    hidden = {one.name.lower() for one in bodies}
    return (*bodies, *(one for one in columns if one.name.lower() not in hidden))


def default_columns(
    style: SchemaStyle, properties: PropertiesFormat = "map", *, headers: bool = False, crc_column: bool = False
) -> tuple[SchemaColumn, ...]:
    """The columns of a reader without a user's schema."""
    if style == "kafka":
        chosen = tuple(one for one in KAFKA_COLUMNS if not one.virtual or (headers and one.name == "headers"))
    else:
        chosen = tuple(one for one in columns_of(style, properties) if not one.virtual)
    if crc_column:
        chosen += tuple(one for one in COLUMNS if one.name == "crcOk")
    return chosen


def ddl_of(columns: Sequence[SchemaColumn]) -> str:
    """The columns in Spark's DDL."""
    return ", ".join(ddl_parts(columns))


def ddl_parts(columns: Sequence[SchemaColumn]) -> list[str]:
    """Each of the columns in Spark's DDL."""
    return [f"{quoted(one.name)} {one.ddl}" for one in columns]


def arrow_schema(columns: Sequence[SchemaColumn]) -> pa.Schema:
    """The columns as an Arrow schema, with exactly the types that Spark maps its own to."""
    return pa.schema([pa.field(one.name, one.arrow) for one in columns])


@dataclass(frozen=True, slots=True)
class Projection:
    """The columns requested of a reader, under the names that Spark expects, and their Arrow schema."""

    columns: tuple[SchemaColumn, ...]
    schema: pa.Schema

    @property
    def names(self) -> tuple[str, ...]:
        """Our names of the columns, in order."""
        return tuple(one.name for one in self.columns)


def projection_of(
    schema: StructType, style: SchemaStyle, properties: PropertiesFormat = "map", bodies: Sequence[SchemaColumn] = ()
) -> Projection:
    """The projection for a schema; names are case-insensitive, as in SQL.

    ``bodies``: the columns of bodies, if they are parsed. ``properties string`` means the stored string. Raises
    ``SchemaError`` for an unknown column or wrong type.
    """
    from pyspark.sql.pandas.types import to_arrow_type  # needs no pandas

    known = {one.name.lower(): one for one in beside(bodies, columns_of(style, properties))}
    columns: list[SchemaColumn] = []
    fields: list[pa.Field] = []
    problems: list[str] = []
    for wanted in schema.fields:
        column = known.get(wanted.name.lower())
        if column is None:
            problems.append(_unknown(wanted.name, known))
            continue
        kind = wanted.dataType.simpleString()
        if column.name == "properties" and not column.of_body and kind == RAW_PROPERTIES.ddl:
            column = RAW_PROPERTIES
        differs = (
            to_arrow_type(wanted.dataType, timezone="UTC") != column.arrow if column.of_body else kind != column.ddl
        )
        if differs:
            problems.append(f"column {wanted.name} is {column.ddl}, not {kind}: read it as {column.ddl} and cast it")
        columns.append(column)
        fields.append(pa.field(wanted.name, column.arrow, nullable=wanted.nullable))
    if problems:
        raise SchemaError("; ".join(problems))
    return Projection(tuple(columns), pa.schema(fields))


def _unknown(name: str, known: dict[str, SchemaColumn]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.5)
    if near:
        return f"there is no column {name}: did you mean {' or '.join(known[one].name for one in near)}?"
    return f"no column {name}; available: {', '.join(one.name for one in known.values())}"
