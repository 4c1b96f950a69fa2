"""When a client tries again, and for how long it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import tenacity

from dledger.client import DLedgerClient, calls
from dledger.client.bulk import _Patience
from dledger.client.channels import retry_options
from dledger.client.shared import (
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    Deadline,
    is_retried,
    is_retried_read,
)
from dledger.errors import DLedgerError, RequestTimeoutError, UnavailableError
from tests.support.fake_node import FakeNode

BROKEN = UnavailableError("the stream broke")


# -- single calls


def tried(failures: Sequence[DLedgerError], retried: Callable[[BaseException], bool]) -> list[float]:
    """The pauses of a call that fails so and then succeeds."""
    left, pauses = list(failures), list[float]()

    def attempt() -> None:
        if left:
            raise left.pop(0)

    tenacity.Retrying(**retry_options(Deadline(1000), retried), sleep=pauses.append)(attempt)
    return pauses


def test_only_what_changes_nothing_is_repeated_after_a_lost_answer() -> None:
    """Whoever calls says which kind of request it is."""
    lost = RequestTimeoutError("no answer")

    assert len(tried([lost, lost], is_retried_read)) == 2
    with pytest.raises(RequestTimeoutError):
        tried([lost], is_retried)


def test_clients_that_fail_together_do_not_return_together() -> None:
    """Pauses grow up to the longest, each with some jitter: else an elected leader would be met by all at once."""
    refused = UnavailableError("refused")
    refused.outcome = "not_applied"

    pauses = tried([refused] * 30, is_retried)

    planned = [min(RETRY_WAIT_S_MIN * 2**number, RETRY_WAIT_S_MAX) for number in range(30)]
    extra = [pause - wanted for pause, wanted in zip(pauses, planned, strict=True)]
    assert all(0 <= one <= RETRY_WAIT_S_MIN + 1e-9 for one in extra)
    assert len({round(one, 6) for one in extra}) > 10


def test_a_large_read_pauses_no_longer_than_it_may_take() -> None:
    """Whoever gave it a time-out waits for its error no longer than that."""
    waits: list[float | None] = []

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return False

    patience = _Patience(Closing(), RETRY_WAIT_S_MIN / 2)

    patience.wait_after(BROKEN, retried=True)

    assert waits[0] is not None
    assert waits[0] <= RETRY_WAIT_S_MIN / 2


# -- streams


@dataclass
class World:
    """A client's streams as they go one after the other, and the time that they and the pauses take."""

    client: DLedgerClient
    script: list[tuple[float, Sequence[bytes]]] = field(default_factory=list)
    """For each stream how long it lasts and what it brings, before it breaks."""
    now_s: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def stream(self, _name: str, _address: str, _request: bytes) -> Generator[bytes]:
        lasts_s, answers = self.script.pop(0)
        self.now_s += lasts_s
        yield from answers
        raise BROKEN

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    def read(self) -> Iterator[bytes]:
        return self.client._stream("Follow", bytes, "127.0.0.1:1")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A client that gives up after five seconds without an answer."""
    with DLedgerClient("127.0.0.1:1", timeout_s=5) as client:
        made = World(client)

        class Countdown(Deadline):
            """On the time of the test."""

            def __init__(self, timeout_s: float) -> None:
                self._at = made.now_s + timeout_s

            @property
            def remaining_s(self) -> float:
                return max(0.0, self._at - made.now_s)

            @property
            def expired(self) -> bool:
                return made.now_s >= self._at

        monkeypatch.setattr(calls, "Deadline", Countdown)
        monkeypatch.setattr(client, "metadata", lambda *_address, **_timeout: FakeNode().status())
        monkeypatch.setattr(client._channels, "stream", made.stream)
        monkeypatch.setattr(client._channels, "pause", made.pause)
        yield made


def test_a_stream_that_brought_something_is_taken_up_again_soon(world: World) -> None:
    """The pauses grow for as long as nothing comes, and begin anew afterwards."""
    world.script = [(0, []), (0, []), (0, [b"a"]), (0, []), (0, [b"b"])]

    entries = world.read()

    assert [next(entries), next(entries)] == [b"a", b"b"]
    first = RETRY_WAIT_S_MIN
    assert world.pauses == [first, 2 * first, first, 2 * first]


def test_a_stream_goes_on_for_as_long_as_something_comes(world: World) -> None:
    """The client's time-out is for what brings nothing: one broken stream after the other may take far longer."""
    world.script = [(4, [b"%d" % number]) for number in range(5)]
    world.script += [(4, []), (4, [])]
    entries = world.read()

    assert [next(entries) for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    with pytest.raises(UnavailableError, match="the stream broke"):
        next(entries)
    assert world.script == []
