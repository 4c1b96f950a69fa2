"""The vectorised decoder: log bytes to Arrow, with numpy. Knows neither Spark nor where the bytes are from."""

from pipeline.decode.batches import batch_bytes_for, batches, decode_stretch
from pipeline.decode.context import Content, DecodeContext, Framing, RowFilter
from pipeline.decode.decoder import decode, decode_columns, named_columns
from pipeline.decode.walk import Walk, WalkEnd, positions_of, walk

__all__ = [
    "Content",
    "DecodeContext",
    "Framing",
    "RowFilter",
    "Walk",
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
