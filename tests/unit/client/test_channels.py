"""A client's channels as certificates are replaced, and what of a search others wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

import pytest

from dledger.client.aio_channels import AsyncChannels, AsyncSeeker
from dledger.client.channels import Channels, Seeker, Service
from dledger.client.discovery import Directory, Report
from dledger.client.shared import Deadline
from dledger.errors import DLedgerError, UnavailableError

SERVICE = Service("Service", lambda error, address, **_: UnavailableError(f"{address}: {error}"))
LEADER = Report("n0", True, 1, None, {})


class FakeChannel:
    """Answers every request with its number; never, if it is ``silent``."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.closed = False

    def unary_unary(self, _method: str, **_: object) -> Callable[..., bytes]:
        return lambda _request, **_: bytes((self.number,))

    def close(self) -> None:
        self.closed = True


class FakeAsyncChannel(FakeChannel):
    """For asyncio."""

    def __init__(self, number: int, silent: asyncio.Event | None = None) -> None:
        super().__init__(number)
        self._silent = silent

    def unary_unary(self, _method: str, **_: object) -> Callable[..., object]:  # type: ignore[override]
        async def answer(_request: bytes, **_: object) -> bytes:
            if self._silent is not None:
                try:
                    await asyncio.Event().wait()
                finally:
                    self._silent.set()
            return bytes((self.number,))

        return answer

    async def close(self, _grace: object) -> None:  # type: ignore[override]
        self.closed = True


class FakeMaker:
    """Makes channels, and has new certificates whenever a test says so."""

    def __init__(self) -> None:
        self.version = 0
        self.made: list[FakeChannel] = []
        self.silenced: dict[str, asyncio.Event] = {}
        """The servers that never answer; and whether who asked them has given up."""

    def open(self, _address: str) -> FakeChannel:
        self.made.append(FakeChannel(len(self.made)))
        return self.made[-1]

    def open_async(self, address: str) -> FakeAsyncChannel:
        made = FakeAsyncChannel(len(self.made), self.silenced.get(address))
        self.made.append(made)
        return made


@pytest.fixture
def maker() -> FakeMaker:
    return FakeMaker()


def test_calls_show_the_certificates_that_there_are_now(maker: FakeMaker) -> None:
    """What runs on the channels before goes on; they are closed with the others."""
    channels = Channels(maker, SERVICE)  # type: ignore[arg-type]
    for version in (0, 0, 1, 1):
        maker.version = version
        assert channels.call("Method", "n0:1", b"", Deadline(30)) == bytes((version,))
    assert [one.closed for one in maker.made] == [False, False]

    channels.close()

    assert [one.closed for one in maker.made] == [True, True]


def test_async_calls_show_the_certificates_that_there_are_now(maker: FakeMaker) -> None:
    """As those of threads."""

    async def test() -> None:
        channels = AsyncChannels(maker, SERVICE)  # type: ignore[arg-type]
        for version in (0, 0, 1, 1):
            maker.version = version
            assert await channels.call("Method", "n0:1", b"", Deadline(30)) == bytes((version,))
        assert [one.closed for one in maker.made] == [False, False]

        await channels.close()

        assert [one.closed for one in maker.made] == [True, True]

    asyncio.run(test())


def test_whoever_has_heard_enough_asks_nobody_any_longer(maker: FakeMaker) -> None:
    """Calls to servers that are silent end with the search, not with their deadline."""

    async def test() -> None:
        given_up = maker.silenced["n1:1"] = asyncio.Event()
        channels = AsyncChannels(maker, SERVICE)  # type: ignore[arg-type]
        addresses = ("n0:1", "n1:1")
        async with aclosing(channels.ask_all("Method", b"", lambda data, _: data, addresses, Deadline(60))) as answers:
            assert await anext(answers) == ("n0:1", b"\x00")
        async with asyncio.timeout(30):
            await given_up.wait()

    asyncio.run(test())


def test_whoever_waited_for_anothers_search_takes_what_it_found() -> None:
    """Hundreds of threads that wait for one search do not each begin one of their own after it."""
    directory = Directory(("n0:1", "n1:1"))
    asked: list[object] = []

    class AnothersSearch:
        """Ends with a leader while one waits for it."""

        def acquire(self, *, timeout: float) -> bool:
            directory.set_leader("n1:1")
            return timeout > 0

        def release(self) -> None: ...

    def ask(addresses: object, _deadline: Deadline) -> Iterator[tuple[str, Report | DLedgerError]]:
        asked.append(addresses)
        yield "n0:1", LEADER

    seeker = Seeker(directory, ask, lambda report: report)
    seeker._seeking = AnothersSearch()  # type: ignore[assignment]

    assert seeker.leader(Deadline(30)) == "n1:1"
    assert asked == []


def test_whoever_gives_up_waiting_for_a_search_does_not_end_it_for_the_others() -> None:
    """Its time is over, not theirs."""

    async def test() -> None:
        answer = asyncio.Event()

        async def ask(_addresses: object, _: Deadline) -> AsyncGenerator[tuple[str, Report | DLedgerError], None]:
            await answer.wait()
            yield "n0:1", LEADER

        seeker = AsyncSeeker(Directory(("n0:1",)), ask, lambda report: report)
        patient = asyncio.create_task(seeker.leader(Deadline(30)))
        with pytest.raises(UnavailableError, match="no leader found within"):
            await seeker.leader(Deadline(0.01))
        answer.set()
        assert await patient == "n0:1"

    asyncio.run(test())
