"""The check of what clients of brokers saw: every lie is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.broker_history import BrokerHistory, SendOp
from tests.support.history import Outcome

QUEUES = {0: [b"a", b"c"], 1: [b"b"]}
Lie = Callable[[BrokerHistory, dict[int, list[bytes]]], None]


def true_history() -> BrokerHistory:
    """Three messages of one ordered sender, one of unknown outcome, one that was refused; all are consumed."""
    history = BrokerHistory()
    history.record(SendOp(b"a", 1, 2, Outcome.ACKED, 0, 0, "s", 0))
    history.record(SendOp(b"b", 2, 3, Outcome.ACKED, 1, 0, "s", 1))
    history.record(SendOp(b"c", 3, 4, Outcome.ACKED, 0, 1, "s", 2))
    history.record(SendOp(b"perhaps", 3, 4, Outcome.UNKNOWN, stream="s", number=3))
    history.record(SendOp(b"no", 3, 4, Outcome.NOT_APPLIED, stream="s", number=4))
    first = history.begin_session("one", {0: 0, 1: 0})
    history.delivered(first, [(0, 0, b"a"), (1, 0, b"b")])
    first.committed.update({0: 1, 1: 0})
    second = history.begin_session("one", {0: 1, 1: 0})
    history.delivered(second, [(0, 1, b"c"), (1, 0, b"b")])
    return history


def test_an_acknowledgement_without_a_place_is_held_to_its_queue_and_to_its_time() -> None:
    """A broker knows that it has a message, and not where; it is there nevertheless, and in order."""
    history = BrokerHistory()
    history.record(SendOp(b"a", 1, 2, Outcome.ACKED, 0, -1))
    history.record(SendOp(b"b", 3, 4, Outcome.ACKED, 0, -1))

    assert history.complaints({0: [b"a", b"b"]}) == []
    assert history.complaints({0: [b"b", b"a"]}) != []
    assert history.complaints({1: [b"a", b"b"]}) != []
    assert history.complaints({0: [b"a"]}) != []


def lost(_history: BrokerHistory, queues: dict[int, list[bytes]]) -> None:
    queues[0].pop()


def moved(_history: BrokerHistory, queues: dict[int, list[bytes]]) -> None:
    queues[1].insert(0, b"perhaps")


def doubled(_history: BrokerHistory, queues: dict[int, list[bytes]]) -> None:
    queues[1].append(b"a")


def refused_and_stored(_history: BrokerHistory, queues: dict[int, list[bytes]]) -> None:
    queues[1].append(b"no")


def never_sent(_history: BrokerHistory, queues: dict[int, list[bytes]]) -> None:
    queues[1].append(b"whence?")


def overtaken(history: BrokerHistory, queues: dict[int, list[bytes]]) -> None:
    queues[0].append(b"early")
    queues[0].append(b"late")
    history.record(SendOp(b"late", 5, 6, Outcome.ACKED, 0, 3))
    history.record(SendOp(b"early", 7, 8, Outcome.ACKED, 0, 2))


def overtaken_by_what_nobody_was_told_of(history: BrokerHistory, queues: dict[int, list[bytes]]) -> None:
    queues[0] += [b"doubtful", b"late"]
    history.record(SendOp(b"late", 5, 6, Outcome.ACKED, 0, 3))
    history.record(SendOp(b"doubtful", 7, 8, Outcome.UNKNOWN))


def out_of_its_senders_order(history: BrokerHistory, queues: dict[int, list[bytes]]) -> None:
    history.record(SendOp(b"y", 5, 9, Outcome.ACKED, 1, 1, "t", 1))
    history.record(SendOp(b"x", 5, 9, Outcome.ACKED, 1, 2, "t", 0))
    queues[1] += [b"y", b"x"]


def skipped(history: BrokerHistory, _queues: dict[int, list[bytes]]) -> None:
    history.delivered(history.begin_session("one", {0: 3}), [])


def gone_back(history: BrokerHistory, _queues: dict[int, list[bytes]]) -> None:
    history.begin_session("one", {0: 0})


def hole(history: BrokerHistory, _queues: dict[int, list[bytes]]) -> None:
    history.delivered(history.begin_session("two", {0: 0}), [(0, 1, b"c")])


def another_body(history: BrokerHistory, _queues: dict[int, list[bytes]]) -> None:
    history.delivered(history.begin_session("two", {0: 0}), [(0, 0, b"c")])


def never_consumed(history: BrokerHistory, queues: dict[int, list[bytes]]) -> None:
    history.record(SendOp(b"unread", 5, 6, Outcome.ACKED, 1, 1))
    queues[1].append(b"unread")


def test_the_truth_is_believed() -> None:
    """Also if what is unknown is stored after all."""
    assert true_history().complaints(QUEUES) == []
    assert true_history().complaints({**QUEUES, 1: [b"b", b"perhaps"]}) == []


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lost, "acknowledged messages are lost"),
        (moved, "not at their acknowledged positions"),
        (doubled, "stored more than once"),
        (refused_and_stored, "were refused"),
        (never_sent, "never sent"),
        (overtaken, "acknowledged before they were sent"),
        (overtaken_by_what_nobody_was_told_of, "acknowledged before they were sent"),
        (out_of_its_senders_order, "order of their sender"),
        (skipped, "skips queue 0 from 2 to 3"),
        (gone_back, "goes back from 1 to 0"),
        (hole, "continues at 1 instead of 0"),
        (another_body, "offset 0 of queue 0 was b'c'"),
        (never_consumed, "never consumed"),
    ],
)
def test_every_lie_is_found(lie: Lie, words: str) -> None:
    """Each kind of damage has its own complaint."""
    history, queues = true_history(), {queue: list(bodies) for queue, bodies in QUEUES.items()}
    lie(history, queues)

    assert words in "\n".join(history.complaints(queues))
