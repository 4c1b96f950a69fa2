"""How changes of the state get into the log, and what those who wait for them are told, and when."""

from __future__ import annotations

import pytest

from rocketstore.state import publisher as publisher_module
from rocketstore.state.changes import PutTopic, TopicConfig, encode_change
from rocketstore.state.publisher import StatePublisher
from rocketstore.types import BROKER_STATE_TOPIC, PutMessageStatus, PutResult
from tests.support.fake_store import FakeStore
from tests.support.waiting import ManualClock

TIMEOUT_MS = 5000
BUSY = PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied")


def _publisher(store: FakeStore, clock: ManualClock) -> StatePublisher:
    return StatePublisher(store, clock, timeout_ms=TIMEOUT_MS, wake=lambda: None)


@pytest.mark.parametrize("refused", [False, True])
def test_a_full_state_counts_only_if_all_its_parts_are_stored(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention may remove what it would replace; nothing is written behind a part that is missing."""
    monkeypatch.setattr(publisher_module, "FULL_BYTES_AT_ONCE", 1)
    store, clock, ended = FakeStore(), ManualClock(), list[bool]()
    publisher = _publisher(store, clock)
    store.refusals += [BUSY] if refused else []
    publisher.publish([b"1", b"2", b"3"], ended.append)
    for _ in range(4):
        publisher.step(store.max_offset(BROKER_STATE_TOPIC, 0))
    assert ended == [not refused]
    assert store.max_offset(BROKER_STATE_TOPIC, 0) == (0 if refused else 3)
    assert publisher.idle


def test_nobody_waits_longer_than_the_timeout_for_a_change_that_is_written_with_later_ones() -> None:
    """The log does not answer; each change has waited for another time before."""
    store, clock = FakeStore(), ManualClock()
    publisher = _publisher(store, clock)
    store.hold_results = True
    began_ms, answered = clock.now_ms, dict[str, int]()

    def offer(name: str) -> None:
        publisher.offer(
            encode_change(PutTopic(TopicConfig(name))), lambda _: answered.update({name: clock.now_ms - began_ms})
        )
        publisher.step(0)

    for name in ("first", "second", "third"):
        offer(name)
        clock.now_ms += 1000
    while (due_ms := publisher.due_ms()) is not None:
        clock.now_ms = due_ms
        publisher.step(0)
    assert answered == {"first": TIMEOUT_MS, "second": 1000 + TIMEOUT_MS, "third": 1000 + TIMEOUT_MS}
