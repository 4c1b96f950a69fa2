"""What is told of each item of a batch, whatever its attempts ended with."""

from __future__ import annotations

from dledger.errors import AccessDeniedError, DLedgerError, RequestTimeoutError
from dledger.sending.batch import Batch


def test_a_later_refusal_makes_nothing_certain_that_was_unknown() -> None:
    """It is of the repetition; what was sent first may be stored. What was never sent is refused with certainty."""
    batch: Batch[None, int] = Batch(1, 0.0, 5000.0, 5000.0)
    unknown, refused = RequestTimeoutError("the stream broke"), AccessDeniedError("the key was revoked")
    batch.left, batch.outcomes = [0, 1], [unknown, None]

    batch.fail(refused)

    assert batch.outcomes == [unknown, refused]
    assert [one.outcome for one in batch.outcomes if isinstance(one, DLedgerError)] == ["unknown", "not_applied"]
