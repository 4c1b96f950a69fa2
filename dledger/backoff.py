"""Pauses between attempts, for callers that wait in their own way: for a due time, an event, or as a coroutine.

Callers that may block use tenacity's ``Retrying`` itself; the pauses here are tenacity's, too.
"""

from __future__ import annotations

from typing import Final

import tenacity

_RETRYING: Final = tenacity.Retrying()


class Backoff:
    """Pauses from ``least`` to ``most``, each twice the one before. Not thread-safe."""

    def __init__(self, least: float, most: float) -> None:
        self._most = most
        self._wait = tenacity.wait_exponential(multiplier=least, max=most)
        self._state = tenacity.RetryCallState(_RETRYING, None, (), {})
        self._hurried = True

    def has_paused(self) -> bool:
        """Whether there was a pause since the last success."""
        return self._state.attempt_number > 1

    def pause(self) -> float:
        """How long to wait after a failure."""
        pause = self._wait(self._state) if self._hurried else self._most
        self._state.attempt_number += 1
        return pause

    def succeeded(self) -> None:
        """Reset the pause to the shortest one."""
        self._state.attempt_number = 1
        self._hurried = True

    def calm_down(self) -> None:
        """Use the longest pause until the next success."""
        self._hurried = False
