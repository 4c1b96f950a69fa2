"""How tests are dealt out: each belongs to a command, and lanes that take longest begin first."""

from __future__ import annotations

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
