"""What is given out, what may be answered when, and what comes again: rules P1 to P9."""

from __future__ import annotations

from typing import Any

import pytest

from rocketstore.pop.operations import (
    CopyResult,
    Origin,
    PopFound,
    PopRules,
    PopWish,
    Verdict,
    decode_handle,
    encode_handle,
)
from rocketstore.pop.queue import SKEW_MS
from rocketstore.pop.tables import AHEAD_MAX, AHEAD_MS, LEASE_MS_MAX, PARKED_MAX, WINDOW_MAX, LeaseWindow, check_row
from rocketstore.pop.windows import BUSY_TICK_MS, COPIES_MAX, EXPIRES_MAX, TICK_MS, NotLoadedError
from tests.unit.rocketstore.pop.desk import GROUP, QUEUE, RETRIES, TOPIC, Desk


def _loaded(messages: int = 3, rules: PopRules | None = None, queues: int = 1) -> Desk:
    desk = Desk(rules=rules, queues=queues)
    desk.load()
    desk.send(messages)
    return desk


def test_a_receive_is_answered_when_its_messages_are_reserved() -> None:
    """P1."""
    desk = _loaded()
    delivery = desk.begin()
    tick = desk.tick()
    assert tick is not None
    assert not delivery.is_done
    desk.apply(tick)
    desk.engine.ticked(tick, None, desk.now_ms)
    desk.look()
    assert delivery.verdict is Verdict.OK
    assert [one.offset for one in delivery.messages] == [0, 1, 2]
    assert desk.window().reserved == 3
    assert desk.window().leased_until_ms >= delivery.messages[0].visible_at_ms


def test_an_ack_is_answered_when_it_is_applied_and_commit_moves_over_what_is_settled() -> None:
    """P2."""
    desk = _loaded()
    first, second, third = desk.receive()
    assert desk.ack(second) is Verdict.OK
    assert (desk.window().commit, desk.window().settled) == (0, 0b10)
    (acked,) = desk.engine.ack(GROUP, TOPIC, [first.handle], desk.now_ms)
    assert not acked.is_done
    desk.settle()
    assert acked.verdict is Verdict.OK
    assert desk.offsets[QUEUE] == desk.window().commit == 2
    assert desk.ack(first) is Verdict.INVALID_HANDLE
    assert desk.ack(third) is Verdict.OK


def test_acks_of_one_queue_are_one_operation_and_each_has_its_answer() -> None:
    """P2, P5: a consumer acknowledges what it got together, and one message may be late."""
    desk = _loaded(3)
    first, second, third = desk.receive()
    assert desk.ack(second) is Verdict.OK
    handles = [first.handle, second.handle, "no handle", third.handle]
    acked = desk.engine.ack(GROUP, TOPIC, handles, desk.now_ms)
    assert len(set(map(id, acked))) == 2
    assert not any(one.is_done for one in acked)
    desk.settle()
    assert [one.verdict for one in acked] == [Verdict.OK, *[Verdict.INVALID_HANDLE] * 2, Verdict.OK]
    assert desk.window().commit == 3


def test_several_who_wait_share_more_ticks_than_one_alone() -> None:
    """A tick costs every member something; and nobody waits for others who do not come."""
    desk = _loaded(9)
    for alone, gap_ms in ((True, TICK_MS), (False, BUSY_TICK_MS)):
        desk.now_ms += BUSY_TICK_MS
        desk.begin(1)
        if not alone:
            desk.begin(1)
        tick = desk.engine.take_tick(desk.now_ms)
        assert tick is not None
        desk.apply(tick)
        desk.engine.ticked(tick, None, desk.now_ms)
        desk.begin(1)
        assert desk.engine.due_ms() == desk.now_ms + gap_ms
        desk.now_ms += gap_ms - 1
        assert desk.engine.take_tick(desk.now_ms) is None
        desk.settle()


def test_a_lease_that_ends_is_copied_before_it_is_settled_and_comes_again() -> None:
    """P4."""
    desk = _loaded(1)
    (message,) = desk.receive()
    desk.later(59_000)
    assert not desk.copies
    desk.later(2_000)
    assert len(desk.copies) == 1
    assert desk.window().commit == 0
    assert desk.ack(message) is Verdict.INVALID_HANDLE
    desk.store_copies()
    assert desk.window().commit == 1
    (again,) = desk.receive()
    assert (again.place, again.attempt) == (RETRIES, 2)
    assert desk.ack(again) is Verdict.OK
    assert desk.ack(message) is Verdict.INVALID_HANDLE


def test_a_new_leader_takes_what_is_not_settled_as_leased_and_accepts_old_handles() -> None:
    """P3, P5."""
    desk = _loaded()
    messages = desk.receive()
    assert desk.ack(messages[0]) is Verdict.OK
    desk.fail_over()
    assert not desk.receive()
    assert desk.ack(messages[0]) is Verdict.INVALID_HANDLE
    assert desk.ack(messages[2]) is Verdict.OK
    desk.later(60_000 + AHEAD_MS + 2 * SKEW_MS)
    assert [one.origin.offset for one in desk.copies] == [1]
    desk.store_copies()
    assert [one.attempt for one in desk.receive()] == [2]


def _waited(rules: PopRules | None = None) -> Desk:
    """All messages are out, so that a consumer that asks again would wait."""
    desk = _loaded(1, rules)
    desk.receive()
    return desk


def test_who_waits_gets_a_message_before_a_tick_says_so() -> None:
    """P1: a row that came before permits it; for so many messages, and for a while."""
    desk = _waited()
    desk.send(AHEAD_MAX + 1)
    for count in (1, AHEAD_MAX - 1):
        delivery = desk.begin(count)
        assert (delivery.verdict, len(delivery.messages)) == (Verdict.OK, count)
    assert max(one.visible_at_ms for one in delivery.messages) <= desk.window().leased_until_ms
    assert desk.window().reserved == 1
    behind = desk.begin()
    assert not behind.is_done
    desk.settle()
    assert (behind.verdict, desk.window().reserved) == (Verdict.OK, AHEAD_MAX + 2)


def test_a_permission_ends_with_its_time() -> None:
    """P1, P3: a new leader would not wait for the end of a lease that begins later."""
    desk = _waited()
    desk.send(2)
    desk.now_ms += AHEAD_MS
    assert not desk.begin(1, invisible_ms=60_001).is_done
    desk.now_ms += 10
    assert not desk.begin(1).is_done


@pytest.mark.parametrize("ordered", [False, True])
def test_messages_that_no_row_permits_wait_for_their_tick(*, ordered: bool) -> None:
    """P1, P8: a backlog's, and those of ordered groups, whose batch a later leader must know."""
    desk = _loaded(5, PopRules(ordered))
    asked = desk.receive(1 if not ordered else 5)
    for one in asked:
        assert desk.ack(one) is Verdict.OK
    desk.send(1)
    assert not desk.begin(1).is_done


def test_what_nobody_got_counts_as_no_attempt() -> None:
    """P3, P4: a leader that failed may have given it out, or not; that survives further failures."""
    desk = _waited(PopRules(attempts_max=2))
    desk.send(2)
    (given,) = desk.begin(1).messages
    for _ in range(2):
        desk.fail_over()
        assert not desk.receive()
    desk.send(1)
    assert [one.offset for one in desk.receive()] == [3], "what is new comes at once"
    assert desk.ack(given) is Verdict.OK
    desk.later(60_000 + AHEAD_MS + 2 * SKEW_MS)
    desk.store_copies()
    again = desk.receive()
    assert {one.place for one in again} == {RETRIES}
    assert sorted(one.attempt for one in again) == [1, 2, 2]
    assert not desk.dead


def test_a_copy_of_an_earlier_leader_is_not_made_again() -> None:
    """P4: it failed between the copy and the settlement."""
    desk = _loaded(1)
    (message,) = desk.receive()
    desk.later(61_000)
    desk.store(desk.copies.pop())
    desk.fail_over()
    assert desk.window().commit == 1
    assert desk.ack(message) is Verdict.INVALID_HANDLE
    desk.later(120_000)
    assert not desk.copies
    assert len(desk.receive()) == 1


def test_a_changed_lease_has_a_new_handle_and_a_long_one_does_not_hold_the_offset() -> None:
    """P6."""
    desk = _loaded(1)
    (message,) = desk.receive()
    changed = desk.engine.change(GROUP, TOPIC, message.handle, 3_600_000, desk.now_ms)
    assert not changed.is_done
    desk.settle()
    assert changed.verdict is Verdict.OK
    assert (desk.window().commit, list(desk.window().parked)) == (1, [0])
    assert desk.ack(message) is Verdict.INVALID_HANDLE
    desk.fail_over()
    desk.later(3_500_000)
    assert not desk.copies
    (acked,) = desk.engine.ack(GROUP, TOPIC, [changed.handle], desk.now_ms)
    desk.settle()
    assert acked.verdict is Verdict.OK
    assert not desk.window().parked


def test_an_ordered_group_gets_one_batch_at_a_time() -> None:
    """P8."""
    desk = _loaded(4, PopRules(ordered=True))
    batch = desk.receive(2, attempt_id="a")
    assert [one.offset for one in batch] == [0, 1]
    assert not desk.receive(2, attempt_id="b")
    assert desk.receive(2, attempt_id="a") == batch
    desk.fail_over()
    assert not desk.receive(2, attempt_id="b")
    assert [one.handle for one in desk.receive(2, attempt_id="a")] == [one.handle for one in batch]
    assert desk.ack(batch[0]) is Verdict.OK
    desk.later(62_000)
    assert not desk.copies
    (again,) = desk.receive(2, attempt_id="b")
    assert (again.offset, again.attempt) == (1, 2)
    assert desk.ack(batch[1]) is Verdict.INVALID_HANDLE
    assert desk.ack(again) is Verdict.OK
    assert [one.offset for one in desk.receive(2, attempt_id="c")] == [2, 3]


def test_a_client_that_is_gone_gives_back_what_it_has_not_settled() -> None:
    """P6: soon, and nothing is kept of the others, by which a client that stays for months would grow."""
    desk = _loaded()
    first, second, third = desk.receive(client_id="c", auto_renew=True)
    assert desk.ack(first) is Verdict.OK
    assert sorted(offset for _, offset in desk.engine._book._clients["c"]) == [1, 2]
    desk.engine.client_gone("c", desk.now_ms)
    desk.later(1_100)
    assert sorted(one.origin.offset for one in desk.copies) == [second.offset, third.offset]
    desk.store_copies()
    assert not desk.engine._book._clients


def test_a_client_that_is_gone_with_many_messages_lets_others_in_between() -> None:
    """P6, P10: one may have a hundred thousand; and what it gets when it is back is not given back."""
    desk = Desk(queues=1)
    count = 2 * EXPIRES_MAX + 1
    desk.send(count)
    desk.load()
    while desk.receive(client_id="c", auto_renew=True):
        pass
    desk.engine.client_gone("c", desk.now_ms)
    soon_ms = desk.now_ms + LEASE_MS_MAX // 2

    def given_back() -> int:
        leases = desk.engine._queues[QUEUE].leases.values()
        return sum(one.visible_at_ms <= soon_ms for one in leases)

    desk.send(1)
    (back,) = desk.receive(client_id="c", auto_renew=True)
    for ended in (EXPIRES_MAX, 2 * EXPIRES_MAX, count, count):
        assert given_back() == ended
        due_ms = desk.engine._book.due_ms()
        assert due_ms is not None
        assert (due_ms <= desk.now_ms) == (ended < count)
        desk.engine.expire(desk.now_ms)
    assert back.visible_at_ms > soon_ms
    assert desk.engine._book._clients.keys() == {"c"}


def test_what_an_ordered_group_begins_anew_is_not_what_has_a_copy() -> None:
    """P4: a message that was given out ahead of its row, and copied, before the group became ordered."""
    desk = Desk(rules=PopRules(ordered=True))
    desk.send(4)
    desk.tables.windows[QUEUE] = LeaseWindow(1, 1, 1, leased_until_ms=desk.now_ms - 2_000, numbers=9, ahead=4)
    desk.offsets[QUEUE] = 1
    desk.origins = [Origin(QUEUE, 2, 1)]
    desk.load()
    (first,) = desk.receive(attempt_id="a")
    assert (first.offset, first.attempt) == (1, 1)
    assert not desk.receive(attempt_id="b")
    assert desk.ack(first) is Verdict.OK
    assert [one.offset for one in desk.receive(attempt_id="b")] == [3]


def test_a_lease_is_told_as_long_as_its_row_says() -> None:
    """P1, P3: the batch was given back, and leased again by a row that no later leader may have."""
    desk = _loaded(1, rules=PopRules(ordered=True))
    renewed: dict[str, Any] = {"attempt_id": "a", "client_id": "c", "auto_renew": True}
    first = desk.begin(1, **renewed)
    desk.engine.client_gone("c", desk.now_ms)
    tick = desk.tick()
    assert tick is not None
    desk.begin(1, **renewed)
    desk.apply(tick)
    desk.engine.ticked(tick, None, desk.now_ms)
    desk.look()
    lock = desk.window().fifo
    assert lock is not None
    assert lock.until_ms < desk.now_ms + 1_100
    assert [one.visible_at_ms for one in first.messages] == [lock.until_ms]
    desk.fail_over(ms=3_000)
    assert [one.offset for one in desk.receive(1, attempt_id="b")] == [0]


def test_a_message_that_was_given_back_is_not_prolonged() -> None:
    """P6: though it was received for as long as its client lives."""
    desk = _loaded(1)
    (message,) = desk.receive(client_id="c", auto_renew=True)
    desk.later(120_000)
    assert not desk.copies
    desk.engine.change(GROUP, TOPIC, message.handle, 5_000, desk.now_ms)
    desk.settle()
    desk.later(5_100)
    assert [one.origin.offset for one in desk.copies] == [0]


def test_a_parked_message_comes_again_though_a_clock_was_wrong() -> None:
    """P3: a leader whose clock was a year ahead wrote when; it is invisible for no longer than any can be."""
    year_ms, longest_ms = 365 * 86_400_000, 12 * 3_600_000
    desk = _loaded(1)
    desk.now_ms += year_ms
    desk.receive(invisible_ms=3_600_000)
    desk.now_ms -= year_ms
    desk.fail_over()
    desk.later(longest_ms - 1_000)
    assert not desk.copies
    desk.later(3_000)
    assert [one.origin.offset for one in desk.copies] == [0]


def test_a_batch_stays_with_the_answer_that_arrived() -> None:
    """P8: an attempt was repeated, and one of its two answers was lost."""
    desk = _loaded(2, PopRules(ordered=True))
    handles = [one.handle for one in desk.receive(2, attempt_id="a")]
    assert [one.handle for one in desk.receive(2, attempt_id="a")] == handles
    desk.engine.give_back(GROUP, TOPIC, handles, desk.now_ms)
    desk.later(2_000)
    assert not desk.receive(2, attempt_id="b")
    desk.engine.give_back(GROUP, TOPIC, handles, desk.now_ms)
    desk.later(2_000)
    assert len(desk.receive(2, attempt_id="b")) == 2


@pytest.mark.parametrize(("limit", "invisible_ms"), [("LEASES_MAX", 60_000), ("PARKED_TOTAL_MAX", 3_600_000)])
def test_one_owner_cannot_take_all_leases(monkeypatch: pytest.MonkeyPatch, limit: str, invisible_ms: int) -> None:
    """P10: others would get nothing for hours. What is settled makes room, and a failover forgets who has what."""
    monkeypatch.setattr(f"rocketstore.pop.engine.{limit}", 8)
    desk = _loaded(20)
    mine = desk.receive(owner="a", invisible_ms=invisible_ms)
    assert len(mine) == 4
    refused = desk.begin(owner="a", invisible_ms=invisible_ms)
    assert refused.full
    assert not refused.messages
    assert len(desk.receive(owner="b", invisible_ms=invisible_ms)) == 4
    assert [desk.ack(one) for one in mine] == [Verdict.OK] * 4
    assert len(desk.receive(owner="a", invisible_ms=invisible_ms)) == 4
    book = desk.engine._book
    assert max(book.owned.values()) <= 4
    for queue in list(desk.engine._queues.values()):
        book.drop_all(queue)
    assert not book.owned
    assert not book.owned_parked


def test_a_lease_is_not_made_long_beyond_its_owners_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: a nack with a long delay is refused then."""
    monkeypatch.setattr("rocketstore.pop.engine.PARKED_TOTAL_MAX", 2)
    desk = _loaded(3)
    for expected, one in zip((Verdict.OK, Verdict.FULL), desk.receive(2, owner="a"), strict=True):
        changing = desk.engine.change(GROUP, TOPIC, one.handle, 3_600_000, desk.now_ms)
        desk.settle()
        assert changing.verdict is expected
    (other,) = desk.receive(1, owner="b")
    changing = desk.engine.change(GROUP, TOPIC, other.handle, 3_600_000, desk.now_ms)
    desk.settle()
    assert changing.verdict is Verdict.OK


def test_a_forged_handle_loads_no_other_topic() -> None:
    """P5, P9: a group would begin at the end of a topic that its client may not read; topics' names may end alike."""
    desk = _loaded(1)
    (message,) = desk.receive()
    said = decode_handle(message.handle)
    for topic, wanted in ((f"x{TOPIC}", TOPIC), (f"a_{GROUP}_{TOPIC}", TOPIC), (TOPIC, ""), ("orders", "ers")):
        forged = encode_handle(said._replace(topic=wanted))
        (acked,) = desk.engine.ack(GROUP, topic, [forged], desk.now_ms)
        desk.settle()
        assert acked.verdict is Verdict.INVALID_HANDLE
    assert desk.engine.ack(GROUP, f"%RETRY%{GROUP}_{TOPIC}", [message.handle], desk.now_ms)
    desk.settle()
    assert desk.ack(message) is Verdict.INVALID_HANDLE


def test_copies_whose_originals_expire_meanwhile_leave_room_for_others() -> None:
    """P4: at most 256 are under way, and retention may remove the originals of all of them."""
    desk = _loaded(COPIES_MAX)
    desk.receive(COPIES_MAX)
    desk.later(60_000)
    expired, desk.copies = desk.copies, []
    assert len(expired) == COPIES_MAX
    desk.send(1)
    (message,) = desk.receive(begin=COPIES_MAX)
    for copy in expired:
        desk.engine.copied(copy, CopyResult.GONE, desk.now_ms)
    desk.later(60_000)
    assert [one.origin.offset for one in desk.copies] == [message.offset]


def test_an_ack_counts_though_its_topic_was_deleted_and_made_again_meanwhile() -> None:
    """P2: the window of the retry topic outlives the topic, and is taken up once in a leadership."""
    desk = _loaded(1)
    desk.receive()
    desk.later(60_000)
    desk.store_copies()
    (again,) = desk.receive()
    (acked,) = desk.engine.ack(GROUP, TOPIC, [again.handle], desk.now_ms)
    tick = desk.tick()
    assert tick is not None
    desk.delete_topic()
    desk.send(1)
    desk.begin()
    with pytest.raises(NotLoadedError):
        desk.begin()
    desk.load()
    desk.apply(tick)
    desk.engine.ticked(tick, None, desk.now_ms)
    desk.look()
    assert acked.verdict is Verdict.OK
    desk.copies = []
    desk.later(70_000)
    assert [one.origin for one in desk.copies if one.origin.place == RETRIES] == []


def test_copies_are_settled_though_their_topic_is_deleted_meanwhile() -> None:
    """P4: nobody who waits for the same tick may wait forever."""
    desk = _loaded(2)
    desk.receive(1)
    desk.later(60_000)
    desk.store_copies()
    assert [one.place for one in desk.receive(1, with_retries=True)] == [RETRIES]
    desk.later(60_000)
    (copy,) = desk.copies
    desk.store(copy)
    desk.engine.copied(copy, CopyResult.STORED, desk.now_ms)
    tick = desk.tick()
    assert tick is not None
    desk.delete_topic()
    desk.begin()
    with pytest.raises(NotLoadedError):
        desk.begin()
    desk.apply(tick)
    desk.engine.ticked(tick, None, desk.now_ms)
    assert desk.window(RETRIES).commit == 1


def test_no_more_dead_letters_are_on_their_way_than_a_new_leader_looks_at() -> None:
    """P4: a consumer may give up any number of messages at once."""
    desk = _loaded(COPIES_MAX + 1)
    messages = desk.receive(COPIES_MAX + 1)
    asked = [desk.engine.dead_letter(GROUP, TOPIC, one.handle, desk.now_ms) for one in messages]
    desk.settle()
    assert len(desk.copies) == COPIES_MAX
    assert asked[-1].verdict is Verdict.FULL
    desk.store_copies()
    assert all(one.verdict is Verdict.OK for one in asked[:-1])
    assert desk.ack(messages[-1]) is Verdict.OK


def test_a_batch_that_a_new_leader_repeats_is_found_by_the_end_that_is_told() -> None:
    """P8: some clients name a delivery by its end, and what they were told leaves room for other clocks."""
    desk = _loaded(1, rules=PopRules(ordered=True))
    desk.receive(attempt_id="a")
    desk.fail_over()
    (again,) = desk.receive(attempt_id="a")
    assert desk.engine.handle_at(QUEUE, 0, again.visible_at_ms) == again.handle


def test_a_group_that_became_ordered_keeps_its_order_over_a_failover() -> None:
    """P8: once nobody can have what ran ahead before, it stays in its place."""
    desk = _loaded(1)
    (first,) = desk.receive()
    assert desk.window().ahead == 1 + AHEAD_MAX
    desk.rules = PopRules(ordered=True)
    desk.later(70_000)
    (first,) = desk.receive()
    assert desk.ack(first) is Verdict.OK
    desk.send(2)
    desk.fail_over()
    assert [(one.place, one.offset) for one in desk.receive()] == [(QUEUE, 1), (QUEUE, 2)]


def test_no_message_is_dead_before_its_last_delivery_is_in_the_log() -> None:
    """P4, P8: nobody was told of it; what ran ahead when the group was not ordered does not count."""
    desk = _loaded(1)
    assert desk.ack(desk.receive()[0]) is Verdict.OK
    desk.rules = PopRules(ordered=True, attempts_max=1)
    desk.send(1)
    desk.begin()
    assert desk.tick() is not None
    desk.now_ms += 70_000
    desk.engine.expire(desk.now_ms)
    assert desk.engine.take_copies() == []


def test_leases_that_end_together_are_ended_some_at_a_time() -> None:
    """After a failover all do, and whoever drives the engine has other things to do."""
    desk = _loaded(EXPIRES_MAX + 1)
    desk.receive(EXPIRES_MAX + 1)
    desk.now_ms += 60_000
    desk.engine.expire(desk.now_ms)
    due_ms = desk.engine.due_ms()
    assert due_ms is not None
    assert due_ms <= desk.now_ms
    desk.engine.expire(desk.now_ms)
    assert desk.engine.take_tick(desk.now_ms) is None
    assert desk.engine.due_ms() is None


def test_no_more_is_parked_than_a_row_can_say_though_others_park_while_a_receive_reads() -> None:
    """P10: otherwise the state could not be written any more."""
    desk = _loaded(PARKED_MAX + 64)
    ordinary = desk.receive(32)
    desk.receive(PARKED_MAX - 16, invisible_ms=3_600_000)
    wish = PopWish(GROUP, TOPIC, [0], 32, 3_600_000)
    delivery = desk.engine.begin(wish, desk.now_ms)
    read = desk.engine.next_read(delivery, desk.now_ms)
    assert read is not None
    for one in ordinary:
        desk.engine.change(GROUP, TOPIC, one.handle, 3_600_000, desk.now_ms)
    found = [PopFound(read.offset + one, 1) for one in range(read.count_max)]
    desk.engine.took(delivery, found, read.offset + len(found), desk.now_ms)
    desk.engine.finish(delivery, desk.now_ms)
    desk.settle()
    assert len(desk.window().parked) <= PARKED_MAX - AHEAD_MAX
    check_row(desk.window().as_row(QUEUE))


def test_no_more_is_parked_than_a_row_can_say_though_a_group_is_not_ordered_any_more() -> None:
    """P10: its batches may be invisible for as long as what is parked; until there is room nobody gets anything."""
    desk = _loaded(PARKED_MAX + 64)
    parked = desk.receive(PARKED_MAX - AHEAD_MAX, invisible_ms=3_600_000)
    desk.rules = PopRules(ordered=True)
    for one in desk.receive(32):
        desk.engine.change(GROUP, TOPIC, one.handle, 3_600_000, desk.now_ms)
    desk.settle()
    desk.rules = PopRules()
    refused = desk.begin()
    desk.settle()
    assert refused.full
    assert not refused.messages
    check_row(desk.window().as_row(QUEUE))
    desk.engine.ack(GROUP, TOPIC, [one.handle for one in parked[:32]], desk.now_ms)
    assert len(desk.receive()) == 32
    check_row(desk.window().as_row(QUEUE))


def test_windows_are_taken_up_one_by_one_before_their_topic_is_loaded() -> None:
    """P4: a full one takes long, and what an earlier leader has copied is not copied again, even if it is due."""
    desk = _loaded(2)
    desk.receive()
    desk.later(60_000)
    desk.store(desk.copies[0])
    desk.fail_over(load=False)
    desk.now_ms += 70_000
    desk.engine.take_up(desk.loading(), 0, desk.now_ms)
    desk.engine.expire(desk.now_ms)
    desk.look()
    assert [one.origin.offset for one in desk.copies] == [1]
    with pytest.raises(NotLoadedError):
        desk.begin()
    desk.load()
    desk.store_copies()
    assert desk.window().commit == 2
    assert [(one.place, one.offset) for one in desk.receive()] == [(RETRIES, 0), (RETRIES, 1)]


def test_a_long_lease_is_not_told_before_its_row_though_rows_ran_ahead() -> None:
    """P1: a later leader would take it for one of a minute."""
    desk = _loaded(1)
    desk.receive()
    desk.send(1)
    delivery = desk.begin(invisible_ms=61_000)
    assert not delivery.is_done
    desk.settle()
    assert [one.offset for one in delivery.messages] == [1]


def test_what_ran_ahead_stays_invisible_when_somebody_moves_the_window() -> None:
    """P1, P11: to the leader that gave it out, and to the next."""
    for fails in (False, True):
        desk = _loaded(1)
        desk.receive()
        desk.send(1)
        assert [one.offset for one in desk.begin().messages] == [1]
        desk.offsets[QUEUE] = desk.tables.moved(QUEUE, 1, reset=False)
        if fails:
            desk.fail_over()
        assert desk.receive() == []
        desk.later(70_000)
        assert [one.origin.offset for one in desk.copies] == [1]


def test_the_retry_topic_does_not_run_ahead() -> None:
    """P1: of it a new leader takes nothing for given out that no row says."""
    desk = _loaded(1)
    desk.receive()
    desk.later(60_000)
    desk.store_copies()
    assert [one.place for one in desk.receive()] == [RETRIES]
    assert desk.window(RETRIES).ahead == 0


def test_a_parked_message_that_an_earlier_leader_has_copied_is_not_copied_again() -> None:
    """P4."""
    desk = _loaded(1)
    desk.receive(invisible_ms=61_000)
    desk.later(61_000)
    desk.store(desk.copies[0])
    desk.fail_over(ms=5_000)
    desk.later(5_000)
    assert desk.copies == []
    assert not desk.window().parked


def test_a_tick_that_was_not_stored_is_written_again() -> None:
    """Its clients may ask no more, but what they have settled must not come again."""
    desk = _loaded(1)
    (message,) = desk.receive()
    desk.engine.ack(GROUP, TOPIC, [message.handle], desk.now_ms)
    tick = desk.tick()
    assert tick is not None
    desk.engine.ticked(tick, "the log is full", desk.now_ms)
    desk.settle()
    assert desk.window().commit == 1


def test_an_ack_of_a_parked_message_may_be_repeated_until_it_is_applied() -> None:
    """P2: another row of the queue, which was on its way before, is not its own."""
    desk = _loaded(1)
    (message,) = desk.receive(invisible_ms=61_000)
    desk.send(1)
    desk.begin()
    tick = desk.tick()
    assert tick is not None
    acked = desk.engine.ack(GROUP, TOPIC, [message.handle], desk.now_ms)
    desk.apply(tick)
    desk.engine.ticked(tick, None, desk.now_ms)
    acked += desk.engine.ack(GROUP, TOPIC, [message.handle], desk.now_ms)
    desk.settle()
    assert [one.verdict for one in acked] == [Verdict.OK] * 2


def test_a_handle_is_told_only_with_a_number_that_a_row_permits() -> None:
    """P5: a later leader would give another delivery the same."""
    desk = _loaded(1)
    delivery = desk.engine.begin(PopWish(GROUP, TOPIC, [0], 1, 60_000), desk.now_ms)
    assert desk.engine.next_read(delivery, desk.now_ms) is not None
    desk.engine.took(delivery, [], 1, desk.now_ms, end=1)  # the filter does not want it
    desk.engine.finish(delivery, desk.now_ms)
    desk.settle()
    assert desk.window().ahead > 1
    desk.send(1)
    assert not desk.begin().is_done


def test_no_row_runs_ahead_beyond_the_window() -> None:
    """P10: a later leader could not write a row for so many."""
    desk = _loaded(WINDOW_MAX - 1)
    desk.receive(WINDOW_MAX)
    assert desk.window().ahead == WINDOW_MAX


def test_a_copy_of_what_ran_ahead_counts_no_attempt() -> None:
    """P3: probably nobody got it."""
    desk = _loaded(1)
    assert desk.ack(desk.receive()[0]) is Verdict.OK
    desk.send(1)
    desk.fail_over()
    desk.later(70_000)
    assert [(one.origin.offset, one.attempt) for one in desk.copies] == [(1, 0)]


def test_who_waits_for_a_window_that_was_reset_meanwhile_is_told_so() -> None:
    """P12: the row does not count, so the message is not settled."""
    desk = _loaded(1)
    (message,) = desk.receive()
    (acked,) = desk.engine.ack(GROUP, TOPIC, [message.handle], desk.now_ms)
    tick = desk.tick()
    assert tick is not None
    desk.offsets[QUEUE] = desk.tables.moved(QUEUE, 0, reset=True)
    desk.apply(tick)
    desk.engine.ticked(tick, None, desk.now_ms)
    desk.settle()
    assert acked.verdict is Verdict.INVALID_HANDLE
