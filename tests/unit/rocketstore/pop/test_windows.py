"""What fits into a window, and what a new leader takes over from one."""

from __future__ import annotations

from rocketstore.pop.operations import PopFound, PopWish, Verdict
from rocketstore.pop.tables import WINDOW_MAX, check_row
from tests.unit.rocketstore.pop.desk import GROUP, QUEUE, TOPIC, Desk

HOUR_MS = 3_600_000


def _loaded(messages: int) -> Desk:
    desk = Desk()
    desk.load()
    desk.send(messages)
    return desk


def test_no_message_is_given_out_behind_a_full_window_though_a_filter_skips_all_before_it() -> None:
    """P10: the state could not write the row, and so nobody would get an answer any more."""
    desk = _loaded(WINDOW_MAX + 1)
    (first,) = desk.receive(1)
    delivery = desk.engine.begin(PopWish(GROUP, TOPIC, [0], 32, 60_000), desk.now_ms)
    assert desk.engine.next_read(delivery, desk.now_ms) is not None
    desk.engine.took(delivery, [PopFound(WINDOW_MAX, 1)], WINDOW_MAX + 1, desk.now_ms, end=WINDOW_MAX + 1)
    desk.engine.finish(delivery, desk.now_ms)
    desk.settle()
    assert (delivery.verdict, delivery.messages) == (Verdict.OK, [])
    assert desk.window().reserved == WINDOW_MAX
    check_row(desk.window().as_row(QUEUE))
    assert desk.ack(first) is Verdict.OK
    assert [one.offset for one in desk.receive()] == [WINDOW_MAX]


def test_a_message_that_a_new_leader_parks_keeps_its_attempts() -> None:
    """P3, P6: the handle says how many, and only the window tells the leader after that."""
    desk = _loaded(1)
    (message,) = desk.receive()
    desk.fail_over()
    changed = desk.engine.change(GROUP, TOPIC, message.handle, HOUR_MS, desk.now_ms)
    desk.settle()
    assert changed.verdict is Verdict.OK
    assert [one.attempt for one in desk.window().parked.values()] == [message.attempt]
    desk.fail_over()
    desk.later(HOUR_MS + 60_000)
    assert [(one.origin.offset, one.attempt) for one in desk.copies] == [(0, message.attempt)]
