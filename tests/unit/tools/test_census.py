"""Figures of the sources."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from tools.tidy.census import size_of, take_census

MOST: Final = {
    "files of fewer than 60 lines": 57,
    "files of more than 600 lines": 7,
    "docstrings of at most 3 words": 383,
    "names with words of our own": 50,
    "class names in more than one module": 33,
    "classes of too many attributes or arguments": 57,
}
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


def test_a_census_counts_files_imports_captions_and_words_of_our_own(tmp_path: Path) -> None:
    """A file of one line is short, one of 601 long; a docstring of four words is none of those that say little."""
    for name, text in {
        "dledger/standing.py": '"""Of it."""\nfrom a import (\n    b,\n)\n',
        "dledger/two.py": 'class RoadTarget:\n    """See there now."""\ndef f():\n    """Says a bit more."""\n',
        "dledger/long.py": "class Broader:\n    pass\n" + "\n" * 599,
        "dledger/fits.py": "\n" * 600,
        "dledger/least.py": "\n" * 60,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    census = take_census(tmp_path)
    assert (census.files, census.short_files, census.long_files) == (5, 2, ("dledger/long.py 601",))
    assert (census.import_lines, census.captions) == (3, 1)
    assert census.own_words == ("dledger/standing.py", "dledger/two.py: RoadTarget")


def test_the_house_gets_no_worse() -> None:
    """Each may only fall: lower a number here when it does."""
    census = take_census(Path(__file__).parents[3])
    now = {
        "files of fewer than 60 lines": census.short_files,
        "files of more than 600 lines": len(census.long_files),
        "docstrings of at most 3 words": census.captions,
        "names with words of our own": len(census.own_words),
        "class names in more than one module": len(census.doubled_classes),
        "classes of too many attributes or arguments": len(census.large_classes),
    }
    assert {name: (count, MOST[name]) for name, count in now.items() if count > MOST[name]} == {}
