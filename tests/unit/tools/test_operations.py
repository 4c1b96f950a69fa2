"""What ``make tidy`` says of an append is said of its leader."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dledger.types import NodeId, Term
from tools.tidy import operations
from tools.tidy.calls import NotedCall
from tools.tidy.operations import under_one_leader


def appends_in(*terms: int) -> Callable[[], tuple[Term, list[NotedCall]]]:
    """Appends that succeed in these terms; the only call of each is named after its number."""
    numbered = iter(enumerate(terms))

    def append() -> tuple[Term, list[NotedCall]]:
        number, term = next(numbered)
        return Term(term), [NotedCall("loop", "file.py", str(number))]

    return append


def leader_of(term: Term) -> NodeId | None:
    """A node for each term."""
    return NodeId(f"n{term}")


def test_only_appends_of_one_term_count() -> None:
    """Leadership moves after the second append: the first one at the new leader had to find it."""
    leader, calls = under_one_leader(appends_in(1, 1, 2, 2, 2), leader_of, 2)

    assert (leader, [one.function for (one,) in calls]) == ("n2", ["3", "4"])


def test_a_leader_that_has_gone_does_not_count() -> None:
    """It was elected and lost before anybody looked: later appends decide."""
    leader, calls = under_one_leader(appends_in(1, 1, 2, 2), lambda term: leader_of(term) if term == 2 else None, 1)

    assert (leader, [one.function for (one,) in calls]) == ("n2", ["3"])


def test_a_leadership_that_keeps_moving_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure is better than one of nobody."""
    monkeypatch.setattr(operations, "SETTLED_S_MAX", 0.0)

    with pytest.raises(TimeoutError, match="no leader lasted for 1 appends"):
        under_one_leader(appends_in(1), leader_of, 1)
