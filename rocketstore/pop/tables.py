"""Pop's replicated state: for each group and queue, which messages were given out, and which of them are settled.

A leader changes a ``LeaseWindow`` only by rows of the log (``PopRow``), and answers once they are applied: every
later leader knows each message that may have been given out, and each that is settled. Leases themselves are in the
leader's memory; ``leased_until_ms`` bounds them all, and the exceptions, which are few, are in the table.

Rows say what shall be, not what to add: one that is applied twice, or after another one that says more, does no harm.
So a leader that does not know whether one was stored writes it again. A row counts only for the *generation* of the
window that it was made for. A window that is made or moved by anybody else has another one, which no window of the
queue had before.

Windows are immutable: anyone who has one may read it on any thread.

Rows are JSON, strictly checked: ``[group, topic, queue, generation, {what changes}]``. Bitmaps are base64 of their
bytes, the lowest first: one settled message takes four characters, a whole window 1.4 KB.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from dledger.access.rules import RETRY_PREFIX
from dledger.errors import InvalidRequestError
from rocketstore.message.checks import check_topic

WINDOW_MAX: Final = 8192
"""Messages between the first one that is not settled and the last one given out (P10)."""
PARKED_MAX: Final = 1024
"""Messages of one queue that are noted singly."""
LEASE_MS_MAX: Final = 60_000
"""The longest ordinary lease; longer ones are noted singly."""
AHEAD_MAX: Final = 8
"""Messages of a queue that may be given out before a row says so."""
AHEAD_MS: Final = 5_000
"""For so long after the row that permits it; ``leased_until_ms`` is at most this and the longest lease ahead."""

_NO_PARKED: Final[Mapping[int, Parked]] = MappingProxyType({})


class PopPlace(NamedTuple):
    """A queue as one group sees it; ``topic`` may be the group's retry topic."""

    group: str
    topic: str
    queue_id: int


def retry_topic_of(group: str, topic: str) -> str:
    """The topic for a group's messages of a topic that come again; RocketMQ's clients know its name."""
    return f"{RETRY_PREFIX}{group}_{topic}"


class Parked(NamedTuple):
    """A message that is invisible for long, so that the commit offset passes it meanwhile."""

    visible_at_ms: int
    attempt: int
    """Deliveries so far that count."""
    number: int
    """Of its newest handle."""


class FifoLock(NamedTuple):
    """The newest batch of an ordered group; nothing else of the queue is given out before all of it is settled, or the
    lock ends.
    """

    attempt_id: str
    first: int
    last: int
    """Offsets of its messages: those from ``first`` to ``last`` that are not settled."""
    until_ms: int
    attempt: int
    """Deliveries so far that count, of each of them."""
    number: int
    """Of its handles."""


UNLOCKED: Final = FifoLock("", 1, 0, 0, 0, 0)
"""In a row: there is no batch any more, though it is not settled; the group is not ordered any more."""


class PopRow(NamedTuple):
    """One window's new state. Zeros, empty values and None say nothing."""

    place: PopPlace
    generation: int
    opens_at: int = -1
    """Make the window, beginning at this offset, unless there is one."""
    begin: int = 0
    """Everything below is settled."""
    reserved: int = 0
    """Everything below may have been given out."""
    ahead: int = 0
    """Everything below may be given out without another row."""
    leased_until_ms: int = 0
    numbers: int = 0
    """Handles may have any number below."""
    settled_from: int = 0
    settled: int = 0
    """A bitmap: bit i stands for the offset ``settled_from`` + i."""
    parked: tuple[tuple[int, Parked], ...] = ()
    """By offset; to the window they are settled."""
    unparked: tuple[int, ...] = ()
    fifo: FifoLock | None = None


@dataclass(frozen=True, slots=True)
class LeaseWindow:
    """The state of one queue for one group."""

    generation: int
    commit: int
    """Everything below is settled or parked; the group's offset, too."""
    reserved: int
    settled: int = 0
    """A bitmap: bit i stands for the offset ``commit`` + i; bits are below ``reserved``, and the lowest is 0."""
    leased_until_ms: int = 0
    """No ordinary lease ends later; ms since 1970 by the leader's clock, as all times here."""
    numbers: int = 0
    parked: Mapping[int, Parked] = field(default_factory=lambda: _NO_PARKED)
    fifo: FifoLock | None = None
    """None if all of it is settled."""
    ahead: int = 0
    """Messages from ``reserved`` to below this may have been given out, too, though probably none was."""

    @property
    def reach(self) -> int:
        """Everything below may have been given out."""
        return max(self.reserved, self.ahead)

    def is_settled(self, offset: int) -> bool:
        """Whether a message counts as settled, or is parked."""
        return offset < self.commit or bool(self.settled >> (offset - self.commit) & 1)

    def with_row(self, row: PopRow) -> LeaseWindow:
        """The window after a row of the same generation."""
        begin = max(self.commit, row.begin)
        reserved = max(self.reserved, row.reserved, begin)
        bits = self.settled >> (begin - self.commit) | _shifted(row.settled, row.settled_from - begin)
        parked = self.parked
        if row.parked or row.unparked:
            noted = dict(parked) | dict(row.parked)
            for offset, _ in row.parked:
                bits |= 1 << (offset - begin) if offset >= begin else 0
            for offset in row.unparked:
                noted.pop(offset, None)
            parked = MappingProxyType(noted) if noted else _NO_PARKED
        bits &= (1 << (reserved - begin)) - 1
        commit, bits = advanced(begin, bits)
        fifo = row.fifo or self.fifo
        return LeaseWindow(
            self.generation,
            commit,
            reserved,
            bits,
            max(self.leased_until_ms, row.leased_until_ms),
            max(self.numbers, row.numbers),
            parked,
            fifo if fifo is not None and fifo.last >= max(commit, fifo.first) else None,
            max(self.ahead, row.ahead),
        )

    def moved_to(self, offset: int, generation: int) -> LeaseWindow:
        """The window after somebody else committed ``offset``, which is higher: what is parked stays so."""
        there = self.with_row(PopRow(_NOWHERE, self.generation, begin=offset))
        return replace(there, generation=generation)

    def cut(self, end: int, generation: int) -> LeaseWindow:
        """The window without the messages from ``end`` on."""
        commit = min(self.commit, end)
        return replace(
            self,
            generation=generation,
            commit=commit,
            reserved=end,
            settled=self.settled & ((1 << (end - commit)) - 1),
            parked=MappingProxyType({offset: one for offset, one in self.parked.items() if offset < end}),
            fifo=self.fifo if self.fifo is not None and self.fifo.first < end else None,
            ahead=end,
        )

    def as_row(self, place: PopPlace) -> PopRow:
        """The row that makes this window."""
        return PopRow(
            place,
            self.generation,
            self.commit,
            reserved=self.reserved,
            ahead=self.ahead,
            leased_until_ms=self.leased_until_ms,
            numbers=self.numbers,
            settled_from=self.commit,
            settled=self.settled,
            parked=tuple(self.parked.items()),
            fifo=self.fifo,
        )


_NOWHERE: Final = PopPlace("", "", 0)


class PopTables:
    """All windows. Not thread-safe, as the tables that it is part of."""

    def __init__(self) -> None:
        self.windows: dict[PopPlace, LeaseWindow] = {}
        self.epoch = 0
        """The highest generation there ever was."""

    def apply(self, row: PopRow, committed: int | None) -> int | None:
        """Apply a row; ``committed`` is the group's offset in the queue, if it has one. Returns what that is then; None
        if the row does not count. Never fails.
        """
        window = self.windows.get(row.place)
        if window is None:
            if row.opens_at < 0 or row.generation <= self.epoch or committed not in (None, row.opens_at):
                return None
            window = LeaseWindow(row.generation, row.opens_at, row.opens_at)
            self.epoch = row.generation
        elif window.generation != row.generation:
            return None
        self.windows[row.place] = window = window.with_row(row)
        return window.commit

    def moved(self, place: PopPlace, offset: int, *, reset: bool) -> int:
        """Somebody else committed ``offset``. After a reset the window is gone, with what was parked (P12).

        Returns the group's offset then, which may be higher: the next messages may be settled.
        """
        window = self.windows.get(place)
        if window is None:
            return offset
        if reset or offset < window.commit:
            del self.windows[place]
            return offset
        self.epoch += 1
        self.windows[place] = window = window.moved_to(offset, self.epoch)
        return window.commit

    def delete_group(self, group: str) -> None:
        """Forget what a group was given (P12)."""
        self.windows = {place: one for place, one in self.windows.items() if place.group != group}

    def delete_topic(self, topic: str) -> None:
        """Forget what was given of a topic (P12)."""
        self.windows = {place: one for place, one in self.windows.items() if place.topic != topic}

    def parked_of(self, group: str) -> int:
        """How many messages of a group are parked (P11)."""
        return sum(len(one.parked) for place, one in self.windows.items() if place.group == group)

    def put_back(self, end_of: Callable[[str, int], int]) -> None:
        """Cut windows that reach beyond their queue's end, after a power cut truncated the log: other messages will be
        there.
        """
        for place, window in self.windows.items():
            end = end_of(place.topic, place.queue_id)
            if window.reserved > end:
                self.epoch += 1
                self.windows[place] = window.cut(end, self.epoch)

    def as_rows(self) -> list[PopRow]:
        """The rows that make these windows in empty tables with the groups' offsets; ``epoch`` is not in them."""
        ordered = sorted(self.windows.items(), key=lambda item: item[1].generation)
        return [window.as_row(place) for place, window in ordered]

    def copy(self) -> PopTables:
        made = PopTables()
        made.windows = self.windows.copy()
        made.epoch = self.epoch
        return made


def advanced(base: int, bits: int) -> tuple[int, int]:
    """``base`` moved over the ones at the low end of ``bits``, and the rest of these."""
    ones = (~bits & (bits + 1)).bit_length() - 1
    return base + ones, bits >> ones


def zeros(bits: int, base: int, end: int) -> Iterator[int]:
    """The offsets from ``base`` to below ``end`` whose bits are 0, in order."""
    left = ~bits & ((1 << max(end - base, 0)) - 1)
    while left:
        low = left & -left
        yield base + low.bit_length() - 1
        left ^= low


def _shifted(bits: int, by: int) -> int:
    return bits << by if by >= 0 else bits >> -by


ROWS_MAX: Final = 256
"""Rows of one change."""
_NUMBER_MAX: Final = 2**62
ATTEMPT_ID_MAX: Final = 64
_QUEUE_ID_MAX: Final = 65_535
_NUMBERS: Final = {
    "open": "opens_at",
    "begin": "begin",
    "reserved": "reserved",
    "ahead": "ahead",
    "until": "leased_until_ms",
    "numbers": "numbers",
}
"""Fields of a row that are whole numbers, by their name in JSON."""
_DEFAULT: Final = PopRow(PopPlace("", "", 0), 0)


class MalformedRowError(InvalidRequestError):
    """Raised when a row violates the rules."""


def check_row(row: PopRow) -> None:
    """Raises ``MalformedRowError`` for a row that could be written but not read back."""
    for what, name in (("group", row.place.group), ("topic", row.place.topic)):
        if not isinstance(name, str) or check_topic(name):
            raise MalformedRowError(f"pop row: {what} {name!r}: 1 to 127 of the characters a-z A-Z 0-9 % | _ -")
    _within("queue id", row.place.queue_id, 0, _QUEUE_ID_MAX)
    _within("generation", row.generation, 1, _NUMBER_MAX)
    for name in _NUMBERS.values():
        _within(name, getattr(row, name), -1 if name == "opens_at" else 0, _NUMBER_MAX)
    _within("first settled offset", row.settled_from, 0, _NUMBER_MAX)
    _within("bits of settled offsets", row.settled.bit_length(), 0, WINDOW_MAX)
    _within("parked messages", len(row.parked), 0, PARKED_MAX)
    _within("messages parked no more", len(row.unparked), 0, PARKED_MAX)
    numbers = [number for offset, parked in row.parked for number in (offset, *parked)]
    for number in (*numbers, *row.unparked, *(row.fifo[1:] if row.fifo is not None else ())):
        _within("number", number, 0, _NUMBER_MAX)
    if row.fifo is not None:
        _within("length of an attempt id", len(row.fifo.attempt_id), 0, ATTEMPT_ID_MAX)


def row_json(row: PopRow) -> list[object]:
    """A row for ``json.dumps``."""
    said: dict[str, object] = {
        name: value
        for name, attribute in _NUMBERS.items()
        if (value := getattr(row, attribute)) != getattr(_DEFAULT, attribute)
    }
    if row.settled:
        data = row.settled.to_bytes((row.settled.bit_length() + 7) // 8, "little")
        said["settled"] = [row.settled_from, base64.b64encode(data).decode()]
    if row.parked:
        said["parked"] = [[offset, *parked] for offset, parked in row.parked]
    if row.unparked:
        said["unparked"] = row.unparked
    if row.fifo is not None:
        said["fifo"] = row.fifo
    return [*row.place, row.generation, said]


def row_from_json(value: object) -> PopRow:
    """A row from the result of ``json.loads``. Raises ``MalformedRowError``; ``check_row`` is for the caller."""
    group, topic, queue_id, generation, said = _list(value, 5)
    if not isinstance(said, dict):
        raise MalformedRowError(f"pop row: expected an object, not {said!r}")
    unknown = said.keys() - _NUMBERS.keys() - {"settled", "parked", "unparked", "fifo"}
    if unknown:
        raise MalformedRowError(f"pop row: unknown {sorted(unknown)}")
    settled_from, settled = _bitmap(said["settled"]) if "settled" in said else (0, 0)
    opens_at, begin, reserved, ahead, until, numbers = (
        _int(said.get(name, getattr(_DEFAULT, attribute))) for name, attribute in _NUMBERS.items()
    )
    return PopRow(
        PopPlace(_text(group), _text(topic), _int(queue_id)),
        _int(generation),
        opens_at,
        begin,
        reserved,
        ahead,
        until,
        numbers,
        settled_from,
        settled,
        tuple(map(_parked, _list(said.get("parked", [])))),
        tuple(map(_int, _list(said.get("unparked", [])))),
        _fifo(said),
    )


def _bitmap(value: object) -> tuple[int, int]:
    first, text = _list(value, 2)
    try:
        data = base64.b64decode(_text(text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedRowError(f"pop row: settled offsets: {error}") from error
    return _int(first), int.from_bytes(data, "little")


def _parked(value: object) -> tuple[int, Parked]:
    offset, *rest = map(_int, _list(value, 4))
    return offset, Parked(*rest)


def _fifo(said: Mapping[str, object]) -> FifoLock | None:
    if "fifo" not in said:
        return None
    attempt_id, *numbers = _list(said["fifo"], 6)
    return FifoLock(_text(attempt_id), *map(_int, numbers))


def _list(value: object, length: int | None = None) -> Sequence[object]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise MalformedRowError(f"pop row: expected a list{'' if length is None else f' of {length}'}, not {value!r}")
    return value


def _int(value: object) -> int:
    if type(value) is not int:  # a bool is an int, too
        raise MalformedRowError(f"pop row: expected a whole number, not {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise MalformedRowError(f"pop row: expected a string, not {value!r}")
    return value


def _within(what: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise MalformedRowError(f"pop row: {what}: invalid whole number {value} within {least} to {most}")
