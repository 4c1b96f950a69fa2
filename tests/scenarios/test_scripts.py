"""The scenarios that are texts (``script.py`` explains them): the core still does what each of them says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.script import SCRIPTS, replay

PATHS = sorted(SCRIPTS.glob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_core_does_what_the_script_says(path: Path) -> None:
    """Message by message; if a change is meant, write the traces anew: python -m tests.scenarios.script."""
    text = path.read_text(encoding="utf-8")

    assert replay(text) == text


def test_a_wrong_trace_is_noticed() -> None:
    """A trace is compared, not only parsed; commands and comments stay where they are."""
    script = "# Why.\n\ngroup 1\n----\nwrong\n\n# And then.\n\nquietly elect n0\n----\n\nlogs\n----\nn0: empty\n"
    right = "# Why.\n\ngroup 1\n----\n(nothing)\n\n# And then.\n\nquietly elect n0\n----\n(not shown)\n\nlogs\n----\n"

    assert replay(script) == right + "n0: 0@1 |\n"
