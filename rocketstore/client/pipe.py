"""One ``SendStream`` to one broker: requests go out in order, answers come back on the pipe's own thread.

A stream costs a third of a unary call, and tells what a unary call cannot: what was never handed to gRPC is certainly
not applied when the stream breaks; the rest is unknown. So nothing is handed over before the broker has answered that
the stream is established: one that is about to stop may reset new streams without a word.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import grpc

from dledger.client.shared import Deadline
from dledger.errors import DLedgerError, UnavailableError
from rocketstore.client.connection import STATUS, BrokerConnection, is_master, parse_answer
from rocketstore.client.errors import (
    BadAnswerError,
    NotMasterError,
    SendOutcomeUnknownError,
    failure_of,
    hint_of,
)
from rocketstore.message.producer_names import MEMORY_KEY
from rocketstore.pb import broker_pb2 as pb

Answer = Sequence[pb.SendResult] | pb.StoredBatch | DLedgerError
Done = Callable[[Answer], None]


class SendPipe:
    """Opens in the constructor, after the broker has said that it takes writes. Raises ``NotMasterError`` if it does
    not, ``UnavailableError`` if it does not answer before the deadline (nothing was sent in either case)."""

    def __init__(self, connection: BrokerConnection, address: str, deadline: Deadline) -> None:
        self.address = address
        status = _status_of(connection, address, deadline)
        if not is_master(status):
            raise NotMasterError(f"{address} is no master now", leader=hint_of(status.leader_address))
        self._lock = threading.Lock()  # guards the fields below
        self._pending: dict[int, Done] = {}
        self._next_id = 0
        self._handed_id = 0
        self._broken: DLedgerError | None = None
        self._closed_because = ""
        self.memory = ""
        """Which producers the broker knows, if it forgets them when it ends; told when the stream is established."""
        self._established = threading.Event()  # or it failed
        self._requests: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._call = connection.open_stream("SendStream", address, self._outgoing())
        self._thread = threading.Thread(target=self._read, name=f"rocketstore-send-{address}", daemon=True)
        self._thread.start()

    def submit(self, messages: Sequence[bytes], done: Done, *, producer: str = "", sequence: int = 0) -> None:
        """Send encoded messages as one request; ``done`` is called once, on the pipe's thread.

        ``producer`` numbers them from ``sequence`` on; without one they are not numbered.
        Raises ``UnavailableError`` (not applied) if the stream is broken.
        """
        with self._lock:
            if self._broken is not None:
                raise UnavailableError(f"the stream to {self.address} is closed: {self._broken}")
            self._next_id += 1
            request_id = self._next_id
            self._pending[request_id] = done
            # Fields of a protobuf message may come in any order: the messages are encoded already, the id follows.
            rest = pb.SendRequest(request_id=request_id, packed_answer=True, producer=producer, sequence=sequence)
            request = b"".join((*messages, rest.SerializeToString()))
            self._requests.put((request_id, request))

    def is_told(self, deadline: Deadline) -> bool:
        """Wait for the broker's word on ``memory``, or for the end of the stream; False if neither comes in time."""
        return self._established.wait(deadline.remaining_s)

    def close(self, why: str = "") -> None:
        """End the stream; what still waits gets its outcome, and ``why``. Joins the thread unless called on it."""
        with self._lock:
            self._closed_because = self._closed_because or why
        self._call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
        self._requests.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _outgoing(self) -> Iterator[bytes]:
        """On gRPC's thread."""
        self._established.wait()
        while (item := self._requests.get()) is not None:
            request_id, request = item
            with self._lock:
                if self._broken is not None:
                    return
                self._handed_id = request_id
            yield request

    def _read(self) -> None:
        failure: DLedgerError = UnavailableError(f"{self.address} ended the stream")
        try:
            told = self._call.initial_metadata()  # waits for it, or for the end of the stream
            if self._call.is_active():
                self.memory = next((str(value) for key, value in told if key == MEMORY_KEY), "")
                self._established.set()
            for data in self._call:
                self._on_answer(data)
        except grpc.RpcError as error:
            with self._lock:
                why = self._closed_because  # else gRPC's own words for what we did ourselves
            failure = UnavailableError(why) if why else failure_of(error, self.address, sent=False)
        except DLedgerError as error:  # garbage
            failure = error
        finally:
            self._fail(failure)

    def _on_answer(self, data: bytes) -> None:
        response = parse_answer(pb.SendResponse, data, self.address)
        with self._lock:
            done = self._pending.pop(response.request_id, None)
        if done is None:
            raise BadAnswerError(f"{self.address} answered request {response.request_id}, which nobody waits for")
        done(_checked(response.stored, self.address) if response.HasField("stored") else response.results)

    def _fail(self, failure: DLedgerError) -> None:
        with self._lock:
            self._broken = failure
            pending, self._pending = self._pending, {}
            handed = self._handed_id
        self._established.set()
        self._call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
        self._requests.put(None)
        unsent = UnavailableError(f"the stream to {self.address} ended: {failure}", leader=failure.leader)
        lost = SendOutcomeUnknownError(f"the stream to {self.address} ended before the answer came: {failure}")
        lost.leader = failure.leader
        told = _as_told(failure)
        for request_id, done in pending.items():
            done(told or (lost if request_id <= handed else unsent))


def _status_of(connection: BrokerConnection, address: str, deadline: Deadline) -> pb.StatusResponse:
    """Asked before anything is sent, so that a failure to connect is certainly not applied."""
    try:
        status = connection.ask(STATUS, pb.StatusRequest(), address, deadline)
    except DLedgerError as error:
        error.outcome = "not_applied"
        if deadline.expired:
            raise UnavailableError(f"{address} did not answer within {deadline.timeout_s:g} s") from error
        raise
    connection.brokers.learn(address, status)
    return status


def _as_told(failure: DLedgerError) -> DLedgerError | None:
    """A failure that says itself what became of the requests: garbage, or a refusal of them all."""
    if isinstance(failure, BadAnswerError):
        return failure
    return failure if isinstance(failure, NotMasterError) and failure.outcome == "not_applied" else None


def _checked(stored: pb.StoredBatch, address: str) -> pb.StoredBatch | BadAnswerError:
    lengths = {
        len(stored.offsets), len(stored.queue_ids), len(stored.queue_offsets), len(stored.store_timestamps_ms)
    }  # fmt: skip
    return stored if len(lengths) == 1 else BadAnswerError(f"{address} answered lists of different lengths")
