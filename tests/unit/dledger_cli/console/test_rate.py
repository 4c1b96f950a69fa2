"""Limits in time."""

from __future__ import annotations

from dledger_cli.console.guard import RateBound


def test_only_so_many_within_any_period() -> None:
    """The period moves with the clock; what was refused does not count."""
    now = [0.0]
    bound = RateBound(2, 10.0, lambda: now[0])

    def tries_at(at_s: float, *tries: bool) -> None:
        now[0] = at_s
        assert [bound.admit() for _ in tries] == list(tries)

    tries_at(0, True)
    tries_at(6, True, False, False)
    tries_at(9.9, False)
    tries_at(10, True, False)
    tries_at(16, True, False)
    tries_at(40, True, True, False)
