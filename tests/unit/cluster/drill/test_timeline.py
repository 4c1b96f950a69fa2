"""What a fault cost, by what was recorded: gaps, first failures, role changes, throughput."""

from __future__ import annotations

import math

import pytest

from cluster.drill.history import (
    DrillSend,
    EventKind,
    NodeView,
    Notes,
    Round,
    SeenChange,
    SendOutcome,
    effects_of,
    quantile,
    series,
    state_periods,
    timeline,
)
from tests.unit.cluster.drill.histories import N0, N1, failover


def acknowledged(*times: float) -> Notes:
    sends = [
        DrillSend(number, b"", at_s - 0.01, at_s, SendOutcome.ACKNOWLEDGED, 0, number)
        for number, at_s in enumerate(times)
    ]
    return Notes(sends=sends, ended_s=10.0)


def test_facts_of_a_failover() -> None:
    """The gap runs from the last acknowledgement before the fault to the first one after it."""
    facts = effects_of(Round(1, "SIGKILL to n0", N0, 1.0, 3.0, 3.5), failover())

    assert facts.without_service_s == pytest.approx(1.10)
    assert facts.first_acknowledged_s == pytest.approx(2.01)
    assert (facts.first_failed_s, facts.first_failed_why) == (1.05, "n0: the stream ended")
    assert (facts.leader_before, facts.leader_after) == (N0, N1)
    assert (facts.term_before, facts.term_after) == (1, 2)
    assert facts.failed == 1


def test_the_longest_gap_counts_not_the_first() -> None:
    """An acknowledgement that was on its way at the fault does not end the outage."""
    facts = effects_of(Round(1, "", N0, 1.0), acknowledged(0.9, 1.05, 3.0, 3.1))

    assert facts.without_service_s == pytest.approx(1.95)
    assert facts.first_acknowledged_s == pytest.approx(3.0)


def test_no_acknowledgement_after_the_fault_is_an_outage_for_ever() -> None:
    """And not one of no length."""
    facts = effects_of(Round(1, "", N0, 1.0), acknowledged(0.5, 0.9))

    assert facts.without_service_s == math.inf
    assert math.isnan(facts.first_acknowledged_s)


def test_a_round_ends_where_the_next_begins() -> None:
    """Its outage is not the next one's."""
    notes = acknowledged(0.9, 1.4, 2.9, 6.0)

    assert effects_of(Round(1, "", N0, 1.0, ends_s=3.0), notes).without_service_s == pytest.approx(1.5)
    assert effects_of(Round(2, "", N0, 3.0), notes).without_service_s == pytest.approx(3.1)


def test_the_timeline_is_in_order_and_tells_of_roles() -> None:
    """A follower that hears of a new term is no news; a silent node, a candidate and a leader are."""
    notes = failover()
    rounds = [effects_of(Round(1, "SIGKILL to n0", N0, 1.0, 3.0, 3.5), notes)]

    events = timeline(notes, rounds)

    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert [event.text for event in events if event.kind is EventKind.ROLE] == [
        "n0 does not answer",
        "n1 is a candidate in term 2",
        "n1 leads and accepts messages in term 2",
        "n0 follows in term 2",
    ]
    kinds = [event.kind for event in events if event.kind is not EventKind.ROLE]
    assert kinds == [
        EventKind.STEP,
        EventKind.FAULT,
        EventKind.FIRST_FAILED,
        EventKind.FIRST_ACKNOWLEDGED,
        EventKind.HEAL,
        EventKind.RECOVERED,
    ]


def test_a_failed_attempt_that_cost_no_message_is_told_as_such() -> None:
    """The row of the fault says 0 failed then, which must not seem to contradict it."""
    noticed, harmless = failover(), failover()
    harmless.sends = [one for one in harmless.sends if one.outcome is SendOutcome.ACKNOWLEDGED]

    first = [
        next(
            one.text
            for one in timeline(notes, [effects_of(Round(1, "", N0, 1.0), notes)])
            if "first failed" in one.text
        )
        for notes in (noticed, harmless)
    ]

    assert first == [
        "first failed attempt: n0: the stream ended",
        "first failed attempt, all sent again in time: n0: the stream ended",
    ]


def test_a_fault_that_nobody_noticed_has_no_first_failure() -> None:
    """Nothing is told of what did not happen."""
    notes = acknowledged(0.9, 1.0, 1.1)
    rounds = [effects_of(Round(1, "", N0, 0.95), notes)]

    assert EventKind.FIRST_FAILED not in [event.kind for event in timeline(notes, rounds)]


def test_lanes_cover_the_whole_time() -> None:
    """Each stretch ends where the next begins, the last one with the drill."""
    found = state_periods(failover().seen, 4.0)

    assert [(one.begin_s, one.end_s, one.view.role) for one in found[N0]] == [
        (0.0, 1.04, "LEADER"),
        (1.04, 3.2, ""),
        (3.2, 4.0, "FOLLOWER"),
    ]
    assert state_periods([SeenChange(0.0, N1, NodeView("LEADER", 1))], 2.0)[N1][0].end_s == 2.0


def test_throughput_and_latency_by_tenths_of_a_second() -> None:
    """By when the answer came; failures apart, and no latency where nothing was acknowledged."""
    sends = [DrillSend(n, b"", 0.0, 0.05 + n / 1000, SendOutcome.ACKNOWLEDGED, 0, n) for n in range(10)]
    sends.append(DrillSend(10, b"", 0.1, 0.31, SendOutcome.REFUSED))

    buckets = series(Notes(sends=sends, ended_s=1.0))

    assert [one.acknowledged_per_s for one in buckets] == pytest.approx([100, 0, 0, 0])
    assert [one.failed_per_s for one in buckets] == pytest.approx([0, 0, 0, 10])
    assert (buckets[0].p50_ms, buckets[0].p99_ms) == pytest.approx((54, 59))
    assert math.isnan(buckets[1].p50_ms)


def test_quantiles() -> None:
    """Of what there is."""
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([1, 2, 3, 4], 0.99) == 4
    assert math.isnan(quantile([], 0.5))
