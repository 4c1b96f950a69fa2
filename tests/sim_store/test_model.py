"""Brokers that break a promise, as the model hears of them: each must be a violation."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from rocketstore.message.message import Message
from rocketstore.message.record import encode_record
from rocketstore.types import PutMessageStatus, PutResult, StoredPlace
from tests.sim_store.checks import check_consumers, check_keys
from tests.sim_store.model import Model, Sent, ViolationError
from tests.sim_store.threads import Scheduler

PLACE = ("A", 0)


def sent(model: Model, body: bytes, *, level: int = 0) -> Sent:
    """A client sends it."""
    one = Sent(body, PLACE, ("k",), level, {"KEYS": "k", "TAGS": "t"})
    model.send(one)
    return one


def stored(queue_offset: int) -> PutResult:
    """The broker says that it has it, as a record of 100 bytes."""
    return PutResult(PutMessageStatus.PUT_OK, StoredPlace(100 * queue_offset, 100, 0, queue_offset, 1))


def acked(model: Model, body: bytes, queue_offset: int) -> Sent:
    """The same, and that is all."""
    one = sent(model, body)
    model.answered(one, stored(queue_offset))
    return one


def record(body: bytes, queue_offset: int, properties: Mapping[str, str]) -> Message:
    """What a pull gives."""
    return Message(*PLACE[:1], body, PLACE[1], dict(properties), queue_offset=queue_offset, offset=100 * queue_offset)


def test_what_is_acknowledged_synchronously_is_durable_whatever_the_log_says() -> None:
    """One that answers before its flush calls nothing durable, and loses what it had acknowledged."""
    for synced in (False, True):
        model = Model(synced=synced)
        one = acked(model, b"a", 0)
        if not synced:
            model.lose_from(0, 0)
            assert one.outcome == "lost"
            continue
        with pytest.raises(ViolationError, match="durable is lost"):
            model.lose_from(0, 0)


def test_what_a_log_has_lost_does_not_come_back() -> None:
    """Bytes behind a cut are no records, also after the next start."""
    model = Model()
    one = acked(model, b"a", 0)
    model.lose_from(0, 0)

    with pytest.raises(ViolationError, match="comes back"):
        model.found(PLACE, 0, record(b"a", 0, one.properties))


@pytest.mark.parametrize("properties", [{"KEYS": "k"}, {"KEYS": "k", "TAGS": "u"}, {"KEYS": "j", "TAGS": "t"}])
def test_a_message_keeps_its_tags_and_keys(properties: dict[str, str]) -> None:
    """A consumer of tag t would never get it."""
    model = Model()
    one = acked(model, b"a", 0)

    assert model.found(PLACE, 0, record(b"a", 0, one.properties)) is one
    with pytest.raises(ViolationError, match="other properties"):
        model.found(PLACE, 0, record(b"a", 0, properties))


def test_a_batch_keeps_its_order() -> None:
    """In one queue."""
    model = Model()

    with pytest.raises(ViolationError, match="out of order"):
        model.answered_together([sent(model, b"a"), sent(model, b"b")], [stored(1), stored(0)])


@pytest.mark.parametrize("told", [True, False])
def test_a_message_comes_behind_what_was_acknowledged_before_it_was_sent(*, told: bool) -> None:
    """Also if nobody was told that it is stored."""
    model = Model()
    acked(model, b"a", 1)
    late = sent(model, b"b")

    def learn() -> None:
        if told:
            model.answered(late, stored(0))
        else:
            model.found(PLACE, 0, record(b"b", 0, late.properties))

    with pytest.raises(ViolationError, match="before what was acknowledged"):
        learn()


class Answers:
    """A store and its state that say what they are told to."""

    def __init__(self, offset: int = 0, records: tuple[bytes, ...] = ()) -> None:
        self.log: Any = type("Log", (), {"min_offset": 0})()
        self._offset = offset
        self._records = records

    def max_offset(self, *_: object) -> int:
        """Of a long queue."""
        return 100

    def offset(self, *_: object) -> int:
        """Of any consumer."""
        return self._offset

    def groups(self) -> list[str]:
        """One."""
        return ["g"]

    def offsets(self, _group: str) -> list[tuple[str, int, int]]:
        """Of one queue."""
        return [(*PLACE, self._offset)]

    def query(self, *_: object) -> list[bytes]:
        """The same for every key."""
        return list(self._records)


@pytest.mark.parametrize("offset", [3, 4])
def test_a_consumer_is_never_moved_further_than_anybody_wanted(offset: int) -> None:
    """It would miss messages, though the offset is one of the queue."""
    model = Model()
    model.wanted(("g", *PLACE), 3)
    model.committed(("g", *PLACE), 3, stored(0))
    broker: Any = Answers(offset)

    if offset == 3:
        check_consumers(broker, broker, model)
        return
    with pytest.raises(ViolationError, match="further than anybody wanted"):
        check_consumers(broker, broker, model)


def test_a_query_finds_a_message_once() -> None:
    """Whatever units an index has."""
    model = Model()
    one = acked(model, b"a", 0)
    found = bytes(encode_record(record(b"a", 0, one.properties)))
    once: Any = Answers(records=(found,))
    twice: Any = Answers(records=(found, found))

    check_keys(once, model, Scheduler(Random(1)))
    with pytest.raises(ViolationError, match="finds it twice"):
        check_keys(twice, model, Scheduler(Random(1)))
