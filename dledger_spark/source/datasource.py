"""The format ``dledger``: selects the reader or writer by the options.

Spark pickles this object between several short-lived processes (look-up, planning, workers), so it holds only the
options. Spark discovers it without registration through the module ``pyspark_dledger``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource

from dledger_spark.decode.typed_bodies import body_format
from dledger_spark.options import ReadOptions, WriteOptions
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
from dledger_spark.source.table_options import for_reads, for_writes, options_in, options_of_table, with_options

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

_SPARKS_OWN: Final = frozenset({"checkpointlocation"})
"""Options that Spark passes to every stream's sink."""


class DLedgerDataSource(DataSource):
    """``spark.read.format("dledger")``, ``readStream``, ``write``, ``writeStream`` and ``USING dledger``."""

    @classmethod
    def name(cls) -> str:
        return "dledger"

    def schema(self) -> str:
        of_table = options_of_table(self.options)
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
        return ", ".join(parts) if of_table is None else with_options(parts, of_table)

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
