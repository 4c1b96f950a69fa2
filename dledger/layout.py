"""The field layouts of stored structures. A layout lists its fields once; packing and reading code derive from it.

The log's own layouts are here, below everything else, because limits depend on their sizes; ``dledger.store.format``
explains the fields. numpy is loaded only for tables.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from dledger.records import record

if TYPE_CHECKING:
    import numpy as np

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
