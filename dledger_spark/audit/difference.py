"""Describes the first difference between replicas: which entry, which field, and whose copy is damaged. Pure.

Two kinds of evidence identify the damaged copy. The entry's own CRCs: that of the body, and that of the chain, which
covers the header and is seeded with the previous entry; they reveal a flipped bit even between two replicas. And the
majority of the replicas, which also distinguishes copies that are all consistent, as after histories that should never
have diverged.

Differing blocks become findings: their bytes are read again record by record, and the first difference of each damaged
replica is described.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

import numpy as np
from crc32c import crc32c

from dledger.records import BLANK_HEAD, BLANK_MAGIC, ENTRY, ENTRY_HEADER_BYTES, MIN_BLANK_BYTES
from dledger.store.format import (
    BLANK,
    HEADER,
    EntryHeader,
    Follow,
    ScanWindow,
    StopKind,
    header_problem,
    scan_records,
    segment_name,
)
from dledger.types import Magic
from dledger_spark.audit.replica import Replica, ReplicaDigest, seek

EXAMINED_MAX: Final = 32
"""Maximum number of blocks read again: one per damaged replica is enough."""
_GONE: Final = (
    "it no longer does. A running node repairs damage by itself, logs the repair, and keeps the damaged data in "
    "damaged-N. Run the audit again"
)
_HEAD_BYTES: Final = 64 * 1024
_ZEROS_AT_ONCE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem and its place. ``replicas`` are the damaged ones; empty if they cannot be identified.

    ``block`` is the start of the block, ``position`` the first differing byte; -1 if there is none. ``index``,
    ``term``, ``field`` and ``values`` come from the ``BlockDivergence``. ``detail`` is for people.
    """

    kind: DifferenceKind
    replicas: tuple[str, ...]
    segment: str
    block: int
    position: int
    index: int
    term: int
    field: str
    values: Mapping[str, str]
    detail: str

    def sentence(self) -> str:
        """The finding as a sentence."""
        who = ", ".join(self.replicas) if self.replicas else "one of the replicas"
        if self.kind in (DifferenceKind.SEGMENT, DifferenceKind.UNREADABLE, DifferenceKind.CHECKPOINT):
            return f"{who}: {self.detail}"
        if self.kind is DifferenceKind.GONE:
            return f"{who} differed in the block at {self.block} when it was digested; {self.detail}"
        shown = ", ".join(f"{name} has {value}" for name, value in self.values.items())
        place = f"entry {self.index} of term {self.term}" if self.index >= 0 else "an unidentified entry"
        if self.kind is DifferenceKind.BLANK:
            place = f"the blank after entry {self.index} of term {self.term}"
        what = "has nothing after that" if self.kind is DifferenceKind.TAIL else f"in field {self.field}: {shown}"
        return (
            f"{who} is damaged at position {self.position} (segment {self.segment}, block at {self.block}), {place}, "
            f"{what}; {self.detail}"
        )


class BlockReader(Protocol):
    """Reads all copies of an entry, from directories or running nodes."""

    def divergence(self, block: int, end: int, names: Sequence[str]) -> BlockDivergence | None:
        """The first difference within the block; None if it no longer exists. ``names``: the replicas to compare."""

    def segment_of(self, position: int) -> str:
        """The name of the segment containing ``position``; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Directories:
    """Reads the replicas' files."""

    replicas: Mapping[str, Replica]
    end_position: int
    """The end of the compared range."""

    def segment_of(self, position: int) -> str:
        segment_bytes = next(iter(self.replicas.values())).segment_bytes
        return segment_name(position - position % segment_bytes)

    def divergence(self, block: int, end: int, names: Sequence[str]) -> BlockDivergence | None:
        copies = [self.replicas[name] for name in names]
        segment_bytes = copies[0].segment_bytes
        start = self._entry_before(block, copies)
        tails = {one.name: _readable(one, start, end - start) for one in copies}
        found = diverge(tails, start, segment_bytes, self._before(start, copies))
        if found is None:
            return None
        # Read again from the entry to the furthest end that any copy claims: it may be in another block.
        size = max([_HEAD_BYTES, *(self._claimed(one, found.entry_position) for one in copies)])
        tails = {one.name: _readable(one, found.entry_position, size) for one in copies}
        again = diverge(tails, found.entry_position, segment_bytes, self._before(found.entry_position, copies))
        return self._tail_or_hole(again or found)

    def _entry_before(self, position: int, copies: Sequence[Replica]) -> int:
        """The start of an entry at or before ``position`` in its segment."""
        base = position - position % copies[0].segment_bytes
        start = max(base, *(int(one.begin.position) for one in copies))
        for one in copies:
            by_index = _by_index(one, position)
            if by_index is not None and by_index.position >= start:
                return by_index.position
        for one in copies:
            walked = seek(one, start, position)
            if walked != start:
                return walked
        return start

    def _before(self, position: int, copies: Sequence[Replica]) -> Follow | None:
        """The entry that the one at ``position`` must continue, if any copy contains it."""
        header = next((found for one in copies if (found := one.header_at(position)) is not None), None)
        if header is None:
            return self._last_before(position, copies)
        for one in self.replicas.values():
            if one.begin.index == header.index - 1 and one.begin.position == position:
                return Follow(one.begin.index, one.begin.term, one.begin.chain_crc)
            previous = one.entry(header.index - 1) if header.index else None
            if previous is not None and previous.position + previous.size <= position:
                return Follow(previous.index, previous.term, previous.chain_crc)
        return Follow(-1, 0, 0) if header.index == 0 and position == 0 else None

    def _last_before(self, position: int, copies: Sequence[Replica]) -> Follow | None:
        for one in copies:
            header = _by_index(one, position - 1) if position else None
            if header is not None and header.position + header.size == position:
                return Follow(header.index, header.term, header.chain_crc)
        return None

    def _claimed(self, replica: Replica, position: int) -> int:
        """The length that the entry or blank at ``position`` claims, if plausible."""
        _, size = BLANK.unpack(_readable(replica, position, BLANK.size).ljust(BLANK.size, b"\0"))
        return size if 0 < size <= replica.segment_bytes - position % replica.segment_bytes else 0

    def _tail_or_hole(self, found: BlockDivergence) -> BlockDivergence:
        """Zeros up to the segment's end are a missing tail; zeros followed by data are a damaged entry."""
        if found.kind is not DifferenceKind.TAIL:
            return found
        if all(self._is_blank(self.replicas[name], found.entry_position) for name in found.damaged):
            return found
        return BlockDivergence(
            DifferenceKind.ENTRY,
            found.position,
            found.entry_position,
            found.index,
            found.term,
            found.field,
            found.values,
            found.damaged,
            found.evidence,
        )

    def _is_blank(self, replica: Replica, position: int) -> bool:
        segment_end = position - position % replica.segment_bytes + replica.segment_bytes
        stop = min(segment_end, self.end_position)
        return not any(
            _readable(replica, at, min(_ZEROS_AT_ONCE, stop - at)).strip(b"\0")
            for at in range(position, stop, _ZEROS_AT_ONCE)
        )


def _readable(replica: Replica, position: int, size: int) -> bytes:
    """The readable bytes."""
    try:
        return replica.read(position, size)
    except OSError:
        return b""


def _by_index(replica: Replica, position: int) -> EntryHeader | None:
    """The last entry starting at or before ``position``, by the replica's index; None if the index is unusable."""
    low, high = replica.begin.index + 1, (replica.committed if replica.committed is not None else -1)
    found: EntryHeader | None = None
    while low <= high:
        middle = (low + high) // 2
        header = replica.entry(middle)
        if header is None:
            return None
        if header.position <= position:
            found, low = header, middle + 1
        else:
            high = middle - 1
    return found


def examine(blocks: Iterable[tuple[int, int, Sequence[ReplicaDigest]]], reader: BlockReader) -> list[Finding]:
    """The findings for differing blocks (position, end, digests), in order of position.

    An unreadable part is reported once per replica and segment, a difference once per damaged replica, and so is one
    that no longer exists.
    """
    findings: list[Finding] = []
    told: set[tuple[str, str]] = set()
    mended: set[tuple[str, ...]] = set()
    suspects: set[str] = set()
    examined = 0
    for position, end, digests in blocks:
        segment = reader.segment_of(position)
        for one in digests:
            if one.error and (one.replica, segment) not in told:
                told.add((one.replica, segment))
                findings.append(_unreadable(one, segment))
        readable = [one for one in digests if not one.error]
        if examined >= EXAMINED_MAX or len({one[2:] for one in readable}) < 2 or _explained(readable, suspects):
            continue
        examined += 1
        divergence = reader.divergence(position, end, [one.replica for one in readable])
        if divergence is None:
            changed = outvoted(readable)
            if changed not in mended:
                mended.add(changed)
                findings.append(Finding(DifferenceKind.GONE, changed, segment, position, -1, -1, -1, "", {}, _GONE))
            continue
        suspects.update(divergence.damaged or (one.replica for one in readable))
        findings.append(_found(divergence, reader.segment_of(divergence.position), position))
    return findings


def _explained(digests: Sequence[ReplicaDigest], suspects: set[str]) -> bool:
    """Whether the replicas already known to be damaged explain the block's difference."""
    rest = {one[2:] for one in digests if one.replica not in suspects}
    return bool(suspects) and len(rest) <= 1


def _unreadable(digest: ReplicaDigest, segment: str) -> Finding:
    kind = DifferenceKind.SEGMENT if "is missing" in digest.error else DifferenceKind.UNREADABLE
    return Finding(kind, (digest.replica,), segment, digest.position, -1, -1, -1, "", {}, digest.error)


def _found(one: BlockDivergence, segment: str, block: int) -> Finding:
    return Finding(
        one.kind, one.damaged, segment, block, one.position, one.index, one.term, one.field, one.values, one.evidence
    )


def outvoted(digests: Sequence[ReplicaDigest]) -> tuple[str, ...]:
    """The replicas that could not read a block or are outside the largest group of equal digests; all if there is a
    tie.
    """
    votes = Counter(one[2:] for one in digests if not one.error)
    ranked = votes.most_common(2)
    tie = not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1])
    return tuple(one.replica for one in digests if one.error or tie or one[2:] != ranked[0][0])


_MAGICS: Final = frozenset(int(magic) for magic in Magic)
_SHOWN_NAMES: Final = {"position": "pos", "chain_crc": "chainCrc", "body_crc": "bodyCrc", "body_length": "bodyLength"}
"""Header fields whose names in the documents differ from those in the code."""
_UNSIGNED: Final = frozenset({"chainCrc", "bodyCrc"})


class DifferenceKind(StrEnum):
    """The problem of a replica."""

    ENTRY = "entry differs"
    BLANK = "blank differs"
    TAIL = "tail missing"
    SEGMENT = "segment missing"
    UNREADABLE = "file unreadable"
    CHECKPOINT = "checkpoint unreadable"
    GONE = "differed, no longer does"


class Copy(NamedTuple):
    """One replica's bytes at the difference, and whether they are consistent in themselves.

    ``empty``: only zeros, or nothing.
    """

    data: bytes
    sound: bool
    reason: str
    empty: bool


@dataclass(frozen=True, slots=True)
class BlockDivergence:
    """The first difference of a block.

    ``position`` is that of the first differing byte, ``entry_position`` that of its entry or blank. ``index`` and
    ``term`` come from a sound copy; for a blank, from the previous entry. ``values`` are each replica's value of the
    field. ``damaged`` is empty if the damaged copy cannot be identified; ``evidence`` says how it was identified.
    """

    kind: DifferenceKind
    position: int
    entry_position: int
    index: int
    term: int
    field: str
    values: Mapping[str, str]
    damaged: tuple[str, ...]
    evidence: str


def first_difference(copies: Sequence[bytes]) -> int | None:
    """The offset of the first byte that differs between copies, or of the end of the shortest one; None if equal."""
    shortest = min(map(len, copies))
    first = np.frombuffer(copies[0], np.uint8, shortest)
    places: list[int] = []
    for other in copies[1:]:
        differs = first != np.frombuffer(other, np.uint8, shortest)
        if differs.any():
            places.append(int(np.argmax(differs)))
    if places:
        return min(places)
    return shortest if any(len(one) != shortest for one in copies) else None


class Walked(NamedTuple):
    """Where the entry or blank that contains an offset starts, and what precedes it (None if unknown)."""

    offset: int
    follow: Follow | None


def walk(data: bytes, offset: int, follow: Follow | None) -> Walked:
    """Walk from the start of the data to the entry containing ``offset``; all earlier entries must be sound."""
    at = 0
    while at + MIN_BLANK_BYTES <= offset:
        magic, size = BLANK.unpack_from(data, at)
        if (magic not in _MAGICS and magic != BLANK_MAGIC) or size < MIN_BLANK_BYTES or at + size > offset:
            break
        if magic != BLANK_MAGIC:
            if size < ENTRY_HEADER_BYTES:
                break
            header = EntryHeader(*HEADER.unpack_from(data, at))
            follow = Follow(header.index, header.term, header.chain_crc)
        at += size
    return Walked(at, follow)


def judge(data: bytes, position: int, segment_bytes: int, follow: Follow | None) -> Copy:
    """One replica's copy of the entry or blank at ``position``, cut to its own length, and whether it is consistent.

    ``data`` extends to the segment's end, or as far as the replica has it.
    """
    if not data.strip(b"\0"):
        return Copy(b"", sound=False, reason="the data is missing", empty=True)
    rest = segment_bytes - position % segment_bytes
    if len(data) >= MIN_BLANK_BYTES and BLANK.unpack_from(data)[0] == BLANK_MAGIC:
        length = BLANK.unpack_from(data)[1]
        if length != rest or len(data) < rest:
            return Copy(
                data[:rest], False, f"a blank of {length} bytes, but {min(rest, len(data))} bytes are left", False
            )
        stray = data[MIN_BLANK_BYTES:rest].strip(b"\0")
        return Copy(data[:rest], not stray, "the blank contains data" if stray else "", False)
    reason = _problem(data, position, follow)
    size = BLANK.unpack_from(data)[1] if len(data) >= MIN_BLANK_BYTES else 0
    # A damaged length must not determine how much is compared: use the rest of the data instead.
    return Copy(
        data[:size] if not reason and ENTRY_HEADER_BYTES <= size <= len(data) else data, not reason, reason, False
    )


def _problem(data: bytes, position: int, follow: Follow | None) -> str:
    """The problem with the entry at the start of ``data``; without ``follow``, its chain CRC is not checked."""
    if follow is not None:
        window = ScanWindow(memoryview(data), position, 0, len(data), unchecked=True)
        scan = scan_records(window, follow, 1)
        return "" if scan.count else scan.reason if scan.stop is StopKind.BAD else "no entry starts here"
    if len(data) < ENTRY_HEADER_BYTES:
        return "too little room for an entry header"
    header = EntryHeader(*HEADER.unpack_from(data))
    problem = header_problem(header, position, Follow(header.index - 1, 0, 0))
    if not problem and header.size > len(data):
        problem = f"an entry of {header.size} bytes does not fit the {len(data)} that are left"
    unchecked = header.chain_crc == 0 and header.body_crc == 0
    if not problem and not unchecked and crc32c(data[ENTRY_HEADER_BYTES : header.size]) != header.body_crc:
        problem = f"bodyCrc of entry {header.index} does not match its body"
    return problem


def diverge(
    tails: Mapping[str, bytes], position: int, segment_bytes: int, follow: Follow | None
) -> BlockDivergence | None:
    """The difference between replicas whose bytes from ``position``, the start of an entry or blank, are ``tails``.

    None if there is none. Each tail extends to the segment's end, or as far as the replica has it or it was requested.
    """
    offset = first_difference(list(tails.values()))
    if offset is None:
        return None
    first = next(iter(tails.values()))
    start = walk(first, min(offset, len(first)), follow)
    copies = {
        name: judge(tail[start.offset :], position + start.offset, segment_bytes, start.follow)
        for name, tail in tails.items()
    }
    damaged, evidence = _blame(copies)
    model = next((one for name, one in copies.items() if name not in damaged and one.data), Copy(b"", False, "", True))
    field, values = _field(tails, offset, start.offset, model)
    index, term = _identity(model, start.follow)
    blank = len(model.data) >= MIN_BLANK_BYTES and BLANK.unpack_from(model.data)[0] == BLANK_MAGIC
    nothing = bool(damaged) and all(copies[name].empty for name in damaged)
    kind = DifferenceKind.TAIL if nothing else DifferenceKind.BLANK if blank else DifferenceKind.ENTRY
    return BlockDivergence(
        kind, position + offset, position + start.offset, index, term, field, values, damaged, evidence
    )


def _blame(copies: Mapping[str, Copy]) -> tuple[tuple[str, ...], str]:
    """Whose copy is damaged, and the evidence."""
    unsound = tuple(name for name, copy in copies.items() if not copy.sound)
    groups: dict[bytes, list[str]] = {}
    for name, copy in copies.items():
        groups.setdefault(copy.data, []).append(name)
    largest = max(groups.values(), key=len)
    majority = len(largest) * 2 > len(copies)
    outvoted = tuple(name for name in copies if name not in largest)
    if unsound and len(unsound) < len(copies):
        reasons = "; ".join(f"{name}: {copies[name].reason}" for name in unsound)
        return unsound, reasons + (", and the majority differs" if majority and unsound == outvoted else "")
    if majority and outvoted:
        checks = "all copies pass their checks" if not unsound else "no copy passes its checks"
        return outvoted, f"{', '.join(largest)} are the majority; {checks}"
    checks = "each copy passes its checks: the histories differ" if not unsound else "no copy passes its checks"
    return (), f"there is no majority, and {checks}"


def _identity(model: Copy, follow: Follow | None) -> tuple[int, int]:
    """Index and term of the entry, from a sound copy, otherwise from the preceding entry (-1 if unknown)."""
    if len(model.data) >= ENTRY_HEADER_BYTES:
        header = EntryHeader(*HEADER.unpack_from(model.data))
        if header.magic in _MAGICS:
            return header.index, header.term
    return (follow.index, follow.term) if follow is not None else (-1, -1)


def _field(tails: Mapping[str, bytes], offset: int, start: int, model: Copy) -> tuple[str, dict[str, str]]:
    """The name of the field containing the first differing byte, and every replica's value of it."""
    at = offset - start
    if len(model.data) >= MIN_BLANK_BYTES and BLANK.unpack_from(model.data)[0] == BLANK_MAGIC:
        field = next((name for name, _ in BLANK_HEAD.fields if at < BLANK_HEAD.behind(name)), "")
        first, end = (BLANK_HEAD.at(field), BLANK_HEAD.behind(field)) if field else (at, at + 1)
        name = "blank length" if field == "size" else f"blank {field or f'byte {at}'}"
    elif at < ENTRY_HEADER_BYTES:
        field = next(name for name, _ in ENTRY.fields if at < ENTRY.behind(name))
        name, first, end = _SHOWN_NAMES.get(field, field), ENTRY.at(field), ENTRY.behind(field)
    else:
        name, first, end = f"body byte {at - ENTRY_HEADER_BYTES}", at, at + 1
    return name, {
        replica: _shown(tail[start + first : start + end], end - first, name) for replica, tail in tails.items()
    }


def _shown(value: bytes, size: int, name: str) -> str:
    if len(value) < size:
        return "nothing"
    if size == 1:
        return f"0x{value[0]:02x}"
    number = int.from_bytes(value, "big", signed=name not in _UNSIGNED)
    return f"{number:#010x}" if name in _UNSIGNED else str(number)
