"""Times on the command line: as they are given, and as they are shown."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from typing import Literal

import click

from dledger.values import parse_duration_ms


class Moment(click.ParamType[str | int]):
    """A time: milliseconds since 1970, ISO 8601 (local time unless it has an offset), or an age (``30m``).

    With ``ends``, also ``first`` and ``last``, which stay text.
    """

    name = "time"

    def __init__(self, *, ends: bool = False) -> None:
        self._ends = ends

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        """Milliseconds since 1970, or the word."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if self._ends and text in ("first", "last"):
            return text
        if text.isascii() and text.isdigit():
            return int(text)
        try:
            return _moment_ms(text)
        except ValueError:
            words = "first, last, " if self._ends else ""
            self.fail(f"invalid time {text!r}: use {words}2026-01-31T12:00, 30m (ago) or milliseconds", param, ctx)


def _moment_ms(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (ago_ms := parse_duration_ms(text, unit="")) >= 0:
            return int(time.time() * 1000 - ago_ms)
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def start_of(moment: str | int) -> Literal["first", "last"] | int:
    """Converts the value of ``Moment(ends=True)`` to a consumer's start."""
    if isinstance(moment, int):
        return moment
    return "last" if moment == "last" else "first"


def time_text(moment_ms: int) -> str:
    """Local time to the millisecond; empty for no time."""
    if moment_ms <= 0:
        return ""
    return datetime.fromtimestamp(moment_ms / 1000).astimezone().isoformat(" ", "milliseconds")[:23]
