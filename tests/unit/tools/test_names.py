"""Names of the sources: one public name, one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
PACKAGES: Final = (
    "dledger",
    "rocketstore",
    "dledger_cli",
    "cluster",
    "dledger_spark",
    "pyspark_dledger",
    "benchmarks",
    "tools",
    "examples",
)

FACADES: Final = (
    "dledger/client/blocking.py",
    "rocketstore/client/blocking.py",
    "rocketstore/client/blocking_consumer.py",
)
"""Blocking clients have the names of the asyncio ones that they are made of."""


def test_no_two_modules_define_a_public_class_of_the_same_name() -> None:
    """A reader who meets a class knows which it is, and a search finds one definition."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "pb" not in path.parts):
        name = str(path.relative_to(ROOT))
        if name in FACADES:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)

    assert {one: paths for one, paths in homes.items() if len(paths) > 1} == {}
