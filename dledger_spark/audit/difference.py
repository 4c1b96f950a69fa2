"""The first place at which replicas differ, named: which entry, which field, and whose copy is damaged. Pure.

Two witnesses say who is damaged. An entry's own CRCs: the body's, and the chain's, which covers the header and is
seeded with the entry before; they tell a flipped bit even where only two replicas are compared. And the majority of the
replicas, which also tells apart copies that all check out, as after a history that should never have happened.
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
"""How fields of headers are called in documents, where it is otherwise."""
_UNSIGNED: Final = frozenset({"chainCrc", "bodyCrc"})


class DifferenceKind(StrEnum):
    """What is wrong with a replica."""

    ENTRY = "entry differs"
    BLANK = "blank differs"
    TAIL = "tail missing"
    SEGMENT = "segment missing"
    UNREADABLE = "file unreadable"
    CHECKPOINT = "checkpoint unreadable"
    GONE = "differed, no longer does"


class Copy(NamedTuple):
    """One replica's bytes of the place where they differ, and whether they check out by themselves.

    ``empty``: only zeros, or nothing at all.
    """

    data: bytes
    sound: bool
    reason: str
    empty: bool


@dataclass(frozen=True, slots=True)
class BlockDivergence:
    """The first difference of a block.

    ``position`` is that of the first differing byte, ``entry_position`` of the entry or blank it lies in. ``index`` and
    ``term`` are those of a sound copy; of a blank, of the entry before it. ``values`` are what each replica has in the
    field. ``damaged`` is empty if nobody can tell who is; ``evidence`` says how that is known.
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
    """Where the first byte is that not all have alike, the end of a shorter one included; None if all are equal."""
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
    """Where the entry or blank begins that an offset lies in, and what precedes it (None: not known)."""

    offset: int
    follow: Follow | None


def walk(data: bytes, offset: int, follow: Follow | None) -> Walked:
    """Go from entry to entry, from the data's begin, to the one that holds ``offset``; all before must be sound."""
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
    """One replica's copy of the entry or blank at ``position``, cut to its own length, and whether it checks out.

    ``data`` goes up to the segment's end, or as far as the replica has it.
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
    # A damaged length must not decide how much is compared: then the rest counts, as far as it is at hand.
    return Copy(
        data[:size] if not reason and ENTRY_HEADER_BYTES <= size <= len(data) else data, not reason, reason, False
    )


def _problem(data: bytes, position: int, follow: Follow | None) -> str:
    """What is wrong with the entry that ``data`` begins with; without ``follow`` its chain CRC is not checked."""
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
    """The difference of replicas whose bytes from ``position`` on are ``tails``: an entry or a blank begins there.

    None if there is none. Each tail goes up to the segment's end, or as far as the replica has it or was asked for.
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
    """Whose copy is damaged, and how that is known."""
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
    """Index and term of the place, by a sound copy, else by what precedes it (-1: not known)."""
    if len(model.data) >= ENTRY_HEADER_BYTES:
        header = EntryHeader(*HEADER.unpack_from(model.data))
        if header.magic in _MAGICS:
            return header.index, header.term
    return (follow.index, follow.term) if follow is not None else (-1, -1)


def _field(tails: Mapping[str, bytes], offset: int, start: int, model: Copy) -> tuple[str, dict[str, str]]:
    """The name of the field that the first differing byte lies in, and every replica's value of it."""
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
