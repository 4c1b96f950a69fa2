"""Converts records to JSON bodies and back, with a plan per class, created once from the types of its fields.

A member's name is the attribute's in camel case, or given by ``Named``; fields without a default are required. Unknown
members are ignored, and null counts as missing, as in Java. ``decode`` raises nothing but ``RequestError``, whatever
the bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from dledger.remoting.codes import RequestError
from dledger.remoting.fastjson import ObjectKey, dumps, dumps_plain, loads
from dledger.remoting.frame import FRAME_BYTES_MAX
from rocketstore.remoting.headers import Bits, Named, camel

ITEMS_MAX: Final = 131_072
"""Default limit for a list or map: the topics in 16 MiB of the shortest entries, 128 bytes each."""
TEXT_CHARS_MAX: Final = 65_536
"""Limit for one text: twice the maximum of a message's properties; names are far shorter."""
_B = TypeVar("_B", bound="Body")
_DIGITS: Final = re.compile(r"[+-]?[0-9]{1,19}")


class AtMost(NamedTuple):
    """Limits the items of a list or map."""

    limit: int


class _EmptyIsNull(NamedTuple):
    """Marks a field that is left out if it is empty or false: a text for which Java writes null, and fields that older
    releases do not have.
    """


EMPTY_IS_NULL: Final = _EmptyIsNull()
NullableText = Annotated[str, EMPTY_IS_NULL]


class Body:
    """Base class of the records that are bodies."""

    __slots__ = ()
    bytes_max: ClassVar[int] = FRAME_BYTES_MAX
    """Maximum length: less than a frame for bodies sent by any client, because decoding blocks everything else."""

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises ``RequestError``."""
        if len(data) > cls.bytes_max:
            raise RequestError(f"malformed body: {len(data)} bytes, at most {cls.bytes_max} are allowed")
        return read(cls, loads(data))

    def encode(self) -> bytes:
        """Encode in the strictest form that Java reads."""
        hint: Any = type(self)
        converter = _converter(hint)
        return (dumps_plain if converter.plain else dumps)(converter.write(self))


def read(kind: type[_B], value: object) -> _B:
    """Convert a parsed body to a record. Raises ``RequestError``."""
    hint: Any = kind
    found: _B = _converter(hint).read(value, "body")
    return found


class _Converter(NamedTuple):
    """Converts between a JSON value and a field; reading gets the member's name for errors."""

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any]
    plain: bool = True
    """Whether it contains neither objects as keys nor floats."""


class _Member(NamedTuple):
    attribute: str
    name: str
    required: bool
    converter: _Converter


def _same(value: object) -> object:
    return value


def _refused(name: str, expected: str, value: object) -> RequestError:
    shown = repr(value[:64]) if type(value) is str else f"a {type(value).__name__}"
    return RequestError(f"malformed body: <{name}> must be {expected}, not {shown}")


@cache
def _converter(hint: Any) -> _Converter:  # noqa: ANN401  # whatever type a field has
    if get_origin(hint) is not Annotated:
        return _plain_converter(hint, ())
    hint, *notes = get_args(hint)
    found = _plain_converter(hint, notes)
    return found._replace(write=lambda value: found.write(value) or None) if EMPTY_IS_NULL in notes else found


def _plain_converter(hint: Any, notes: Sequence[object]) -> _Converter:  # noqa: ANN401  # whatever type a field has
    count = next((note.limit for note in notes if isinstance(note, AtMost)), ITEMS_MAX)
    if hint is int:
        return _Converter(_integer(next(note.width for note in notes if isinstance(note, Bits))), _same)
    if hint is str:
        return _Converter(_text, _same)
    if hint is bool:
        return _Converter(_boolean, _same)
    if hint is float:
        return _Converter(_float, _same, plain=False)
    if get_origin(hint) in (Union, UnionType):  # with None
        whole = _converter(get_args(hint)[0])
        return _Converter(whole.read, lambda value: None if value is None else whole.write(value), whole.plain)
    if get_origin(hint) is tuple:
        return _list(_converter(get_args(hint)[0]), count)
    if get_origin(hint) is Mapping:
        key, value = get_args(hint)
        return _map(_key(key), _converter(value), count)
    return _enumeration(hint) if issubclass(hint, IntEnum) else _object(hint)


def _integer(width: int) -> Callable[[object, str], int]:
    limit = 1 << (width - 1)

    def convert(value: object, name: str) -> int:
        number = value
        if type(value) is str and _DIGITS.fullmatch(value):  # the C++ client writes large numbers as text
            number = int(value)
        if type(number) is not int or not -limit <= number < limit:
            raise _refused(name, f"a whole number of {width} bits", value)
        return number

    return convert


def _text(value: object, name: str) -> str:
    if type(value) in (int, float):
        return str(value)
    if type(value) is not str or len(value) > TEXT_CHARS_MAX:
        raise _refused(name, f"a text of at most {TEXT_CHARS_MAX} characters", value)
    return value


_BOOLEANS: Final[Mapping[object, bool]] = {
    True: True,
    False: False,
    "true": True,
    "false": False,
    "1": True,
    "0": False,
}
"""1 and 0, written by the C++ client, equal the first two."""


def _boolean(value: object, name: str) -> bool:
    if type(value) not in (bool, int, str) or value not in _BOOLEANS:
        raise _refused(name, "true or false", value)
    return _BOOLEANS[value]


def _float(value: object, name: str) -> float:
    if type(value) in (int, float):
        try:
            number = float(value)  # type: ignore[arg-type]  # as the line above says
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise _refused(name, "a number", value)


def _enumeration(kind: type[IntEnum]) -> _Converter:
    """Java and Go write the name, C++ the number."""
    values: dict[object, IntEnum] = {one.name: one for one in kind} | {int(one): one for one in kind}

    def convert(value: object, name: str) -> IntEnum:
        if type(value) not in (int, str) or value not in values:
            raise _refused(name, f"one of {', '.join(one.name for one in kind)}", value)
        return values[value]

    return _Converter(convert, lambda value: value.name)


def _list(item: _Converter, count: int) -> _Converter:
    def convert(value: object, name: str) -> tuple[object, ...]:
        if type(value) is not list or len(value) > count:
            raise _refused(name, f"a list of at most {count} items", value)
        return tuple([item.read(one, name) for one in value])

    return _Converter(convert, lambda values: [item.write(one) for one in values], item.plain)


def _key(hint: Any) -> _Converter:  # noqa: ANN401  # whatever type a field has
    if isinstance(hint, type) and issubclass(hint, Body):
        whole = _object(hint)
        return _Converter(
            lambda text, name: whole.read(loads(text.encode()), name),
            lambda key: ObjectKey(dumps_plain(whole.write(key)).decode()),
            plain=False,
        )
    return _Converter(_converter(hint).read, str)


def _map(key: _Converter, item: _Converter, count: int) -> _Converter:
    def convert(value: object, name: str) -> dict[object, object]:
        if type(value) is not dict or len(value) > count:
            raise _refused(name, f"an object of at most {count} members", value)
        return {key.read(one, name): item.read(each, name) for one, each in value.items() if each is not None}

    return _Converter(
        convert,
        lambda values: {key.write(one): item.write(each) for one, each in values.items()},
        key.plain and item.plain,
    )


def _object(kind: type[Any]) -> _Converter:
    members = _members(kind)

    def convert(value: object, name: str) -> object:
        if type(value) is not dict:
            raise _refused(name, "an object", value)
        arguments: dict[str, object] = {}
        for member in members:
            found = value.get(member.name)
            if found is not None:
                arguments[member.attribute] = member.converter.read(found, member.name)
            elif member.required:
                raise RequestError(f"malformed body: <{member.name}> is null")
        return kind(**arguments)

    def write_members(whole: object) -> dict[str, object]:
        written: dict[str, object] = {}
        for member in members:
            value = member.converter.write(getattr(whole, member.attribute))
            if value is not None:
                written[member.name] = value
        return written

    return _Converter(convert, write_members, all(member.converter.plain for member in members))


def _members(kind: type[Any]) -> tuple[_Member, ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_member(one, hints[one.name]) for one in dataclasses.fields(kind))


def _member(one: dataclasses.Field[Any], hint: Any) -> _Member:  # noqa: ANN401  # whatever type a field has
    name = camel(one.name)
    if get_origin(hint) is Annotated:
        name = next((note.name for note in get_args(hint)[1:] if isinstance(note, Named)), name)
    required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    return _Member(one.name, name, required, _converter(hint))
