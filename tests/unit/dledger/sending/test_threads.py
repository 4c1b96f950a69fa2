"""What carries a window with threads: who waits is woken, who is left is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dledger.errors import (
    DLedgerError,
    NotLeaderError,
    PendingFullError,
    RequestTimeoutError,
    UnavailableError,
)
from dledger.sending import window as window_module
from dledger.sending.batch import AllStored, Answer, OutgoingBatch
from dledger.sending.futures import SentItem
from dledger.sending.numbering import ProducerNumbering
from dledger.sending.stream import Stream
from dledger.sending.threads import Links, OnAnswer, OnEnd, Sender
from dledger.sending.window import Window, WindowOptions, Wish
from tests.support.waiting import wait_until
from tests.unit.dledger.sending.world import RULES


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
        wait_until(lambda: bool(self.batches), "it is sent")
        batch = self.batches.pop(0)
        answer = AllStored(range(len(batch.sent))) if answer is None else answer
        self._on_answer(self, batch, answer)()  # type: ignore[arg-type]

    def close(self, _why: str = "") -> None:
        self.is_closed = True
        while self.batches:
            self.answer(RequestTimeoutError("it was closed"))
        self._on_end(self)  # type: ignore[arg-type]


@contextmanager
def sending(
    options: WindowOptions,
    numbering: ProducerNumbering,
    *,
    refusals: Sequence[DLedgerError] = (),
    find_leader: Callable[[], str | None] = lambda: None,
) -> Iterator[tuple[Sender[None, int], list[Line]]]:
    """A sender, and the streams that it has opened; the first one has these ``refusals``."""
    lines: list[Line] = []

    def connect(_timeout_s: float, on_answer: OnAnswer[None, int], on_end: OnEnd[None, int]) -> Stream[None, int]:
        lines.append(Line(on_answer, on_end))
        lines[0].refusals += refusals if len(lines) == 1 else ()
        return lines[-1]  # type: ignore[return-value]

    links = Links(connect, find_leader, lambda _address, _error: None)
    sender = Sender(links, Window(options, RULES, numbering), "s")
    try:
        yield sender, lines
    finally:
        ending = threading.Thread(target=sender.abandon, args=(NotLeaderError("the test is over"),), daemon=True)
        ending.start()
        ending.join(30)
        assert not ending.is_alive()


def test_room_for_several_is_told_to_all_who_wait() -> None:
    """Whoever is not woken waits until something else is done, perhaps in vain."""
    options = WindowOptions(linger_ms=0.0, pending_bytes_max=130, timeout_ms=60_000.0)
    with sending(options, ProducerNumbering()) as (sender, lines):
        sender.add_many([b"a", b"b"])
        adding = [threading.Thread(target=sender.add, args=(b"c",)) for _ in range(2)]
        for thread in adding:
            thread.start()
        wait_until(lambda: len(sender._room._waiters) == 2, "both wait")  # type: ignore[attr-defined]
        wait_until(lambda: bool(lines), "connected")
        lines[0].answer()
        for thread in adding:
            thread.join(30)

        assert not any(thread.is_alive() for thread in adding)


def test_numbers_that_found_no_room_may_be_given_again() -> None:
    """They were not used: a sender that takes only those behind them would never store anything again."""
    options = WindowOptions(linger_ms=0.0, pending_bytes_max=65, timeout_ms=50.0)
    with sending(options, ProducerNumbering("given")) as (sender, lines):
        first, _ = sender.add(b"a", sequence=0, timeout_s=60.0)
        with pytest.raises(PendingFullError):
            sender.add_many([b"b", b"c"], sequence=1)
        wait_until(lambda: bool(lines), "connected")
        lines[0].answer()
        assert first.done

        sender._window.options = replace(options, timeout_ms=60_000.0)
        ((batch, _, count),) = sender.add_many([b"b", b"c"], sequence=1)
        assert (batch.sequence, count) == (1, 2)


@pytest.mark.usefixtures("caplog")
def test_a_callback_that_fails_harms_nobody() -> None:
    """Neither whoever else waits for the batch, nor what comes later: the same thread drives everything."""
    with sending(WindowOptions(linger_ms=0.0, timeout_ms=60_000.0), ProducerNumbering()) as (sender, lines):
        item = SentItem(*sender.add(b"a"))
        called: list[int] = []

        def fail(_item: SentItem[int]) -> None:
            called.append(1)
            raise ValueError("the application's own")

        item.add_done_callback(fail)
        item.add_done_callback(lambda _item: called.append(2))
        wait_until(lambda: bool(lines), "connected")
        lines[0].answer()
        assert item.result(30) == 0
        assert called == [1, 2]

        later = SentItem(*sender.add(b"b"))
        lines[0].answer()
        assert later.result(30) == 0


def test_a_server_that_refuses_is_left() -> None:
    """With its stream: nobody would close it later."""
    with sending(WindowOptions(linger_ms=0.0, timeout_ms=60_000.0), ProducerNumbering()) as (sender, lines):
        batch, _ = sender.add(b"a")
        wait_until(lambda: len(lines) == 1, "connected")
        lines[0].answer(NotLeaderError("not here"))
        wait_until(lambda: len(lines) == 2, "connected again")
        lines[1].answer()

        assert batch.done
        assert [line.is_closed for line in lines] == [True, False]


def test_what_a_stream_that_has_just_ended_does_not_take_goes_to_the_next() -> None:
    """Nobody answers what was never submitted."""
    refusals = [UnavailableError("the stream is closed")]
    options = WindowOptions(linger_ms=0.0, timeout_ms=60_000.0)
    with sending(options, ProducerNumbering(), refusals=refusals) as (sender, lines):
        batch, _ = sender.add(b"a")
        wait_until(lambda: len(lines) == 2, "connected again")
        lines[1].answer()

        assert batch.outcomes == range(1)


def test_a_late_server_is_not_left_because_nobody_says_who_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way would become unknown, though nothing is wrong but that it takes long."""
    monkeypatch.setattr(window_module, "LOOK_AFTER_MS", 1.0)
    monkeypatch.setattr(window_module, "LOOK_AGAIN_MS", 1.0)
    looks: list[None] = []
    options = WindowOptions(linger_ms=0.0, timeout_ms=60_000.0)
    with sending(options, ProducerNumbering(), find_leader=lambda: looks.append(None)) as (sender, lines):
        batch, _ = sender.add(b"a")
        wait_until(lambda: len(looks) > 2, "it looks who leads")
        assert not lines[0].is_closed
        lines[0].answer()

        assert batch.outcomes == range(1)


def test_whoever_waits_hears_of_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the client: nobody would ever tell what became of what was added."""
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(str(args.exc_value)))

    called: list[object] = []

    def connect(*_: object) -> Stream[None, int]:
        raise UnavailableError("nobody is there")

    def step(_now_ms: float) -> Wish:
        raise ValueError("a bug")

    links: Links[None, int] = Links(connect, lambda: None, lambda _address, _error: None)
    options = WindowOptions(linger_ms=0.0, timeout_ms=60_000.0)
    sender = Sender(links, Window(options, RULES, ProducerNumbering()), "s")
    item = SentItem(*sender.add(b"a"))
    item.add_done_callback(called.append)
    monkeypatch.setattr(sender._window, "step", step)
    sender._thread.join(30)

    assert called == [item]
    error = item.exception()
    assert error is not None
    assert error.outcome == "not_applied"
    assert told == ["a bug"]
