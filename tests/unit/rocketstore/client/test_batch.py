"""What is told of each message of a batch, whatever its attempts ended with."""

from __future__ import annotations

from dledger.client.shared import Deadline
from dledger.errors import AccessDeniedError, DLedgerError
from rocketstore.client.batch import SendBatch
from rocketstore.client.errors import SendOutcomeUnknownError


def test_a_later_refusal_makes_nothing_certain_that_was_unknown() -> None:
    """It is of the repetition; what was sent first may be stored. What was never sent is refused with certainty."""
    batch = SendBatch(1, 0.0, Deadline(5.0))
    unknown, refused = SendOutcomeUnknownError("the stream broke"), AccessDeniedError("the key was revoked")
    batch.left, batch.outcomes = [0, 1], [unknown, None]

    batch.fail(refused)

    assert batch.outcomes == [unknown, refused]
    assert [one.outcome for one in batch.outcomes if isinstance(one, DLedgerError)] == ["unknown", "not_applied"]
