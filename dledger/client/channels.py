"""A client's channels, opened on demand, the calls on them, and its search for the leader."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar, cast

import grpc
import tenacity

from dledger.client.channel_maker import ChannelMaker
from dledger.client.discovery import DISCOVERY_TIMEOUT_S, LOOK_TIMEOUT_S, Directory, Search, ServerReport
from dledger.client.shared import RETRY_WAIT_S_MAX, RETRY_WAIT_S_MIN, Deadline, is_retried
from dledger.client.signing import is_challenge
from dledger.errors import DLedgerError, RequestTimeoutError, UnavailableError
from dledger.forks import LostLock, mind_forks
from dledger.records import record
from dledger.rpc import options

CONNECTION_STREAMS_MAX: Final = 64
"""Streams per connection, half of the usual server limit, because other calls need room, too."""
_T = TypeVar("_T")
_StatusT = TypeVar("_StatusT")
_Place: TypeAlias = tuple[str, int]
_Call: TypeAlias = Any  # grpc-stubs have no common type for calls with a done callback
Answer: TypeAlias = Annotated[_T, "requested at once"]
"""What an attempt returns."""


def retry_options(deadline: Deadline, retried: Callable[[BaseException], bool] = is_retried) -> dict[str, Any]:
    """Arguments for tenacity's ``Retrying`` and ``AsyncRetrying``: until the deadline, backing off with jitter."""
    jitter = tenacity.wait_random(0, RETRY_WAIT_S_MIN)
    backoff = tenacity.wait_exponential(multiplier=RETRY_WAIT_S_MIN, max=RETRY_WAIT_S_MAX) + jitter

    def wait(state: tenacity.RetryCallState) -> float:
        # Never right up to the deadline: an attempt without time to answer turns "not applied" into "unknown".
        return min(backoff(state), deadline.remaining_s / 2)

    return {
        "stop": lambda _state: deadline.remaining_s < RETRY_WAIT_S_MIN,
        "wait": wait,
        "retry": tenacity.retry_if_exception(retried),
        "reraise": True,
    }


def retry(deadline: Deadline, attempt: Callable[[], _T], goes_on: Callable[[BaseException], bool]) -> _T:
    """Repeat with growing pauses until the deadline, while ``goes_on`` accepts the error."""
    return tenacity.Retrying(**retry_options(deadline, goes_on))(attempt)


@record(frozen=True, slots=True)
class Service:
    """A gRPC service as a client sees it."""

    name: str
    failure_of: Callable[..., DLedgerError]
    """The error for ``grpc.RpcError``, an address, and by keyword ``sent``: whether anything may have changed."""


class Channels:
    """Thread-safe. Every call raises ``UnavailableError`` after closing."""

    def __init__(self, maker: ChannelMaker, service: Service) -> None:
        self._maker = maker
        self._service = service
        self._lock = threading.Lock()  # guards the fields below
        self._channels: dict[_Place, grpc.Channel] = {}
        self._methods: dict[tuple[str, str], grpc.UnaryUnaryMultiCallable[bytes, bytes]] = {}
        self._streams: Counter[_Place] = Counter()  # open streams per channel
        self._old: list[grpc.Channel] = []  # made with certificates that have since been replaced
        self._tls_version = 0
        self.closing = threading.Event()
        """Set when no new calls may start."""
        self._is_left_behind = False
        mind_forks(self)

    def leave_behind(self) -> None:
        """In a forked child: no call starts, and gRPC, whose threads are not here, is not touched."""
        self._is_left_behind = True
        self._lock = cast(threading.Lock, LostLock())
        self.closing = threading.Event()
        self.closing.set()

    @property
    def closed(self) -> bool:
        """Whether no new calls may start."""
        return self.closing.is_set()

    def stop(self) -> None:
        """Start no new calls: the first step of closing."""
        self.closing.set()

    def pause(self, seconds: float) -> None:
        """Pause between attempts; ends early on closing."""
        self.closing.wait(seconds)

    def close(self) -> None:
        """Close every channel; calls in progress fail. Idempotent."""
        if self._is_left_behind:
            return
        with self._lock:
            self.stop()
            channels = [*self._channels.values(), *self._old]
            self._channels.clear()
            self._methods.clear()
            self._old.clear()
        for channel in channels:
            channel.close()

    def channel(self, address: str, number: int = 0) -> grpc.Channel:
        """Return the channel to a server, or a further one; each has its own connection."""
        tls_version = self._maker.version
        with self._lock:
            if self.closing.is_set():
                raise UnavailableError("the client is closed")
            if tls_version != self._tls_version:  # calls on the old channels continue
                self._tls_version = tls_version
                self._old += self._channels.values()
                self._channels.clear()
                self._methods.clear()
            channel = self._channels.get((address, number))
            if channel is None:
                channel = self._channels[address, number] = self._maker.open(address)
            return channel

    def open_stream(self, name: str, address: str, requests: Iterator[bytes]) -> grpc.CallIterator[bytes]:
        """Open a bidirectional stream to one server."""
        with self._lock:
            place = next(
                one for number in itertools.count() if self._streams[one := (address, number)] < CONNECTION_STREAMS_MAX
            )
            self._streams[place] += 1
        call: grpc.CallIterator[bytes] | None = None
        try:
            stream: grpc.StreamStreamMultiCallable[bytes, bytes] = self.channel(*place).stream_stream(
                options.method(self._service.name, name), request_serializer=None, response_deserializer=None
            )
            call = stream(requests)
        except ValueError as error:  # gRPC's word for a channel that was closed meanwhile
            raise UnavailableError(f"the connection to {address} is closed") from error
        finally:
            if call is None or not call.add_callback(partial(self._stream_ended, place)):
                self._stream_ended(place)
        return call

    def _stream_ended(self, place: _Place) -> None:
        with self._lock:
            self._streams[place] -= 1

    def stream(self, name: str, address: str, request: bytes) -> Generator[bytes, None, None]:
        """The answers of one server to one request. Raises the error that broke the stream (nothing was changed)."""
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = self.channel(address).unary_stream(
            options.method(self._service.name, name), request_serializer=None, response_deserializer=None
        )
        call = method(request)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._service.failure_of(error, address, sent=False) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped

    def call(self, name: str, address: str, request: bytes, deadline: Deadline, *, changes: bool = False) -> bytes:
        """Make one attempt at one server. ``changes``: whether the request changes anything there."""
        try:
            return self._method(name, address)(request, timeout=max(deadline.remaining_s, 0.001))
        except grpc.RpcError as error:
            failure = self._service.failure_of(error, address, sent=changes)
            raise self._maker.diagnose(failure, address) from error
        except ValueError as error:
            raise UnavailableError(f"the connection to {address} is closed") from error

    def ask_all(
        self,
        name: str,
        request: bytes,
        decode: Callable[[bytes, str], _T],
        addresses: Collection[str],
        deadline: Deadline,
    ) -> Generator[tuple[str, _T | DLedgerError], None, None]:
        """Ask several servers at once; yields answers as they arrive. Late ones are cancelled when the caller stops."""
        answers: SimpleQueue[tuple[str, _Call]] = SimpleQueue()
        calls: dict[str, _Call] = {}
        challenged: set[str] = set()

        def ask(address: str) -> None:
            try:
                call = self._method(name, address).future(request, timeout=max(deadline.remaining_s, 0.001))
            except ValueError as error:
                raise UnavailableError(f"the connection to {address} is closed") from error
            calls[address] = call
            call.add_done_callback(lambda done: answers.put((address, done)))

        try:
            for address in addresses:
                ask(address)
            while calls:
                try:
                    address, call = answers.get(timeout=deadline.remaining_s + 0.1)
                except Empty:
                    for late in calls:
                        yield late, RequestTimeoutError(f"no answer from {late} in time")
                    return
                del calls[address]
                if address not in challenged and is_challenge(call):
                    challenged.add(address)
                    ask(address)
                    continue
                answer = self._answer_of(call, address, decode)
                yield address, self._maker.diagnose(answer, address) if isinstance(answer, DLedgerError) else answer
        finally:
            for call in calls.values():
                call.cancel()

    def _answer_of(self, call: _Call, address: str, decode: Callable[[bytes, str], _T]) -> _T | DLedgerError:
        try:
            return decode(call.result(), address)
        except grpc.RpcError as error:
            return self._service.failure_of(error, address, sent=False)
        except grpc.FutureCancelledError:
            return UnavailableError(f"the request to {address} was cancelled")
        except DLedgerError as error:
            return error

    def _method(self, name: str, address: str) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
        method = self._methods.get((name, address))
        if method is None or self._maker.version != self._tls_version or self.closing.is_set():
            method = self.channel(address).unary_unary(
                options.method(self._service.name, name), request_serializer=None, response_deserializer=None
            )
            with self._lock:
                self._methods[name, address] = method
        return method


class Seeker(Generic[_StatusT]):
    """Searches for the leader: one thread searches at a time, and the others take its result."""

    def __init__(
        self,
        directory: Directory,
        ask_all: Callable[[Collection[str], Deadline], Iterator[tuple[str, _StatusT | DLedgerError]]],
        report_of: Callable[[_StatusT], ServerReport],
    ) -> None:
        self._directory = directory
        self._ask_all = ask_all
        self._report_of = report_of
        self._seeking = threading.Lock()

    def leader(self, deadline: Deadline) -> str:
        """The server that accepts changes. Raises ``UnavailableError`` without a leader, or why asking is pointless."""
        found = self._directory.leader
        if found is not None:
            return found
        found, search = self._seek(deadline)
        if found is None:
            raise search.failure("no leader at present")
        return found

    def reader(self, deadline: Deadline) -> str:
        """The server to read from: the leader, or without one any server that answers. Raises like ``leader``."""
        found = self._directory.leader
        if found is not None:
            return found
        found, search = self._seek(deadline)
        found = found or search.answering
        if found is None:
            raise search.failure("nobody answers")
        return found

    def look(self, timeout_s: float = LOOK_TIMEOUT_S) -> str | None:
        """Detect that another server took over although the believed leader is silent, or still answers.

        Waits for silent servers only until a majority agrees on the leader. Returns the leader to believe in then.
        """
        search = Search(self._directory, doubting=True)
        with suppress(DLedgerError):  # no server answers, or the client is closed
            if not self._ask(search, Deadline(timeout_s)):
                search.conclude()
        return self._directory.leader

    def _seek(self, deadline: Deadline) -> tuple[str | None, Search]:
        search = Search(self._directory)
        if not self._seeking.acquire(timeout=deadline.remaining_s):
            raise UnavailableError(f"no {self._directory.leader_is} found within {deadline.timeout_s:g} s")
        try:
            if (known := self._directory.leader) is not None:
                return known, search
            if self._ask(search, Deadline(min(DISCOVERY_TIMEOUT_S, deadline.remaining_s))):
                return self._directory.leader, search
            return search.conclude(), search
        finally:
            self._seeking.release()

    def _ask(self, search: Search, deadline: Deadline) -> bool:
        while addresses := search.whom_to_ask():
            for address, answer in self._ask_all(addresses, deadline):
                told = answer if isinstance(answer, DLedgerError) else self._report_of(answer)
                if search.take(address, told):
                    return True
        return False
