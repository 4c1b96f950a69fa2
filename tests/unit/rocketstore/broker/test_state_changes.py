"""Several changes of the state at once, of which not all are stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from dledger.rpc.loops import LoopBridge
from rocketstore.broker.mastership import Mastership, StateChange, StateChanges
from rocketstore.broker.refusal import Refusal
from rocketstore.types import Outcome, PutMessageStatus, PutResult
from tests.support.on_loop import on_loop

STORED = PutResult(PutMessageStatus.PUT_OK)


def failed(outcome: Outcome) -> PutResult:
    return PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome=outcome, reason="no")


@pytest.mark.parametrize(
    ("results", "outcome"),
    [
        ([failed("not_applied")], "not_applied"),
        ([failed("not_applied"), failed("not_applied")], "not_applied"),
        ([STORED, failed("not_applied")], "unknown"),
        ([failed("not_applied"), failed("unknown")], "unknown"),
    ],
)
def test_only_if_no_change_was_made_it_is_certain_that_nothing_changed(results: list[PutResult], outcome: str) -> None:
    @on_loop
    async def refuse() -> None:
        changes = StateChanges(LoopBridge(), cast("Mastership", SimpleNamespace(leader_address="")))
        with pytest.raises(Refusal) as caught:
            await changes.make(*map(_resulting, results))
        assert caught.value.outcome == outcome

    refuse()


def _resulting(result: PutResult) -> StateChange:
    return lambda done: done(result)
