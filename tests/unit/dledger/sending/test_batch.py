"""What is told of each item of a batch, whatever its attempts ended with."""

from __future__ import annotations

from collections.abc import Callable

from dledger.errors import AccessDeniedError, DLedgerError, InvalidRequestError, PendingFullError, RequestTimeoutError
from dledger.sending.batch import OutgoingBatch
from tests.unit.dledger.sending.world import RULES


def test_a_later_refusal_makes_nothing_certain_that_was_unknown() -> None:
    """It is of the repetition; what was sent first may be stored. What was never sent is refused with certainty."""
    batch: OutgoingBatch[None, int] = OutgoingBatch(1, 0.0, 5000.0, 5000.0)
    unknown, refused = RequestTimeoutError("the stream broke"), AccessDeniedError("the key was revoked")
    batch.left, batch.outcomes = [0, 1], [unknown, None]

    batch.fail(refused)

    assert batch.outcomes == [unknown, refused]
    assert [one.outcome for one in batch.outcomes if isinstance(one, DLedgerError)] == ["unknown", "not_applied"]


def test_what_may_be_stored_is_not_sent_in_parts() -> None:
    """The success of one part would say nothing of what became of the others at the first attempt."""
    batch: OutgoingBatch[None, int] = OutgoingBatch(1, 0.0, 5000.0, 5000.0)
    batch.payloads = [b"a", b"b"]
    batch.complete()
    batch.producer, batch.sequence = "n0", 0
    for answer in (RequestTimeoutError("the stream broke"), InvalidRequestError("the limits have changed")):
        batch.begin(0.0, is_first=True)
        batch.take(answer, RULES, given=False)

    assert not batch.left
    assert [one.outcome for one in batch.outcomes if isinstance(one, DLedgerError)] == ["unknown", "unknown"]


def test_a_refused_item_makes_nothing_certain_of_those_behind_it_that_were_unknown() -> None:
    """All of it may be stored since the first attempt, whatever a server that has other limits says of the second."""
    batch: OutgoingBatch[None, int] = OutgoingBatch(1, 0.0, 5000.0, 5000.0)
    batch.payloads = [b"a", b"b", b"c"]
    batch.complete()
    batch.producer, batch.sequence = "given", 0
    busy, refused = PendingFullError("full"), InvalidRequestError("the limits have changed")
    for answer in (RequestTimeoutError("the stream broke"), [busy, refused, busy]):
        batch.begin(0.0, is_first=True)
        batch.take(answer, RULES, given=True)

    assert not batch.left
    assert [one.outcome for one in batch.outcomes if isinstance(one, DLedgerError)] == ["unknown"] * 3


class DoneMeanwhile(list[Callable[[], object]]):
    """Callbacks of a batch that is done just before one is added, when the driver has looked for them already."""

    def __init__(self, batch: OutgoingBatch[None, int]) -> None:
        super().__init__()
        self._batch = batch

    def append(self, callback: Callable[[], object]) -> None:
        self._batch.done = True
        self._batch.announce()
        super().append(callback)


def test_a_callback_that_comes_as_the_batch_is_done_is_called() -> None:
    """Once: else whoever waits would wait for ever."""
    batch: OutgoingBatch[None, int] = OutgoingBatch(1, 0.0, 5000.0, 5000.0)
    batch.callbacks = DoneMeanwhile(batch)
    called: list[int] = []

    batch.when_done(lambda: called.append(1))

    assert called == [1]
