"""Decodes log bytes into a batch of rows, without a loop per record unless checksums are verified.

Computes only the requested columns, and reads and checks only the parts of each record that they need.

A stretch of log is split into batches of a suitable size, for readers of files and of running nodes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final
from zlib import crc32

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from dledger.records import ENTRY_HEADER_BYTES
from dledger.store.format import CHAIN_CRC, CHAIN_CRC_END, CHAIN_CRC_OFFSET
from dledger.values import MIB
from dledger_spark.decode.columns import TAIL, Shared, array_of, computed_by
from dledger_spark.decode.layout import ENTRY, Bytes, Ints, Mask, gather, with_nulls
from dledger_spark.decode.records import Chain, DecodeContext, Records, rows_of
from dledger_spark.decode.typed_bodies import BodiesTooLargeError
from dledger_spark.errors import BrokenRecordError, SchemaError
from dledger_spark.schema import BIG_COLUMNS, SchemaColumn, arrow_schema, columns_of
from rocketstore.message.record import CRC_MASK
from rocketstore.message.scan import WalkEnd, walk


def intact(records: Records) -> Mask:
    """Whether each record's checksums match; ``False`` for broken records.

    For an entry: the CRC32C of its body, and the chain CRC of its header if the previous entry is known
    (``headers_intact``). An entry without checksums (Java's) and a plain log's message are checked by the CRC of the
    message's body, the only one that RocketMQ stores.
    """
    good = ~(records.broken | records.broken_tail)
    if records.context.framing == "entry":
        unchecked = (records.field("entry_body_crc") == 0) & (records.field("entry_chain_crc") == 0)
        good &= unchecked | _entry_bodies(records, good & ~unchecked)
        by_message = good & unchecked
    else:
        by_message = good
    if records.context.content == "message" and by_message.any():
        good &= ~by_message | _message_bodies(records, by_message)
    return good


def _entry_bodies(records: Records, wanted: Mask) -> Mask:
    begins, ends = (records.message_starts[wanted].tolist(), records.ends[wanted].tolist())
    with records.window.data as view:
        found = [crc32c(view[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    return _compared(found, records.field("entry_body_crc"), wanted)


def _message_bodies(records: Records, wanted: Mask) -> Mask:
    begins, ends = (records.body_begins[wanted].tolist(), records.body_ends[wanted].tolist())
    with records.window.data as view:
        found = [crc32(view[begin:end]) & CRC_MASK for begin, end in zip(begins, ends, strict=True)]
    return _compared(found, records.field("crc"), wanted)


def _compared(found: list[int], stored: Ints, wanted: Mask) -> Mask:
    right = np.zeros(len(wanted), np.bool_)
    right[wanted] = np.array(found, np.int64) == stored[wanted]
    return right


def headers_intact(window: Bytes, starts: Ints, heads: Ints, before: Chain | None = None) -> Mask:
    """Whether each entry's header continues the chain. ``starts`` are all entries of a stretch, including NOOPs.

    ``heads``: their stored chain CRCs. ``before``: that of the entry before the first one; if unknown, the first one
    counts as intact. After a failed entry, both its stored chain CRC and the computed one are tried, so that one wrong
    header is not reported together with the next one.
    """
    right = np.ones(len(starts), np.bool_)
    stored = heads.tolist()
    first = 1 if before is None else 0
    last_stored, expected = (stored[0], stored[0]) if before is None else before
    with window.data as view:
        for number, start in enumerate(starts.tolist()[first:], first):
            head = view[start : start + CHAIN_CRC_OFFSET]
            rest = view[start + CHAIN_CRC_END : start + ENTRY_HEADER_BYTES]
            computed = crc32c(rest, crc32c(head, last_stored))
            if computed != stored[number]:
                if expected != last_stored:
                    computed = crc32c(rest, crc32c(head, expected))
                right[number] = computed == stored[number]
            expected, last_stored = computed, stored[number]
    return right


def chain_after(window: Bytes, starts: Ints, before: Chain | None = None) -> Chain:
    """The chain after the last of these entries; ``before``: the chain before the first one, if known."""
    last = int(starts[-1])
    head = window[last : last + ENTRY_HEADER_BYTES].tobytes()
    stored = _chain_in(head)
    if len(starts) > 1:
        at = int(starts[-2])
        handed = _chain_in(window[at : at + ENTRY_HEADER_BYTES].tobytes())
    elif before is not None:
        handed = before[0]
    else:
        return stored, stored
    return stored, crc32c(head[CHAIN_CRC_END:], crc32c(head[:CHAIN_CRC_OFFSET], handed))


def _chain_in(head: bytes) -> int:
    found: int = CHAIN_CRC.unpack_from(head, CHAIN_CRC_OFFSET)[0]
    return found


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
        crc_ok = intact(records) & chained[np.searchsorted(starts, records.starts)]
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
            intact: Mask = headers_intact(window, starts, chains, context.chain_before) | unchecked
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
        for batch in _parts(window, starts[first:following], columns, context, magics):
            if batch.num_rows:
                yield batch
        if chained:
            chain = chain_after(window, starts[first:following], context.chain_before)
            context = replace(context, chain_before=chain)
        first = following
    return context


def _parts(
    window: Bytes, starts: Ints, columns: Sequence[SchemaColumn], context: DecodeContext, told: Ints | None
) -> Iterator[pa.RecordBatch]:
    """The records as one batch, or as several if their bodies, decompressed, take too much memory together."""
    try:
        batch = decode_columns(window, starts, columns, context, told)
    except BodiesTooLargeError:
        half = len(starts) // 2
        yield from _parts(window, starts[:half], columns, context, None if told is None else told[:half])
        if context.framing == "entry" and looks_at_checksums(columns, context):
            context = replace(context, chain_before=chain_after(window, starts[:half], context.chain_before))
        yield from _parts(window, starts[half:], columns, context, None if told is None else told[half:])
    else:
        yield batch


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
