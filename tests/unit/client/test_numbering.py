"""What becomes of numbers behind a gap."""

from __future__ import annotations

from dledger.client.append_batch import AppendBatch
from dledger.client.numbering import Numbering
from dledger.client.shared import Deadline


def numbered(numbering: Numbering, *doubts: bool) -> list[AppendBatch]:
    """One batch after the other, sent; those in doubt may be stored."""
    batches = []
    for number, doubt in enumerate(doubts):
        batch = AppendBatch(number, 0.0, Deadline(10))
        batch.bodies = [b"x"]
        numbering.number(batch)
        batch.uncertain = doubt
        batches.append(batch)
    return batches


def sequences(*batches: AppendBatch) -> list[int | None]:
    return [None if batch.producer is None else batch.producer.sequence for batch in batches]


def test_behind_a_gap_everything_is_numbered_anew_if_all_of_it_is_certainly_not_stored() -> None:
    """From what is stored on."""
    numbering = Numbering()
    first, second, third = numbered(numbering, False, False, False)
    numbering.finish(first, stored=False)

    numbering.close_gaps([second, third])

    assert sequences(second, third) == [None, None]
    numbering.number(second)
    assert sequences(second) == [0]


def test_behind_a_gap_nothing_gets_another_number_while_one_of_them_is_in_doubt() -> None:
    """It may be stored under its number: what would get that one now would be taken for its repetition, and dropped."""
    for doubts in ((True, False), (False, True), (True, True)):
        numbering = Numbering()
        first, *others = numbered(numbering, False, *doubts)
        numbering.finish(first, stored=False)

        numbering.close_gaps(others)

        assert sequences(*others) == [1, 2]
