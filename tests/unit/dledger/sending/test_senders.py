"""What the driver of windows adds to them: time goes on whatever else takes a while, and nobody is told a lie."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import pytest

from dledger.errors import DLedgerError, RequestTimeoutError, UnavailableError
from dledger.sending.aio import AsyncLinks, AsyncSender, BatchStream
from dledger.sending.batch import OutgoingBatch, ProducerNumbering
from dledger.sending.window import Window, WindowOptions
from tests.unit.dledger.sending.world import RULES

PATIENCE_S = 120.0
AnyWindow = Window[Any, Any]
Note = Callable[..., Any]


def window_of(*, batch_items: int = 1024, pending_bytes_max: int = 1 << 20, timeout_ms: float) -> AnyWindow:
    options = WindowOptions(
        linger_ms=0.0, batch_items=batch_items, pending_bytes_max=pending_bytes_max, timeout_ms=timeout_ms
    )
    return Window(options, RULES, ProducerNumbering())


class SilentStream:
    """Takes everything, answers nothing; what is under way when it is closed is unknown."""

    address = "n1:1"
    server_memory = ""

    def __init__(self, on_answer: Callable[..., Any], on_end: Callable[..., Any]) -> None:
        self.broken: DLedgerError | None = None
        self.under_way: list[OutgoingBatch[Any, Any]] = []
        self._on_answer = on_answer
        self._on_end = on_end

    def submit(self, batch: OutgoingBatch[Any, Any]) -> DLedgerError | None:
        self.under_way.append(batch)
        return None

    def end(self) -> None:
        if self.broken is None:
            self.broken = UnavailableError("closed")
            news = [self._on_answer(self, one, RequestTimeoutError("closed")) for one in self.under_way]
            self._on_end(self)
            for tell in news:
                if tell is not None:
                    tell()


class TaskStream(SilentStream):
    async def close(self, _why: str = "") -> None:
        self.end()


def _quiet(_address: str, _error: DLedgerError) -> None:
    """Nobody wants to know."""


def test_of_many_that_are_taken_in_part_no_task_hears_that_none_is_stored() -> None:
    async def run() -> None:
        async def connect(_timeout_s: float, on_answer: Note, on_end: Note) -> BatchStream[Any, Any]:
            return TaskStream(on_answer, on_end)

        sender = AsyncSender(
            AsyncLinks(connect, nobody, _quiet), window_of(batch_items=1, pending_bytes_max=1, timeout_ms=60_000.0), "s"
        )
        adding = asyncio.ensure_future(sender.add_many([b"a", b"b"]))
        while not sender._waiting:
            await asyncio.sleep(0)
        await sender.abandon(UnavailableError("the client is closed"))
        with pytest.raises(UnavailableError) as raised:
            await adding
        assert raised.value.outcome == "unknown"

    asyncio.run(run())


async def nobody() -> None:
    """Who leads."""


def test_a_task_is_told_whatever_callbacks_raise() -> None:
    async def run() -> None:
        async def connect(_timeout_s: float, _on_answer: Note, _on_end: Note) -> NoReturn:
            raise UnavailableError("nobody there")

        sender = AsyncSender(AsyncLinks(connect, nobody, _quiet), window_of(batch_items=1, timeout_ms=100.0), "s")
        batch, _ = await sender.add(b"a")
        other, _ = await sender.add(b"b")
        batch.when_done(lambda: 1 // 0)
        told = asyncio.Event()
        batch.when_done(told.set)
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        await asyncio.wait_for(waited(other), PATIENCE_S)
        assert (await sender.add(b"c"))[0] is not other
        await sender.close()

    asyncio.run(run())


def waited(batch: OutgoingBatch[Any, Any]) -> Awaitable[object]:
    told = asyncio.Event()
    batch.when_done(told.set)
    return told.wait()
