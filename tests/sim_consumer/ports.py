"""The model broker as a ``BrokerConnection`` of the gRPC clients: the same calls and streams, without a network.

Each consumer has a connection of its own; ``cut`` it, and the consumer is dead to the world, as a killed process is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from dledger.client.shared import Deadline
from dledger.errors import DLedgerError, InvalidRequestError, UnavailableError
from rocketstore.client.errors import NotAllowedNowError, NotFoundError
from rocketstore.pb import broker_pb2 as pb
from tests.sim_consumer.broker import ModelBroker, Pulled, RefusedError

ADDRESS: Final = "127.0.0.1:1"
LOOK_S: Final = 0.02
_CODES: Final = {
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "not_allowed": grpc.StatusCode.PERMISSION_DENIED,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
}
_ERRORS: Final[dict[str, type[DLedgerError]]] = {
    "unavailable": UnavailableError,
    "not_found": NotFoundError,
    "not_allowed": NotAllowedNowError,
    "invalid": InvalidRequestError,
}


class BrokenError(grpc.RpcError):
    """How a stream ends."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[()]:
        return ()


def _answer_to(pulled: Pulled, incarnation: int) -> pb.PullResponse:
    return pb.PullResponse(
        status=pulled.status,
        records=b"".join(pulled.records),
        count=len(pulled.records),
        next_offset=pulled.next_offset,
        min_offset=pulled.min_offset,
        max_offset=pulled.max_offset,
        incarnation=incarnation,
    )


class _Call:
    """A stream: one answer per request."""

    def __init__(self, link: ModelConnection, requests: Iterator[bytes]) -> None:
        self._link = link
        self._requests = requests
        self._cancelled = False
        self._start = link.broker.starts

    def __iter__(self) -> _Call:
        return self

    def __next__(self) -> bytes:
        try:
            self.check()
            answer = self.answer()
            self.check()
        except RefusedError as error:
            self.end()
            raise BrokenError(_CODES[error.kind], str(error)) from None
        return answer

    def check(self) -> None:
        """Whether it goes on."""
        if not self.goes_on():
            raise RefusedError("unavailable", "the stream has ended")

    def goes_on(self) -> bool:
        """Whether neither side has ended it."""
        return not self._cancelled and self._link.is_up and self._link.broker.starts == self._start

    def answer(self) -> bytes:
        raise NotImplementedError

    def end(self) -> None:
        """Whatever its end means."""

    def cancel(self) -> None:
        self._cancelled = True
        self.end()
        with self._link.broker.changed:
            self._link.broker.changed.notify_all()


class _Pulls(_Call):
    def answer(self) -> bytes:
        request = pb.PullRequest.FromString(next(self._requests))
        pulled = self._link.broker.pull(
            (request.topic, request.queue_id),
            request.offset,
            count=min(request.max_messages, self._link.pull_max),
            wait_s=request.wait_ms / 1000,
            goes_on=self.goes_on,
        )
        return _answer_to(pulled, self._start).SerializeToString()


class _Membership(_Call):
    def __init__(self, link: ModelConnection, requests: Iterator[bytes]) -> None:
        super().__init__(link, requests)
        self._joined: tuple[str, str] | None = None
        self._told: list[str] | None = None

    def answer(self) -> bytes:
        broker = self._link.broker
        if self._joined is None:
            request = pb.MembershipRequest.FromString(next(self._requests))
            broker.join(request.group, request.client_id)
            self._joined = (request.group, request.client_id)
        group, client_id = self._joined
        with broker.changed:
            while self._told == (members := list(broker.members.get(group, []))):
                broker.changed.wait(LOOK_S)
                self.check()
                broker.check_up()
            if client_id not in members:
                raise RefusedError("unavailable", "the broker was away")
            self._told = members
        return pb.MembershipResponse(client_ids=members).SerializeToString()

    def end(self) -> None:
        if self._joined is not None:
            self._link.broker.leave(*self._joined)


class _Directory:
    leader = ADDRESS
    addresses = (ADDRESS,)

    def note_failure(self, address: str, error: DLedgerError) -> None: ...


class ModelConnection:
    """What consumers use of a ``BrokerConnection``, its ``channels`` and its ``seeker``."""

    signs = False

    def __init__(self, broker: ModelBroker, timeout_s: float, pull_max: int) -> None:
        self.broker = broker
        self.timeout_s = timeout_s
        self.pull_max = pull_max
        self.directory = _Directory()
        self.channels = self.seeker = self
        self.closed = False
        self._cut = threading.Event()

    @property
    def is_up(self) -> bool:
        return not (self.closed or self._cut.is_set() or self.broker.is_down)

    def cut(self) -> None:
        """From now on nothing gets through, in either direction."""
        self._cut.set()
        with self.broker.changed:
            self.broker.changed.notify_all()

    def close(self) -> None:
        self.closed = True
        with self.broker.changed:
            self.broker.changed.notify_all()

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    def look(self) -> str:
        return ADDRESS

    def reader(self, deadline: Deadline) -> str:
        if not self.is_up:
            self._cut.wait(min(LOOK_S, deadline.remaining_s))
            raise UnavailableError("the broker is down")
        return ADDRESS

    def open_stream(self, name: str, _address: str, requests: Iterator[bytes]) -> _Call:
        return (_Pulls if name == "PullStream" else _Membership)(self, requests)

    def ask(self, method: Any, request: Any, _address: str, deadline: Deadline) -> Any:  # noqa: ANN401  # any message
        return self.ask_master(method, request, deadline)

    def ask_reader(self, method: Any, request: Any, deadline: Deadline) -> Any:  # noqa: ANN401  # any message
        return self.ask_master(method, request, deadline)

    def ask_master(self, method: Any, request: Any, _deadline: Deadline, **_: float) -> Any:  # noqa: ANN401  # as above
        answer: Callable[[Any], Any] = getattr(self, f"_{method.name}")
        with self.broker.changed:  # a request reaches the broker that it was sent to, or none
            if self.is_up:
                start = self.broker.starts
                try:
                    made = answer(request)
                except RefusedError as error:
                    raise _ERRORS[error.kind](str(error)) from None
                if self.is_up and self.broker.starts == start:  # else the answer is lost
                    return made
        self._cut.wait(LOOK_S)
        raise UnavailableError("the broker is down")

    # --- the methods --------------------------------------------------------------------------------------------------

    def _ListTopics(self, _: pb.ListTopicsRequest) -> pb.ListTopicsResponse:  # noqa: N802  # the method's name
        with self.broker.changed:
            topics = [
                pb.Topic(name=name, read_queues=one.queues, write_queues=one.queues, permission=one.permission)
                for name, one in self.broker.topics.items()
            ]
        return pb.ListTopicsResponse(topics=topics)

    def _QueueRange(self, request: pb.QueueRequest) -> pb.QueueRangeResponse:  # noqa: N802  # as above
        first, end = self.broker.range_of((request.topic, request.queue_id))
        return pb.QueueRangeResponse(min_offset=first, max_offset=end)

    def _OffsetByTime(self, request: pb.OffsetByTimeRequest) -> pb.OffsetResponse:  # noqa: N802  # as above
        return pb.OffsetResponse(offset=self.broker.offset_at((request.topic, request.queue_id), request.timestamp_ms))

    def _Pull(self, request: pb.PullRequest) -> pb.PullResponse:  # noqa: N802  # as above
        pulled = self.broker.pull(
            (request.topic, request.queue_id), request.offset, count=request.max_messages, wait_s=0.0
        )
        return _answer_to(pulled, self.broker.starts)

    def _FetchOffsets(self, request: pb.FetchOffsetsRequest) -> pb.FetchOffsetsResponse:  # noqa: N802  # as above
        found = self.broker.positions(request.group, request.topic)
        return pb.FetchOffsetsResponse(
            offsets=[pb.ConsumerOffset(topic=request.topic, queue_id=one, offset=at) for one, at in found.items()],
            incarnation=self.broker.starts,
        )

    def _CommitOffsets(self, request: pb.CommitOffsetsRequest) -> pb.CommitOffsetsResponse:  # noqa: N802  # as above
        for topic in {one.topic for one in request.offsets}:
            offsets = {one.queue_id: one.offset for one in request.offsets if one.topic == topic}
            self.broker.commit(request.group, topic, offsets, back=request.reset, incarnation=request.incarnation)
        return pb.CommitOffsetsResponse(incarnation=self.broker.starts)

    def _LockQueues(self, request: pb.LockQueuesRequest) -> pb.LockQueuesResponse:  # noqa: N802  # as above
        got = self.broker.lock(request.client_id, [(one.topic, one.queue_id) for one in request.queues])
        return pb.LockQueuesResponse(queues=[pb.GroupQueue(topic=one[0], queue_id=one[1]) for one in got])

    def _UnlockQueues(self, request: pb.UnlockQueuesRequest) -> pb.UnlockQueuesResponse:  # noqa: N802  # as above
        self.broker.unlock(request.client_id, [(one.topic, one.queue_id) for one in request.queues])
        return pb.UnlockQueuesResponse()

    def _SendBack(self, request: pb.SendBackRequest) -> pb.SendBackResponse:  # noqa: N802  # as above
        self.broker.send_back(request.group, request.offset, dead=request.delay_level < 0)
        return pb.SendBackResponse()
