"""How many timed messages each account, or address without access control, has waiting. On the loop.

Counted are those that this broker has taken in since it started, by when they are due: to the minute, and to the hour
those that are due in more than two hours. One that is recalled counts until it was due.
"""

from __future__ import annotations

from typing import Final

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
EXACT_MS: Final = 2 * HOUR_MS
PERIODS_MAX: Final = 65_536
"""Of all owners. One has at most 1,100 for 40 days; beyond this, a message counts for the owner's last period."""


class TimedShares:
    """By owner."""

    def __init__(self) -> None:
        self._due: dict[str, dict[int, int]] = {}  # by owner, by the end of a period (ms)
        self.periods = 0
        """Of all owners, as of the last call."""
        self._next_ms = 0  # no period ends earlier

    def add(self, owner: str, due_ms: int, now_ms: int) -> None:
        """One more, stored."""
        self._forget(now_ms)
        period_ms = MINUTE_MS if due_ms - now_ms <= EXACT_MS else HOUR_MS
        end_ms = (due_ms // period_ms + 1) * period_ms
        found = self._due.setdefault(owner, {})
        if end_ms not in found:
            if self.periods < PERIODS_MAX or not found:
                self.periods += 1
            else:
                end_ms = max(found)
        found[end_ms] = found.get(end_ms, 0) + 1
        self._next_ms = min(self._next_ms or end_ms, end_ms)

    def waiting(self, owner: str, now_ms: int) -> int:
        """About how many."""
        self._forget(now_ms)
        return sum(self._due.get(owner, {}).values())

    def _forget(self, now_ms: int) -> None:
        """Forget the messages that are due by now."""
        if now_ms < self._next_ms or not self._due:
            return
        left = {
            owner: kept
            for owner, found in self._due.items()
            if (kept := {end_ms: count for end_ms, count in found.items() if end_ms > now_ms})
        }
        self._due, self.periods = left, sum(map(len, left.values()))
        self._next_ms = min((min(found) for found in left.values()), default=0)
