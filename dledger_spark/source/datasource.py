"""The format ``dledger``: selects the reader or writer by the options.

Spark pickles the data source between several short-lived processes (look-up, planning, workers), so it holds only the
options. Spark discovers it without registration through the module ``pyspark_dledger``.

The options of a table (``CREATE TABLE … USING dledger OPTIONS (…)``) are given to a Python source only once, when Spark
requests the schema for its catalog; readers and writers of the table later get the schema but not the options. So the
options are stored in the schema, as the comment of its first column, which ``DESCRIBE`` also shows. Secrets are
refused: a comment is not the place for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource

from dledger_spark.decode.typed_bodies import body_format
from dledger_spark.errors import OptionError
from dledger_spark.options import READ_OPTIONS, WRITE_OPTIONS, Option, ReadOptions, WriteOptions
from dledger_spark.schema import (
    BAD_BODY,
    Projection,
    SchemaColumn,
    beside,
    body_columns,
    ddl_parts,
    default_columns,
    projection_of,
)

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType
if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_TABLE_MARK: Final = "provider"
"""Present among the options only when a table is created."""
_OF_SPARK: Final = frozenset(
    ("provider", "owner", "location", "comment", "external", "is_managed_location", "collation")
)
_PREFIX: Final = "option."
_COMMENT: Final = "comment"
_BEGIN: Final = "dledger options: "
_NOTHING: Final[Mapping[str, str]] = {}
_SECRETS: Final = frozenset(("secretkey",))


def _options_of_table(options: Mapping[str, str]) -> dict[str, str] | None:
    """The user's options if a table is being created, otherwise None. Raises ``OptionError`` for a secret."""
    if _TABLE_MARK not in options:
        return None
    own = {name: text for name, text in options.items() if name not in _OF_SPARK and not name.startswith(_PREFIX)}
    refuse_secrets(own)
    return own


def refuse_secrets(options: Mapping[str, str]) -> None:
    """Raises ``OptionError`` for options that no table may have."""
    if _SECRETS & {name.lower() for name in options}:
        raise OptionError(
            "a table would expose its secretKey to everybody: create a temporary view (CREATE TEMPORARY VIEW … "
            "USING dledger OPTIONS …), or name its file (secretKeyFile)"
        )


def _with_options(columns: Sequence[str], options: Mapping[str, str]) -> str:
    """A schema in Spark's DDL, of these columns, that contains the options."""
    comment = _BEGIN + json.dumps(dict(options), sort_keys=True)
    quoted = comment.replace("\\", "\\\\").replace("'", "\\'")
    first, *others = columns
    return ", ".join([f"{first} COMMENT '{quoted}'", *others])


def options_in(schema: StructType) -> dict[str, str]:
    """The options in a table's schema; their names are in lower case."""
    for field in schema.fields:
        comment = (field.metadata or {}).get(_COMMENT, "")
        if isinstance(comment, str) and comment.startswith(_BEGIN):
            found: dict[str, str] = json.loads(comment.removeprefix(_BEGIN))
            return found
    return {}


def for_reads(options: Mapping[str, str], given: Mapping[str, str] = _NOTHING) -> dict[str, str]:
    """A table's options without those for writing, overridden by the query's options."""
    return _merged(_without(options, WRITE_OPTIONS, READ_OPTIONS), given, READ_OPTIONS)


def for_writes(options: Mapping[str, str], given: Mapping[str, str] = _NOTHING) -> dict[str, str]:
    """A table's options without those for reading, overridden by the query's options."""
    return _merged(_without(options, READ_OPTIONS, WRITE_OPTIONS), given, WRITE_OPTIONS)


def _merged(of_table: Mapping[str, str], given: Mapping[str, str], table: Iterable[Option]) -> dict[str, str]:
    """Merge by option, because each has several names; duplicates within the query are kept, to be refused later."""
    meanings = {name.lower(): one.attribute for one in table for name in (one.name, *one.aliases)}
    said = {meanings.get(name.lower(), name.lower()) for name in given}
    left = {name: text for name, text in of_table.items() if meanings.get(name.lower(), name.lower()) not in said}
    return left | dict(given)


def _without(options: Mapping[str, str], others: Iterable[Option], own: Iterable[Option]) -> dict[str, str]:
    unwanted = _names(others) - _names(own)
    return {name: text for name, text in options.items() if name.lower() not in unwanted}


def _names(table: Iterable[Option]) -> frozenset[str]:
    return frozenset(name.lower() for one in table for name in (one.name, *one.aliases))


_SPARKS_OWN: Final = frozenset({"checkpointlocation"})
"""Options that Spark passes to every stream's sink."""


class DLedgerDataSource(DataSource):
    """``spark.read.format("dledger")``, ``readStream``, ``write``, ``writeStream`` and ``USING dledger``."""

    @classmethod
    def name(cls) -> str:
        return "dledger"

    def schema(self) -> str:
        of_table = _options_of_table(self.options)
        options = ReadOptions.parse(self.options if of_table is None else for_reads(of_table))
        crc_column = options.verify_crc == "column"
        columns = default_columns(
            options.schema_style, options.properties_format, headers=options.include_headers, crc_column=crc_column
        )
        if bodies := _body_columns(options):
            columns = beside(bodies, [one for one in columns if (one.source or one.name) != "body"])
            if options.bad_bodies == "fail":
                columns = tuple(one for one in columns if one != BAD_BODY)
        parts = ddl_parts(columns)
        return ", ".join(parts) if of_table is None else _with_options(parts, of_table)

    def reader(self, schema: StructType) -> DataSourceReader:
        options, projection = self._read(schema)
        if options.is_live:
            from dledger_spark.source.live import live_reader

            return live_reader(options, projection)
        from dledger_spark.source.batch import directory_reader

        return directory_reader(options, projection)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from dledger_spark.source.stream import stream_reader

        return stream_reader(*self._read(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from dledger_spark.source.sink import batch_writer

        return batch_writer(self._write_options(schema), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's
        from dledger_spark.source.sink import stream_writer

        return stream_writer(self._write_options(schema), schema, overwrite=overwrite)

    def _read(self, schema: StructType) -> tuple[ReadOptions, Projection]:
        """The parsed options and projection. Raises ``OptionError``, ``SchemaError``."""
        options = ReadOptions.parse(for_reads(options_in(schema), self.options))
        return options, projection_of(schema, options.schema_style, options.properties_format, _body_columns(options))

    def _write_options(self, schema: StructType) -> WriteOptions:
        given = {name: text for name, text in self.options.items() if name.lower() not in _SPARKS_OWN}
        return WriteOptions.parse(for_writes(options_in(schema), given))


def _body_columns(options: ReadOptions) -> tuple[SchemaColumn, ...]:
    """The columns of bodies. Raises ``SchemaError``."""
    bodies = body_format(options)
    return () if bodies is None else body_columns(bodies.columns)
