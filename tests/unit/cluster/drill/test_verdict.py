"""The verdict can fail: every defect that a group could have is found, named and counted."""

from __future__ import annotations

from dataclasses import replace

from cluster.drill.history import DrillDelivery, SendOutcome, ServedMessage
from cluster.drill.verdict import EXAMPLES_MAX, DefectKind, DrillVerdict, Station, judge_migration
from tests.unit.cluster.drill.histories import N0, N1, N2, History, body_of, perfect


def kinds(history: History) -> dict[DefectKind, int]:
    return {one.kind: one.count for one in history.verdict().defects}


def test_a_perfect_history_passes() -> None:
    """No false alarm."""
    verdict = perfect().verdict()

    assert verdict.passed
    assert (verdict.sent, verdict.acknowledged, verdict.consumed, verdict.redelivered) == (10, 10, 10, 0)


def test_a_message_that_is_nowhere_is_lost() -> None:
    """The one defect that must never be missed."""
    history = perfect()
    history.change_queue(1, history.queue(1)[:-1])

    verdict = history.verdict()

    assert not verdict.passed
    assert verdict.count(DefectKind.LOST) == 1
    assert "number 9" in verdict.defects[0].examples[0]


def test_a_message_that_one_node_lacks_is_lost() -> None:
    """It may be that node which leads next."""
    history = perfect()
    history.change_queue(0, history.queue(0)[:-1], N2)

    assert kinds(history) == {DefectKind.LOST: 1, DefectKind.NODES_DIFFER: 1}
    assert "is not on n2" in history.verdict().defects[0].examples[0]


def test_everything_is_lost_if_no_node_gives_anything_back() -> None:
    """Nothing read is nothing proved."""
    history = perfect()
    history.copies = []

    assert kinds(history)[DefectKind.LOST] == 10


def test_a_message_that_is_stored_twice_is_a_duplicate() -> None:
    """It was sent once, or acknowledged once."""
    history = perfect()
    history.change_queue(0, [*history.queue(0), ServedMessage(5, body_of(4), 4)])

    assert kinds(history) == {DefectKind.DUPLICATED: 1}


def test_a_message_of_unknown_outcome_may_be_there_or_not() -> None:
    """But not twice."""
    absent, present = perfect(), perfect()
    absent.with_outcome(9, SendOutcome.UNKNOWN)
    absent.change_queue(1, absent.queue(1)[:-1])
    absent.deliveries = [one for one in absent.deliveries if one.body != body_of(9)]
    present.with_outcome(9, SendOutcome.UNKNOWN)
    doubled = perfect()
    doubled.with_outcome(9, SendOutcome.UNKNOWN)
    doubled.change_queue(1, [*doubled.queue(1), ServedMessage(5, body_of(9), 9)])

    assert absent.verdict().passed
    assert present.verdict().passed
    assert [one.verdict().unknown_stored for one in (absent, present)] == [0, 1]
    assert kinds(doubled) == {DefectKind.DUPLICATED: 1}


def test_acknowledgements_against_the_order_of_sending_are_found() -> None:
    """Numbers 4 and 6 of queue 0 have changed places, also on disk."""
    history = perfect()
    four, six = history.sends[4], history.sends[6]
    history.sends[4] = four._replace(queue_offset=six.queue_offset)
    history.sends[6] = six._replace(queue_offset=four.queue_offset)
    stored = history.queue(0)
    stored[2], stored[3] = stored[2]._replace(body=body_of(6)), stored[3]._replace(body=body_of(4))
    history.change_queue(0, stored)
    history.deliveries = [
        DrillDelivery(0, 1.0, queue_id, one.queue_offset, one.body)
        for queue_id in (0, 1)
        for one in history.queue(queue_id)
    ]

    assert kinds(history) == {DefectKind.OUT_OF_ORDER: 1}


def test_a_message_elsewhere_than_acknowledged_is_found() -> None:
    """The acknowledgement named offset 7."""
    history = perfect()
    history.sends[8] = history.sends[8]._replace(queue_offset=7)

    assert kinds(history) == {DefectKind.MOVED: 1}


def test_a_refused_message_that_is_stored_is_found() -> None:
    """Whoever sends it again would double it."""
    history = perfect()
    history.with_outcome(3, SendOutcome.REFUSED)

    assert kinds(history) == {DefectKind.REFUSED_BUT_STORED: 1}


def test_a_message_that_nobody_sent_is_found() -> None:
    """For example one of another run."""
    history = perfect()
    history.change_queue(1, [*history.queue(1), ServedMessage(5, b"who am I", 0)])

    assert kinds(history) == {DefectKind.NEVER_SENT: 1}


def test_gaps_and_repeats_of_queue_offsets_are_found() -> None:
    """Offsets count from 0 on."""
    gap, repeat, late = perfect(), perfect(), perfect()
    gap.change_queue(
        0, [one._replace(queue_offset=one.queue_offset + 2 * (one.queue_offset > 3)) for one in gap.queue(0)]
    )
    repeat.change_queue(0, [one._replace(queue_offset=min(one.queue_offset, 3)) for one in repeat.queue(0)])
    late.change_queue(0, late.queue(0)[1:])

    assert [kinds(one)[DefectKind.OFFSETS] for one in (gap, repeat, late)] == [3, 3, 3]  # once per node


def test_nodes_whose_records_or_logs_differ_are_found() -> None:
    """Same message, other bytes; or the same queues from another log."""
    record, log = perfect(), perfect()
    changed = record.queue(0)
    changed[2] = changed[2]._replace(record_crc=12345)
    record.change_queue(0, changed, N1)
    log.copies[2] = replace(log.copies[2], log="entries 0 to 11")

    assert kinds(record) == {DefectKind.NODES_DIFFER: 1}
    assert kinds(log) == {DefectKind.NODES_DIFFER: 1}


def test_an_acknowledged_message_that_was_not_consumed_is_found() -> None:
    """The group's consumer had its time."""
    history = perfect()
    history.deliveries.pop()

    assert kinds(history) == {DefectKind.NOT_CONSUMED: 1}


def test_a_consumer_that_skips_or_gets_something_else_is_found() -> None:
    """Within one of its lives."""
    skipping, wrong = perfect(), perfect()
    again = DrillDelivery(1, 2.0, 0, 2, body_of(4))
    skipping.deliveries += [DrillDelivery(1, 2.0, 0, 0, body_of(0)), again]
    wrong.deliveries.append(DrillDelivery(1, 2.0, 0, 0, b"something else"))

    assert kinds(skipping) == {DefectKind.CONSUMED_WRONGLY: 1}
    assert kinds(wrong) == {DefectKind.CONSUMED_WRONGLY: 1}


def test_getting_messages_again_in_the_next_life_is_allowed() -> None:
    """At least once: it had not committed them."""
    history = perfect()
    history.deliveries += [one._replace(session=1) for one in history.deliveries[6:]]

    verdict = history.verdict()

    assert verdict.passed
    assert verdict.redelivered == 4


def test_only_a_few_cases_are_told_and_all_are_counted() -> None:
    """A report of thousands would not be read."""
    history = perfect(40)
    history.change_queue(0, [])

    lost = history.verdict().defects[0]

    assert lost.count == 20
    assert len(lost.examples) == EXAMPLES_MAX


# --- a migration: several stations ---------------------------------------------------------------------------------


def migration(before: History, after: History) -> DrillVerdict:
    """Six messages were on ``before``'s two brokers, all of ``after``'s are on one at the end."""
    stations = [Station(6, before.copies[:2]), Station(len(after.sends), after.copies[2:])]
    return judge_migration(after.sends, after.deliveries, stations)


def test_a_perfect_road_passes() -> None:
    """It tells the figures of its end, and who held what on the way."""
    verdict = migration(perfect(6), perfect(10))

    assert verdict.passed, verdict.defects
    assert (verdict.sent, verdict.acknowledged, verdict.consumed) == (10, 10, 10)
    assert (verdict.earlier, verdict.nodes) == ((N0, N1), (N2,))


def test_what_an_earlier_station_lost_is_lost() -> None:
    """Although it is there at the end."""
    before = perfect(6)
    before.change_queue(1, before.queue(1)[:-1], N1)

    verdict = migration(before, perfect(10))

    assert verdict.count(DefectKind.LOST) == 1
    assert "is not on n1" in verdict.defects[0].examples[0]


def test_what_was_sent_later_is_not_missed_at_an_earlier_station() -> None:
    """Nor is what it should not have had overlooked."""
    assert migration(perfect(6), perfect(10)).passed
    assert migration(perfect(8), perfect(10)).count(DefectKind.NEVER_SENT) == 2


def test_a_step_that_changes_a_message_is_found() -> None:
    """Also one of unknown outcome, of which no acknowledgement tells the place."""
    was = ServedMessage(2, body_of(4), 4)
    for changed in (was._replace(body=body_of(8)), was._replace(queue_offset=7)):
        before, after = perfect(6), perfect(10)
        before.with_outcome(4, SendOutcome.UNKNOWN)
        after.with_outcome(4, SendOutcome.UNKNOWN)
        queue = after.queue(0)
        assert queue[2] == was
        queue[2] = changed
        after.change_queue(0, queue)

        found = [one for one in migration(before, after).defects if one.kind is DefectKind.CHANGED]

        assert [one.count for one in found] == [1]
        assert "queue 0 offset 2" in found[0].examples[0]


def test_a_step_that_drops_a_message_of_unknown_outcome_is_found() -> None:
    """It was readable before; afterwards others stand in its place."""
    before, after = perfect(6), perfect(6)
    for history in (before, after):
        history.with_outcome(5, SendOutcome.UNKNOWN)
    after.change_queue(1, after.queue(1)[:-1])
    after.deliveries = [one for one in after.deliveries if one.body != body_of(5)]

    assert {one.kind: one.count for one in migration(before, after).defects} == {DefectKind.CHANGED: 1}
