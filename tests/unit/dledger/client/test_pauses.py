"""When a client tries again, and for how long it goes on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from dledger.client.aio import client as module
from dledger.client.aio import large_reads
from dledger.client.shared import RETRY_WAIT_S_MIN, TimeLimit
from dledger.errors import UnavailableError
from dledger.remoting.log_codec import encode_read_answer
from dledger.rpc.clients.codec import ReadAnswer
from dledger.types import Entry, LogIndex, Position, Term

BROKEN = UnavailableError("the stream broke")


def test_a_large_read_pauses_no_longer_than_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gave it a time-out waits for its error no longer than that."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(large_reads, "asyncio", SimpleNamespace(sleep=sleep))
    patience = large_reads._Patience(lambda: False, RETRY_WAIT_S_MIN / 2)

    asyncio.run(patience.wait_after(BROKEN, retried=True))

    assert len(waits) == 1
    assert waits[0] <= RETRY_WAIT_S_MIN / 2


# -- who follows


@dataclass
class World:
    """A follower's requests as they go one after the other, and the time that they and the pauses take."""

    script: list[tuple[float, bytes]] = field(default_factory=list)
    """For each request how long it lasts, and the entry that it brings; none: it breaks."""
    now_s: float = 0.0
    pauses: list[float] = field(default_factory=list)
    next_index: int = 0

    async def call(self, _address: str, _code: int, _body: bytes, _deadline: TimeLimit) -> bytes:
        lasts_s, body = self.script.pop(0)
        self.now_s += lasts_s
        if not body:
            raise BROKEN
        entry = Entry(LogIndex(self.next_index), Term(1), Position(0), body)
        self.next_index += 1
        return encode_read_answer(ReadAnswer([entry], entry.index, LogIndex(0), entry.index))

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    def follow(self, monkeypatch: pytest.MonkeyPatch, count: int) -> list[bytes]:
        """What a client gets that gives up after five seconds without an answer, and stops after ``count``."""
        world = self

        class Countdown(TimeLimit):
            """On the time of the test."""

            def __init__(self, timeout_s: float) -> None:
                self._at = world.now_s + timeout_s

            @property
            def remaining_s(self) -> float:
                return max(0.0, self._at - world.now_s)

            @property
            def expired(self) -> bool:
                return world.now_s >= self._at

        async def read() -> list[bytes]:
            found: list[bytes] = []
            async with module.DLedgerClient("127.0.0.1:1", timeout_s=5) as client:
                monkeypatch.setattr(client._connections, "call", self.call)
                async with aclosing(client.follow(0, address="127.0.0.1:1")) as entries:
                    async for entry in entries:
                        found.append(entry.body)
                        if len(found) == count:
                            break
            return found

        monkeypatch.setattr(module, "TimeLimit", Countdown)
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=self.sleep))
        return asyncio.run(read())


def test_a_follower_that_got_something_goes_on_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses grow for as long as nothing comes, and begin anew afterwards."""
    world = World([(0, b""), (0, b""), (0, b"a"), (0, b""), (0, b"b")])

    assert world.follow(monkeypatch, 2) == [b"a", b"b"]
    first = RETRY_WAIT_S_MIN
    assert world.pauses == [first, 2 * first, first]


def test_a_follower_goes_on_for_as_long_as_something_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's time-out is for what brings nothing: one broken request after the other may take far longer."""
    world = World([one for number in range(5) for one in ((4.0, b""), (0.5, b"%d" % number))] + [(4.0, b"")] * 2)

    with pytest.raises(UnavailableError, match="the stream broke"):
        world.follow(monkeypatch, 6)
    assert world.script == []
    assert world.next_index == 5
