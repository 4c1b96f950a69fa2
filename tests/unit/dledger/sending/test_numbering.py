"""Which numbers batches get, and keep, after each kind of failure (the cases of ``dledger.sending.batch``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from dledger.core.noop_payload import check_name
from dledger.errors import (
    DLedgerError,
    NotLeaderError,
    OutOfOrderSequenceError,
    RequestTimeoutError,
    TooManyProducersError,
    UnknownProducerError,
)
from dledger.sending.batch import UNNUMBERED_MS, OutgoingBatch, ProducerNumbering, new_producer_name

MESSAGES = 3
Make = Callable[..., OutgoingBatch[None, int]]


@pytest.fixture
def numbers() -> ProducerNumbering:
    """Whose names are n0, n1, ..."""
    names = itertools.count()
    return ProducerNumbering(make_name=lambda: f"n{next(names)}")


@pytest.fixture
def send(numbers: ProducerNumbering) -> Make:
    """Makes batches of three messages, one after the other, and numbers them as a sender does."""
    count = itertools.count()

    def made(*, doubtful: bool = False, error: DLedgerError | None = None) -> OutgoingBatch[None, int]:
        batch: OutgoingBatch[None, int] = OutgoingBatch(next(count), 0.0, 5000.0, 5000.0)
        batch.payloads = [b""] * MESSAGES
        batch.complete()
        numbers.assign(batch, 0.0)
        batch.was_first = True
        batch.doubtful, batch.error = doubtful, error
        if doubtful:
            batch.outcomes = [RequestTimeoutError("?")] * MESSAGES
        return batch

    return made


def store(numbers: ProducerNumbering, batch: OutgoingBatch[None, int]) -> None:
    """It is answered: all of it is stored."""
    batch.sequence += MESSAGES
    numbers.stored(batch)


def number_again(
    numbers: ProducerNumbering, *waiting: OutgoingBatch[None, int], now_ms: float = 0.0
) -> list[tuple[str, int, bool]]:
    """What the batches are sent with after a failure."""
    numbers.regroup(waiting, now_ms)
    for batch in waiting:
        numbers.assign(batch, now_ms)
    return [(one.producer, one.sequence, one.doubtful) for one in waiting]


def test_names_are_names_and_never_the_same() -> None:
    """As the broker takes them."""
    names = {new_producer_name() for _ in range(100)}

    assert len(names) == 100
    for name in names:
        check_name(name)


def test_behind_what_is_stored_numbers_are_given_out_again(numbers: ProducerNumbering, send: Make) -> None:
    """Case 1: one was refused for good, those behind it were never stored."""
    store(numbers, send())
    send()

    assert number_again(numbers, send(), send()) == [("n0", 3, False), ("n0", 6, False)]


def test_doubtful_numbers_stay_where_nothing_is_missing(numbers: ProducerNumbering, send: Make) -> None:
    """Case 2: all of them, also those behind it; a later one gets the next."""
    store(numbers, send())
    waiting = [send(error=NotLeaderError("")), send(doubtful=True), send()]

    assert number_again(numbers, *waiting, send()) == [
        ("n0", 3, False),
        ("n0", 6, True),
        ("n0", 9, False),
        ("n0", 12, False),
    ]


def test_a_refused_batch_behind_a_doubtful_one_leaves_no_hole(numbers: ProducerNumbering, send: Make) -> None:
    """Case 2: its number is given to the next one."""
    store(numbers, send())
    kept = send(doubtful=True)
    send()  # refused for good

    assert number_again(numbers, kept) == [("n0", 3, True)]
    assert (send().producer, send().sequence) == ("n0", 9)


def test_what_must_be_stored_because_something_behind_it_is_keeps_its_number(
    numbers: ProducerNumbering, send: Make
) -> None:
    """Case 2: a copy of it arrived late, after the retry was refused. Under another number it would be stored twice."""
    store(numbers, send())
    known_late = send(doubtful=True, error=NotLeaderError(""))
    store(numbers, send())
    waiting = [known_late, send()]

    assert number_again(numbers, *waiting, send()) == [("n0", 3, True), ("n0", 9, False), ("n0", 12, False)]


def test_behind_a_certain_hole_nothing_is_doubtful(numbers: ProducerNumbering, send: Make) -> None:
    """Case 3: the numbers before it are never reached under this name."""
    store(numbers, send())
    kept = send(doubtful=True)
    send()  # given up, and never stored
    waiting = [kept, send(), send(doubtful=True), send()]

    assert number_again(numbers, *waiting) == [("n0", 3, True), ("n1", 0, False), ("n1", 3, False), ("n1", 6, False)]
    assert waiting[2].outcomes == [None] * MESSAGES


def test_behind_an_uncertain_hole_what_is_doubtful_stays_so(numbers: ProducerNumbering, send: Make) -> None:
    """Case 4: it is stored if the lost one is. All else must not wait for that."""
    lost = send(doubtful=True)
    waiting = [send(doubtful=True), send(), send(doubtful=True)]
    numbers.failed(lost)

    assert number_again(numbers, *waiting) == [("n0", 3, True), ("n1", 0, False), ("n0", 9, True)]
    store(numbers, waiting[0])  # of the old name: it says nothing of the new one
    assert number_again(numbers, waiting[1], waiting[2]) == [("n1", 0, False), ("n0", 9, True)]


def test_what_lost_its_numbers_is_not_overtaken(numbers: ProducerNumbering, send: Make) -> None:
    """What is behind it got its own while it had an old name: they say nothing, as long as they were not sent."""
    lost, kept, refused, behind = send(doubtful=True), send(doubtful=True), send(doubtful=True), send()
    numbers.failed(lost)
    assert number_again(numbers, kept, refused, behind)[2] == ("n1", 0, False)
    refused.forget()  # a part of it was refused

    assert number_again(numbers, kept, refused, behind) == [("n0", 3, True), ("n1", 0, False), ("n1", 3, False)]


@pytest.mark.parametrize("error", [UnknownProducerError(""), OutOfOrderSequenceError("")])
def test_where_the_broker_knows_of_less_a_new_name_begins(
    numbers: ProducerNumbering, send: Make, error: DLedgerError
) -> None:
    """Case 5: it has forgotten the producer. A doubtful batch may be told so by a broker that leads no more."""
    store(numbers, send())
    waiting = [send(error=error), send()]

    assert number_again(numbers, *waiting) == [("n1", 0, False), ("n1", 3, False)]
    for batch in waiting:
        store(numbers, batch)
    assert number_again(numbers, send(doubtful=True, error=OutOfOrderSequenceError(""))) == [("n1", 6, True)]


def test_without_room_nothing_is_numbered_for_a_while(numbers: ProducerNumbering, send: Make) -> None:
    """Case 6; then it is tried again."""
    assert number_again(numbers, send(error=TooManyProducersError("")), send()) == [("", -1, False)] * 2

    assert number_again(numbers, send(), now_ms=UNNUMBERED_MS - 1) == [("", -1, False)]
    assert number_again(numbers, send(), now_ms=UNNUMBERED_MS) == [("n1", 0, False)]


def test_a_refusal_because_of_an_earlier_batch_costs_no_name(numbers: ProducerNumbering, send: Make) -> None:
    """It was sent behind another one, which was refused for good: it follows what is stored after all."""
    store(numbers, send())
    send()  # refused for good
    behind = send(error=OutOfOrderSequenceError(""))
    behind.was_first = False

    assert number_again(numbers, behind, send()) == [("n0", 3, False), ("n0", 6, False)]
