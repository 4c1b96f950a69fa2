"""JSON as written and read by fastjson, the library of RocketMQ's Java programs. Pure.

Java writes the keys of maps like values: ``{0:"127.0.0.1:10911"}``, and objects as keys,
``{{"brokerName":"b","queueId":0,"topic":"t"}:5}``. Here every key is a text: the number's digits, or the object's own
JSON as an ``ObjectKey``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from json import decoder
from json.encoder import encode_basestring_ascii
from typing import Any, Final, cast

from dledger.remoting.codes import RequestError

VALUES_MAX: Final = 500_000
"""Limit for the values in one text: a registration of 60,000 topics. Parsing takes up to 64 bytes and two microseconds
per value, during which nothing else runs; without a limit, a frame of 16 MiB would become gigabytes.
"""
TOLERANT_VALUES_MAX: Final = 200_000
"""Limit for a text that is not JSON: its parser takes a microsecond per value, during which nothing else runs."""
DEPTH_MAX: Final = 32
"""Limit for a text that is not JSON; no body of the protocol is deeper than eight."""
ESCAPES_MAX: Final = 200_000
"""Limit for a text with escaped surrogates: each takes half a microsecond to check."""

_scan_string: Final[Callable[[str, int, bool], tuple[str, int]]] = decoder.scanstring  # type: ignore[attr-defined]
_WIDE_ESCAPE: Final = "\\ud"
_ESCAPES: Final = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_SPACE: Final = re.compile(r"[ \t\r\n]*+")
_NUMBER: Final = re.compile(r"-?[0-9]++(\.[0-9]++)?([eE][+-]?[0-9]++)?")
_NAME: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*+")
_SINGLE_QUOTED: Final = re.compile(r"'([^'\\]*+(?:\\.[^'\\]*+)*+)'", re.DOTALL)
_IN_SINGLE_QUOTES: Final = re.compile(r"\\'|\"|\\.", re.DOTALL)
_PLAIN_MEMBER: Final = re.compile(
    r'[ \t\r\n]*+(?:"([^"\\]*+)"|(-?[0-9]++))[ \t\r\n]*+:[ \t\r\n]*+(?:"([^"\\]*+)"|(-?[0-9]++))[ \t\r\n]*+([,}])'
)
"""A text or digits as key, without escapes, and a value that is neither list nor object."""
_CONSTANTS: Final[Mapping[str, bool | None]] = {
    "true": True,
    "false": False,
    "null": None,
    "undefined": None,
    "NaN": None,
    "Infinity": None,
}


class ObjectKey(str):
    """The JSON of an object used as a key. ``dumps`` writes it without quotes."""

    __slots__ = ()


def loads(data: bytes, *, tolerant: bool = True) -> object:
    """Parse a body. Raises ``RequestError`` if it is neither JSON nor, if that is ``tolerant``, fastjson's variant."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError("malformed body: not UTF-8") from error
    if len(text) > VALUES_MAX and sum(map(text.count, ",[{")) >= VALUES_MAX:
        raise RequestError(f"malformed body: more than {VALUES_MAX} values")
    try:
        text = _whole(text)
        try:
            return _DECODER.decode(text)
        except ValueError:
            if not tolerant:
                raise
            return _Parser(text).parse()
    except RecursionError as error:
        raise RequestError("malformed body: nested too deeply") from error
    except ValueError as error:
        raise RequestError("malformed body: not JSON") from error


def strict(text: str) -> Any:  # noqa: ANN401  # whatever JSON holds
    """Parse JSON; no text in it contains half a surrogate pair. Raises ``ValueError`` and ``RecursionError``."""
    text = _whole(text)
    try:
        value, end = _SCAN(text, 0)
    except StopIteration:
        end = -1
    return value if end == len(text) else _DECODER.decode(text)  # which allows for space around it


def _whole(text: str) -> str:
    """Replace halves of surrogate pairs by question marks, as Java does: UTF-8 cannot encode them."""
    if _WIDE_ESCAPE in text or "\\uD" in text:
        text, count = _ESCAPES.subn(lambda found: "?" if found[1] else found[0], text, ESCAPES_MAX)
        if count == ESCAPES_MAX:
            raise ValueError("too many escapes")
    return text


def _null(_: str) -> None:
    """Java writes null for NaN and infinity."""


_DECODER: Final = json.JSONDecoder(parse_constant=_null)
_SCAN: Final[Callable[[str, int], tuple[Any, int]]] = _DECODER.scan_once  # type: ignore[attr-defined]


class _Parser:
    """Parses what only fastjson accepts: names, numbers and objects as keys, single quotes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._left = TOLERANT_VALUES_MAX

    def parse(self) -> object:
        """The only value in the text."""
        value = self._value(DEPTH_MAX)
        self._next()
        if self._at != len(self._text):
            raise ValueError
        return value

    def _next(self) -> str:
        """Move to the next non-space character, and return it; empty at the end."""
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        """Consume and return the next character."""
        found = self._next()
        self._at += 1
        return found

    def _count(self, count: int = 1) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError

    def _value(self, depth: int) -> object:
        self._count()
        if depth < 0:
            raise ValueError
        first = self._next()
        if first == "{":
            return self._object(depth)
        if first == "[":
            return self._list(depth)
        if first in {'"', "'"}:
            return self._string(first)
        if name := _NAME.match(self._text, self._at):
            self._at = name.end()
            if name[0] not in _CONSTANTS:
                raise ValueError
            return _CONSTANTS[name[0]]
        return self._number()

    def _list(self, depth: int) -> list[object]:
        self._at += 1
        found: list[object] = []
        if self._next() == "]":
            self._at += 1
            return found
        while True:
            found.append(self._value(depth - 1))
            if (separator := self._take()) != ",":
                break
        if separator != "]":
            raise ValueError
        return found

    def _object(self, depth: int, *, as_key: bool = False) -> dict[str, object]:
        self._at += 1
        found: dict[str, object] = {}
        if self._next() == "}":
            self._at += 1
            return found
        while True:
            if plain := _PLAIN_MEMBER.match(self._text, self._at):  # five times as fast, and the usual case
                self._count()
                self._at = plain.end()
                quoted, digits, text, number, separator = plain.groups()
                found[digits if quoted is None else quoted] = int(number) if text is None else text
            else:
                key = self._key(depth, as_key=as_key)
                if self._take() != ":":
                    raise ValueError
                found[key] = self._value(0 if as_key else depth - 1)
                separator = self._take()
            if separator != ",":
                break
        if separator != "}":
            raise ValueError
        return found

    def _key(self, depth: int, *, as_key: bool) -> str:
        """An object as key contains only plain values: the JSON of nested keys would double with each level."""
        first = self._next()
        if first in {'"', "'"}:
            return self._string(first)
        if first == "{" and not as_key:
            return ObjectKey(_write(self._object(depth, as_key=True)))
        if name := _NAME.match(self._text, self._at):
            self._at = name.end()
            return name[0]
        return str(self._number())

    def _string(self, quote: str) -> str:
        if quote == '"':
            value, self._at = _scan_string(self._text, self._at + 1, False)
            return value
        found = _SINGLE_QUOTED.match(self._text, self._at)
        if found is None:
            raise ValueError
        self._at = found.end()
        inner, count = _IN_SINGLE_QUOTES.subn(
            lambda one: {"\\'": "'", '"': '\\"'}.get(one[0], one[0]), found[1], self._left + 1
        )
        self._count(count)
        return _scan_string(inner + '"', 0, False)[0]

    def _number(self) -> int | float:
        found = _NUMBER.match(self._text, self._at)
        if found is None:
            raise ValueError
        self._at = found.end()
        return float(found[0]) if found[1] or found[2] else int(found[0])


def dumps(value: object) -> bytes:
    """Encode in the strictest form that Java reads: members sorted by name, no nulls, numeric keys in quotes."""
    return _write(value).encode("ascii")


def dumps_plain(value: object) -> bytes:
    """Like ``dumps``, five times as fast, for values without nulls, objects as keys, and non-finite floats."""
    return _PLAIN.encode(value).encode("ascii")


_PLAIN: Final = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":"))


def _write(value: object) -> str:
    kind = type(value)
    if kind is str:
        return encode_basestring_ascii(cast("str", value))
    if value is True or value is False:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    if kind is dict:
        members = sorted(cast("dict[str, object]", value).items())
        return "{" + ",".join([_member(key, one) for key, one in members if one is not None]) + "}"
    if kind is list:
        return "[" + ",".join(map(_write, cast("Iterable[object]", value))) + "]"
    if kind is float and math.isfinite(cast("float", value)):
        return repr(value)
    if value is None or kind is float:
        return "null"
    raise TypeError(f"{kind.__name__} has no form in JSON")


def _member(key: str, value: object) -> str:
    return (key if type(key) is ObjectKey else encode_basestring_ascii(key)) + ":" + _write(value)
