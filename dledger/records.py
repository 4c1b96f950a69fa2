"""Records: immutable values, created thousands of times a second.

A frozen dataclass sets each field through ``object.__setattr__``, which makes creation four times as expensive, and an
append creates some sixty. ``record`` takes the arguments of ``dataclass``, and to mypy it is ``dataclass``: mypy, which
checks every line of the project, refuses assignments to fields. At run time they are possible; equality, order and hash
are those of a frozen dataclass. They are compiled when they are first needed, which few programs do of most records: it
is a tenth of what a short command costs.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

_Class = TypeVar("_Class")

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, slots: bool, order: bool = False) -> Callable[[type[_Class]], type[_Class]]:
        """``dataclass``, except that ``frozen`` is left to mypy."""
        if order or not frozen:
            return dataclasses.dataclass(slots=slots, order=order, unsafe_hash=frozen)

        def made(kind: type[_Class]) -> type[_Class]:
            own = {name for name in ("__repr__", "__eq__", "__hash__") if kind.__dict__.get(name) is not None}
            kind = dataclasses.dataclass(slots=slots, eq=False, repr=False)(kind)
            if "__repr__" not in own:
                kind.__repr__ = _repr
            if "__eq__" not in own:
                kind.__eq__ = _at_first_use(kind, "__eq__", _EQUALITY)
            if "__hash__" not in own:
                kind.__hash__ = _at_first_use(kind, "__hash__", _HASH)
            return kind

        return made


_EQUALITY = """
def __eq__(self, other):
    if other.__class__ is self.__class__:
        return {self} == {other}
    return NotImplemented
"""
_HASH = """
def __hash__(self):
    return hash({self})
"""


def _at_first_use(kind: type, name: str, source: str) -> Callable[..., object]:
    """A method that puts the compiled one in its place."""

    def method(self: object, *arguments: object) -> object:
        compared = [one.name for one in dataclasses.fields(kind) if one.compare]
        values = {whose: "".join(f"{whose}.{field}, " for field in compared) for whose in ("self", "other")}
        compiled: dict[str, Callable[..., object]] = {}
        exec(source.format(**{whose: f"({fields})" for whose, fields in values.items()}), compiled)
        setattr(kind, name, compiled[name])
        return compiled[name](self, *arguments)

    return method


@reprlib.recursive_repr()
def _repr(self: object) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self) if one.repr)  # type: ignore[arg-type]  # it is one
    return f"{type(self).__qualname__}({', '.join(shown)})"


__all__ = ["record"]
