"""One stream of requests: what becomes of what is under way when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import grpc
import pytest

from dledger.client.append_wire import wire_of
from dledger.client.appends import AppendBatch
from dledger.errors import DLedgerError, InvalidRequestError, RequestTimeoutError, UnavailableError
from dledger.rpc import options
from dledger.sending.batch import AllStored, OutgoingBatch
from dledger.sending.stream import Stream
from tests.support.waiting import wait_until


@contextmanager
def refusing_server(code: grpc.StatusCode, *, after: int) -> Iterator[str]:
    """Takes ``after`` requests of each append stream, answers none, and ends it with ``code``."""

    def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
        context.send_initial_metadata(())
        for _ in range(after):
            next(requests)
        context.abort(code, "the permission was withdrawn")

    service, _, method = options.method(options.LOG_SERVICE, "AppendStream").lstrip("/").partition("/")
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def noting(told: list[str]) -> Callable[[object, AppendBatch, object], Callable[[], object]]:
    """Takes down at once what becomes of a batch."""

    def on_answer(_stream: object, _batch: AppendBatch, answer: object) -> Callable[[], object]:
        told.append(f"{type(answer).__name__}: {answer}")
        return int

    return on_answer


def one_entry() -> AppendBatch:
    batch: AppendBatch = OutgoingBatch(1, 0.0, 10_000.0, 10_000.0)
    batch.payloads = [b"x"]
    batch.complete()
    batch.begin(0.0, is_first=True)
    return batch


@pytest.mark.parametrize("code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED])
def test_what_was_sent_on_a_stream_that_is_refused_later_has_an_unknown_outcome(code: grpc.StatusCode) -> None:
    """Whatever the refusal says of a request of its own: what came before it may be stored."""
    outcomes: list[object] = []
    ended: list[object] = []
    with refusing_server(code, after=2) as address, grpc.insecure_channel(address) as channel:
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            options.method(options.LOG_SERVICE, "AppendStream"), request_serializer=None, response_deserializer=None
        )
        stream = Stream(
            method,
            address,
            wire_of("default"),
            lambda _stream, _batch, answer: partial(outcomes.append, answer),
            ended.append,
        )
        stream.open(10)
        for _ in range(2):
            assert stream.submit(one_entry()) is None
        wait_until(lambda: bool(ended), "it has ended")
        refusal = stream.submit(one_entry())
        stream.close()

    assert [type(one) for one in outcomes] == [RequestTimeoutError] * 2
    assert {one.outcome for one in outcomes if isinstance(one, DLedgerError)} == {"unknown"}
    assert refusal is not None
    assert refusal.outcome == "not_applied"


class SilentCall(grpc.RpcError):
    """A call of which gRPC owes its last word: nothing that waits for it ever returns, whatever becomes of the call."""

    def __init__(self, *, accepted: bool, over: bool) -> None:
        self._accepted = accepted
        self._over = over
        self.spoken = threading.Event()
        self.requests: Iterator[bytes] = iter(())

    def __call__(self, requests: Iterator[bytes]) -> SilentCall:
        self.requests = requests
        return self

    def __iter__(self) -> SilentCall:
        return self

    def __next__(self) -> bytes:
        self.spoken.wait()
        raise self

    def add_callback(self, callback: Callable[[], None]) -> bool:
        if self._over:
            callback()
        return True

    def initial_metadata(self) -> tuple[()]:
        if not self._accepted:
            self.spoken.wait()
        return ()

    def is_active(self) -> bool:
        return not self._over

    def cancel(self) -> None:
        self._over = True

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        return "at last"

    def trailing_metadata(self) -> tuple[()]:
        return ()


@pytest.fixture
def _short_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dledger.sending.stream.LAST_WORD_S", 0.05)


@pytest.mark.usefixtures("_short_last_word")
@pytest.mark.parametrize("over", [False, True])
def test_a_call_whose_metadata_grpc_never_tells_is_given_up(over: bool) -> None:
    """One that is over at once: long before the time is."""
    call = SilentCall(accepted=False, over=over)
    ended: list[object] = []
    began = time.monotonic()
    stream = Stream(call, "n1:1", wire_of("default"), lambda *_: int, ended.append)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="ended the stream" if over else "did not accept a stream") as refused:
        stream.open(30.0 if over else 0.05)

    assert refused.value.outcome == "not_applied"
    assert time.monotonic() - began < 15
    assert len(ended) == 1
    call.spoken.set()


@pytest.mark.usefixtures("_short_last_word")
def test_closing_a_stream_tells_everybody_even_if_grpc_never_says_that_it_is_over() -> None:
    """Once: what gRPC says later changes nothing."""
    call = SilentCall(accepted=True, over=False)
    told: list[str] = []
    stream = Stream(
        call,  # type: ignore[arg-type]
        "n1:1",
        wire_of("default"),
        noting(told),
        lambda _stream: told.append("end"),
    )
    stream.open(10)
    assert stream.submit(one_entry()) is None
    next(call.requests)  # gRPC has it
    assert stream.submit(one_entry()) is None
    stream.close("another node leads")

    lost, unsent, end = told
    assert lost.startswith("RequestTimeoutError")
    assert unsent.startswith("UnavailableError")
    assert "another node leads" in lost
    assert end == "end"
    assert next(call.requests, None) is None, "what is told as not applied is not handed over later"
    call.spoken.set()
    stream._thread.join(10)
    assert not stream._thread.is_alive()
    assert told == [lost, unsent, end]
    assert stream.submit(one_entry()) is not None


class LateWord(SilentCall):
    """Is over at once; why, gRPC says a moment later."""

    def initial_metadata(self) -> tuple[()]:
        self.spoken.wait(0.2)
        raise self


def test_why_a_stream_was_refused_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may name the leader, or say that trying again is hopeless."""
    monkeypatch.setattr("dledger.sending.stream.LAST_WORD_S", 30.0)
    call = LateWord(accepted=False, over=True)
    stream = Stream(call, "n1:1", wire_of("default"), lambda *_: int, lambda _: None)  # type: ignore[arg-type]

    with pytest.raises(DLedgerError, match="at last"):
        stream.open(30.0)


class SlowCall(SilentCall):
    """Is accepted, but not at once."""

    def __init__(self) -> None:
        super().__init__(accepted=True, over=False)
        self.accepted = threading.Event()

    def initial_metadata(self) -> tuple[()]:
        self.accepted.wait()
        return ()


@pytest.mark.usefixtures("_short_last_word")
def test_a_stream_may_take_for_ever_to_be_accepted() -> None:
    """A limit that no lock can wait for is none."""
    call = SlowCall()
    accepting = threading.Timer(0.05, call.accepted.set)
    accepting.start()
    stream = Stream(call, "n1:1", wire_of("default"), lambda *_: int, lambda _: None)  # type: ignore[arg-type]
    stream.open(float("inf"))
    stream.close()
    call.spoken.set()
    accepting.join()


@pytest.mark.usefixtures("_short_last_word")
def test_what_is_submitted_as_the_stream_ends_gets_its_outcome() -> None:
    """Either it is refused, or it is told of with the others; it is not left lying between them."""
    call = SilentCall(accepted=True, over=False)
    told: list[object] = []
    ended = threading.Event()
    closing = threading.Thread(target=lambda: stream.close())

    def encode(_batch: AppendBatch, _number: int) -> bytes:
        closing.start()
        ended.wait(0.3)  # in vain: the end comes after what is being submitted, or before it
        return b""

    stream = Stream(
        call,  # type: ignore[arg-type]
        "n1:1",
        replace(wire_of("default"), encode=encode),
        lambda _stream, batch, _answer: partial(told.append, batch),
        lambda _stream: ended.set(),
    )
    stream.open(10)
    batch = one_entry()
    refusal = stream.submit(batch)
    closing.join(30)

    assert ended.is_set()
    assert told == ([batch] if refusal is None else [])
    call.spoken.set()


class OneAnswer(SilentCall):
    """Of which gRPC hands over one answer, and then nothing more."""

    def __init__(self) -> None:
        super().__init__(accepted=True, over=False)
        self.answers = threading.Semaphore(0)
        self._is_answered = False

    def __next__(self) -> bytes:
        if self._is_answered:
            return super().__next__()
        self._is_answered = True
        self.answers.acquire()
        return b""


@pytest.mark.usefixtures("_short_last_word")
def test_a_stream_does_not_end_in_the_middle_of_an_answer() -> None:
    """Whoever is told of the end may rely on having heard of every answer."""
    call = OneAnswer()
    told: list[str] = []
    telling, ended = threading.Event(), threading.Event()

    def on_answer(_stream: object, _batch: object, answer: object) -> Callable[[], object]:
        if isinstance(answer, AllStored):
            telling.set()
            ended.wait(0.3)  # in vain: the end waits for this
        told.append(type(answer).__name__)
        return lambda: None

    def on_end(_stream: object) -> None:
        told.append("end")
        ended.set()

    wire = replace(wire_of("default"), decode=lambda _data, _address: (1, AllStored([])))
    stream = Stream(call, "n1:1", wire, on_answer, on_end)  # type: ignore[arg-type]
    stream.open(10)
    for _ in range(2):
        assert stream.submit(one_entry()) is None
    call.answers.release()
    assert telling.wait(30)
    stream.close()

    assert told == ["AllStored", "UnavailableError", "end"]
    call.spoken.set()


@pytest.mark.usefixtures("_short_last_word")
def test_a_server_that_answers_what_nobody_asked_is_believed_nothing() -> None:
    """Which request its answers were meant for is not known: all are unknown, and told why."""
    call = OneAnswer()
    told: list[object] = []
    ended = threading.Event()

    def on_answer(_stream: object, _batch: object, answer: object) -> Callable[[], object]:
        told.append(answer)
        return int

    wire = replace(wire_of("default"), decode=lambda _data, _address: (7, AllStored([])))
    stream = Stream(call, "n1:1", wire, on_answer, lambda _stream: ended.set())  # type: ignore[arg-type]
    stream.open(10)
    for _ in range(2):
        assert stream.submit(one_entry()) is None
    next(call.requests)  # gRPC has the first
    call.answers.release()
    assert ended.wait(30)

    assert [(type(one), one.outcome) for one in told if isinstance(one, DLedgerError)] == [
        (InvalidRequestError, "unknown")
    ] * 2
    assert "answered request 7" in str(told[0])
    call.spoken.set()


@pytest.mark.usefixtures("_short_last_word")
def test_the_end_of_a_stream_does_not_wait_for_the_applications_code() -> None:
    """A callback may wait for what is sent again on another stream, which is made when this one has ended."""
    call = SilentCall(accepted=True, over=False)
    told: list[str] = []
    stream = Stream(
        call,  # type: ignore[arg-type]
        "n1:1",
        wire_of("default"),
        lambda *_: partial(told.append, "callback"),
        lambda _stream: told.append("end"),
    )
    stream.open(10)
    for _ in range(2):
        assert stream.submit(one_entry()) is None
    stream.close()

    assert told == ["end", "callback", "callback"]
    call.spoken.set()
