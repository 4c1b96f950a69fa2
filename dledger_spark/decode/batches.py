"""Splits a stretch of log into batches of a suitable size, for readers of files and of running nodes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from dledger.values import MIB
from dledger_spark.decode.checksums import chain_after
from dledger_spark.decode.context import DecodeContext
from dledger_spark.decode.decoder import decode_columns, looks_at_checksums
from dledger_spark.decode.layout import Bytes, Ints
from dledger_spark.errors import BrokenRecordError
from dledger_spark.schema import BIG_COLUMNS, SchemaColumn
from rocketstore.message.scan import WalkEnd, walk

BATCH_BYTES: Final = 8 * MIB
"""Log bytes per batch with bodies: smaller batches cost more per byte, larger ones exceed the caches."""
SLIM_BATCH_BYTES: Final = 32 * MIB
"""The same without bodies, for small rows."""
_PROBLEMS: Final = {WalkEnd.CUT: "a record extends beyond the data", WalkEnd.ZERO: "zeros where a record was expected"}


def batch_bytes_for(columns: Sequence[SchemaColumn]) -> int:
    """How many log bytes one batch of these columns should cover."""
    return BATCH_BYTES if any(one.of_body or one.name in BIG_COLUMNS for one in columns) else SLIM_BATCH_BYTES


def batches(
    window: Bytes,
    starts: Ints,
    columns: Sequence[SchemaColumn],
    context: DecodeContext,
    batch_bytes: int = 0,
    told: Ints | None = None,
) -> Generator[pa.RecordBatch, None, DecodeContext]:
    """The records at ``starts`` in batches; batches without rows are left out. Raises ``BrokenRecordError``.

    ``told``: the magic numbers that an index has of them. Returns the context for what follows them.
    """
    step = batch_bytes or batch_bytes_for(columns)
    chained = context.framing == "entry" and looks_at_checksums(columns, context)
    first = 0
    while first < len(starts):
        following = max(first + 1, int(np.searchsorted(starts, int(starts[first]) + step)))
        magics = None if told is None else told[first:following]
        batch = decode_columns(window, starts[first:following], columns, context, magics)
        if batch.num_rows:
            yield batch
        if chained:
            chain = chain_after(window, starts[first:following], context.chain_before)
            context = replace(context, chain_before=chain)
        first = following
    return context


def decode_stretch(
    data: bytes | memoryview, columns: Sequence[SchemaColumn], context: DecodeContext, first_index: int = -1
) -> Generator[pa.RecordBatch, None, DecodeContext]:
    """All records of ``data``, which begins and ends between records; a blank may follow them.

    ``first_index``: of the first entry, for errors. Raises ``BrokenRecordError``. Returns the context for what follows.
    """
    found = walk(data, context.framing)
    context = yield from batches(np.frombuffer(data, np.uint8), found.starts, columns, context)
    if found.kind not in (WalkEnd.LIMIT, WalkEnd.BLANK):
        position = context.base + found.end
        entry = f"entry {first_index + len(found.starts)}, " if first_index >= 0 else ""
        where = f"segment {context.segment}, offset {position - context.segment_base} ({entry}position {position})"
        problem = found.reason or _PROBLEMS.get(found.kind, "")
        raise BrokenRecordError(f"{where if context.segment else f'position {position} of the log'}: {problem}")
    return context
