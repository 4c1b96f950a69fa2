"""Limits how many topics and groups, which persist, one client can create, to leave room for others.

Counts only in this broker's memory, since its start; ``rocketstore.state.limits`` has the limits on totals.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from rocketstore.state.limits import LimitReachedError

OWNERS_MAX: Final = 10_000
"""How many clients are remembered; beyond that, the least recently active one is forgotten."""


class CreationQuota:
    """Lives on the event loop. Only names for which ``exists`` is still true count."""

    def __init__(self, what: str, setting: str, most: int, exists: Callable[[str], bool]) -> None:
        self._what = what
        self._setting = setting
        self._most = max(1, most)
        self._exists = exists
        self._made: OrderedDict[str, dict[str, int]] = OrderedDict()

    def take(self, owner: str, name: str, amount: int) -> None:
        """Record that ``owner`` creates this now. Raises ``LimitReachedError``."""
        made = self._made.setdefault(owner, {})
        self._made.move_to_end(owner)
        if len(self._made) > OWNERS_MAX:
            self._made.popitem(last=False)
        if sum(made.values()) + amount > self._most:
            for gone in [one for one in made if one != name and not self._exists(one)]:
                del made[gone]
        have = sum(made.values()) - made.get(name, 0)
        if have + amount > self._most:
            raise LimitReachedError(
                f"{owner} has made {have} {self._what} since this broker started, the limit per account or "
                f"address is {self._most} ({self._setting}, account_share_percent): delete some, or raise the "
                "settings"
            )
        made[name] = amount
