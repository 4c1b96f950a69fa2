"""Sizes on the command line: ``4g``."""

from __future__ import annotations

import re
from typing import Final

import click

_SIZE: Final = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_FACTORS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class _Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3 only
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """A number of bytes, also with k, m, g or t (powers of 1024); more than 0."""
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip())
        size = int(found[1]) * _FACTORS[found[2].lower()] if found else 0
        if size <= 0:
            self.fail(f"{value!r} is no size: write bytes, or a number with k, m, g or t", param, ctx)
        return size


SIZE: Final = _Size()
