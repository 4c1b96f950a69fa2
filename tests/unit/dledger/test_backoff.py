"""How long the pauses between attempts are."""

from __future__ import annotations

from dledger.clock import Backoff


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    """However many there are."""
    backoff = Backoff(500, 3000)

    assert not backoff.has_paused()
    assert [backoff.pause() for _ in range(5)] == [500, 1000, 2000, 3000, 3000]
    assert backoff.has_paused()
    assert [backoff.pause() for _ in range(5000)][-1] == 3000
    backoff.succeeded()
    assert not backoff.has_paused()
    assert backoff.pause() == 500


def test_what_needs_a_person_is_not_tried_in_a_hurry() -> None:
    """Until something succeeds."""
    backoff = Backoff(0.1, 2.0)
    backoff.calm_down()

    assert [backoff.pause(), backoff.pause()] == [2.0, 2.0]
    backoff.succeeded()
    assert backoff.pause() == 0.1
