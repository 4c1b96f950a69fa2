"""Turns differing blocks into findings: reads their bytes again record by record, and describes the first difference of
each damaged replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dledger.store.format import BLANK, EntryHeader, Follow, segment_name
from dledger_spark.audit.blocks import ReplicaDigest
from dledger_spark.audit.difference import BlockDivergence, DifferenceKind, diverge
from dledger_spark.audit.replica import Replica, seek

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
        """See ``BlockReader``."""
        segment_bytes = next(iter(self.replicas.values())).segment_bytes
        return segment_name(position - position % segment_bytes)

    def divergence(self, block: int, end: int, names: Sequence[str]) -> BlockDivergence | None:
        """See ``BlockReader``."""
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
