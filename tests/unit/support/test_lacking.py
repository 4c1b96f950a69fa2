"""What the machine lacks is one line of the summary, or a failure where all is meant to be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import lacking

TESTS = Path(__file__).parents[2]


def skipped(thing: str, install: str) -> str:
    """Why a test that needs it is skipped."""
    with pytest.raises(pytest.skip.Exception) as told:
        lacking.lacks(thing, install)
    return f"Skipped: {told.value}"


@pytest.fixture(autouse=True)
def _not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lacking.FAILS, raising=False)


def test_a_lacking_thing_is_one_line_with_the_number_of_tests_and_what_to_install() -> None:
    """However many tests need it, and whatever each of them says."""
    reasons = [
        skipped("zsh", "apt-get install zsh"),
        skipped("Docker", "no engine is running,\n and only root can start one: install docker.io"),
        skipped("zsh", "another hint"),
        "Skipped: for another reason",
    ]

    assert lacking.summary(reasons) == [
        "no Docker: 1 test skipped (no engine is running, and only root can start one: install docker.io)",
        "for another reason: 1 test skipped",
        "no zsh: 2 tests skipped (apt-get install zsh)",
    ]


def test_a_lacking_thing_fails_where_all_is_meant_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else CI would not notice that it no longer tests something."""
    monkeypatch.setenv(lacking.FAILS, "1")

    with pytest.raises(pytest.fail.Exception, match="lacking: zsh: apt-get install zsh"):
        lacking.lacks("zsh", "apt-get install zsh")


def test_a_program_on_the_path_is_found_and_another_is_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name of its package."""
    there = tmp_path / "there"
    there.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert lacking.program("there") == str(there)
    with pytest.raises(pytest.skip.Exception, match="lacking: gone: apt-get install package"):
        lacking.program("gone", "package")


def test_no_test_is_skipped_in_another_way() -> None:
    """That would be a line of its own for each test, and no failure in CI."""
    other = re.compile(r"\bpytest\.(?:mark\.)?(?:skip|skipif|importorskip)\b")

    found = {str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if other.search(path.read_text("utf-8"))}

    assert found == {"support/lacking.py", "unit/support/test_lacking.py"}
