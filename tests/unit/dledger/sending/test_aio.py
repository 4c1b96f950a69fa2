"""What carries a window on an event loop: nobody is left waiting, and nothing is told too well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from dledger.errors import DLedgerError, NotLeaderError, RequestTimeoutError, UnavailableError
from dledger.sending import window as window_module
from dledger.sending.aio import AsyncLinks, AsyncSender, BatchStream, OnAnswer, OnEnd
from dledger.sending.batch import AllStored, Answer, OutgoingBatch, ProducerNumbering
from dledger.sending.futures import wait_for_batch
from dledger.sending.window import Window, WindowOptions
from tests.unit.dledger.sending.world import RULES


def run(test: Awaitable[None]) -> None:
    """On a loop; what should come at once fails after a while."""

    async def main() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)  # yields to the others on this loop


class Line:
    """A stream that is answered by the test."""

    def __init__(self, on_answer: OnAnswer[None, int], on_end: OnEnd[None, int]) -> None:
        self.address = "n1:1"
        self.server_memory = ""
        self.broken: DLedgerError | None = None
        self.batches: list[OutgoingBatch[None, int]] = []
        self.is_closed = False
        self.refusals: list[DLedgerError] = []
        """What is not even submitted."""
        self._on_answer = on_answer
        self._on_end = on_end

    def submit(self, batch: OutgoingBatch[None, int]) -> DLedgerError | None:
        if self.refusals:
            return self.refusals.pop()
        self.batches.append(batch)
        return None

    def answer(self, answer: Answer[int] | None = None) -> None:
        """What is under way for longest: it is stored, or whatever else is said of it."""
        batch = self.batches.pop(0)
        self._on_answer(self, batch, AllStored(range(len(batch.sent))) if answer is None else answer)

    async def close(self, _why: str = "") -> None:
        self.is_closed = True
        while self.batches:
            self.answer(RequestTimeoutError("it was closed"))
        self._on_end(self)


Made = tuple[AsyncSender[None, int], list[Line]]


async def _nobody() -> str | None:
    return None


def sender_of(
    options: WindowOptions,
    *,
    refusals: Sequence[DLedgerError] = (),
    find_leader: Callable[[], Awaitable[str | None]] = _nobody,
) -> Made:
    """A sender, and the streams that it has opened; the first one has these ``refusals``."""
    lines: list[Line] = []

    async def connect(
        _timeout_s: float, on_answer: OnAnswer[None, int], on_end: OnEnd[None, int]
    ) -> BatchStream[None, int]:
        lines.append(Line(on_answer, on_end))
        lines[0].refusals += refusals if len(lines) == 1 else ()
        return lines[-1]

    links = AsyncLinks(connect, find_leader, lambda _address, _error: None)
    return AsyncSender(links, Window(options, RULES, ProducerNumbering()), "s"), lines


def test_room_is_not_given_to_more_than_fit() -> None:
    """All who wait are woken; those for whom nothing is left go on waiting."""

    async def test() -> None:
        options = WindowOptions(linger_ms=0.0, batch_items=1, pending_bytes_max=130, timeout_ms=60_000.0)
        sender, lines = sender_of(options)
        for _ in range(2):
            await sender.add(b"a")
        adding = [asyncio.create_task(sender.add(b"a")) for _ in range(4)]
        await until(lambda: len(sender._waiting) == 4 and bool(lines) and bool(lines[0].batches))

        lines[0].answer()
        await until(lambda: any(task.done() for task in adding))
        for _ in range(10):
            await asyncio.sleep(0)
        assert [task.done() for task in adding] == [True, False, False, False]
        assert sender._window.pending_bytes == 130
        for task in adding:
            task.cancel()
        await sender.abandon(UnavailableError("the test is over"))

    run(test())


def test_whoever_gives_up_waiting_for_room_harms_nobody() -> None:
    """The next one gets the room, and the answers go on."""

    async def test() -> None:
        sender, lines = sender_of(WindowOptions(linger_ms=0.0, pending_bytes_max=65, timeout_ms=60_000.0))
        first, _ = await sender.add(b"a")
        adding = [asyncio.create_task(sender.add(b"b")) for _ in range(2)]
        await until(lambda: len(sender._waiting) == 2 and bool(lines) and bool(lines[0].batches))
        adding[0].cancel()
        await asyncio.wait(adding[:1])

        lines[0].answer()
        assert first.done
        await adding[1]
        await sender.abandon(UnavailableError("the test is over"))

    run(test())


def test_flushing_waits_also_for_what_still_lingers() -> None:
    """As closing does: leaving the context must not fail what was just added."""

    async def test() -> None:
        sender, lines = sender_of(WindowOptions(linger_ms=20_000.0, timeout_ms=60_000.0))
        batch, _ = await sender.add(b"a")
        closing = asyncio.create_task(sender.close())
        await until(lambda: closing.done() or (bool(lines) and bool(lines[0].batches)))
        lines[0].answer()
        await closing

        assert batch.outcomes == range(1)
        assert lines[0].is_closed

    run(test())


def test_abandoning_tells_also_what_was_never_sent() -> None:
    """Nobody else would: there is no stream whose end is told."""

    async def test() -> None:
        sender, _ = sender_of(WindowOptions(linger_ms=20_000.0, timeout_ms=60_000.0))
        batch, _ = await sender.add(b"a")
        waiting = asyncio.create_task(wait_for_batch(batch))
        await asyncio.sleep(0)
        await sender.abandon(UnavailableError("closed"))
        await waiting

        assert [one.outcome for one in batch.outcomes if isinstance(one, DLedgerError)] == ["not_applied"]

    run(test())


def test_a_server_that_refuses_is_left() -> None:
    """With its stream: nobody would close it later."""

    async def test() -> None:
        sender, lines = sender_of(WindowOptions(linger_ms=0.0, timeout_ms=60_000.0))
        await sender.add(b"a")
        await until(lambda: len(lines) == 1 and bool(lines[0].batches))
        lines[0].answer(NotLeaderError("not here"))
        await until(lambda: len(lines) == 2 and bool(lines[1].batches))
        lines[1].answer()

        assert [line.is_closed for line in lines] == [True, False]
        await sender.close()

    run(test())


def test_what_a_stream_that_has_just_ended_does_not_take_goes_to_the_next() -> None:
    """Nobody answers what was never submitted."""

    async def test() -> None:
        refusals = [UnavailableError("the stream is closed")]
        sender, lines = sender_of(WindowOptions(linger_ms=0.0, timeout_ms=60_000.0), refusals=refusals)
        batch, _ = await sender.add(b"a")
        await until(lambda: len(lines) == 2 and bool(lines[1].batches))
        lines[1].answer()

        assert batch.outcomes == range(1)
        await sender.close()

    run(test())


def test_a_late_server_is_not_left_because_nobody_says_who_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way would become unknown, though nothing is wrong but that it takes long."""
    monkeypatch.setattr(window_module, "LOOK_AFTER_MS", 1.0)
    monkeypatch.setattr(window_module, "LOOK_AGAIN_MS", 1.0)
    looks: list[None] = []

    async def find_leader() -> str | None:
        looks.append(None)
        return None

    async def test() -> None:
        sender, lines = sender_of(WindowOptions(linger_ms=0.0, timeout_ms=60_000.0), find_leader=find_leader)
        batch, _ = await sender.add(b"a")
        await until(lambda: len(looks) > 2)
        assert not lines[0].is_closed
        lines[0].answer()

        assert batch.outcomes == range(1)
        await sender.close()

    run(test())


def test_abandoning_ends_what_was_begun() -> None:
    """A search for the leader or the opening of a stream: nothing runs on without anybody to end it."""
    ended: list[None] = []

    async def connect(_timeout_s: float, _on_answer: object, _on_end: object) -> BatchStream[None, int]:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # closing takes a moment
            ended.append(None)
        raise AssertionError("nobody ends it")

    async def test() -> None:
        links: AsyncLinks[None, int] = AsyncLinks(connect, _nobody, lambda _address, _error: None)
        sender = AsyncSender(links, Window(WindowOptions(linger_ms=0.0), RULES, ProducerNumbering()), "s")
        await sender.add(b"a")
        await asyncio.sleep(0)
        await sender.abandon(UnavailableError("closed"))

        assert ended == [None]

    run(test())


def test_whoever_waits_hears_of_a_bug() -> None:
    """Of the client: nobody would ever tell what became of what was added."""

    async def connect(_timeout_s: float, _on_answer: object, _on_end: object) -> BatchStream[None, int]:
        raise ValueError("a bug")

    async def test() -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["exception"]))
        links: AsyncLinks[None, int] = AsyncLinks(connect, _nobody, lambda _address, _error: None)
        sender = AsyncSender(
            links, Window(WindowOptions(linger_ms=0.0, timeout_ms=60_000.0), RULES, ProducerNumbering()), "s"
        )
        batch, _ = await sender.add(b"a")
        await wait_for_batch(batch)

        assert [one.outcome for one in batch.outcomes if isinstance(one, DLedgerError)] == ["not_applied"]
        assert [str(error) for error in told] == ["a bug"]

    run(test())
