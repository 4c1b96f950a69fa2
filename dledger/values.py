"""Parsers of values, the same everywhere (conf files, flags, the environment, Spark's options), and limits of numbers.

Each parser takes text without surrounding blanks and raises ``ValueError``, whose message names the text and the
accepted forms.

The limits of a field are written beside its type: ``queues: Annotated[int, Range(1, 65536)] = 8``. Validation, its
messages and the generated reference all read them; relations between fields are code.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import nan
from numbers import Real
from pathlib import Path
from typing import Annotated, Final, get_type_hints

_SIZE: Final = re.compile(r"([+-]?\d+)\s*([kmgt]?)i?b?", re.IGNORECASE | re.ASCII)
_SIZE_SHIFTS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_DURATION: Final = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))\s*(ms|s|m|h|d)?", re.IGNORECASE | re.ASCII)
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION_MS_MAX: Final = (1 << 63) - 1
_INTEGER: Final = re.compile(r"[+-]?\d+(?:_\d+)*", re.ASCII)
_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_TRUE: Final = ("true", "yes", "on", "1")
_FALSE: Final = ("false", "no", "off", "0")
PORT_MAX: Final = 65535
MIB: Final = 1 << 20
CLIENT_PORT_OFFSET: Final = 10_000
"""From a node's peer port to its client port, unless it is configured."""
GRPC_PORT_OFFSET: Final = 2
"""From the port for clients to that of gRPC, unless it is configured."""


def parse_size(text: str) -> int:
    """A number of bytes: ``4096``, ``64k``, ``16MiB``, ``1g`` (powers of 1024)."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"invalid size {text!r}: use bytes or a suffix, such as 64k, 16MiB or 1g")
    return int(match[1]) << _SIZE_SHIFTS[match[2].lower()]


def parse_duration_ms(text: str, unit: str = "ms") -> float:
    """Milliseconds: ``500ms``, ``30s``, ``1.5h``. A bare number is in ``unit``; if that is empty, it is refused."""
    match = _DURATION.fullmatch(text)
    of = (match[2] or unit).lower() if match is not None else ""
    if match is None or not of:
        bare = f" ({unit} without one)" if unit else ""
        raise ValueError(f"invalid duration {text!r}: use a number with ms, s, m, h or d{bare}")
    from fractions import Fraction  # here: few programs are given a duration

    exact = Fraction(match[1]) * _UNITS_MS[of]  # 1.001s are 1001 ms, which no binary fraction is
    if abs(exact) > _DURATION_MS_MAX:
        raise ValueError(f"invalid duration {text!r}: at most {_DURATION_MS_MAX} ms")
    return int(exact) if exact.denominator == 1 else float(exact)


def parse_millis(text: str) -> int:
    """A whole number of milliseconds: ``500``, ``500ms``, ``30s``."""
    found = parse_duration_ms(text) if _INTEGER.fullmatch(text) is None else parse_integer(text)
    if found != int(found):
        raise ValueError(f"invalid duration {text!r}: use whole milliseconds")
    return int(found)


def parse_integer(text: str) -> int:
    """A whole number, also ``10_000``."""
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"invalid whole number {text!r}")
    return int(text)


def parse_number(text: str) -> float:
    """A decimal number without an exponent."""
    if _NUMBER.fullmatch(text) is None or not math.isfinite(float(text)):
        raise ValueError(f"invalid number {text!r}")
    return float(text)


def parse_percentage(text: str) -> float:
    """A percentage, as a ratio."""
    return parse_number(text) / 100


def parse_boolean(text: str) -> bool:
    """``true`` or ``false`` and their usual synonyms."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"invalid boolean {text!r}: use true or false")


def split(text: str, separators: str) -> list[str]:
    """The parts between any of the separators, without blanks and empty ones."""
    return [part.strip() for part in re.split(f"[{separators}]", text) if part.strip()]


def parse_path(text: str) -> Path:
    """A path; ``~`` is a user's home directory. Raises ``ValueError`` if there is none."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text!r}: there is no such home directory: write the whole path") from None


# --- addresses -------------------------------------------------------------------------------------------------------


def parse_address(text: str, port_min: int = 1) -> tuple[str, int]:
    """``host:port``; an IPv6 host is in brackets, or bare if the part left of the last colon is one."""
    host, _, digits = text.rpartition(":")
    host = without_brackets(host)
    port = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= len(str(PORT_MAX)) else -1
    if not host or not port_min <= port <= PORT_MAX or (":" in host and not _is_ipv6(host)):
        raise ValueError(
            f"invalid address {text!r}: use HOST:PORT with a port up to {PORT_MAX}, "
            "such as 127.0.0.1:30911 or [::1]:30911"
        )
    return host, port


def parse_addresses(text: str) -> tuple[str, ...]:
    """``host:port,host:port``, also separated by semicolons; at least one."""
    found = tuple(address_text(*parse_address(part)) for part in split(text, ",;"))
    if not found:
        raise ValueError("no address given: use HOST:PORT,HOST:PORT")
    return found


def address_text(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host of ``host:port``, without brackets; empty if there is no port."""
    return without_brackets(address.rpartition(":")[0])


def without_brackets(host: str) -> str:
    """An IPv6 host in the form that sockets want; any other unchanged."""
    return host.removeprefix("[").removesuffix("]")


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def plaintext_problems(addresses: Iterable[str], use_tls: str, insist: str) -> list[str]:
    """Problems of plaintext at these addresses (``host:port`` or hosts): none if all are on this machine."""
    remote = [one for one in dict.fromkeys(addresses) if not is_loopback(one)]
    if not remote:
        return []
    return [
        f"plaintext is for loopback addresses only, not for {', '.join(remote)}: {use_tls} "
        f"(`dledger certs` creates the files), or {insist} to accept the risk"
    ]


def is_loopback(address: str) -> bool:
    """Whether a host, or the host of ``host:port``, is certainly this machine and visible from nowhere else.

    Of names only ``localhost``: many machines ask a name server for names ending in ``.localhost``.
    """
    kind, _, path = address.partition(":")
    if kind in ("unix", "unix-abstract") and path:
        return not path.isdigit()  # otherwise a host of that name
    has_port = address.count(":") == 1 or (address.startswith("[") and not address.endswith("]"))
    host = host_of(address) if has_port else without_brackets(address)
    if host.removesuffix(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
