"""Reading the text of one option: numbers, sizes, durations, addresses, offsets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from dledger.config import MIB

EARLIEST: Final = -2
"""``startingOffsets=earliest``; Kafka's number for it."""
LATEST: Final = -1
"""``latest``; Kafka's number for it."""
_SIZE: Final = re.compile(r"(\d+)\s*([kmg]?)i?b?", re.IGNORECASE)
_SIZE_FACTORS: Final = {"": 1, "k": 1024, "m": MIB, "g": 1024 * MIB}
_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|h)?", re.IGNORECASE)
_DURATION_FACTORS: Final = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_BOOLEANS: Final = {"true": True, "false": False}


class BadValueError(ValueError):
    """Raised for a text that an option cannot have; the message completes "option x: "."""


def text_value(text: str) -> str:
    return text


def path_value(text: str) -> str:
    """A local path; Spark's catalog hands over ``file:`` URIs."""
    for prefix in ("file://", "file:"):
        if text.startswith(prefix):
            return text[len(prefix) :]
    if "://" in text:
        raise BadValueError(
            f"{text} is on no local file system: mount or copy the directory, or read the running group"
        )
    return text


def addresses_value(text: str) -> tuple[str, ...]:
    addresses = tuple(one.strip() for one in re.split("[,;]", text) if one.strip())
    for one in addresses:
        host, _, port = one.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise BadValueError(f"{one} is not host:port (a node's client port)")
    if not addresses:
        raise BadValueError("name at least one host:port")
    return addresses


def names_value(text: str) -> tuple[str, ...]:
    names = tuple(one.strip() for one in text.split(",") if one.strip())
    if not names:
        raise BadValueError("name at least one topic")
    return names


def pattern_value(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise BadValueError(f"{text} is no regular expression: {error}") from error
    return text


def number_value(minimum: int, maximum: int = (1 << 63) - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise BadValueError(f"invalid whole number {text!r}") from None
        if not minimum <= number <= maximum:
            raise BadValueError(f"{number} is not between {minimum} and {maximum}")
        return number

    return parse


def size_value(minimum: int, maximum: int = (1 << 63) - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        match = _SIZE.fullmatch(text)
        if not match:
            raise BadValueError(f"{text!r} is no size: bytes, or a number with k, m or g")
        size = int(match[1]) * _SIZE_FACTORS[match[2].lower()]
        if not minimum <= size <= maximum:
            raise BadValueError(f"{text} is not between {minimum} and {maximum} bytes")
        return size

    return parse


def duration_ms_value(text: str) -> int:
    match = _DURATION.fullmatch(text)
    if not match:
        raise BadValueError(f"{text!r} is no duration: a number with ms, s, m or h")
    return int(match[1]) * _DURATION_FACTORS[(match[2] or "").lower()]


def boolean_value(text: str) -> bool:
    try:
        return _BOOLEANS[text.lower()]
    except KeyError:
        raise BadValueError(f"invalid boolean {text!r}: use true or false") from None


def choice_value(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        for one in choices:
            if text.lower() == one:
                return one
        raise BadValueError(f"invalid value {text!r}: use one of {', '.join(choices)}")

    return parse


def offsets_value(*, starting: bool) -> Callable[[str], int]:
    """``earliest``, ``latest``, ``{"index": N}``, or N; -2 and -1 as in Kafka."""
    words = {"earliest": EARLIEST, "latest": LATEST} if starting else {"latest": LATEST}
    allowed = f'{", ".join(words)} or {{"index": N}}'

    def parse(text: str) -> int:
        if text.lower() in words:
            return words[text.lower()]
        try:
            value = json.loads(text)
        except ValueError:
            raise BadValueError(f"invalid value {text!r}: use one of {allowed}") from None
        if isinstance(value, dict) and set(value) == {"index"}:
            value = value["index"]
        elif isinstance(value, dict):
            raise BadValueError(f"a group is one log with one index, not one per topic and partition: {allowed}")
        if not isinstance(value, int) or isinstance(value, bool) or (value < 0 and value not in words.values()):
            raise BadValueError(f"invalid value {text!r}: use one of {allowed}")
        return value

    return parse
