"""Records: immutable values, created thousands of times a second, and the layouts of stored ones.

A frozen dataclass sets each field through ``object.__setattr__``, which makes creation four times as expensive, and an
append creates some sixty. ``record`` takes the arguments of ``dataclass``, and to mypy it is ``dataclass``: mypy, which
checks every line of the project, refuses assignments to fields. At run time they are possible; equality, order and hash
are those of a frozen dataclass. They are compiled when they are first needed, which few programs do of most records: it
is a tenth of what a short command costs.

``RecordLayout`` is the field layout of a stored structure: it lists the fields once, and packing and reading code
derive from it. The log's own layouts are here, below everything else, because limits depend on their sizes;
``dledger.store.format`` explains the fields. numpy is loaded only for tables.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from struct import Struct
from typing import TYPE_CHECKING, Final, TypeVar

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


if TYPE_CHECKING:
    import numpy as np

_Class = TypeVar("_Class")


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


_CODES: Final = {"i1": "b", "u1": "B", "i2": "h", "i4": "i", "u4": "I", "i8": "q"}


@record(frozen=True, slots=True)
class RecordLayout:
    """Fields in stored order: big-endian, without gaps.

    Each is a name and a kind: a number's sign and bytes, such as ``"i4"``, or ``"V"`` and a number of bytes.
    """

    fields: tuple[tuple[str, str], ...]

    @property
    def size(self) -> int:
        """The bytes of a structure."""
        return sum(_width(kind) for _, kind in self.fields)

    def at(self, name: str) -> int:
        """Where a field begins."""
        names = [one for one, _ in self.fields]
        return sum(_width(kind) for _, kind in self.fields[: names.index(name)])

    def behind(self, name: str) -> int:
        """Where a field ends."""
        return self.at(name) + _width(dict(self.fields)[name])

    def without(self, name: str) -> RecordLayout:
        """The same without one field, closed up."""
        return RecordLayout(tuple(field for field in self.fields if field[0] != name))

    def prefixed(self, prefix: str) -> RecordLayout:
        """The same with prefixed names."""
        return RecordLayout(tuple((prefix + name, kind) for name, kind in self.fields))

    def followed_by(self, other: RecordLayout) -> RecordLayout:
        """One structure directly after the other."""
        return RecordLayout(self.fields + other.fields)

    def struct(self, *names: str) -> Struct:
        """Packs or reads whole structures, for these fields in stored order, or all of them."""
        wanted = names or tuple(name for name, _ in self.fields)
        if tuple(name for name, _ in self.fields if name in wanted) != wanted:
            raise ValueError(f"{wanted} are not fields in the order in which they are stored")
        codes = (_code(kind) if name in wanted else f"{_width(kind)}x" for name, kind in self.fields)
        return Struct(">" + "".join(codes))

    def part(self, *names: str) -> Struct:
        """Packs or reads adjacent fields alone."""
        first = [name for name, _ in self.fields].index(names[0])
        fields = self.fields[first : first + len(names)]
        if tuple(name for name, _ in fields) != names:
            raise ValueError(f"{names} do not stand next to each other")
        return Struct(">" + "".join(_code(kind) for _, kind in fields))

    def dtype(self) -> np.dtype[np.void]:
        """A row of a table of structures."""
        import numpy as np

        return np.dtype([(name, kind if kind[0] == "V" else f">{kind}") for name, kind in self.fields])


def _width(kind: str) -> int:
    return int(kind[1:])


def _code(kind: str) -> str:
    return f"{kind[1:]}s" if kind[0] == "V" else _CODES[kind]


ENTRY: Final = RecordLayout(
    (
        ("magic", "i4"),
        ("size", "i4"),
        ("index", "i8"),
        ("term", "i8"),
        ("position", "i8"),
        ("channel", "i4"),
        ("chain_crc", "u4"),
        ("body_crc", "u4"),
        ("body_length", "i4"),
    )
)
"""The header of an entry, before its body."""
INDEX_UNIT: Final = RecordLayout((("magic", "i4"), ("position", "i8"), ("size", "i4"), ("index", "i8"), ("term", "i8")))
BLANK_HEAD: Final = RecordLayout((("magic", "i4"), ("size", "i4")))
"""The start of a blank; an entry starts alike."""
ENTRY_HEADER_BYTES: Final = ENTRY.size
INDEX_UNIT_BYTES: Final = INDEX_UNIT.size
MIN_BLANK_BYTES: Final = BLANK_HEAD.size
BLANK_MAGIC: Final = -1
