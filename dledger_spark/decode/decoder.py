"""Decodes log bytes into a batch of rows, without a loop per record unless checksums are verified.

Computes only the requested columns, and reads and checks only the parts of each record that they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa

from dledger_spark.decode import checksums
from dledger_spark.decode.columns import TAIL, Shared, array_of, computed_by
from dledger_spark.decode.context import DecodeContext
from dledger_spark.decode.layout import ENTRY, Bytes, Ints, Mask, gather
from dledger_spark.decode.records import Records, rows_of
from dledger_spark.decode.slices import with_nulls
from dledger_spark.errors import BrokenRecordError, SchemaError
from dledger_spark.schema import SchemaColumn, arrow_schema, columns_of

_ADVICE: Final = "verifyCrc=skip omits such records, verifyCrc=column marks them in crcOk"
_NOT_IN_BROKEN: Final = frozenset(("position", "segment", "crcOk"))


def named_columns(names: Sequence[str], context: DecodeContext) -> tuple[SchemaColumn, ...]:
    """The columns with these names. Raises ``SchemaError``."""
    known = {one.name: one for one in columns_of(context.schema_style, context.properties_format)}
    if missing := [name for name in names if name not in known]:
        raise SchemaError(f"no column {', '.join(missing)}; available: {', '.join(known)}")
    return tuple(known[name] for name in names)


def decode(
    data: bytes | memoryview | Bytes, starts: Ints, columns: Sequence[str], context: DecodeContext
) -> pa.RecordBatch:
    """The rows of the records starting at ``starts`` in ``data``, whose place is in ``context``.

    Starts ascend. NOOPs yield no rows. Raises ``BrokenRecordError`` for a damaged record, unless ``context.verify_crc``
    says otherwise; and ``SchemaError``.
    """
    return decode_columns(data, starts, named_columns(columns, context), context)


def looks_at_checksums(columns: Sequence[SchemaColumn], context: DecodeContext) -> bool:
    """Whether these columns require the records' checksums."""
    filtered = (name for some in context.filters for name in some.columns)
    return context.verify_crc != "false" or "crcOk" in filtered or any(computed_by(one) == "crcOk" for one in columns)


def decode_columns(
    data: bytes | memoryview | Bytes,
    starts: Ints,
    columns: Sequence[SchemaColumn],
    context: DecodeContext,
    told: Ints | None = None,
) -> pa.RecordBatch:
    """Like ``decode``, with resolved columns. ``told``: the magic numbers in an index, for all entries there."""
    window = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    names = {computed_by(one) for one in columns} | {one for some in context.filters for one in some.columns}
    crc_ok: Mask | None = None
    if context.verify_crc == "false" and "crcOk" not in names:
        records = rows_of(window, starts, context, told=told)
    else:
        chained = _chained(window, starts, context, all_there=told is not None)
        records = rows_of(window, starts, context, ~chained, told)  # a damaged header may look like a NOOP's
        crc_ok = checksums.intact(records) & chained[np.searchsorted(starts, records.starts)]
    broken = records.broken | records.broken_tail if crc_ok is not None or names & TAIL else records.broken
    if context.verify_crc == "skip" and crc_ok is not None:
        records, crc_ok, broken = _selected(records, crc_ok, broken, crc_ok)
    elif context.verify_crc == "fail" and crc_ok is not None and not crc_ok.all():
        raise _refusal(records, int(np.argmin(crc_ok)), broken)
    elif context.verify_crc == "false" and "crcOk" not in names and broken.any():
        raise _refusal(records, int(np.argmax(broken)), broken)
    if context.filters:
        records, crc_ok, broken = _filtered(records, crc_ok, broken)
    return _batch(records, columns, crc_ok, broken)


def _selected(records: Records, crc_ok: Mask | None, broken: Mask, wanted: Mask) -> tuple[Records, Mask | None, Mask]:
    return records.select(wanted), None if crc_ok is None else crc_ok[wanted], broken[wanted]


def _filtered(records: Records, crc_ok: Mask | None, broken: Mask) -> tuple[Records, Mask | None, Mask]:
    for one in records.context.filters:
        batch = _batch(records, named_columns(one.columns, _plain_names(records.context)), crc_ok, broken)
        wanted = one.keeps(batch)
        if one.keeps_broken:
            wanted = wanted | broken
        records, crc_ok, broken = _selected(records, crc_ok, broken, wanted)
    return records, crc_ok, broken


def _plain_names(context: DecodeContext) -> DecodeContext:
    """Filters use our column names, whatever the output columns are called."""
    return DecodeContext(context.framing, context.content)


@lru_cache(maxsize=16)
def _schema(columns: tuple[SchemaColumn, ...]) -> pa.Schema:
    return arrow_schema(columns)


def _batch(records: Records, columns: Sequence[SchemaColumn], crc_ok: Mask | None, broken: Mask) -> pa.RecordBatch:
    schema = _schema(tuple(columns))
    if not broken.any():
        shared = Shared(records, None if crc_ok is None else pa.array(crc_ok))
        return pa.RecordBatch.from_arrays([array_of(one, shared) for one in columns], schema=schema)
    everything = Shared(records, None if crc_ok is None else pa.array(crc_ok))
    whole = Shared(records.select(~broken), None)
    arrays = [
        array_of(one, everything) if computed_by(one) in _NOT_IN_BROKEN else with_nulls(array_of(one, whole), ~broken)
        for one in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _chained(window: Bytes, starts: Ints, context: DecodeContext, *, all_there: bool) -> Mask:
    """Which headers continue the checksum chain, as far as that can be checked: requires all starts."""
    if context.framing == "entry" and len(starts):
        heads = gather(window, starts, ENTRY)
        chains = heads["entry_chain_crc"].astype(np.int64)
        in_row = all_there or np.array_equal(starts[1:], (starts + heads["entry_size"].astype(np.int64))[:-1])
        if in_row and chains.any():
            unchecked = (chains == 0) & (heads["entry_body_crc"] == 0)  # Java's, in a log that was continued here
            intact: Mask = checksums.headers_intact(window, starts, chains, context.chain_before) | unchecked
            return intact
    return np.ones(len(starts), np.bool_)


def _refusal(records: Records, row: int, broken: Mask) -> BrokenRecordError:
    context = records.context
    offset = int(records.positions[row]) - context.segment_base
    problem = records.problem(row) if broken[row] else "its checksum does not match"
    where = f"segment {context.segment}" if context.segment else "the log"
    if context.framing == "entry" and not broken[row]:
        problem += f" (entry {int(records.field('entry_index')[row])})"
    return BrokenRecordError(f"{where}, offset {offset}: damaged record: {problem}. {_ADVICE}")
