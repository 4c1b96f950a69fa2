"""Who is remembered, for how long, and who gives way where there is no room for all."""

from __future__ import annotations

import pytest

from dledger.core.noop_payload import MADE_UP_BYTES, Registration, made_up_name, own_name, stream_task_name
from dledger.errors import TooManyProducersError, UnknownProducerError
from tests.support.producers import append, known, leading, settled, successor, told


def test_the_longest_idle_producer_gives_way_to_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But nobody who was active lately: it may still repeat something."""
    solo = leading(max_producers=2)
    append(solo, "a", 0, b"")
    append(solo, "b", 0, b"")
    solo.now_ms += 300_000
    append(solo, "a", 1, b"")

    refused = append(solo, "c", 0, b"").error
    solo.now_ms += 300_000
    append(solo, "c", 0, b"")

    assert isinstance(refused, TooManyProducersError)
    assert "max_producers" in str(refused)
    assert known(solo) == {"a": 2, "c": 1}
    assert told(solo)[-1] == Registration("c", 3, dropped=2)
    assert known(successor(solo)) == {"a": 2, "c": 1}


def test_names_of_clients_own_making_give_way_before_given_ones() -> None:
    """Whoever was given a name may come back under it and repeat; a client that made its own up does not."""
    first, second = (made_up_name(bytes([number] * MADE_UP_BYTES)) for number in range(2))
    solo = leading(max_producers=3)
    for name in ("sink/0", first, second):
        append(solo, name, 0, b"")
    solo = successor(solo, max_producers=3)  # which has it from the log alone
    solo.now_ms += 300_000
    append(solo, first, 1, b"")
    solo.now_ms += 300_000

    append(solo, "sink/1", 0, b"")
    without_second = known(solo)
    append(solo, "sink/2", 0, b"")

    assert without_second == {"sink/0": 1, first: 2, "sink/1": 1}  # the one that is idle, though not for longest
    assert known(solo) == {first: 2, "sink/1": 1, "sink/2": 1}  # no such one is idle for long: as ever
    assert known(successor(solo)) == known(solo)


def test_ended_batches_of_a_stream_give_way_to_its_later_ones() -> None:
    """A stream that runs for days pushes out only itself, and of that neither its batch nor one that just ended."""
    query, other = "0b5f1b1e-8a64-4d0e-9d5c-7f3f3f1a2b3c", "1b5f1b1e-8a64-4d0e-9d5c-7f3f3f1a2b3c"
    first, second, third, fourth = (stream_task_name(query, *task) for task in ((7, 0), (8, 0), (8, 1), (9, 0)))
    solo = leading(max_producers=4)
    for name in ("given", stream_task_name(other, 1, 0), first):
        append(solo, name, 0, b"")
    solo.now_ms += 119_999
    append(solo, second, 0, b"")

    too_early = append(solo, third, 0, b"").error
    solo = successor(solo, max_producers=4)  # which has it from the log alone
    solo.now_ms += 120_000
    append(solo, third, 0, b"")
    refused = append(solo, stream_task_name(query, 8, 2), 0, b"").error
    append(solo, fourth, 0, b"")

    assert isinstance(too_early, TooManyProducersError)
    assert isinstance(refused, TooManyProducersError)  # its own batch does not give way
    assert known(solo) == {"given": 1, stream_task_name(other, 1, 0): 1, third: 1, fourth: 1}


def test_a_made_up_name_gives_way_only_if_that_is_enough_room() -> None:
    """Where the bytes of a snapshot are what is short, a longer name may need more."""
    made_up, long = made_up_name(bytes(MADE_UP_BYTES)), "p" * 70
    solo = leading(max_entry_bytes=256)
    append(solo, long, 0, b"")
    append(solo, made_up, 0, b"")
    solo.now_ms += 600_000

    append(solo, "q" * 70, 0, b"")

    assert known(solo) == {made_up: 1, "q" * 70: 1}


def test_whoever_repeats_or_asks_is_not_idle() -> None:
    """It relies on being known."""
    solo = leading(max_producers=3)
    for name in "abc":
        append(solo, name, 0, b"")
    solo.now_ms += 600_000
    append(solo, "a", 0, b"")
    solo.node.producer_sequence("b", solo.now_ms, lambda _answer: None)
    append(solo, "d", 0, b"")

    assert known(solo) == {"a": 1, "b": 1, "d": 1}


def test_a_small_store_bounds_the_producers_too() -> None:
    """All of them must fit one entry."""
    solo = leading(max_entry_bytes=256)
    outcomes = [append(solo, f"p{number}", 0, b"") for number in range(5)]

    other = successor(solo, max_entry_bytes=256)

    assert [outcome.pending for outcome in outcomes] == [True, True, True, True, False]
    assert isinstance(outcomes[4].error, TooManyProducersError)
    assert known(other) == {"p0": 1, "p1": 1, "p2": 1, "p3": 1}


def test_idle_producers_are_forgotten_at_a_snapshot() -> None:
    """Not before the time is over that was promised; the idle time is carried from leader to leader."""
    solo = leading(producer_expiry_ms=1000)
    append(solo, "a", 0, b"")
    solo.now_ms += 600
    solo.node.quorum_ack.write_snapshot(solo.now_ms)
    second = successor(solo, producer_expiry_ms=1000)
    append(second, "b", 0, b"")
    still = known(second)
    second.now_ms += 400
    second.node.quorum_ack.write_snapshot(second.now_ms)
    forgotten = settled(second, append(second, "a", 1, b""))

    assert still == {"a": 1, "b": 1}
    assert known(second) == {"b": 1}
    assert known(successor(second)) == {"b": 1}
    assert isinstance(forgotten.error, UnknownProducerError)


def test_slots_are_not_used_again_at_once() -> None:
    """A slot names one producer from its registration on."""
    solo = leading(producer_expiry_ms=1000)
    append(solo, "a", 0, b"")
    solo.now_ms += 2000
    solo.node.quorum_ack.write_snapshot(solo.now_ms)
    other = successor(solo)
    append(other, "b", 0, b"")

    assert told(other)[-1] == Registration("b", 2)


def test_one_account_does_not_fill_the_table_for_all() -> None:
    """Beyond its part a new name takes the place of an idle one of its own, or is refused; others still come in."""
    solo = leading(max_producers=8)
    names = [own_name("greedy", f"job/{number}") for number in range(8)]
    others = [own_name("modest", "job/1"), "job/1"]
    for name in names[:6]:
        append(solo, name, 0, b"")

    refused = append(solo, names[6], 0, b"").error
    for name in others:
        append(solo, name, 0, b"")
    full = known(solo)
    solo = successor(solo, max_producers=8)
    still_refused = append(solo, names[6], 0, b"").error
    solo.now_ms += 600_000
    for name in others:
        append(solo, name, 1, b"")
    append(solo, names[6], 0, b"")

    assert isinstance(refused, TooManyProducersError)
    assert "producers of this account" in str(refused)
    assert set(full) == {*names[:6], *others}
    assert isinstance(still_refused, TooManyProducersError)
    assert set(known(solo)) == {*names[1:7], *others}
    assert known(successor(solo, max_producers=8)) == known(solo)
