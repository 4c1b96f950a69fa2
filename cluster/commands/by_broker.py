"""Prints what several groups of brokers answered, each row with the group's name; without names for a single one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from cluster import terminal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T")
_D = TypeVar("_D", bound="DataclassInstance")


def facts(found: Sequence[tuple[str, Sequence[_D]]]) -> list[dict[str, object]]:
    """Everything as JSON objects."""
    several = len(found) > 1
    return [
        {**({"broker": broker} if several else {}), **dataclasses.asdict(one)} for broker, ones in found for one in ones
    ]


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
