"""Copies of messages that come again: many at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rocketstore.broker.popping import copies
from rocketstore.broker.popping.copies import Copies
from rocketstore.broker.reading import MessageFilter, QueueReading, ReadLimits
from rocketstore.broker.sending import MessageSource, SendBatch, SendDone, Sending
from rocketstore.pop.tables import retry_topic_of
from rocketstore.types import GetResult, PutMessageStatus, PutResult
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.popping.harness import GROUP, TOPIC, PopBroker, bodies

COUNT = 60
REFUSED = PutResult(PutMessageStatus.FLOW_CONTROL, outcome="not_applied", reason="as if the broker were busy")
UNKNOWN = PutResult(PutMessageStatus.UNKNOWN_ERROR, outcome="unknown", reason="as if no quorum had answered in time")
TOO_LARGE = PutResult(PutMessageStatus.MESSAGE_ILLEGAL, outcome="not_applied", reason="as if it fitted into no entry")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many copies each request had; the first copy of the first request of several is refused."""
    sizes: list[int] = []
    submit = Sending.submit

    def counted(self: Sending, caller: MessageSource | None, batch: SendBatch, done: SendDone) -> None:
        if batch.again:
            is_first = len(batch.messages) > 1 and max(sizes, default=0) <= 1
            sizes.append(len(batch.messages))
            if is_first:

                def without_the_first(results: Sequence[PutResult]) -> None:
                    done([REFUSED, *results])

                submit(self, caller, batch._replace(messages=batch.messages[1:]), without_the_first)
                return
        submit(self, caller, batch, done)

    monkeypatch.setattr(Sending, "submit", counted)
    return sizes


def again(path: Path) -> list[bytes]:
    """Messages whose leases have ended together, as they come again."""
    with PopBroker(path) as pop:
        pop.send([b"%d" % number for number in range(COUNT)])
        pop.end_together(pop.receive_all(COUNT, invisible_ms=60_000))
        found = sorted(bodies(pop.receive_all(COUNT, invisible_ms=60_000)))
        wait_until(lambda: pop.window().commit == COUNT, "the originals are settled")
        return found


def test_copies_of_leases_that_end_together_are_stored_together(tmp_path: Path, batches: list[int]) -> None:
    """A request for each costs as much as a message; one that is refused is tried again, and it alone."""
    assert again(tmp_path) == sorted(b"%d" % number for number in range(COUNT))
    assert max(batches) > COUNT // 4
    assert sum(batches) == COUNT + 1


def test_a_request_of_copies_stays_small(tmp_path: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many leases end."""
    monkeypatch.setattr(copies, "TOGETHER_BYTES", 10)
    assert again(tmp_path) == sorted(b"%d" % number for number in range(COUNT))
    assert max(batches) <= 10
    assert sum(batches) == COUNT + 1


def test_a_large_copy_that_is_refused_keeps_no_other_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log refuses what is stored together as a whole: a message that is too large now that maxMessageSize is lower
    would have all whose leases end with it tried again and again.
    """
    monkeypatch.setattr(copies, "TOGETHER_BYTES", 1000)
    large, refused, submit = bytes(1000), set[bytes](), Sending.submit

    def refusing(self: Sending, caller: MessageSource | None, batch: SendBatch, done: SendDone) -> None:
        if batch.again and any(one.body == large for one in batch.messages):
            refused.update(one.body for one in batch.messages)
            done([TOO_LARGE] * len(batch.messages))
            return
        submit(self, caller, batch, done)

    monkeypatch.setattr(Sending, "submit", refusing)
    small = [b"%d" % number for number in range(COUNT)]
    with PopBroker(tmp_path) as pop:
        pop.send([*small[:10], large, *small[10:]])
        pop.end_together(pop.receive_all(COUNT + 1, invisible_ms=60_000))
        found = bodies(pop.receive_all(COUNT, invisible_ms=60_000))

    assert sorted(found) == sorted(small)
    assert refused == {large}


@pytest.mark.parametrize("becomes", ["stored", "dispatched", "nothing"])
def test_copies_of_unknown_outcome_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    """P4: those that are stored are not stored again, also if they cannot be read yet, and the others are."""
    submit, begun, asked = Sending.submit, threading.Event(), list[int]()

    def unknown(self: Sending, caller: MessageSource | None, batch: SendBatch, done: SendDone) -> None:
        if not batch.again or asked or not begun.is_set() or len(batch.messages) == 1:
            submit(self, caller, batch, done)
            return
        asked.append(len(batch.messages))
        if becomes != "nothing":
            submit(self, caller, batch, lambda _results: None)
        if becomes == "dispatched":
            store = self._store
            wait_until(lambda: store.dispatch_position >= store.log.end_offset, "they can be read")
        done([UNKNOWN] * len(batch.messages))

    monkeypatch.setattr(Sending, "submit", unknown)
    with PopBroker(tmp_path) as pop:
        pop.send([b"first"])
        pop.receive_all(1, invisible_ms=1000)
        pop.receive_all(1, invisible_ms=60_000)  # the topic is loaded, so that nobody looks for copies any more
        sent = [b"%d" % number for number in range(COUNT)]
        pop.send(sent)
        begun.set()
        pop.end_together(pop.receive_all(COUNT, invisible_ms=60_000))
        found = bodies(pop.receive_all(COUNT, invisible_ms=60_000))
        wait_until(lambda: pop.window().commit == COUNT + 1, "the originals are settled")
        copied = [one.body for one in pop.stored(retry_topic_of(GROUP, TOPIC))]

    assert sorted(found) == sorted(sent)
    assert sorted(copied) == sorted([b"first", *sent])
    assert asked


def test_copies_that_were_dropped_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another member leads, and may have settled their originals: what is acked would come again."""
    send, submit, dropped = Copies._send_gathered, Sending.submit, threading.Event()
    stored: list[bytes] = []

    def drop(self: Copies) -> None:
        assert self._gathered
        self.drop()
        send(self)
        dropped.set()

    def noting(self: Sending, caller: MessageSource | None, batch: SendBatch, done: SendDone) -> None:
        stored.extend(one.body for one in batch.messages if batch.again)
        submit(self, caller, batch, done)

    monkeypatch.setattr(Copies, "_send_gathered", drop)
    monkeypatch.setattr(Sending, "submit", noting)
    with PopBroker(tmp_path) as pop:
        pop.send([b"a"])
        pop.receive_all(1, invisible_ms=1000)
        assert dropped.wait(60)

    assert not stored


def test_a_message_in_the_place_of_one_that_is_gone_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read goes on to the next message that there is, which nobody has given up."""
    read = QueueReading.read

    async def read_on(
        self: QueueReading, topic: str, queue_id: int, offset: int, wanted: MessageFilter | None, limits: ReadLimits
    ) -> GetResult:
        is_gone = (topic, offset, limits.messages) == (TOPIC, 0, 1)
        return await read(self, topic, queue_id, 1 if is_gone else offset, wanted, limits)

    with PopBroker(tmp_path) as pop:
        pop.send([b"a", b"b"])
        pop.receive_all(2, invisible_ms=1000)
        monkeypatch.setattr(QueueReading, "read", read_on)
        wait_until(lambda: pop.window().commit == 2, "the originals are settled")
        assert [one.body for one in pop.stored(retry_topic_of(GROUP, TOPIC))] == [b"b"]
