"""A client's channels as certificates are replaced, and what of a search others wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from dledger.client.channels import Channels, Seeker, Service
from dledger.client.discovery import Directory, ServerReport
from dledger.client.shared import Deadline
from dledger.errors import DLedgerError, RequestTimeoutError, UnavailableError

SERVICE = Service("Service", lambda error, address, **_: UnavailableError(f"{address}: {error}"))
LEADER = ServerReport("n0", True, 1, None, {})


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


class Future:
    """A call that nobody waits for: it has failed at once, or is ``silent``."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self.cancelled = False

    def add_done_callback(self, callback: Callable[[Future], None]) -> None:
        if not self._silent:
            callback(self)

    def result(self) -> bytes:
        raise UnavailableError("refused")

    def cancel(self) -> None:
        self.cancelled = True


class Futures(FakeMaker):
    """Whose channels give these, one for each request."""

    def __init__(self, *, silent: bool) -> None:
        super().__init__()
        self.calls: list[Future] = []
        self._silent = silent

    def unary_unary(self, _method: str, **_: object) -> Futures:
        return self

    def open(self, _address: str) -> Futures:  # type: ignore[override]
        return self

    def future(self, _request: bytes, **_: object) -> Future:
        self.calls.append(Future(silent=self._silent))
        return self.calls[-1]

    def diagnose(self, error: DLedgerError, _address: str) -> DLedgerError:
        return error


def test_a_server_that_challenges_again_and_again_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first challenge tells how to sign; what is refused after that stays refused."""
    futures = Futures(silent=False)
    monkeypatch.setattr("dledger.client.channels.is_challenge", lambda _call: len(futures.calls) < 5)
    channels = Channels(futures, SERVICE)  # type: ignore[arg-type]

    ((address, answer),) = channels.ask_all("Method", b"", lambda data, _: data, ["n0:1"], Deadline(30))

    assert address == "n0:1"
    assert isinstance(answer, UnavailableError)
    assert len(futures.calls) == 2


def test_servers_of_which_grpc_says_nothing_have_not_answered_in_time() -> None:
    """Not even that the time is over: they are told of all the same, and their calls are ended."""
    futures = Futures(silent=True)
    channels = Channels(futures, SERVICE)  # type: ignore[arg-type]

    answers = dict(channels.ask_all("Method", b"", lambda data, _: data, ["n0:1", "n1:1"], Deadline(0.01)))

    assert {address: type(answer) for address, answer in answers.items()} == {
        "n0:1": RequestTimeoutError,
        "n1:1": RequestTimeoutError,
    }
    assert all(call.cancelled for call in futures.calls)


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

    def ask(addresses: object, _deadline: Deadline) -> Iterator[tuple[str, ServerReport | DLedgerError]]:
        asked.append(addresses)
        yield "n0:1", LEADER

    seeker = Seeker(directory, ask, lambda report: report)
    seeker._seeking = AnothersSearch()  # type: ignore[assignment]

    assert seeker.leader(Deadline(30)) == "n1:1"
    assert asked == []
