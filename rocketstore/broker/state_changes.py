"""Changes of the broker's state: they are messages of its log, so each has an outcome as a send has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dledger.rpc.bridge import LoopBridge, LoopCallback
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.ports import StateDone
from rocketstore.broker.refusal import Refusal
from rocketstore.types import PutResult

CHANGES_AT_ONCE: Final = 64
"""Of several in one request: looking at each takes the loop's time."""

StateChange = Callable[[StateDone], None]
"""Begins a change; calls the function with its outcome."""


class StateChanges:
    """On the loop."""

    def __init__(self, bridge: LoopBridge, mastership: Mastership) -> None:
        self._bridge = bridge
        self._mastership = mastership

    async def make(self, *changes: StateChange) -> None:
        """Returns once all are stored and applied. Raises ``Refusal``."""
        done = 0
        for start in range(0, len(changes), CHANGES_AT_ONCE):
            results = await asyncio.gather(*map(self.outcome, changes[start : start + CHANGES_AT_ONCE]))
            done += sum(one.ok for one in results)
            failed = next((one for one in results if not one.ok), None)
            if failed is not None:
                count = f"{done} of {len(changes)} changes are done: " if len(changes) > 1 else ""
                nothing = not done and all(one.outcome == "not_applied" for one in results)
                outcome = failed.outcome if nothing else "unknown"
                refused = failed._replace(reason=f"{count}{failed.reason or failed.status}", outcome=outcome)
                raise Refusal.of(refused, self._mastership.leader_address)

    def outcome(self, change: StateChange) -> asyncio.Future[PutResult]:
        """Begins a change; the future gets what became of it."""
        outcome: LoopCallback[PutResult] = LoopCallback(self._bridge)
        change(outcome.done)
        return outcome.future
