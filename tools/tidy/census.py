"""Counts of the sources: files and lines, names, protocols, docstrings that say little, words of our own."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGES: Final = ("dledger", "rocketstore", "dledger_spark", "pyspark_dledger", "dledger_cli", "cluster")
ATTRIBUTES_MAX: Final = 15
"""Of a class, set in its constructor; more are hard to keep in mind."""
ARGUMENTS_MAX: Final = 7
"""Of a constructor, without ``self``."""
LINES_MIN: Final = 60
"""Of a file: a shorter one belongs to the file that uses it."""
LINES_MAX: Final = 600
CAPTION_WORDS_MAX: Final = 3
"""A docstring of so few words repeats the name."""
OWN_WORDS: Final = frozenset(
    {
        "Aside",
        "Belief",
        "Branch",
        "Counted",
        "Desk",
        "Detours",
        "Ends",
        "Facts",
        "Kept",
        "Lane",
        "Letters",
        "Mending",
        "News",
        "Newest",
        "Place",
        "Places",
        "Playground",
        "Prehistory",
        "Road",
        "Run",
        "Seeker",
        "Share",
        "Shares",
        "Stage",
        "Standing",
        "Surroundings",
        "Traces",
        "Truth",
        "Upkeep",
        "Verdicts",
        "Warmer",
        "Watched",
        "Whereabouts",
        "Wish",
    }
)
"""Words of our own in names of modules and classes, for which the field has others."""
_GENERATED: Final = "pb"
_NAMED: Final = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_WORD: Final = re.compile("[A-Z]?[a-z]+")


@dataclass(frozen=True, slots=True)
class Census:
    """The figures of all product packages, without generated code."""

    files: int
    short_files: int
    """Of fewer than ``LINES_MIN`` lines."""
    long_files: tuple[str, ...]
    """Of more than ``LINES_MAX`` lines, with their number."""
    lines: int
    import_lines: int
    captions: int
    """Docstrings of at most ``CAPTION_WORDS_MAX`` words."""
    own_words: tuple[str, ...]
    """Names of modules and classes with one of ``OWN_WORDS``."""
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
    lines: list[int] = []
    long: list[str] = []
    public = captions = import_lines = 0
    own_words: list[str] = []
    protocols: list[str] = []
    large: list[tuple[int, str]] = []
    modules_of: Counter[str] = Counter()
    for path in sources(root):
        name, text = str(path.relative_to(root)), path.read_text()
        tree = ast.parse(text)
        lines.append(text.count("\n"))
        if lines[-1] > LINES_MAX:
            long.append(f"{name} {lines[-1]}")
        import_lines += _import_lines(tree)
        captions += _captions(tree)
        classes = [one for one in tree.body if isinstance(one, ast.ClassDef)]
        public += sum(not one.name.startswith("_") for one in tree.body if isinstance(one, _NAMED))
        own_words += [name] * _has_own_word(path.stem)
        own_words += [f"{name}: {one.name}" for one in classes if _has_own_word(one.name)]
        protocols += [f"{name}: {one.name}" for one in classes if _is_protocol(one)]
        large += _large(classes)
        modules_of.update({one.name for one in classes})
    return Census(
        files=len(lines),
        short_files=sum(one < LINES_MIN for one in lines),
        long_files=tuple(long),
        lines=sum(lines),
        import_lines=import_lines,
        captions=captions,
        own_words=tuple(own_words),
        public_names=public,
        protocols=tuple(protocols),
        doubled_classes=tuple(sorted(name for name, count in modules_of.items() if count > 1)),
        large_classes=tuple(text for _, text in sorted(large)),
    )


def _import_lines(tree: ast.Module) -> int:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)


def _captions(tree: ast.Module) -> int:
    docstrings = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, _NAMED))
    return sum(0 < len(one.split()) <= CAPTION_WORDS_MAX for one in docstrings)


def _is_protocol(one: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in one.bases)


def _large(classes: list[ast.ClassDef]) -> Iterator[tuple[int, str]]:
    for one in classes:
        attributes, arguments = size_of(one)
        if attributes > ATTRIBUTES_MAX or arguments > ARGUMENTS_MAX:
            yield -attributes, f"{one.name} {attributes}/{arguments}"


def _has_own_word(name: str) -> bool:
    return not OWN_WORDS.isdisjoint(word.capitalize() for word in _WORD.findall(name))


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
