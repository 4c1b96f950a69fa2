"""Reads a page's request to the console, field by field."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

OFFSET_MAX: Final = (1 << 63) - 1


class BadInputError(Exception):
    """Raised for an invalid request; the message says why, and ``field`` which field is wrong, if it is one."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Fields:
    """A JSON object with some of the ``known`` fields; null counts as missing. Everything raises ``BadInputError``."""

    def __init__(self, body: bytes, known: Collection[str]) -> None:
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise BadInputError("the body must be a JSON object") from None
        if not isinstance(given, dict):
            raise BadInputError("the body must be a JSON object")
        if unknown := sorted(given.keys() - set(known)):
            raise BadInputError(f"unknown field {unknown[0][:64]!r}: use {', '.join(known)}")
        self._given: dict[str, object] = {name: value for name, value in given.items() if value is not None}

    def text(self, name: str, *, longest: int, shortest: int = 1) -> str:
        """A text of at most ``longest`` characters, without control characters."""
        text = self.body(name, longest=longest, shortest=shortest)
        if not text.isprintable():
            raise BadInputError(f"{name} has control characters", name)
        return text

    def body(self, name: str, *, longest: int, shortest: int = 0) -> str:
        """A text of any characters."""
        found = self._given.get(name, "")
        if not isinstance(found, str):
            raise BadInputError(f"{name} must be a text", name)
        if len(found) < shortest:
            raise BadInputError(f"{name} is missing", name)
        if len(found) > longest:
            raise BadInputError(f"{name} has {len(found):,} characters: at most {longest:,} are allowed", name)
        try:
            found.encode()
        except UnicodeEncodeError:
            raise BadInputError(f"{name} has half a character (a lone surrogate)", name) from None
        return found

    def number(self, name: str, low: int, high: int) -> int:
        """A whole number."""
        found = self.optional_number(name, low, high)
        if found is None:
            raise BadInputError(f"{name} is missing: give a number from {low:,} to {high:,}", name)
        return found

    def optional_number(self, name: str, low: int, high: int) -> int | None:
        """A whole number, or None if there is none."""
        found = self._given.get(name)
        return None if found is None else _whole(found, name, low, high)

    def flag(self, name: str) -> bool:
        """True or false; false if missing."""
        found = self._given.get(name, False)
        if not isinstance(found, bool):
            raise BadInputError(f"{name} must be true or false", name)
        return found

    def choice(self, name: str, choices: Collection[str]) -> str:
        """One of several words."""
        found = self._given.get(name)
        if not isinstance(found, str) or found not in choices:
            raise BadInputError(f"{name} must be one of {', '.join(choices)}", name)
        return found

    def places(self, name: str, *, most: int) -> dict[int, int]:
        """An object with an offset for some queues, at least one."""
        found = self._given.get(name)
        if not isinstance(found, dict) or not 0 < len(found) <= most:
            raise BadInputError(f"{name} must have the offsets of 1 to {most:,} queues", name)
        return {
            _whole(_digits(queue), name, 0, 65_535): _whole(offset, name, 0, OFFSET_MAX)
            for queue, offset in found.items()
        }


def _digits(text: str) -> object:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else text


def _whole(found: object, name: str, low: int, high: int) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
        raise BadInputError(f"{name} must be a whole number from {low:,} to {high:,}", name)
    return found
