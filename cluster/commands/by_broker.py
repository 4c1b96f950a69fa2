"""Prints what several groups of brokers answered, each row with the group's name; without names for a single one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from cluster import terminal

_T = TypeVar("_T")


def print_table(
    columns: Sequence[str],
    found: Sequence[tuple[str, Sequence[_T]]],
    row: Callable[[_T], tuple[str, ...]],
    *,
    least: Sequence[str] = (),
) -> None:
    """Print one table; columns of ``least`` are left out where there is no room."""
    if len(found) > 1:
        rows = [(broker, *row(one)) for broker, ones in found for one in ones]
        terminal.print_table(("broker", *columns), rows, least=least)
    else:
        terminal.print_table(columns, [row(one) for _, ones in found for one in ones], least=least)
