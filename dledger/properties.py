"""Java ``.properties`` text, as in RocketMQ's ``.conf`` files. Pure: text in, properties out.

Hand-written, because Python's own parsers are for INI files: other escapes, sections, and no line numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dledger.errors import ConfigError

_BLANKS = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")


@dataclass(frozen=True, slots=True)
class Property:
    """One ``key=value`` and the number of the line where it starts."""

    key: str
    value: str
    line: int


def decode(raw: bytes) -> str:
    """Decode UTF-8 (dropping a byte order mark) or, if it is invalid, latin-1, which accepts all bytes."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def parse(text: str) -> list[Property]:
    """Every property in the order of the text; blanks at the end of a value are dropped (in Java they break numbers).

    Raises ``ConfigError`` naming every line with an invalid escape.
    """
    found: list[Property] = []
    problems: list[str] = []
    for number, line in _logical_lines(text):
        key, value = _split(line)
        try:
            found.append(Property(_unescape(key), _unescape(value.rstrip(_BLANKS)), number))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise ConfigError(problems)
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments and blank lines; one that ends in an odd number of ``\\`` continues on the next.

    ``<!--`` at the start of a line opens a comment, too: files of RocketMQ 5's distribution begin with one, and Java
    takes each of its lines for a property. Raises ``ConfigError`` if it is never closed.
    """
    pending = ""
    start = 0
    opened = 0
    for number, natural in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        line = natural.lstrip(_BLANKS)
        if not start:
            if opened or line.startswith("<!--"):
                opened = 0 if "-->" in line else opened or number
                continue
            if not line or line[0] in "#!":
                continue
            start = number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            pending += line[:-1]
            continue
        yield start, pending + line
        pending, start = "", 0
    if opened:
        raise ConfigError([f"line {opened}: the comment <!-- is never closed: add --> after it"])
    if start:
        yield start, pending


def _split(line: str) -> tuple[str, str]:
    """The key ends at the first unescaped ``=``, ``:`` or blank; blanks around one ``=`` or ``:`` belong to neither."""
    at = 0
    while at < len(line) and line[at] not in "=:" + _BLANKS:
        at += 2 if line[at] == "\\" else 1
    value = line[at:].lstrip(_BLANKS)
    if value[:1] in ("=", ":"):
        value = value[1:].lstrip(_BLANKS)
    return line[:at], value


def _unescape(text: str) -> str:
    parts: list[str] = []
    at = 0
    while at < len(text):
        if text[at] != "\\":
            parts.append(text[at])
            at += 1
            continue
        escaped = text[at + 1 : at + 2]
        at += 2
        if escaped == "u":
            if not _HEX4.match(text, at):
                raise ValueError("\\u must be followed by four hexadecimal digits")
            parts.append(chr(int(text[at : at + 4], 16)))
            at += 4
        else:
            parts.append(_ESCAPES.get(escaped, escaped))
    # Java strings are UTF-16: a character beyond the basic plane is written as two escapes.
    return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
