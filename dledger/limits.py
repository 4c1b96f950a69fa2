"""Limits of the numbers in fields, written beside the type: ``queues: Annotated[int, Range(1, 65536)] = 8``.

Validation, its messages and the generated reference all read them; relations between fields are code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import nan
from numbers import Real
from typing import Annotated, Final, get_type_hints


class Unit(StrEnum):
    """The unit of a field, which determines how its text is read and its value shown."""

    BYTES = "bytes"
    MS = "ms"
    HOURS = "hours"
    PERCENT = "percent"


@dataclass(frozen=True, slots=True)
class Range:
    """From ``low`` to ``high``, both included; with ``above``, from above that.

    ``or_zero``: 0 is allowed too, and switches the limit off. For a tuple, it applies to each item.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    or_zero: bool = False
    multiple_of: int = 0

    def allows(self, value: float) -> bool:
        """Whether a value is in range; NaN never is."""
        if self.or_zero and value == 0:
            return True
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (not self.multiple_of or value % self.multiple_of == 0)
        )

    def text(self, unit: Unit | None = None) -> str:
        """For people; completes "must be"."""
        low, high, above = (None if one is None else _bound(one, unit) for one in (self.low, self.high, self.above))
        parts = [
            "0 or" if self.or_zero else "",
            f"above {above}" if above is not None else "",
            f"between {low} and {high}" if low is not None and high is not None else "",
            f"at least {low}" if low is not None and high is None else "",
            f"{'and ' if above is not None else ''}at most {high}" if low is None and high is not None else "",
            f"and a multiple of {self.multiple_of}" if self.multiple_of else "",
        ]
        return " ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class Internal:
    """Beside a field that no conf file, variable or flag sets: nobody turns it, but simulations and tests do."""


def _number(value: object) -> float:
    """The number; NaN, which is in no range, for anything else."""
    if isinstance(value, int | float):
        return value
    return float(value) if isinstance(value, Real) else nan


@dataclass(frozen=True, slots=True)
class FieldLimits:
    """The limits beside one field's type."""

    range: Range | None = None
    unit: Unit | None = None
    is_setting: bool = True

    def complaint(self, value: object) -> str:
        """The problem with a value; empty if there is none."""
        if self.range is None or value is None:
            return ""
        given = value if isinstance(value, tuple) else (value,)
        if all(self.range.allows(_number(one)) for one in given):
            return ""
        return f"{';'.join(map(str, given))} must be {self.range.text(self.unit)}"

    def problem(self, name: str, value: object) -> str:
        """The same for a field of this name."""
        complaint = self.complaint(value)
        return f"{name}={complaint}" if complaint else ""


_KNOWN: Final[dict[type, Mapping[str, FieldLimits]]] = {}
"""Cached: computing them takes too long for a record that is created per sender."""


def limits_of(record: type) -> Mapping[str, FieldLimits]:
    """The limits of every field of a record."""
    if (known := _KNOWN.get(record)) is not None:
        return known
    found: dict[str, FieldLimits] = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        beside: tuple[object, ...] = getattr(hint, "__metadata__", ())
        allowed = next((one for one in beside if isinstance(one, Range)), None)
        unit = next((one for one in beside if isinstance(one, Unit)), None)
        found[name] = FieldLimits(allowed, unit, is_setting=not any(isinstance(one, Internal) for one in beside))
    _KNOWN[record] = found
    return found


def out_of_range(record: object) -> list[str]:
    """Everything wrong with the numbers in a record, one sentence per field."""
    problems = (one.problem(name, getattr(record, name)) for name, one in limits_of(type(record)).items())
    return [one for one in problems if one]


_SIZE_WORDS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size_text(size: int) -> str:
    """A number of bytes with a unit, if that is exact."""
    for unit, word in _SIZE_WORDS:
        if size >= unit and size % unit == 0:
            return f"{size // unit} {word}"
    return f"{size:,} bytes"


def _bound(value: float, unit: Unit | None) -> str:
    if unit is Unit.BYTES and value and value % 1024 == 0:
        return size_text(int(value))
    return str(int(value)) if value == int(value) else f"{value:g}"


Positive = Annotated[int, Range(1)]
AboveZero = Annotated[float, Range(above=0)]
Port = Annotated[int, Range(0, 65535)]
Bytes = Annotated[int, Range(1), Unit.BYTES]
BytesOrZero = Annotated[int, Range(0), Unit.BYTES]
Millis = Annotated[int, Range(1), Unit.MS]
AnyMillis = Annotated[int, Unit.MS]
Percent = Annotated[int, Range(1, 100), Unit.PERCENT]
