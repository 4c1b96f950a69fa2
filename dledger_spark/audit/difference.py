"""Describes the first difference between replicas: which entry, which field, and whose copy is damaged. Pure.

Two kinds of evidence identify the damaged copy. The entry's own CRCs: that of the body, and that of the chain, which
covers the header and is seeded with the previous entry; they reveal a flipped bit even between two replicas. And the
majority of the replicas, which also distinguishes copies that are all consistent, as after histories that should never
have diverged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from dledger.layout import BLANK_HEAD, BLANK_MAGIC, ENTRY, ENTRY_HEADER_BYTES, MIN_BLANK_BYTES
from dledger.store.format import BLANK, HEADER, EntryHeader, Follow, ScanWindow, StopKind, header_problem, scan_records
from dledger.types import Magic

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
