"""One ``AppendStream`` to one node: what both ``append`` and the appender send on.

A stream message costs a third of a unary call, and a stream tells exactly what a unary call cannot: nothing is sent
before it is established, so a failure before that is certainly ``not_applied``, and one after that is ``unknown``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import grpc

from dledger.client.lanes import Lane
from dledger.client.shared import LOOK_AFTER_S, LOOK_AGAIN_S, Deadline, rpc_failure
from dledger.errors import DLedgerError, RequestTimeoutError, UnavailableError
from dledger.rpc import client_codec as codec
from dledger.rpc import options
from dledger.types import AppendedBatch, ProducerBatch

Outcome = AppendedBatch | DLedgerError
Done = Callable[[Outcome], None]


class AppendPipe:
    """Opens in the constructor. Raises ``UnavailableError`` (not applied) if that fails before the deadline."""

    def __init__(self, channel: grpc.Channel, address: str, group: str, deadline: Deadline) -> None:
        self.address = address
        self.lane: Lane | None = None
        """For whoever sends with it: from where its appends have their numbers."""
        self._group = group
        self._lock = threading.Lock()  # guards _pending, _next_id, _broken
        self._pending: dict[int, Done] = {}
        self._next_id = 0
        self._broken: DLedgerError | None = None
        self._established = threading.Event()
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            options.method(options.LOG_SERVICE, "AppendStream"), request_serializer=None, response_deserializer=None
        )
        self._call = stream(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._read, name=f"dledger-append-{address}", daemon=True)
        self._thread.start()
        if not self._established.wait(deadline.remaining_s):
            self.close()
            raise UnavailableError(f"{address} did not accept a stream within {deadline.timeout_s} s")
        failure = self._failure()
        if failure is not None:
            self.close()
            raise failure

    @property
    def broken(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._failure() is not None

    def submit(
        self,
        bodies: Sequence[bytes],
        done: Done,
        *,
        ordered: bool = False,
        producer: ProducerBatch | Callable[[], ProducerBatch | None] | None = None,
    ) -> int:
        """Send a batch; ``done`` is called once, on the pipe's thread. Raises ``UnavailableError`` (not applied).

        A function as ``producer`` is called right before the batch goes into the stream: in the order of the requests.
        """
        with self._lock:
            if self._broken is not None:
                raise UnavailableError(f"the stream to {self.address} is closed: {self._broken}")
            self._next_id += 1
            request_id = self._next_id
            if callable(producer):
                producer = producer()
            self._pending[request_id] = done
            self._requests.put(codec.encode_append(codec.Append(self._group, bodies, request_id, ordered, producer)))
        return request_id

    def append(
        self,
        bodies: Sequence[bytes],
        deadline: Deadline,
        producer: ProducerBatch | Callable[[], ProducerBatch | None] | None = None,
        is_deposed: Callable[[], bool] | None = None,
    ) -> AppendedBatch:
        """Send a batch and wait for it. Raises what the node answered, or ``RequestTimeoutError`` (unknown).

        ``is_deposed`` is asked now and then when no answer comes: if so, it is waited for no longer (also unknown).
        """
        if deadline.expired:
            raise UnavailableError(f"no time was left to ask {self.address}: {deadline.timeout_s} s are over")
        arrived = threading.Lock()
        arrived.acquire()
        outcomes: list[Outcome] = []

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            arrived.release()

        request_id = self.submit(bodies, done, producer=producer)
        wait_s = deadline.remaining_s if is_deposed is None else min(LOOK_AFTER_S, deadline.remaining_s)
        while not arrived.acquire(timeout=wait_s):
            if deadline.expired or (is_deposed is not None and is_deposed()):
                with self._lock:
                    self._pending.pop(request_id, None)
                raise RequestTimeoutError(f"no answer of {self.address} within {deadline.timeout_s} s")
            wait_s = min(LOOK_AGAIN_S, deadline.remaining_s)
        outcome = outcomes[0]
        if isinstance(outcome, DLedgerError):
            raise outcome
        return outcome

    def close(self) -> None:
        """End the stream; what still waits gets an unknown outcome. Joins the thread unless called on it."""
        self._call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
        self._requests.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _failure(self) -> DLedgerError | None:
        return self._broken

    def _read(self) -> None:
        failure: DLedgerError = UnavailableError(f"{self.address} ended the stream")
        established = False
        try:
            self._call.initial_metadata()  # waits for the server's word, or for the call's end
            established = self._call.is_active()
            if established:
                self._established.set()
            for data in self._call:
                self._on_answer(data)
        except grpc.RpcError as error:
            failure = rpc_failure(error, self.address, sent=established)
        except DLedgerError as error:  # garbage
            failure = error
            failure.outcome = "unknown"
        finally:
            self._fail(failure)

    def _on_answer(self, data: bytes) -> None:
        request_id, outcome = codec.decode_appended(data)
        with self._lock:
            done = self._pending.pop(request_id, None)
        if done is not None:  # else its caller has given up
            done(outcome)

    def _fail(self, failure: DLedgerError) -> None:
        with self._lock:
            self._broken = failure
            pending, self._pending = self._pending, {}
        self._established.set()
        self._requests.put(None)
        if failure.outcome == "not_applied" and pending:
            # Sent, and the stream ended before the answer: only the node knows.
            failure = RequestTimeoutError(f"the stream to {self.address} ended before the answer came: {failure}")
        for done in pending.values():
            done(failure)
