"""Parsers of values, the same everywhere: conf files, flags, the environment, Spark's options.

Each parser takes text without surrounding blanks and raises ``ValueError``, whose message names the text and the
accepted forms.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable
from typing import Final

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
