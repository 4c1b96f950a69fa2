"""How tests are dealt out: each belongs to a command, and lanes that take longest begin first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tests.support import sweeps, tiers


class Test:
    """What is asked of a test: its module, its marks, its lane."""

    __test__ = False

    def __init__(self, module: str, *marks: str, lane: str = "") -> None:
        self.path = tiers.TESTS / module
        self._marks = {one: getattr(pytest.mark, one).mark for one in marks}
        if lane:
            self._marks["lane"] = pytest.mark.lane(lane).mark
        self.lane = ""

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.lane = marker.args[0]


def as_items(*tests: Test) -> list[pytest.Item]:
    """For what takes tests of pytest's, which only pytest can make."""
    return cast("list[pytest.Item]", list(tests))


@pytest.mark.parametrize(
    ("test", "quick", "rest"),
    [
        (Test("unit/a.py"), True, False),
        (Test("unit/a.py", "slow"), False, True),
        (Test("unit/a.py", "sweep"), True, True),
        (Test("fuzz/a.py"), True, True),
        (Test("integration/a.py"), False, True),
        (Test("integration/a.py", "smoke"), True, False),
        (Test("integration/a.py", "smoke", "slow"), True, False),
        (Test("spark/jobs/a.py"), False, True),
    ],
)
def test_the_rest_is_what_the_quick_tests_leave_out_or_thin(test: Test, quick: bool, rest: bool) -> None:
    """Together they are all; nothing is run twice but long sweeps."""
    (item,) = as_items(test)

    assert tiers.belongs(item, tiers.QUICK) == quick
    assert tiers.belongs(item, tiers.REST) == rest
    assert tiers.belongs(item, tiers.ALL)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes a module below ``tests``."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    monkeypatch.setattr(tiers, "TESTS", tmp_path)
    return write


@pytest.mark.parametrize(
    ("name", "text", "run_by"),
    [
        ("unit/test_a.py", "def test_a(): ...", {tiers.QUICK}),
        ("unit/test_a.py", "import subprocess", {tiers.QUICK, tiers.MACHINE}),
        ("unit/test_a.py", "from tests.support.lacking import lacks", {tiers.QUICK, tiers.MACHINE}),
        ("unit/test_a.py", "@pytest.mark.slow", {tiers.QUICK, tiers.REST}),
        ("unit/test_a.py", "@pytest.mark.sweep", {tiers.QUICK, tiers.REST}),
        ("unit/test_a.py", "from hypothesis import given", {tiers.QUICK, tiers.REST}),
        ("unit/test_a.py", "TestMap = MapMachine.TestCase", {tiers.QUICK, tiers.REST}),
        ("fuzz/test_a.py", "", {tiers.QUICK, tiers.REST}),
        ("integration/test_a.py", "import subprocess", {tiers.REST}),
        ("integration/test_a.py", "@pytest.mark.smoke", {tiers.QUICK, tiers.MACHINE, tiers.REST}),
    ],
)
def test_modules_are_loaded_for_tiers_that_run_something_of_them(
    module: Callable[[str, str], Path], name: str, text: str, run_by: set[str]
) -> None:
    """Each worker loads them: most modules have nothing for the rest."""
    path = module(name, text)

    assert {tier for tier in tiers.TIERS if tiers.may_run(tier, path)} == {tiers.ALL, *run_by}


@pytest.mark.parametrize(("text", "is_overlooked"), [("s = pytest.mark.slow", False), ("from a import s", True)])
def test_a_test_of_the_rest_whose_module_does_not_tell_is_overlooked(
    module: Callable[[str, str], Path], text: str, is_overlooked: bool
) -> None:
    """It would never run, and nobody would notice."""
    test = Test("", "slow")
    test.path = module("unit/test_a.py", text)

    assert tiers.overlooked(as_items(test)) == as_items(*[test] * is_overlooked)


def test_modules_are_dealt_to_lanes_of_about_the_same_length() -> None:
    """The longest first, each to the lane that has least so far."""
    assert tiers.deal({"a": 5.0, "b": 4.0, "c": 3.0, "d": 3.0, "e": 2.0}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}


def test_the_longest_lane_begins_and_modules_stay_together() -> None:
    """What is on no lane comes last, the longest module first; tests of a lane keep their order."""
    tests = [
        Test("unit/short.py"),
        Test("unit/long.py"),
        Test("integration/test_commands.py"),
        Test("integration/test_kill.py"),
        Test("integration/test_tls.py"),
        Test("docs/test_walks.py", lane="processes"),
        Test("integration/test_tls.py"),
        Test("spark/test_batch.py"),
    ]
    known = {
        "unit/long.py": 50.0,
        "unit/short.py": 1.0,
        "integration/test_commands.py": 7.0,
        "integration/test_kill.py": 20.0,
        "integration/test_tls.py": 9.0,
        "docs/test_walks.py": 3.0,
        "spark/test_batch.py": 5.0,
    }

    ordered = cast("list[Test]", tiers.arrange(as_items(*tests), known))  # what was given

    assert [tests.index(one) for one in ordered] == [3, 2, 5, 4, 6, 7, 1, 0]
    assert [one.lane for one in ordered] == [
        "faults-0",
        "processes-1",
        "processes-1",
        "processes-0",
        "processes-0",
        "spark-0",
        "",
        "",
    ]


def test_a_part_of_a_sweep_is_even_and_has_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable it is the whole."""
    monkeypatch.setenv(sweeps.THIN, "thin")
    assert list(sweeps.thinned(range(20), 8)) == [0, 8, 16, 19]
    assert list(sweeps.thinned([1, 2], 8)) == [1, 2]
    assert [sweeps.fewer(count, 8, least=2) for count in (100, 8, 1)] == [12, 2, 1]

    monkeypatch.delenv(sweeps.THIN)
    assert list(sweeps.thinned(range(20), 8)) == list(range(20))
    assert sweeps.fewer(100) == 100
