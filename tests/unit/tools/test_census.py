"""Figures of the sources."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.tidy.census import size_of, take_census

LARGE = """
class Large:
    def __init__(self, a, b, *, c=1, d=2):
        self.one, self.two = a, b
        if c:
            self.three: int = c
        self.one = d
        other.four = self.five

    def start(self):
        self.late = 1
"""


def test_a_class_has_the_attributes_and_arguments_of_its_constructor() -> None:
    """Each attribute once; neither those of others, nor reads, nor those that other methods set."""
    (large,) = ast.parse(LARGE).body
    assert isinstance(large, ast.ClassDef)
    assert size_of(large) == (3, 4)


def test_a_census_counts_lines_names_twins_and_large_classes(tmp_path: Path) -> None:
    """In the product's packages only, and not in what is generated."""
    wide = "class Wide:\n    def __init__(self, " + ", ".join("abcdefgh") + "):\n        pass\n"
    for name, text in {
        "dledger/one.py": f"class _Twin:\n    pass\ndef public():\n    pass\n{wide}",
        "cluster/two.py": "class _Twin:\n    pass\n",
        "dledger/pb/three.py": "class Generated:\n    pass\n",
        "tests/four.py": "class Test:\n    pass\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    census = take_census(tmp_path)
    assert (census.lines, census.public_names, census.doubled_classes) == (9, 2, ("_Twin",))
    assert census.large_classes == ("Wide 0/8",)
