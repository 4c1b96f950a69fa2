"""Decompresses the bodies that producers have compressed (``decompressed=true``)."""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import pyarrow as pa

from dledger_spark.decode.layout import Ints
from dledger_spark.errors import OptionError
from rocketstore.message.message import SYS_FLAG_COMPRESSED

BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""A longer body is null, as one that is damaged."""
BATCH_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Of all bodies of a batch: Arrow's offsets have 32 bits."""
_METHODS: Final = 0x700
_ZLIB: Final = (0, 0x300)
"""RocketMQ 4 sets no method."""
_STREAMS: Final = {0x100: "lz4", 0x200: "zstd"}


def decompressed(bodies: pa.Array, sys_flags: Ints) -> pa.Array:
    """The bodies, of which those that are marked as compressed are not any more; null for what cannot be read.

    Raises ``OptionError`` if they take too much memory together.
    """
    rows = np.flatnonzero(sys_flags & SYS_FLAG_COMPRESSED)
    if not len(rows):
        return bodies
    values = bodies.to_pylist()
    total = 0
    for row in rows.tolist():
        plain = values[row] = _plain(values[row], int(sys_flags[row]) & _METHODS)
        total += 0 if plain is None else len(plain)
        if total > BATCH_BYTES_MAX:
            raise OptionError(
                f"option decompressed: the bodies of one batch take more than {BATCH_BYTES_MAX >> 20} MiB: read them "
                "without it, or with a smaller spark.sql.execution.arrow.maxRecordsPerBatch"
            )
    return pa.array(values, pa.binary())


def _plain(body: bytes, method: int) -> bytes | None:
    if method in _ZLIB:
        inflating = zlib.decompressobj()
        try:
            found = inflating.decompress(body, BODY_BYTES_MAX)
        except zlib.error:
            return None
        return found if inflating.eof else None
    codec = _STREAMS.get(method)
    if codec is None or not body:
        return None
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
            read: bytes = stream.read(BODY_BYTES_MAX + 1)
    except (pa.ArrowException, OSError):
        return None
    return read if len(read) <= BODY_BYTES_MAX else None
