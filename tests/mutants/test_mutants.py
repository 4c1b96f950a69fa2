"""The planted bugs themselves fit the code as it is; ten of them, others with each commit, are tried at once."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.mutant import HERE, ROOT, Mutant, MutantError, read, read_all
from tests.mutants.trial import Outcome, copied, planted, try_tests

TRIED = 10
TIMEOUT_S = 120.0


def _commit() -> str:
    words = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def chosen(mutants: list[Mutant], commit: str, count: int = TRIED) -> list[Mutant]:
    """``count`` of them, by the commit."""
    return sorted(mutants, key=lambda one: hashlib.sha256(f"{commit} {one.name}".encode()).digest())[:count]


MUTANTS = read_all()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The project, to be spoilt."""
    with copied(tmp_path_factory.mktemp("mutants")) as made:
        yield made


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_it_can_be_planted(mutant: Mutant, copy: Path) -> None:
    """Else it proves nothing: whoever changes the code that it spoils writes it anew."""
    before = {name: (copy / name).read_bytes() for name in mutant.changed}

    with planted(mutant, copy) as problem:
        assert not problem
        assert all((copy / name).read_bytes() != content for name, content in before.items())

    assert all((copy / name).read_bytes() == content for name, content in before.items())


@pytest.mark.parametrize("mutant", chosen(MUTANTS, _commit()), ids=lambda one: one.name)
def test_it_is_caught(mutant: Mutant, copy: Path) -> None:
    """By the first of its tests that looks where it is."""
    with planted(mutant, copy) as problem:
        assert not problem
        findings = try_tests(mutant, copy, TIMEOUT_S)

    assert findings[-1].outcome in (Outcome.CAUGHT, Outcome.HUNG), "; ".join(map(str, findings))


def test_ten_are_chosen_by_the_commit() -> None:
    """The same ones for the same commit, others for the next one."""
    made = [Mutant(f"m{number}", "", "", (), 0, "") for number in range(100)]

    assert chosen(made, "a") == chosen(made, "a")
    assert chosen(made, "a") != chosen(made, "b")
    assert len(chosen(made, "a")) == TRIED


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Bug: x\nHarm: y\nTests: tests/unit\n", "a blank line and the output of `git diff` are wanted"),
        ("Bug: x\nTests: tests/unit\n\ndiff --git a/x b/x\n", "Harm missing"),
        ("Bug: x\nHarm: y\nTests: tests/nowhere\n\ndiff --git a/x b/x\n", "there is no tests/nowhere"),
        ("Bug: x\nBug: y\n\ndiff --git a/x b/x\n", "or there twice"),
        ("Bug: x\nHarm: y\nTests: tests\nSeeds: few\n\ndiff --git a/x b/x\n", "invalid number few"),
    ],
)
def test_a_file_that_is_no_planted_bug_says_why(tmp_path: Path, text: str, complaint: str) -> None:
    """With the file's name."""
    path = tmp_path / "one.patch"
    path.write_text(text)

    with pytest.raises(MutantError, match=complaint):
        read(path)


def test_there_are_enough_of_them() -> None:
    """One for each rule that was ever broken, and for each trap."""
    assert len(list(HERE.glob("*.patch"))) >= 60
