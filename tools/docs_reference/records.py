"""Settings as the code defines them: fields, types, defaults, docstrings, and the errors for invalid values."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_type_hints

from dledger.config import Member
from dledger.values import Unit, limits_of, size_text

Problems = Callable[[Any], list[str]]  # Any: a record, whichever.

_ODD_INTEGERS: Final = (0, -1, 1, 101, 70_000, 1 << 40)
_ODD_VALUES: Final[dict[str, tuple[object, ...]]] = {
    "int": _ODD_INTEGERS,
    "int | None": _ODD_INTEGERS,
    "float": (-1.0, 2.0),
    "str": ("", "?"),
    "tuple[int, ...]": ((24,),),
    "tuple[NodeId, ...]": (("?",),),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One setting as its record defines it."""

    name: str
    kind: str
    """Its type, as written in the source."""
    default: object
    meaning: str
    """The docstring below it; empty if there is none."""
    record: str
    limits: tuple[str, ...]
    """Limits of its value, then those that depend on other settings."""
    unit: Unit | None = None


def docstrings(record: type) -> dict[str, str]:
    """The docstring below each field, in one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(record)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for one, below in pairwise(body):
        if (
            isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[one.target.id] = " ".join(below.value.value.split())
    return found


def fields_of(root: Any, problems: Problems, *, without: frozenset[str] = frozenset()) -> Iterator[Field]:  # noqa: ANN401
    """Every setting of ``root`` and its nested records, with the defaults in ``root``.

    ``problems`` validates a whole record like ``root``. ``without`` names fields that are not settings.
    """
    yield from _walk(root, problems, lambda record: record, without)


def _walk(record: Any, problems: Problems, embed: Callable[[Any], Any], without: frozenset[str]) -> Iterator[Field]:  # noqa: ANN401
    hints = get_type_hints(type(record))
    said = docstrings(type(record))
    sections: list[str] = []
    for one in fields(record):
        value = getattr(record, one.name)
        if one.name in without:
            continue
        if is_dataclass(value) and not isinstance(value, Member):
            sections.append(one.name)
            continue
        kind = _kind(hints[one.name])
        alone = limits_of(type(record))[one.name]
        if not alone.is_setting:
            continue
        limits = _limits(record, one.name, kind, problems, embed)
        if alone.range is not None:
            limits = (alone.range.text(alone.unit), *limits)
        yield Field(one.name, kind, value, said.get(one.name, ""), type(record).__name__, limits, alone.unit)
    for name in sections:

        def embed_section(inner: Any, name: str = name) -> Any:  # noqa: ANN401
            return embed(replace(record, **{name: inner}))

        yield from _walk(getattr(record, name), problems, embed_section, without)


def _kind(hint: object) -> str:
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)


# --- limits ----------------------------------------------------------------------------------------------------------


def _limits(record: Any, name: str, kind: str, problems: Problems, embed: Callable[[Any], Any]) -> tuple[str, ...]:  # noqa: ANN401
    """The further ``problems`` caused by an invalid value of this setting alone, without the values."""
    before = set(problems(embed(record)))
    alone = limits_of(type(record))[name]
    found: dict[str, None] = {}
    for odd in _odd_values(getattr(record, name), kind):
        for sentence in problems(embed(replace(record, **{name: odd}))):
            if sentence not in before and sentence != alone.problem(name, odd):
                found[_without_values(sentence)] = None
    return tuple(found)


def _odd_values(value: object, kind: str) -> tuple[object, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, Enum):
        return tuple(one for one in type(value) if one is not value)
    odd = _ODD_VALUES.get(kind, ())
    return (*odd, value + 1) if isinstance(value, int) else odd


def _without_values(sentence: str) -> str:
    sentence = re.sub(r"\b([a-z][a-z0-9_]*)=(?:\([^)]*\)|[^\s,;:)]+)", r"\1", sentence)
    sentence = re.sub(r"(?<!\S)\?(?=[\s,;:)]|$)", "others", sentence)  # the odd string, unquoted
    return re.sub(r"'[^']*'", "…", sentence)


# --- texts -----------------------------------------------------------------------------------------------------------


def default_text(field: Field, unit: str) -> str:
    """The default as a user would write it."""
    value = field.default
    if isinstance(value, bool):
        return str(value).lower()
    if unit == "size" and isinstance(value, int):
        return size_text(value)
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Path):
        home = Path.home()
        return f"~/{value.relative_to(home)}" if value.is_relative_to(home) else str(value)
    if isinstance(value, tuple):
        return ";".join(_item_text(one) for one in value) or "none"
    if isinstance(value, bytes):
        return value.decode() or "empty"
    if value is None:
        return "none"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} {unit}" if text and unit in ("ms", "hours", "percent") else text or "empty"


def _item_text(item: object) -> str:
    return f"{item.node_id}-{item.address}" if isinstance(item, Member) else str(item)
