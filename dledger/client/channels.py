"""A client's channels and the unary calls on them: opened when they are needed, and anew when certificates change."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

import grpc

from dledger.client.security import ChannelMaker
from dledger.client.shared import Deadline
from dledger.client.signing import is_challenge
from dledger.errors import DLedgerError, RequestTimeoutError, UnavailableError
from dledger.records import record
from dledger.rpc import options

CONNECTION_STREAMS_MAX: Final = 64
"""Streams on one connection, half of what servers take by default: other calls need places, too."""
_AnswerT = TypeVar("_AnswerT")
_Place: TypeAlias = tuple[str, int]
_Call: TypeAlias = Any  # grpc-stubs have no common type for calls with a done callback


@record(frozen=True, slots=True)
class Service:
    """A gRPC service as a client sees it."""

    name: str
    failure_of: Callable[..., DLedgerError]
    """The error for ``grpc.RpcError``, an address, and by keyword ``sent``: whether something may have changed."""


class Channels:
    """Thread-safe. Everything raises ``UnavailableError`` once they are closed."""

    def __init__(self, maker: ChannelMaker, service: Service) -> None:
        self._maker = maker
        self._service = service
        self._lock = threading.Lock()  # guards the fields below
        self._channels: dict[_Place, grpc.Channel] = {}
        self._methods: dict[tuple[str, str], grpc.UnaryUnaryMultiCallable[bytes, bytes]] = {}
        self._streams: Counter[_Place] = Counter()  # that run on them
        self._old: list[grpc.Channel] = []  # made with certificates that were replaced since
        self._tls_version = 0
        self.closing = threading.Event()
        """Set when they are closed."""

    def close(self) -> None:
        """Calls under way fail. Idempotent."""
        with self._lock:
            self.closing.set()
            channels = [*self._channels.values(), *self._old]
            self._channels.clear()
            self._methods.clear()
            self._old.clear()
        for channel in channels:
            channel.close()

    def channel(self, address: str, number: int = 0) -> grpc.Channel:
        """The channel to a server, or a further one; each has a connection of its own."""
        tls_version = self._maker.version
        with self._lock:
            if self.closing.is_set():
                raise UnavailableError("the client is closed")
            if tls_version != self._tls_version:  # what runs on the old channels goes on
                self._tls_version = tls_version
                self._old += self._channels.values()
                self._channels.clear()
                self._methods.clear()
            channel = self._channels.get((address, number))
            if channel is None:
                channel = self._channels[address, number] = self._maker.open(address)
            return channel

    def open_stream(self, name: str, address: str, requests: Iterator[bytes]) -> grpc.CallIterator[bytes]:
        """A stream both ways to one server."""
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

    def call(self, name: str, address: str, request: bytes, deadline: Deadline, *, changes: bool = False) -> bytes:
        """One attempt at one server. ``changes``: whether the request changes something there."""
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
        decode: Callable[[bytes, str], _AnswerT],
        addresses: Collection[str],
        deadline: Deadline,
    ) -> Iterator[tuple[str, _AnswerT | DLedgerError]]:
        """Ask several servers at once; their answers as they come. What is late is cancelled when the caller stops."""
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
                        yield late, RequestTimeoutError(f"no answer of {late} in time")
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

    def _answer_of(
        self, call: _Call, address: str, decode: Callable[[bytes, str], _AnswerT]
    ) -> _AnswerT | DLedgerError:
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
