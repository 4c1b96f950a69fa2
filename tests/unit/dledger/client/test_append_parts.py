"""An append of more than goes into one request: one deadline for all parts, and the truth about those that are in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dledger.client import AppendResult, AsyncDLedgerClient, DLedgerClient, shared
from dledger.errors import DLedgerError, PendingFullError
from dledger.sending.aio import AsyncSender
from dledger.sending.batch import OutgoingBatch
from dledger.sending.threads import Sender
from dledger.types import LogIndex, Position, Term

NOBODY = "127.0.0.1:1"
PART_S = 2.0
"""What storing a part takes."""


class Parts:
    """Stores two parts; for another one there is no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timeouts_s: list[float | None] = []
        self._now_s = 1000.0
        monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=lambda: self._now_s))
        monkeypatch.setattr(Sender, "add_whole", lambda _sender, payloads, **words: self._take(payloads, **words))
        monkeypatch.setattr(AsyncSender, "add_whole", lambda _sender, payloads, **words: self._later(payloads, **words))

    def _take(
        self, payloads: list[bytes], *, sequence: int | None = None, timeout_s: float | None = None
    ) -> OutgoingBatch[None, AppendResult]:
        assert sequence is None
        if len(self.timeouts_s) == 2:
            raise PendingFullError("too much waits")
        self.timeouts_s.append(timeout_s)
        self._now_s += PART_S
        batch: OutgoingBatch[None, AppendResult] = OutgoingBatch(1, 0.0, 0.0, 0.0)
        batch.outcomes = [AppendResult(LogIndex(0), Term(1), Position(0))] * len(payloads)
        batch.done = True
        return batch

    async def _later(
        self, payloads: list[bytes], *, sequence: int | None = None, timeout_s: float | None = None
    ) -> OutgoingBatch[None, AppendResult]:
        return self._take(payloads, sequence=sequence, timeout_s=timeout_s)


def append(bodies: list[bytes], *, is_async: bool) -> list[AppendResult]:
    """With ten seconds for all of it."""
    if not is_async:
        with DLedgerClient(NOBODY) as client:
            return client.append_many(bodies, timeout_s=10.0)

    async def appended() -> list[AppendResult]:
        async with AsyncDLedgerClient(NOBODY) as client:
            return await client.append_many(bodies, timeout_s=10.0)

    return asyncio.run(appended())


@pytest.mark.parametrize("is_async", [False, True])
def test_all_parts_have_one_deadline(monkeypatch: pytest.MonkeyPatch, *, is_async: bool) -> None:
    """Not each part all of it: the call would last for as many times as long."""
    parts = Parts(monkeypatch)

    assert len(append([b"x"] * 2000, is_async=is_async)) == 2000
    assert parts.timeouts_s == [10.0, 10.0 - PART_S]


@pytest.mark.parametrize("is_async", [False, True])
def test_without_room_for_the_next_part_the_outcome_is_unknown(
    monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    """Those before it are stored: whoever takes it for not applied would append them a second time."""
    Parts(monkeypatch)

    with pytest.raises(DLedgerError) as caught:
        append([b"x"] * 3000, is_async=is_async)

    assert isinstance(caught.value, PendingFullError)
    assert caught.value.outcome == "unknown"
    assert caught.value.__notes__ == ["the first 2048 entries were appended; the next request failed"]
