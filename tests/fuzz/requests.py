"""Sequences of requests as no client of ours sends them: any fields, any bytes, any order, over several connections."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from dledger.errors import DLedgerError
from dledger_cli.process import is_no_lost_client
from tests.fuzz.shapes import Known, messages, mutilated
from tests.support.http2 import PREFACE, Http2Link, call_frames
from tests.support.waiting import wait_until

CONNECTIONS: Final = 3
CALL_S: Final = 5.0
STREAM_ANSWERS_MAX: Final = 20
THREADS_SPARE: Final = 24
"""Of pools that grow with use and of gRPC itself."""
SOCKETS_SPARE: Final = 64
"""Both ends of what members have open among each other."""
_BUGS: Final = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS})
"""What gRPC answers where a handler raises what nobody expected."""


@dataclass(frozen=True, slots=True)
class Port:
    """An address, and what it serves."""

    address: str
    services: tuple[FileDescriptor, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """A gRPC method."""

    path: str
    request: type[Message]
    response: type[Message]
    takes_stream: bool
    gives_stream: bool


def methods_of(files: Sequence[FileDescriptor]) -> list[Method]:
    """All of them."""
    return [
        _method(one)
        for file in files
        for service in file.services_by_name.values()
        for one in service.methods_by_name.values()
    ]


def _method(one: MethodDescriptor) -> Method:
    name = f"/{one.containing_service.full_name}/{one.name}"
    request, response = GetMessageClass(one.input_type), GetMessageClass(one.output_type)
    return Method(name, request, response, one.client_streaming, one.server_streaming)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is done; ``ending`` is how a call ends: waited for, half closed, cancelled, left open."""

    kind: str
    connection: int
    method: Method
    payloads: tuple[bytes, ...]
    ending: str
    raw: bytes = b""

    def __repr__(self) -> str:
        return f"Step({self.kind}, {self.connection}, {self.method.path}, {self.payloads}, {self.ending}, {self.raw!r})"


def steps(port: Port, known: Known) -> st.SearchStrategy[list[Step]]:
    """Sequences for a port. ``known``: what a field is mostly said to be, so that not everything is refused at once."""
    methods = methods_of(port.services)

    @st.composite
    def one(draw: st.DrawFn) -> Step:
        kind = draw(st.sampled_from(["call"] * 8 + ["raw"]))
        method = draw(st.sampled_from(methods))
        request = messages(method.request, known)
        count = draw(st.integers(1, 4)) if method.takes_stream else 1
        payloads = tuple(draw(request) for _ in range(count))
        ending = draw(st.sampled_from(["wait", "wait", "wait", "cancel", "leave"]))
        raw = draw(_raw(method, payloads[0])) if kind == "raw" else b""
        return Step(kind, draw(st.integers(0, CONNECTIONS - 1)), method, payloads, ending, raw)

    return st.lists(one(), min_size=1, max_size=8)


def _raw(method: Method, payload: bytes) -> st.SearchStrategy[bytes]:
    """Bytes on a connection of their own: noise, or HTTP/2 and a call that were right once."""
    sound = PREFACE + b"\0\0\0\4\0\0\0\0\0" + call_frames(1, method.path, payload)
    return st.binary(max_size=200) | mutilated(sound) | mutilated(sound + call_frames(3, method.path, payload))


class Player:
    """Plays steps against a port, over a few channels; raises ``AssertionError`` for an answer that is a bug's."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._host, _, number = port.address.rpartition(":")
        self._number = int(number)
        self._held = ExitStack()
        options = [("grpc.use_local_subchannel_pool", 1)]  # else the channels share a connection
        self._channels = [
            self._held.enter_context(grpc.insecure_channel(port.address, options)) for _ in range(CONNECTIONS)
        ]
        self._open: list[Any] = []  # calls of several kinds

    def close(self) -> None:
        """Cancel what was left open, and hang up."""
        for one in self._open:
            one.cancel()
        self._open.clear()
        self._held.close()

    def play(self, sequence: Sequence[Step]) -> None:
        """One after the other; what is left open goes on meanwhile."""
        for step in sequence:
            if step.kind == "call":
                self._call(step)
            else:
                self._send(step.raw)

    def _call(self, step: Step) -> None:
        method, channel = step.method, self._channels[step.connection]
        over = threading.Event()

        def requests() -> Iterator[bytes]:
            yield from step.payloads
            if step.ending == "leave":
                over.wait(CALL_S)

        make = getattr(channel, f"{_arity(method.takes_stream)}_{_arity(method.gives_stream)}")
        begin = make(method.path, request_serializer=None, response_deserializer=None)
        argument = requests() if method.takes_stream else step.payloads[0]
        call: Any  # of one of four kinds
        call = begin(argument, timeout=CALL_S) if method.gives_stream else begin.future(argument, timeout=CALL_S)
        if step.ending == "leave" and method.gives_stream:
            call.add_callback(over.set)
            self._open.append(call)
            return
        if step.ending == "cancel":
            call.cancel()
        code = details = None
        try:
            if method.gives_stream:
                for number, answer in enumerate(call):
                    method.response.FromString(answer)
                    if number == STREAM_ANSWERS_MAX:
                        call.cancel()
            else:
                method.response.FromString(call.result(CALL_S + 5))
        except grpc.FutureCancelledError:
            pass
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
        finally:
            over.set()
        assert code not in _BUGS, f"{method.path}: {code}: {details}"

    def _send(self, data: bytes) -> None:
        with suppress(OSError), Http2Link(self._host, self._number) as link:
            link.send(data)


def _arity(streams: bool) -> str:
    return "stream" if streams else "unary"


class _Errors(logging.Handler):
    """Exceptions that were logged, but for those that are the project's own or the system's.

    Neither does it count when gRPC tells that a client hung up before its answer, which our programs do not log.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.addFilter(is_no_lost_client)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage()
        if (error is not None and not isinstance(error, DLedgerError | OSError)) or "never retrieved" in text:
            self.found.append(f"{record.name}: {text}: {error!r}")


@contextmanager
def nothing_escapes() -> Iterator[None]:
    """No exception that nobody expected is logged by anybody."""
    errors, root = _Errors(), logging.getLogger()
    root.addHandler(errors)
    try:
        yield
    finally:
        root.removeHandler(errors)
    assert not errors.found, errors.found[:3]


@contextmanager
def nothing_piles_up() -> Iterator[None]:
    """Threads and sockets are about as many afterwards as before. (How many files there are depends on the topics.)"""
    threads_before, sockets_before = threading.active_count(), _sockets()
    yield
    wait_until(lambda: threading.active_count() <= threads_before + THREADS_SPARE, "threads end")
    sockets_max = sockets_before + SOCKETS_SPARE
    wait_until(lambda: _sockets() <= sockets_max, f"connections are closed ({_sockets()}, {sockets_before} before)")


def _sockets() -> int:
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(one).startswith("socket:")
    return found
