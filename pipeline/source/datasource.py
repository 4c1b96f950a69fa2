"""The format ``dledger``: picks who reads or writes by the options.

Spark pickles this object between several short processes (look-up, planning, workers), so it holds nothing but the
options. It is found without registration through the module ``pyspark_dledger``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from pipeline.options import ReadOptions, WriteOptions
from pipeline.schema import Projection, ddl_of, default_columns, projection_of

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class DLedgerDataSource(DataSource):
    """``spark.read.format("dledger")``, ``readStream``, ``write``, ``writeStream`` and ``USING dledger``."""

    @classmethod
    def name(cls) -> str:
        return "dledger"

    @cached_property
    def read_options(self) -> ReadOptions:
        """The options as those of a read. Raises ``OptionError``."""
        return ReadOptions.parse(self.options)

    def schema(self) -> str:
        options = self.read_options
        crc_column = options.verify_crc == "column"
        columns = default_columns(
            options.schema_style, options.properties_format, headers=options.include_headers, crc_column=crc_column
        )
        return ddl_of(columns)

    def _projection(self, schema: StructType) -> Projection:
        return projection_of(schema, self.read_options.schema_style, self.read_options.properties_format)

    def reader(self, schema: StructType) -> DataSourceReader:
        if self.read_options.is_live:
            from pipeline.source.live import live_reader

            return live_reader(self.read_options, self._projection(schema))
        from pipeline.source.batch import directory_reader

        return directory_reader(self.read_options, self._projection(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from pipeline.source.stream import stream_reader

        return stream_reader(self.read_options, self._projection(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from pipeline.source.sink import batch_writer

        return batch_writer(WriteOptions.parse(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's
        from pipeline.source.sink import stream_writer

        return stream_writer(WriteOptions.parse(self.options), schema, overwrite=overwrite)
