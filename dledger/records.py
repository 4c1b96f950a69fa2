"""Records: immutable values, created thousands of times a second.

A frozen dataclass sets each field through ``object.__setattr__``, which makes creation four times as expensive, and an
append creates some sixty. ``record`` takes the arguments of ``dataclass``, and to mypy it is ``dataclass``: mypy, which
checks every line of the project, refuses assignments to fields. At run time they are possible; equality, order and hash
are those of a frozen dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

_Class = TypeVar("_Class")

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, slots: bool, order: bool = False) -> Callable[[type[_Class]], type[_Class]]:
        """``dataclass``, except that ``frozen`` is left to mypy."""
        return dataclasses.dataclass(slots=slots, order=order, unsafe_hash=frozen)


__all__ = ["record"]
