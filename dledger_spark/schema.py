"""The columns of the format ``dledger``: names, Spark types, Arrow types, and the validation of users' schemas.

Spark passes a user's schema to the reader, so it acts as a projection: only its columns are computed, and bodies that
are not requested are never read. Spark requires exactly the Arrow types that it maps its own to; both are listed side
by side. This module imports pyspark only inside functions: the decoder and its tests do not need it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from dledger_spark.body_types import ddl_type, quoted
from dledger_spark.errors import SchemaError
from dledger_spark.options import PropertiesFormat, SchemaStyle

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

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
