"""An append of more than goes into one request: one deadline for all parts, and the truth about those that are in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dledger.client import AppendResult, shared
from dledger.client.aio import DLedgerClient
from dledger.errors import DLedgerError, PendingFullError
from dledger.sending.aio import AsyncSender
from dledger.sending.batch import OutgoingBatch
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
        monkeypatch.setattr(AsyncSender, "add_whole", lambda _sender, payloads, **words: self._take(payloads, **words))

    async def _take(
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


def append(bodies: list[bytes]) -> list[AppendResult]:
    """With ten seconds for all of it."""

    async def appended() -> list[AppendResult]:
        async with DLedgerClient(NOBODY) as client:
            return await client.append_many(bodies, timeout_s=10.0)

    return asyncio.run(appended())


def test_all_parts_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each part all of it: the call would last for as many times as long."""
    parts = Parts(monkeypatch)

    assert len(append([b"x"] * 2000)) == 2000
    assert parts.timeouts_s == [10.0, 10.0 - PART_S]


def test_without_room_for_the_next_part_the_outcome_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it are stored: whoever takes it for not applied would append them a second time."""
    Parts(monkeypatch)

    with pytest.raises(DLedgerError) as caught:
        append([b"x"] * 3000)

    assert isinstance(caught.value, PendingFullError)
    assert caught.value.outcome == "unknown"
    assert caught.value.__notes__ == ["the first 2048 entries were appended; the next request failed"]
