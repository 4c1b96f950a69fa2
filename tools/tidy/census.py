"""Counts of the sources: lines, public names, protocols, class names that are used twice, and large classes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGES: Final = ("dledger", "rocketstore", "dledger_spark", "pyspark_dledger", "cluster")
ATTRIBUTES_MAX: Final = 15
"""Of a class, set in its constructor; more are hard to keep in mind."""
ARGUMENTS_MAX: Final = 7
"""Of a constructor, without ``self``."""
_GENERATED: Final = "pb"


@dataclass(frozen=True, slots=True)
class Census:
    """The figures of all product packages, without generated code."""

    lines: int
    public_names: int
    """Public top-level functions and classes."""
    protocols: tuple[str, ...]
    doubled_classes: tuple[str, ...]
    """Class names defined in more than one module."""
    large_classes: tuple[str, ...]
    """Those with more than ``ATTRIBUTES_MAX`` attributes or ``ARGUMENTS_MAX`` arguments, with both counts."""


def sources(root: Path) -> Iterator[Path]:
    """The product's source files."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if _GENERATED not in path.relative_to(root).parts:
                yield path


def take_census(root: Path) -> Census:
    """Read all sources below ``root``."""
    lines = public = 0
    protocols: list[str] = []
    large: list[tuple[int, str]] = []
    modules_of: Counter[str] = Counter()
    for path in sources(root):
        text = path.read_text()
        lines += text.count("\n")
        classes = set()
        for one in ast.parse(text).body:
            if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                public += not one.name.startswith("_")
            if isinstance(one, ast.ClassDef):
                classes.add(one.name)
                attributes, arguments = size_of(one)
                if attributes > ATTRIBUTES_MAX or arguments > ARGUMENTS_MAX:
                    large.append((-attributes, f"{one.name} {attributes}/{arguments}"))
                if any(ast.unparse(base).partition("[")[0] == "Protocol" for base in one.bases):
                    protocols.append(f"{path.relative_to(root)}: {one.name}")
        modules_of.update(classes)
    doubled = tuple(sorted(name for name, count in modules_of.items() if count > 1))
    return Census(lines, public, tuple(protocols), doubled, tuple(text for _, text in sorted(large)))


def size_of(one: ast.ClassDef) -> tuple[int, int]:
    """The number of attributes that the constructor of a class sets, and of its arguments."""
    constructor = next(
        (part for part in one.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None
    )
    if constructor is None:
        return 0, 0
    attributes = {
        node.attr
        for node in ast.walk(constructor)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    taken = constructor.args
    return len(attributes), len(taken.posonlyargs) + len(taken.args) + len(taken.kwonlyargs) - 1
