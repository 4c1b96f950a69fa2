"""Verifies the checksums of records on request: one Python loop per record around C functions."""

from __future__ import annotations

from zlib import crc32

import numpy as np
from crc32c import crc32c

from dledger.layout import ENTRY_HEADER_BYTES
from dledger.store.format import CHAIN_CRC, CHAIN_CRC_END, CHAIN_CRC_OFFSET
from dledger_spark.decode.context import Chain
from dledger_spark.decode.layout import Bytes, Ints, Mask
from dledger_spark.decode.records import Records
from rocketstore.message.record import CRC_MASK


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
