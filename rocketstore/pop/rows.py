"""Rows of the pop tables as JSON, strictly checked: ``[group, topic, queue, generation, {what changes}]``.

Bitmaps are base64 of their bytes, the lowest first: one settled message takes four characters, a whole window 1.4 KB.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Final

from dledger.errors import InvalidRequestError
from rocketstore.message.checks import check_topic
from rocketstore.pop.tables import PARKED_MAX, WINDOW_MAX, FifoLock, Parked, PopPlace, PopRow

ROWS_MAX: Final = 256
"""Rows of one change."""
NUMBER_MAX: Final = 2**62
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
    _within("generation", row.generation, 1, NUMBER_MAX)
    for name in _NUMBERS.values():
        _within(name, getattr(row, name), -1 if name == "opens_at" else 0, NUMBER_MAX)
    _within("first settled offset", row.settled_from, 0, NUMBER_MAX)
    _within("bits of settled offsets", row.settled.bit_length(), 0, WINDOW_MAX)
    _within("parked messages", len(row.parked), 0, PARKED_MAX)
    _within("messages parked no more", len(row.unparked), 0, PARKED_MAX)
    numbers = [number for offset, parked in row.parked for number in (offset, *parked)]
    for number in (*numbers, *row.unparked, *(row.fifo[1:] if row.fifo is not None else ())):
        _within("number", number, 0, NUMBER_MAX)
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
