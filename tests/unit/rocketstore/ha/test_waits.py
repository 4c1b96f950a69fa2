"""Puts that wait for slaves: each is answered once, and PUT_OK only if enough slaves have it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketstore.ha.waits import UNNAMED, ReplicaWaits
from rocketstore.types import PutMessageStatus
from tests.support.waiting import ManualClock

OK, LATE, ABSENT = (
    PutMessageStatus.PUT_OK,
    PutMessageStatus.FLUSH_SLAVE_TIMEOUT,
    PutMessageStatus.SLAVE_NOT_AVAILABLE,
)


class Waits:
    """A master's waits with a log whose end is set by hand, and what was answered."""

    def __init__(self, needed: int = 1) -> None:
        self.clock = ManualClock()
        self.end = 0
        self.answers: dict[int, list[PutMessageStatus]] = {}
        self.waits = ReplicaWaits(
            self.clock, slaves_needed=needed, timeout_ms=3000, behind_bytes_max=1000, end=lambda: self.end
        )

    def put(self, end: int) -> None:
        """A put whose message ends at ``end``."""
        self.end = max(end, self.end)
        answers = self.answers.setdefault(end, [])
        self.waits.wait_for(end, lambda status, _why: answers.append(status))


def test_a_put_waits_for_one_slave() -> None:
    """Answered when a slave has everything up to its end, and not before."""
    one = Waits()
    one.waits.joined("a", ord("a"), 0)
    one.put(100)
    one.waits.acknowledged("a", 99)
    assert one.answers == {100: []}
    one.waits.acknowledged("a", 100)
    assert one.answers == {100: [OK]}
    one.put(50)  # before what is replicated
    assert one.answers[50] == [OK]


def test_without_slaves_a_put_is_answered_at_once() -> None:
    """As RocketMQ does: the message is stored, and the producer learns that it has one copy."""
    one = Waits()
    one.put(100)
    assert one.answers == {100: [ABSENT]}
    one.waits.joined("a", ord("a"), 0)
    one.end = 1100
    one.put(1100)  # the slave lacks more than it may
    assert one.answers[1100] == [ABSENT]


def test_what_a_slave_had_does_not_count_once_it_is_gone() -> None:
    """A put after that needs another one that has it; RocketMQ keeps the highest number for ever."""
    one = Waits()
    one.waits.joined("a", ord("a"), 0)
    one.waits.acknowledged("a", 500)
    one.waits.left("a")
    one.put(300)
    assert one.answers.pop(300) == [ABSENT]
    one.waits.joined("b", ord("b"), 0)
    one.put(400)
    assert one.answers == {400: []}
    one.waits.acknowledged("a", 900)  # a late word of who has left
    assert one.answers == {400: []}
    one.waits.acknowledged("b", 400)
    assert one.answers == {400: [OK]}


def test_two_copies_need_two_slaves() -> None:
    """The second fastest decides."""
    one = Waits(needed=2)
    one.waits.joined("a", ord("a"), 0)
    one.put(10)
    assert one.answers == {10: [ABSENT]}
    one.waits.joined("b", ord("b"), 0)
    one.put(20)
    one.waits.acknowledged("a", 20)
    assert one.answers[20] == []
    one.waits.acknowledged("b", 20)
    assert one.answers[20] == [OK]


@pytest.mark.parametrize("broker_id", [1, UNNAMED])
def test_a_slave_that_is_connected_twice_is_one_copy(broker_id: int) -> None:
    """It comes anew while its old connection is not given up; RocketMQ's slaves do not say which of them they are."""
    one = Waits(needed=2)
    one.waits.joined("old", broker_id, 0)
    one.end = 100
    one.waits.acknowledged("old", 100)
    one.waits.joined("new", broker_id, 100)
    assert one.waits.in_sync == 1
    one.put(100)
    assert one.answers == {100: [ABSENT]}
    one.waits.joined("other", 2, 0)
    one.put(200)
    one.waits.acknowledged("old", 200)
    one.waits.acknowledged("new", 200)
    assert one.answers[200] == []
    one.waits.acknowledged("other", 200)
    assert one.answers[200] == [OK]


def test_a_slave_counts_with_its_oldest_connection_that_is_alive() -> None:
    """What another connection says under its number counts only once nothing is heard on the older one, or it ends."""
    one = Waits()
    one.waits.joined("old", 1, 0)
    one.waits.joined("new", 1, 0)
    one.put(100)
    one.waits.acknowledged("new", 100)
    assert one.answers == {100: []}
    one.clock.now_ms += 10_000
    one.waits.acknowledged("new", 100)
    assert one.answers == {100: [OK]}
    one.waits.acknowledged("old", 100)  # it was only slow
    one.put(200)
    one.waits.acknowledged("new", 200)
    assert one.answers[200] == []
    one.waits.left("old")
    assert one.waits.in_sync == 1
    one.waits.acknowledged("new", 200)
    assert one.answers[200] == [OK]


@pytest.mark.parametrize("order", ["ahead first", "behind first"])
def test_an_unnamed_slave_that_is_behind_holds_up_nothing_that_another_one_has(order: str) -> None:
    """Of two that do not say who they are the one that has the message counts, whichever came or spoke last."""
    one = Waits()
    names = ["ahead", "behind"] if order == "ahead first" else ["behind", "ahead"]
    for name in names:
        one.waits.joined(name, UNNAMED, 0)
    one.waits.acknowledged("behind", 40)
    one.put(100)
    one.waits.acknowledged("ahead", 100)
    assert one.answers == {100: [OK]}
    one.put(200)
    one.waits.acknowledged("ahead", 200)
    one.waits.acknowledged("behind", 150)
    assert one.answers[200] == [OK]


def test_an_unnamed_slave_counts_while_any_of_its_connections_lasts() -> None:
    """The end of one of them takes nothing from the other."""
    one = Waits()
    one.waits.joined("old", UNNAMED, 0)
    one.waits.joined("new", UNNAMED, 0)
    one.waits.left("new")
    one.put(100)
    one.waits.acknowledged("old", 100)
    assert one.answers == {100: [OK]}


def test_a_put_that_waits_too_long_is_answered() -> None:
    """After the time-out, once, and others keep theirs."""
    one = Waits()
    one.waits.joined("a", ord("a"), 0)
    one.put(10)
    one.clock.now_ms += 2000
    one.put(20)
    assert one.waits.expire() == 1.0
    one.clock.now_ms += 1000
    assert one.waits.expire() == 2.0
    assert one.answers == {10: [LATE], 20: []}
    one.waits.acknowledged("a", 20)
    assert one.answers == {10: [LATE], 20: [OK]}
    assert one.waits.expire() is None
    assert one.waits.waiting == 0


def test_nobody_waits_for_ever_when_it_ends() -> None:
    """Everybody is answered, once."""
    one = Waits()
    one.waits.joined("a", ord("a"), 0)
    one.put(10)
    one.waits.close()
    one.waits.close()
    assert one.answers == {10: [LATE]}
    one.waits.joined("b", ord("b"), 10)  # it was about to
    one.put(20)
    assert one.answers[20] == [ABSENT]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(1, 60), st.just(0)),
            st.tuples(st.just("ack"), st.integers(0, 2), st.integers(0, 60)),
            st.tuples(st.just("leave"), st.integers(0, 2), st.just(0)),
            st.tuples(st.just("time"), st.integers(0, 4000), st.just(0)),
        ),
        max_size=40,
    ),
    st.integers(1, 2),
)
def test_it_is_answered_once_and_ok_only_if_enough_have_it(steps: list[tuple[str, int, int]], needed: int) -> None:
    """In any order of puts, acknowledgements, departures and time-outs."""
    one, have, end = Waits(needed), {}, 0  # type: Waits, dict[int, int], int
    held: dict[int, int] = {}
    for kind, number, acknowledged in steps:
        before = {put: len(answers) for put, answers in one.answers.items()}
        if kind == "put":
            end += number
            one.put(end)
            held[end] = 0
        elif kind == "ack":
            if number not in have:
                one.waits.joined(number, number, 0)
            have[number] = max(min(acknowledged, end), have.get(number, 0))
            one.waits.acknowledged(number, have[number])
        elif kind == "leave":
            have.pop(number, None)
            one.waits.left(number)
        else:
            one.clock.now_ms += number
            one.waits.expire()
        for put, answers in one.answers.items():
            if len(answers) > before.get(put, 0) and answers[-1] is OK:
                assert sum(got >= put for got in have.values()) >= needed
    one.clock.now_ms += 4000
    one.waits.expire()
    assert all(len(answers) == 1 for answers in one.answers.values())
