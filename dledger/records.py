"""Records: values that nobody changes, made a thousand times a second.

A frozen dataclass sets each field through ``object.__setattr__``, so that making one costs four times as much as making
one that is not frozen, and an append makes some sixty. ``record`` takes what ``dataclass`` takes, and to mypy it is
``dataclass``: an assignment to a field is refused there, where every line of the project is checked. At run time it is
not; equality, order and hash are those of a frozen one.
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
        """As ``dataclass``, but that ``frozen`` is left to mypy."""
        return dataclasses.dataclass(slots=slots, order=order, unsafe_hash=frozen)


__all__ = ["record"]
