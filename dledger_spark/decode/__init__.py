"""The vectorised decoder from log bytes to Arrow, in numpy. Independent of Spark and of the source of the bytes."""

from dledger_spark.decode.decoder import batch_bytes_for, batches, decode, decode_columns, decode_stretch, named_columns
from dledger_spark.decode.layout import positions_of
from dledger_spark.decode.records import Content, DecodeContext, RowFilter
from rocketstore.message.scan import Framing, RecordWalk, WalkEnd, walk

__all__ = [
    "Content",
    "DecodeContext",
    "Framing",
    "RecordWalk",
    "RowFilter",
    "WalkEnd",
    "batch_bytes_for",
    "batches",
    "decode",
    "decode_columns",
    "decode_stretch",
    "named_columns",
    "positions_of",
    "walk",
]
