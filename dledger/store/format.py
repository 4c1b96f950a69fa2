"""The encoding of entries, blanks and index units: how they are packed, chained, placed and verified. Pure.

All integers are big-endian. An entry record is a 48 byte header followed by the body:

    0      4      8          16         24         32        36         40        44          48
    +------+------+----------+----------+----------+---------+----------+---------+-----------+------
    |magic | size | index    | term     | pos      | channel | chainCrc | bodyCrc | bodyLength| body
    +------+------+----------+----------+----------+---------+----------+---------+-----------+------

``bodyCrc`` is the CRC32C of the body. ``chainCrc`` is the CRC32C of the 44 header bytes other than itself (so it also
covers ``bodyCrc``), seeded with the previous entry's ``chainCrc``, and with 0 before the first entry: it vouches for
everything before it.

A blank is magic -1 and a length that includes its own 8 bytes; the rest is zero. A segment never holds part of an
entry: when ``size + 8`` exceeds the rest of a segment, a blank takes that rest and the entry starts the next segment.
So a used segment always ends in a blank and at least 8 bytes always remain after an entry.

A NOOP has magic 2, or magic 1 and the bytes NOOP as its channel (``magic_of``). The channel of any other entry is the
slot of the producer that appended it, or 0 (``dledger.core.producers``).

An index unit is 32 bytes at ``index * 32``: magic i32, pos i64, size i32, index i64, term i64. It is derived from data.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, chain, groupby
from typing import Final

import numpy as np
from crc32c import crc32c

from dledger.core.ports import BatchHook
from dledger.errors import EntryTooLargeError, InvalidRequestError, invariant
from dledger.records import BLANK_HEAD, BLANK_MAGIC, ENTRY, ENTRY_HEADER_BYTES, INDEX_UNIT, MIN_BLANK_BYTES, record
from dledger.types import (
    NOOP_CHANNEL,
    Body,
    Boundary,
    CheckedRun,
    Entry,
    EntryColumns,
    EntryId,
    EntryRun,
    LogIndex,
    Magic,
    Position,
    Term,
)

HEADER: Final = ENTRY.struct()
"""The stored header."""
_CHAINED: Final = ENTRY.without("chain_crc")
CHAINED_HEADER: Final = _CHAINED.struct()
"""The header without ``chainCrc``: the bytes that the chain covers."""
UNIT: Final = INDEX_UNIT.struct()
BLANK: Final = BLANK_HEAD.struct()
HEADERS: Final = ENTRY.dtype()
"""Entry headers as a table."""
UNITS: Final = INDEX_UNIT.dtype()
"""Index units as a table."""
_CHAINED_HEADERS: Final = _CHAINED.dtype()
_MANY_ENTRIES: Final = 256
"""Batches of at least this size are encoded in columns: half the time per entry, at a fixed cost of 64 of them."""
CHAIN_CRC: Final = ENTRY.part("chain_crc")
CHAIN_CRC_OFFSET: Final = ENTRY.at("chain_crc")
CHAIN_CRC_END: Final = ENTRY.behind("chain_crc")
CHANNEL_OFFSET: Final = ENTRY.at("channel")
_MAGIC_AND_CHANNEL: Final = ENTRY.struct("magic", "channel")
_NAME_DIGITS: Final = 20
_VALID_MAGICS: Final = frozenset(int(magic) for magic in Magic)
_SCAN_ENTRIES_MAX: Final = 1 << 30


@record(frozen=True, slots=True)
class EntryHeader:
    """An entry header, field by field."""

    magic: int
    size: int
    index: int
    term: int
    position: int
    channel: int
    chain_crc: int
    body_crc: int
    body_length: int


@record(frozen=True, slots=True)
class IndexUnit:
    """An index unit, field by field."""

    magic: int
    position: int
    size: int
    index: int
    term: int


def segment_name(base: int) -> str:
    """The file name of the segment that starts at ``base``."""
    return f"{base:0{_NAME_DIGITS}d}"


def parse_segment_name(name: str) -> int | None:
    """The base in a segment's file name; ``None`` for any other name."""
    if len(name) == _NAME_DIGITS and name.isascii() and name.isdigit():
        return int(name)
    return None


def blank_head(length: int) -> bytes:
    """The first 8 bytes of a blank of ``length`` bytes; the others are zero."""
    return BLANK.pack(BLANK_MAGIC, length)


def place(end: int, record_bytes: int, segment_bytes: int) -> int:
    """Where a record after ``end`` goes: there, or at the start of the next segment if it would not fit."""
    remaining = segment_bytes - end % segment_bytes
    return end if record_bytes + MIN_BLANK_BYTES <= remaining else end + remaining


def check_batch(bodies: Sequence[Body], entry_bytes_limit: int) -> None:
    """Raise ``InvalidRequestError`` for an empty batch, ``EntryTooLargeError`` for one entry beyond the limit."""
    if not bodies:
        raise InvalidRequestError("empty batch: append at least one entry")
    largest = max(map(len, bodies))
    if largest + ENTRY_HEADER_BYTES > entry_bytes_limit:
        raise EntryTooLargeError(
            f"a body of {largest} bytes makes a record of {largest + ENTRY_HEADER_BYTES} bytes: at most "
            f"{entry_bytes_limit} fit (max_entry_bytes, segment_bytes)"
        )


@record(frozen=True, slots=True)
class Piece:
    """The part of a batch that goes into one segment."""

    position: int
    bodies: Sequence[Body]
    channel: int = 0


def split_batch(bodies: Sequence[Body], end: int, segment_bytes: int, channel: int = 0) -> list[Piece]:
    """Place a batch after ``end``, one piece per segment."""
    total = sum(map(len, bodies)) + ENTRY_HEADER_BYTES * len(bodies)
    if place(end, total, segment_bytes) == end:
        return [Piece(end, bodies, channel)]
    pieces: list[Piece] = []
    position = start = place(end, len(bodies[0]) + ENTRY_HEADER_BYTES, segment_bytes)
    first = 0
    for number, body in enumerate(bodies):
        placed = place(position, len(body) + ENTRY_HEADER_BYTES, segment_bytes)
        if placed != position:
            pieces.append(Piece(start, bodies[first:number], channel))
            start, first = placed, number
        position = placed + len(body) + ENTRY_HEADER_BYTES
    pieces.append(Piece(start, bodies[first:], channel))
    return pieces


@record(frozen=True, slots=True)
class EncodedRecords:
    """Contiguous records ready to write, with their index units."""

    records: bytes
    units: bytes
    positions: list[int]
    chain_crc: int


def encode_piece(magic: int, term: int, first_index: int, piece: Piece, chain_crc: int) -> EncodedRecords:
    """Encode one piece of a batch: the leader's hot loop, under the node's lock."""
    if len(piece.bodies) >= _MANY_ENTRIES:
        return _encode_many(magic, term, first_index, piece, chain_crc)
    pack, pack_unit, pack_chain, crc = CHAINED_HEADER.pack, UNIT.pack, CHAIN_CRC.pack, crc32c
    parts: list[Body] = []
    units: list[bytes] = []
    positions: list[int] = []
    position, index, chain, channel = piece.position, first_index, chain_crc, piece.channel
    add_unit, add_position = units.append, positions.append
    for body in piece.bodies:
        length = len(body)
        size = length + ENTRY_HEADER_BYTES
        header = pack(magic, size, index, term, position, channel, crc(body), length)
        chain = crc(header, chain)
        parts += (header[:CHAIN_CRC_OFFSET], pack_chain(chain), header[CHAIN_CRC_OFFSET:], body)
        add_unit(pack_unit(magic, position, size, index, term))
        add_position(position)
        position += size
        index += 1
    return EncodedRecords(b"".join(parts), b"".join(units), positions, chain)


def _encode_many(magic: int, term: int, first_index: int, piece: Piece, chain_crc: int) -> EncodedRecords:
    """``encode_piece`` by columns: a batch may have 65,536 entries, and votes and heartbeats wait meanwhile."""
    bodies, count = piece.bodies, len(piece.bodies)
    lengths = np.fromiter(map(len, bodies), np.int64, count)
    sizes = lengths + ENTRY_HEADER_BYTES
    positions = np.cumsum(sizes) - sizes + piece.position
    headers = np.empty(count, HEADERS)
    headers["magic"], headers["term"], headers["channel"] = magic, term, piece.channel
    headers["size"], headers["body_length"], headers["position"] = sizes, lengths, positions
    headers["index"] = np.arange(first_index, first_index + count)
    headers["body_crc"] = np.fromiter(map(crc32c, bodies), np.uint32, count)
    chained, units = np.empty(count, _CHAINED_HEADERS), np.empty(count, UNITS)
    for columns in (chained, units):
        for name in columns.dtype.names or ():
            columns[name] = headers[name]
    opaque = chained.view(f"V{_CHAINED_HEADERS.itemsize}").tolist()
    headers["chain_crc"] = [chain_crc := crc32c(header, chain_crc) for header in opaque]
    records = chain.from_iterable(zip(headers.view(f"V{HEADERS.itemsize}").tolist(), bodies, strict=True))
    return EncodedRecords(b"".join(records), units.tobytes(), positions.tolist(), chain_crc)


def encode_record(
    term: int, index: int, position: int, body: Body, chain_crc: int, magic: int = 1, channel: int = 0
) -> tuple[bytes, int]:
    """One record and its chain CRC, given the previous entry's chain CRC."""
    length = len(body)
    size = length + ENTRY_HEADER_BYTES
    header = CHAINED_HEADER.pack(magic, size, index, term, position, channel, crc32c(body), length)
    chain = crc32c(header, chain_crc)
    return b"".join((header[:CHAIN_CRC_OFFSET], CHAIN_CRC.pack(chain), header[CHAIN_CRC_OFFSET:], body)), chain


def apply_batch_hooks(hooks: Sequence[BatchHook], piece: Piece) -> Piece:
    """The piece after the hooks."""
    bodies, lengths = piece.bodies, list(map(len, piece.bodies))
    positions = list(accumulate((length + ENTRY_HEADER_BYTES for length in lengths[:-1]), initial=piece.position))
    for hook in hooks:
        bodies = hook(positions, bodies)
    invariant(list(map(len, bodies)) == lengths, "a hook must not change the length of a body")
    return Piece(piece.position, bodies, piece.channel)


@record(frozen=True, slots=True)
class Follow:
    """The entry (or boundary) that the next record must continue."""

    index: int
    term: int
    chain_crc: int


class StopKind(Enum):
    """Why a scan of records stopped."""

    LIMIT = "limit"
    """Everything requested was read."""
    ZERO = "zero"
    """The next header is all zero: nothing was ever written there, or it was wiped."""
    BLANK = "blank"
    BAD = "bad"


@record(frozen=True, slots=True)
class Scan:
    """The verified records from an offset on, and where and why the scan stopped."""

    count: int
    end_offset: int
    follow: Follow
    units: bytes
    stop: StopKind
    reason: str = ""
    noops: tuple[int, ...] = ()
    """The indexes of those that are NOOPs."""


@record(frozen=True, slots=True)
class ScanWindow:
    """The range to scan: ``view[offset:stop]``, whose offset 0 is absolute position ``base``."""

    view: memoryview
    base: int
    offset: int
    stop: int
    unchecked: bool = False
    """Accept records with both CRC fields 0 (the Java line's)."""


def scan_records(window: ScanWindow, follow: Follow, entries_max: int = _SCAN_ENTRIES_MAX) -> Scan:
    """Verify consecutive records: headers, contiguity, terms, positions, both CRCs. The follower's hot loop."""
    view, base, offset, stop = window.view, window.base, window.offset, window.stop
    unpack, pack_unit, crc, valid = HEADER.unpack_from, UNIT.pack, crc32c, _VALID_MAGICS
    header_bytes, chain_at, chain_end = ENTRY_HEADER_BYTES, CHAIN_CRC_OFFSET, CHAIN_CRC_END
    noop, noop_channel = int(Magic.NOOP), NOOP_CHANNEL
    units: list[bytes] = []
    noops: list[int] = []
    add_unit = units.append
    next_index, last_term, chain = follow.index + 1, follow.term, follow.chain_crc
    header_stop = stop - header_bytes
    limit = next_index + entries_max
    while offset <= header_stop and next_index < limit:
        magic, size, index, term, position, channel, chain_crc, body_crc, length = unpack(view, offset)
        end = offset + size
        if (
            index != next_index
            or position != base + offset
            or size != length + header_bytes
            or length < 0
            or end > stop
            or term < last_term
            or magic not in valid
        ):
            break
        computed = crc(view[offset + chain_end : offset + header_bytes], crc(view[offset : offset + chain_at], chain))
        if computed != chain_crc or crc(view[offset + header_bytes : end]) != body_crc:
            if not (window.unchecked and chain_crc == 0 and body_crc == 0):
                break
            computed = 0
        chain, last_term = computed, term
        add_unit(pack_unit(magic, position, size, index, term))
        if magic == noop or channel == noop_channel:
            noops.append(index)
        next_index += 1
        offset = end
    kind, reason = (StopKind.LIMIT, "")
    if next_index < limit and offset < stop:
        kind, reason = _why_stopped(window, offset, Follow(next_index - 1, last_term, chain))
    last = Follow(next_index - 1, last_term, chain)
    return Scan(len(units), offset, last, b"".join(units), kind, reason, tuple(noops))


def _why_stopped(window: ScanWindow, offset: int, follow: Follow) -> tuple[StopKind, str]:
    """Explain what is wrong with the bytes at ``offset`` (slow, once per scan)."""
    view, rest = window.view, window.stop - offset
    if rest < ENTRY_HEADER_BYTES:
        return _why_stopped_short(view, offset, rest)
    if not any(view[offset : offset + ENTRY_HEADER_BYTES]):
        return StopKind.ZERO, "no record starts here"
    header = EntryHeader(*HEADER.unpack_from(view, offset))
    if header.magic == BLANK_MAGIC:
        return StopKind.BLANK, f"a blank of {header.size} bytes"
    problem = header_problem(header, window.base + offset, follow)
    if not problem and offset + header.size > window.stop:
        problem = f"a record of {header.size} bytes does not fit the {rest} bytes left"
    if not problem and crc32c(view[offset + ENTRY_HEADER_BYTES : offset + header.size]) != header.body_crc:
        problem = f"bodyCrc of entry {header.index} does not match its body"
    return StopKind.BAD, problem or f"chainCrc of entry {header.index} does not continue entry {follow.index}"


def _why_stopped_short(view: memoryview, offset: int, rest: int) -> tuple[StopKind, str]:
    if not any(view[offset : offset + rest]):
        return StopKind.ZERO, "no record starts here"
    if rest >= MIN_BLANK_BYTES and BLANK.unpack_from(view, offset)[0] == BLANK_MAGIC:
        return StopKind.BLANK, f"a blank of {BLANK.unpack_from(view, offset)[1]} bytes"
    return StopKind.BAD, f"{rest} bytes are left, less than an entry header"


def header_chain_crc(header: EntryHeader, seed: int) -> int:
    """The chain CRC of a header's other fields, seeded with the previous entry's."""
    return crc32c(
        CHAINED_HEADER.pack(
            header.magic,
            header.size,
            header.index,
            header.term,
            header.position,
            header.channel,
            header.body_crc,
            header.body_length,
        ),
        seed,
    )


def unit_of(header: EntryHeader) -> IndexUnit:
    """The index unit that names a record."""
    return IndexUnit(header.magic, header.position, header.size, header.index, header.term)


def header_problem(header: EntryHeader, position: int, follow: Follow) -> str:
    """The problem with a header at ``position`` after ``follow``, as a clause; empty if there is none."""
    if header.magic not in _VALID_MAGICS:
        return f"magic {header.magic} is not that of an entry"
    if header.body_length < 0 or header.size != header.body_length + ENTRY_HEADER_BYTES:
        return f"size {header.size} and bodyLength {header.body_length} do not fit together"
    if header.index != follow.index + 1:
        return f"index {header.index} found where {follow.index + 1} was expected"
    if header.term < follow.term:
        return f"term {header.term} after term {follow.term}"
    if header.position != position:
        return f"pos {header.position} found at position {position}"
    return ""


def check_run(run: EntryRun, *, unchecked: bool = False) -> CheckedRun:
    """Verify a received run by itself (``Log.check_run``)."""
    follow = Follow(run.previous.index, run.previous.term, run.previous_chain_crc)
    window = ScanWindow(memoryview(run.data), run.position, 0, len(run.data), unchecked)
    count = run.last_index - run.first_index + 1
    if run.first_index != run.previous.index + 1 or count < 1:
        raise InvalidRequestError(
            f"a run of entries {run.first_index} to {run.last_index} cannot follow entry {run.previous.index}"
        )
    scan = scan_records(window, follow)
    if scan.end_offset != len(run.data):
        raise InvalidRequestError(
            f"entry {scan.follow.index + 1} of the run (its byte {scan.end_offset}) is wrong: {scan.reason}"
        )
    if scan.count != count:
        raise InvalidRequestError(f"the run holds {scan.count} entries from {run.first_index} on, not {count}")
    last = EntryId(Term(scan.follow.term), LogIndex(scan.follow.index))
    return CheckedRun(run, last, scan.follow.chain_crc, scan.units, tuple(map(LogIndex, scan.noops)))


def scan_run(run: EntryRun, *, unchecked: bool = False) -> Scan:
    """Verify a run read from disk, up to its first bad record."""
    follow = Follow(run.previous.index, run.previous.term, run.previous_chain_crc)
    return scan_records(ScanWindow(memoryview(run.data), run.position, 0, len(run.data), unchecked), follow)


def decode_run(run: EntryRun, *, unchecked: bool = False) -> tuple[list[Entry], Scan]:
    """The entries of a run read from disk, up to the first bad one, and the result of the scan."""
    scan = scan_run(run, unchecked=unchecked)
    entries: list[Entry] = []
    offset, data, unpack, normal = 0, run.data, HEADER.unpack_from, Magic.NORMAL
    for _ in range(scan.count):  # as ``decode_entry``, without its calls: a state machine reads every entry
        magic, size, index, term, position, channel, chain_crc, body_crc, _ = unpack(data, offset)
        meaning = normal if magic == 1 and channel != NOOP_CHANNEL else magic_of(magic, channel)
        body = data[offset + ENTRY_HEADER_BYTES : offset + size]
        entries.append(Entry(index, term, position, body, meaning, channel, body_crc, chain_crc))
        offset += size
    return entries, scan


def columns_of(entries: Sequence[Entry]) -> EntryColumns:
    """Consecutive entries, at least one, by columns."""
    first, last = entries[0].index, entries[-1]
    runs: list[tuple[int, int, int]] = []
    index = int(first)
    for channel, run in groupby(NOOP_CHANNEL if one.magic is Magic.NOOP else one.channel for one in entries):
        count = len(list(run))
        runs.append((channel, index, count))
        index += count
    end = Position(last.position + ENTRY_HEADER_BYTES + len(last.body))
    return EntryColumns(first, [one.term for one in entries], [one.body for one in entries], runs, end, last.chain_crc)


def decode_entry(records: bytes, offset: int = 0) -> Entry:
    """The entry whose verified record starts at ``offset``."""
    header = EntryHeader(*HEADER.unpack_from(records, offset))
    return Entry(
        index=LogIndex(header.index),
        term=Term(header.term),
        position=Position(header.position),
        body=records[offset + ENTRY_HEADER_BYTES : offset + header.size],
        magic=magic_of(header.magic, header.channel),
        channel=header.channel,
        body_crc=header.body_crc,
        chain_crc=header.chain_crc,
    )


def is_magic(magic: int) -> bool:
    """Whether an entry's header may begin with this magic."""
    return magic in _VALID_MAGICS


def magic_of(magic: int, channel: int) -> Magic:
    """The meaning of an entry, from two fields of its verified header."""
    return Magic.NOOP if (magic, channel) == (Magic.NORMAL, NOOP_CHANNEL) else Magic(magic)


def channel_of(record: bytes) -> int:
    """The channel field of an entry's record; ``NOOP_CHANNEL`` for every NOOP."""
    magic, channel = _MAGIC_AND_CHANNEL.unpack_from(record)
    return NOOP_CHANNEL if magic == Magic.NOOP else int(channel)


def run_problem(checked: CheckedRun, from_index: int, last: EntryId, chain_crc: int) -> str:
    """Why a run's entries from ``from_index`` on do not continue a log in index, term or chain; empty if they do."""
    run = checked.run
    if from_index != last.index + 1 or not run.first_index <= from_index <= run.last_index:
        return (
            f"entries {run.first_index} to {run.last_index} cannot be appended from {from_index} on after {last.index}"
        )
    first = from_index == run.first_index
    before_term = run.previous.term if first else checked.term_of(LogIndex(from_index - 1))
    before_chain = run.previous_chain_crc if first else checked.chain_crc_of(LogIndex(from_index - 1))
    if before_term != last.term:
        return f"entry {last.index} has term {last.term} here and {before_term} in the run"
    if before_chain != chain_crc:
        return f"entry {last.index} has chainCrc {chain_crc:#010x} here and {before_chain:#010x} in the run"
    return ""


def run_place_problem(position: int, size: int, end: int, segment_bytes: int) -> str:
    """Why a run of ``size`` bytes cannot be stored at ``position`` in a log ending at ``end``; empty if it can."""
    next_segment = end - end % segment_bytes + segment_bytes
    if position != end and (position != next_segment or end % segment_bytes == 0):
        return f"the run starts at position {position}, but the log ends at {end}"
    if position % segment_bytes + size + MIN_BLANK_BYTES > segment_bytes:
        return f"a run of {size} bytes at position {position} does not fit its segment of {segment_bytes} bytes"
    return ""


def after(boundary: Boundary) -> Follow:
    """The position in the chain that the first entry after a boundary must continue."""
    return Follow(boundary.index, boundary.term, boundary.chain_crc)
