"""Counts of the sources: lines, public names, protocols, and class names that are used twice."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGES: Final = ("dledger", "rocketstore", "dledger_spark", "pyspark_dledger", "cluster")
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
                if any(ast.unparse(base).partition("[")[0] == "Protocol" for base in one.bases):
                    protocols.append(f"{path.relative_to(root)}: {one.name}")
        modules_of.update(classes)
    doubled = tuple(sorted(name for name, count in modules_of.items() if count > 1))
    return Census(lines, public, tuple(protocols), doubled)
