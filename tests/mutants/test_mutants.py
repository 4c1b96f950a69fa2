"""Rows of planted bugs, made up: how they are read, put into a copy and taken out again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import misfits
from tests.mutants.mutant import Change, Mutant, MutantError, read, read_all
from tests.mutants.trial import planted

ROW = """
[one-is-two]
harm = "sums are wrong"
tests = ["tests/mutants"]
file = "a.py"
old = "x = 1"
new = "x = 2"
"""


def written(tmp_path: Path, text: str, name: str = "pack.toml") -> Path:
    """A file of rows."""
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_row_is_read(tmp_path: Path) -> None:
    """With its further replacements, which are in the same file unless they name another one."""
    more = '[[one-is-two.also]]\nold = "y"\nnew = ""\n[[one-is-two.also]]\nfile = "b.py"\nold = "z"\nnew = "0"\n'

    (found,) = read(written(tmp_path, ROW + "seeds = 30\nfirst = 7\nworlds = 4\n" + more))

    assert (found.name, found.seeds, found.first, found.tests) == ("one-is-two", 30, 7, ("tests/mutants",))
    assert found.worlds == 4
    assert found.changes == (Change("a.py", "x = 1", "x = 2"), Change("a.py", "y", ""), Change("b.py", "z", "0"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (ROW.replace("harm", "Harm"), r"Harm, harm missing or unknown"),
        (ROW.replace("tests/mutants", "tests/nowhere"), "there is no tests/nowhere"),
        (ROW.replace("x = 2", "x = 1"), "old is another one than new"),
        (ROW.replace('old = "x = 1"', 'old = ""'), "old is another one than new"),
        (ROW + 'seeds = "few"\n', "seeds, first and worlds are numbers"),
        (ROW + "worlds = -1\n", "seeds, first and worlds are numbers"),
        (ROW + ROW, "pack.toml: "),
    ],
)
def test_a_row_that_is_no_planted_bug_says_why(tmp_path: Path, text: str, complaint: str) -> None:
    """With the file's name, and the row's."""
    with pytest.raises(MutantError, match=complaint) as raised:
        read(written(tmp_path, text))

    assert "pack.toml" in str(raised.value)


def test_a_name_stands_for_one_bug(tmp_path: Path) -> None:
    """Also across files, for ``make mutants`` takes names."""
    written(tmp_path, ROW)
    written(tmp_path, ROW, "sack.toml")

    with pytest.raises(MutantError, match=r"sack.toml: \[one-is-two\]: the name is taken by pack.toml: \[one-is-two\]"):
        read_all(tmp_path)


def test_a_bug_is_in_the_copy_for_as_long_as_it_is_tried(tmp_path: Path) -> None:
    """Then every file is as it was before."""
    (mutant,) = read(written(tmp_path, ROW))
    source = tmp_path / "a.py"
    source.write_text("x = 1\n")

    with planted(mutant, tmp_path):
        assert source.read_text() == "x = 2\n"

    assert source.read_text() == "x = 1\n"


@pytest.mark.parametrize("text", ["x = 3\n", "x = 1\nx = 1\n"])
def test_text_that_is_not_there_exactly_once_is_an_error(tmp_path: Path, text: str) -> None:
    """It names the row, the file and the text, and the copy stays as it is."""
    (mutant,) = read(written(tmp_path, ROW))
    source = tmp_path / "a.py"
    source.write_text(text)

    with (
        pytest.raises(MutantError, match=r"pack.toml: \[one-is-two\]: a.py has 'x = 1' \d times"),
        planted(mutant, tmp_path),
    ):
        pass

    assert source.read_text() == text
    assert len(misfits([mutant], tmp_path)) == 1


def test_a_file_that_is_gone_is_an_error() -> None:
    """Not a traceback."""
    mutant = Mutant("m", "pack.toml: [m]", "", (), 0, (Change("nowhere.py", "a", "b"),))

    assert "cannot read nowhere.py" in misfits([mutant])[0]
