"""A signed request counts once, in bounded memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.access.guard import SPAN, ReplayWindow, TooManySessionsError

WINDOW = 1000


def test_a_number_counts_once_in_any_order() -> None:
    """Threads may overtake each other."""
    window = ReplayWindow(WINDOW)
    numbers = list(range(500))
    random.Random(1).shuffle(numbers)

    assert all(window.take("key", "s", one, 0, 0) for one in numbers)
    assert not any(window.take("key", "s", one, 0, 0) for one in numbers)


def test_what_is_too_far_behind_is_refused() -> None:
    """Nobody knows any more whether it came before."""
    window = ReplayWindow(WINDOW)
    window.take("key", "s", SPAN + 5, 0, 0)

    assert window.take("key", "s", 6, 0, 0)
    assert not window.take("key", "s", 5, 0, 0)


@given(st.lists(st.integers(0, 3 * SPAN), max_size=60))
def test_nothing_is_taken_twice(numbers: list[int]) -> None:
    """Against a plain set that forgets nothing."""
    window, seen = ReplayWindow(WINDOW), set[int]()

    for number in numbers:
        if window.take("key", "s", number, 0, 0):
            assert number not in seen
            seen.add(number)
        else:
            assert number in seen or number <= max(seen) - SPAN


def test_sessions_of_several_clients_do_not_touch() -> None:
    """Neither two of one account nor the same of two accounts."""
    window = ReplayWindow(WINDOW)

    assert [window.take(key, session, 1, 0, 0) for key in "ab" for session in "st"] == [True] * 4


def test_when_it_is_full_new_clients_are_refused_and_nobody_is_forgotten() -> None:
    """Refuse rather than forget: what is forgotten could be replayed."""
    window = ReplayWindow(WINDOW, sessions_max=3, account_sessions_max=3)
    for number in range(3):
        window.take("key", f"s{number}", 1, 0, 0)

    with pytest.raises(TooManySessionsError):
        window.take("other", "s", 1, 500, 500)
    assert not any(window.take("key", f"s{number}", 1, 500, 500) for number in range(3))
    assert window.take("key", "s0", 2, 500, 500)


def test_one_account_cannot_keep_the_others_out() -> None:
    """It has a part of the room."""
    window = ReplayWindow(WINDOW, sessions_max=100, account_sessions_max=2)
    window.take("greedy", "s0", 1, 0, 0)
    window.take("greedy", "s1", 1, 0, 0)

    with pytest.raises(TooManySessionsError):
        window.take("greedy", "s2", 1, 0, 0)
    assert window.take("other", "s2", 1, 0, 0)


def test_a_session_is_forgotten_when_all_of_it_is_too_old_and_stays_refused() -> None:
    """Then its room is another's; a replay of it is refused, also when the clock was set back."""
    window = ReplayWindow(WINDOW, sessions_max=1)
    window.take("key", "old", 1, 5000, 5000)

    with pytest.raises(TooManySessionsError):
        window.take("key", "new", 1, 6000, 6000)
    assert window.take("key", "new", 1, 7001, 7001)
    assert len(window) == 1
    assert not window.take("key", "old", 1, 5000, 5500)


def test_memory_does_not_grow_with_requests() -> None:
    """Half a kilobyte per client, however many requests it makes."""
    window = ReplayWindow(WINDOW)

    assert all(window.take("key", "s", number, number, number) for number in range(3 * SPAN))

    [session] = window._sessions.values()
    assert session.seen.bit_length() <= SPAN
    assert len(window) == 1


def test_a_clock_that_is_set_back_lets_nothing_in_again() -> None:
    """What was forgotten in a sweep stays refused, also after another sweep under the earlier clock."""
    window = ReplayWindow(WINDOW, sessions_max=10, account_sessions_max=1)
    assert window.take("y", "s", 1, 5000, 5000)
    assert window.take("x", "s", 1, 7000, 7000)
    for timestamp_ms, now_ms in ((7000, 7000), (6500, 5500)):
        with pytest.raises(TooManySessionsError):
            window.take("x", "another", 1, timestamp_ms, now_ms)

    assert not window.take("y", "s", 1, 5000, 5500)
