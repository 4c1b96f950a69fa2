"""The checker of the map finds every violation that is planted, and nothing in a history that is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.map_history import Change, Look, Told, check

A = Change("k", "a", 0, 1, Told.DONE, revision=5)
B = Change("k", "b", 2, 4, Told.DONE, if_revision=5, revision=7, former="a")
U = Change("k", "u", 2, 3, Told.UNKNOWN)
R = Change("k", "r", 0, 9, Told.REFUSED)
OTHER = Change("k", "x", 4, 5, Told.OTHER_REVISION, if_revision=5, revision=7, former="b")
LOOK = Look("k", "b", 7, 8, 5, 6)


def test_a_right_history_passes() -> None:
    """A change whose client does not know of it is seen, or by the next change only, or not at all."""
    assert check([A, B, R, OTHER], [LOOK]) == []
    assert check([A, B, R, U], [LOOK, Look("k", "u", 9, 9, 7, 8)]) == []
    assert check([A, U, Change("k", "c", 4, 5, Told.DONE, revision=9, former="u")], []) == []
    assert check([A, B, U], [LOOK, Look("j", None, 0, 6, 0, 9)]) == []


@pytest.mark.parametrize(
    ("changes", "looks", "word"),
    [
        ([A, replace(B, revision=4, former=None)], [], "order"),
        ([A, B], [replace(LOOK, index=6, revision=5, value="a")], "order"),
        ([A, B], [replace(LOOK, revision=5, value="a")], "last change"),
        ([A, B], [replace(LOOK, revision=0, value=None)], "last change"),
        ([A, B], [replace(LOOK, value="z")], "nobody put"),
        ([A, B, R], [replace(LOOK, value="r", revision=8)], "nobody put"),
        ([A, B, replace(OTHER, revision=8, former="x")], [], "nobody put"),
        ([A, B], [replace(LOOK, value="a")], "another value"),
        ([A, B, replace(U, began=10, ended=11)], [Look("k", "u", 9, 9, 7, 8)], "before its put"),
        ([A, replace(B, former=None)], [], "value before was"),
        ([A, replace(B, former="z")], [], "value before was"),
        ([A, replace(B, if_revision=4)], [], "swap at another revision"),
        ([A, U, replace(B, former="u", if_revision=5)], [], "swap at a revision outside"),
        ([A, B, replace(OTHER, if_revision=7)], [], "refused at the revision"),
        ([A, replace(B, revision=5, began=0)], [], "two changes"),
        ([A, B, U], [Look("k", "u", 9, 9, 7, 8), Look("k", "u", 10, 10, 9, 10)], "another value"),
    ],
)
def test_a_violation_is_found(changes: list[Change], looks: list[Look], word: str) -> None:
    """Stale reads, lost and repeated changes, values out of nowhere."""
    assert any(word in one for one in check(changes, looks)), check(changes, looks)
