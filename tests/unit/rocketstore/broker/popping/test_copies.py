"""Copies of messages that come again: many at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rocketstore.broker.popping import copies
from rocketstore.broker.sending import MessageSource, SendBatch, SendDone, Sending
from rocketstore.types import PutMessageStatus, PutResult
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.popping.harness import PopBroker, bodies

COUNT = 60
REFUSED = PutResult(PutMessageStatus.FLOW_CONTROL, outcome="not_applied", reason="as if the broker were busy")
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
        pop.receive_all(COUNT, invisible_ms=1000)
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
        pop.receive_all(COUNT + 1, invisible_ms=1000)
        found = bodies(pop.receive_all(COUNT, invisible_ms=60_000))

    assert sorted(found) == sorted(small)
    assert refused == {large}
