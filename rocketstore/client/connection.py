"""How clients reach brokers: channels, which brokers there are, who is the master, and retried unary calls."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

import grpc
import tenacity
from google.protobuf.message import DecodeError, Message

from dledger.client.security import ChannelMaker, ClientSecurity
from dledger.client.shared import DISCOVERY_TIMEOUT_S, Deadline, parse_addresses, retry_options
from dledger.client.signing import is_challenge
from dledger.client.whereabouts import Whereabouts
from dledger.errors import (
    AccessDeniedError,
    DLedgerError,
    InvalidRequestError,
    RequestTimeoutError,
    TlsError,
    UnavailableError,
)
from dledger.rpc import options
from rocketstore.client.errors import (
    BadAnswerError,
    BrokerBusyError,
    NotMasterError,
    failure_of,
    hint_of,
    is_retried_read,
)
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import BrokerRole

SERVICE: Final = "rocketstore.v1.BrokerService"
CONNECTION_STREAMS_MAX: Final = 64
"""Streams on one connection, half of what servers take by default: other calls need places, too."""
_T = TypeVar("_T")


AnswerT = TypeVar("AnswerT", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[AnswerT]):
    """A unary method of the broker and what it answers."""

    name: str
    answer: type[AnswerT]


PULL: Final = Method("Pull", pb.PullResponse)
QUERY_BY_ID: Final = Method("QueryById", pb.RecordsResponse)
QUERY_BY_KEY: Final = Method("QueryByKey", pb.RecordsResponse)
QUEUE_RANGE: Final = Method("QueueRange", pb.QueueRangeResponse)
OFFSET_BY_TIME: Final = Method("OffsetByTime", pb.OffsetResponse)
COMMIT_OFFSETS: Final = Method("CommitOffsets", pb.CommitOffsetsResponse)
COMMIT_POSITION: Final = Method("CommitPosition", pb.CommitPositionResponse)
FETCH_OFFSETS: Final = Method("FetchOffsets", pb.FetchOffsetsResponse)
PUT_TOPIC: Final = Method("PutTopic", pb.PutTopicResponse)
DELETE_TOPIC: Final = Method("DeleteTopic", pb.DeleteTopicResponse)
LIST_TOPICS: Final = Method("ListTopics", pb.ListTopicsResponse)
DELETE_GROUP: Final = Method("DeleteGroup", pb.DeleteGroupResponse)
LIST_GROUPS: Final = Method("ListGroups", pb.ListGroupsResponse)
PRODUCER: Final = Method("Producer", pb.ProducerResponse)
STATUS: Final = Method("Status", pb.StatusResponse)


def parse_answer(kind: type[AnswerT], data: bytes, address: str) -> AnswerT:
    """Raises ``BadAnswerError`` for garbage."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise BadAnswerError(f"{address} answered {len(data)} bytes that are no {kind.__name__}: {error}") from None


def is_master(status: pb.StatusResponse) -> bool:
    """Whether the broker said that it takes writes."""
    return status.broker_role in (BrokerRole.SYNC_MASTER, BrokerRole.ASYNC_MASTER)


def _is_agreed(statuses: Sequence[pb.StatusResponse]) -> bool:
    """Whether a master is among them that a majority of its group follows in its term: then no other one can be."""
    for master in filter(is_master, statuses):
        followers = {
            one.node_id for one in statuses if one.node_id and (one.leader, one.term) == (master.node_id, master.term)
        }
        if len(followers | {master.node_id}) > len(master.members) / 2:
            return bool(master.members)
    return False


class Brokers:
    """The brokers a client knows: those it was given, those it learnt of, and who is the master. Thread-safe."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._lock = threading.Lock()  # guards all fields
        self._whereabouts = Whereabouts(addresses)
        self._master: str | None = None
        self._suspect: str | None = None
        self._turn = 0

    @property
    def master(self) -> str | None:
        """The address that most likely takes writes."""
        return self._master

    @property
    def suspect(self) -> str | None:
        """Who failed last as a master: its own word is not enough to trust it again."""
        return self._suspect

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address worth asking: given ones first, then learnt ones of brokers that answer at no given one."""
        with self._lock:
            return self._whereabouts.addresses

    def candidates(self) -> tuple[str, ...]:
        """``addresses``, the master first and the others in turn, so that load and failures spread."""
        known, master = self.addresses, self._master
        with self._lock:
            self._turn += 1
            turn = self._turn % len(known)
        rotated = known[turn:] + known[:turn]
        return (master, *(one for one in rotated if one != master)) if master is not None else rotated

    def learn(self, address: str, status: pb.StatusResponse) -> None:
        """Take what the broker at ``address`` said of itself and the others."""
        with self._lock:
            if status.node_id:
                self._whereabouts.note_answer(address, status.node_id)
            for node, member in status.members.items():
                if member:
                    self._whereabouts.note_said(node, member)
            if status.leader and status.leader_address:
                self._whereabouts.note_said(status.leader, status.leader_address)

    def set_master(self, address: str) -> None:
        """Believe that ``address`` is the master."""
        with self._lock:
            self._master = address
            self._suspect = None

    def note_tried(self, address: str) -> None:
        """Remember that ``address`` was asked, and gave no answer."""
        with self._lock:
            self._whereabouts.note_tried(address)

    def note_failure(self, address: str, error: DLedgerError) -> None:
        """Draw the conclusion from a failed request: follow the hint, or forget a master that does not answer."""
        said = error.leader.address if error.leader is not None else ""
        with self._lock:
            self._whereabouts.note_tried(address)
            hinted = self._whereabouts.find_said(said) if said else None
            if hinted is not None and hinted != address:
                self._master = hinted
            elif self._master == address and not isinstance(
                error, BrokerBusyError | InvalidRequestError | AccessDeniedError
            ):
                self._master = None
                self._suspect = address


class BrokerConnection:
    """Channels to all brokers and calls on them. Thread-safe; every call ends by its deadline.

    ``addresses``: one or more brokers' listen addresses (``host:port``); the others of the group are learnt.
    """

    def __init__(
        self, addresses: Sequence[str] | str, *, timeout_s: float = 5.0, security: ClientSecurity | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self.brokers = Brokers(parse_addresses(addresses))
        self._channel_maker = ChannelMaker(security, self.brokers.addresses)
        self._lock = threading.Lock()  # guards the fields below
        self._channels: dict[tuple[str, int], grpc.Channel] = {}
        self._streams: Counter[tuple[str, int]] = Counter()  # that run on them
        self._old_channels: list[grpc.Channel] = []  # made with certificates that were replaced since
        self._tls_version = 0
        self._closing = threading.Event()
        self._seeking = threading.Lock()  # one at a time looks for the master, the others take what it found

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing.is_set()

    def close(self) -> None:
        """Close every channel; calls under way fail. Idempotent."""
        with self._lock:
            self._closing.set()
            channels = [*self._channels.values(), *self._old_channels]
            self._channels.clear()
            self._old_channels.clear()
        for channel in channels:
            channel.close()

    @property
    def signs(self) -> bool:
        """Whether requests are signed with an access key."""
        return bool(self._channel_maker.security.access_key)

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        """A deadline from now on, by default after the connection's own timeout."""
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    def channel(self, address: str, number: int = 0) -> grpc.Channel:
        """The channel to a broker, or a further one, opened lazily; each has a connection of its own."""
        tls_version = self._channel_maker.version
        with self._lock:
            if self._closing.is_set():
                raise UnavailableError("the connection is closed")
            if tls_version != self._tls_version:  # what runs on the old channels goes on
                self._tls_version = tls_version
                self._old_channels += self._channels.values()
                self._channels.clear()
            channel = self._channels.get((address, number))
            if channel is None:
                channel = self._channels[address, number] = self._channel_maker.open(address)
            return channel

    def open_stream(self, name: str, address: str, requests: Iterator[bytes]) -> grpc.CallIterator[bytes]:
        """A bidirectional stream to one broker. Raises ``UnavailableError`` if the connection is closed."""
        with self._lock:
            place = next(
                one for number in itertools.count() if self._streams[one := (address, number)] < CONNECTION_STREAMS_MAX
            )
            self._streams[place] += 1
        call: grpc.CallIterator[bytes] | None = None
        try:
            stream: grpc.StreamStreamMultiCallable[bytes, bytes] = self.channel(*place).stream_stream(
                options.method(SERVICE, name), request_serializer=None, response_deserializer=None
            )
            call = stream(requests)
        except ValueError as error:  # gRPC's word for a channel that was closed meanwhile
            raise UnavailableError(f"the connection to {address} is closed") from error
        finally:
            if call is None or not call.add_callback(partial(self._stream_ended, place)):
                self._stream_ended(place)
        return call

    def _stream_ended(self, place: tuple[str, int]) -> None:
        with self._lock:
            self._streams[place] -= 1

    # --- calls ------------------------------------------------------------------------------------------------------

    def ask(self, method: Method[AnswerT], request: Message, address: str, deadline: Deadline) -> AnswerT:
        """One attempt at one broker."""
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel(address).unary_unary(
            options.method(SERVICE, method.name), request_serializer=None, response_deserializer=None
        )
        try:
            data: bytes = call(request.SerializeToString(), timeout=max(deadline.remaining_s, 0.001))
        except grpc.RpcError as error:
            raise failure_of(error, address, sent=True) from error
        except ValueError as error:
            raise UnavailableError(f"the connection to {address} is closed") from error
        return parse_answer(method.answer, data, address)

    def ask_master(self, method: Method[AnswerT], request: Message, deadline: Deadline) -> AnswerT:
        """Ask the master, wherever it is by then; only for requests that may be repeated."""
        return self._ask_until(method, request, deadline, self.master)

    def ask_reader(self, method: Method[AnswerT], request: Message, deadline: Deadline) -> AnswerT:
        """Ask the master, or any living broker while there is none."""
        return self._ask_until(method, request, deadline, self.reader)

    def _ask_until(
        self, method: Method[AnswerT], request: Message, deadline: Deadline, where: Callable[[Deadline], str]
    ) -> AnswerT:
        said: DLedgerError | None = None

        def attempt() -> AnswerT:
            nonlocal said
            try:
                address = where(deadline)
            except UnavailableError as error:
                if said is not None and deadline.expired:  # the search was cut short: what a broker said tells more
                    raise said from error
                raise
            try:
                return self.ask(method, request, address, deadline)
            except DLedgerError as error:
                said = error
                self.brokers.note_failure(address, error)
                raise

        return self.retry(deadline, attempt)

    def retry(self, deadline: Deadline, attempt: Callable[[], _T]) -> _T:
        """Repeat what may be repeated, with growing pauses, until the deadline."""
        try:
            return attempt()  # the usual case pays nothing for the machinery below
        except DLedgerError as error:
            if self._closing.is_set() or deadline.expired or not is_retried_read(error):
                raise
        goes_on = lambda error: not self._closing.is_set() and is_retried_read(error)  # noqa: E731
        return tenacity.Retrying(**retry_options(deadline, goes_on))(attempt)

    # --- who is the master ------------------------------------------------------------------------------------------

    def master(self, deadline: Deadline) -> str:
        """Where writes go. Raises ``UnavailableError`` if no broker says that it takes them."""
        address = self.brokers.master
        if address is not None:
            return address
        return self._seek(deadline)[0] or self._no_master({})

    def check_master(self, address: str, deadline: Deadline) -> None:
        """Ask a broker whether it takes writes. Raises ``NotMasterError`` if not.

        Asked before anything is sent, so that a failure to connect is certainly not applied.
        """
        try:
            status = self.ask(STATUS, pb.StatusRequest(), address, deadline)
        except DLedgerError as error:
            error.outcome = "not_applied"
            if deadline.expired:
                raise UnavailableError(f"{address} did not answer within {deadline.timeout_s:g} s") from error
            raise
        self.brokers.learn(address, status)
        if not is_master(status):
            raise NotMasterError(f"{address} is no master now", leader=hint_of(status.leader_address))

    def reader(self, deadline: Deadline) -> str:
        """Where reads go: the master, or any broker that answers while there is none."""
        address = self.brokers.master
        if address is not None:
            return address
        master, answering = self._seek(deadline)
        if master is not None:
            return master
        return answering or self._no_master({})

    def _seek(self, deadline: Deadline) -> tuple[str | None, str | None]:
        """The master and some broker that answers. Raises what makes asking hopeless, or if nobody answers."""
        if not self._seeking.acquire(timeout=deadline.remaining_s):
            raise UnavailableError(f"no master found within {deadline.timeout_s} s")
        try:
            if (known := self.brokers.master) is not None:
                return known, known
            return self._ask_round(Deadline(min(DISCOVERY_TIMEOUT_S, deadline.remaining_s)))
        finally:
            self._seeking.release()

    def look_for_master(self, timeout_s: float = DISCOVERY_TIMEOUT_S) -> None:
        """Notice that another broker took over, although the one believed to be the master still answers, or is silent.

        Asks all, but waits for silent ones only until a majority agrees on who leads.
        """
        if self._closing.is_set():
            return
        answers: dict[str, pb.StatusResponse] = {}
        try:
            for address, answer in self.ask_all(self.brokers.addresses, Deadline(timeout_s)):
                if not isinstance(answer, DLedgerError):
                    answers[address] = answer
                    if _is_agreed(list(answers.values())):
                        break
        except DLedgerError:  # closed meanwhile
            return
        masters = [(status.term, address) for address, status in answers.items() if is_master(status)]
        present = self.brokers.master
        if masters and (best := max(masters))[1] != present and (best[0], present) not in masters:
            self.brokers.set_master(best[1])

    def _ask_round(self, deadline: Deadline) -> tuple[str | None, str | None]:
        asked: set[str] = set()
        failures: dict[str, DLedgerError] = {}
        statuses: dict[str, pb.StatusResponse] = {}
        while addresses := [one for one in self.brokers.addresses if one not in asked]:
            asked.update(addresses)
            for address, answer in self.ask_all(addresses, deadline):
                if isinstance(answer, DLedgerError):
                    failures[address] = answer
                    continue
                statuses[address] = answer
                if is_master(answer) and address != self.brokers.suspect:
                    self.brokers.set_master(address)
                    return address, address
        masters = [address for address, status in statuses.items() if is_master(status)]
        if masters:
            best = max(masters, key=lambda address: statuses[address].term)
            newest = max(status.term for status in statuses.values())
            if statuses[best].term >= newest:  # else it has not noticed yet that others elect without it
                self.brokers.set_master(best)
                return best, best
        if not statuses:
            self._no_master(failures)
        return None, next(iter(statuses))

    def _no_master(self, failures: dict[str, DLedgerError]) -> str:
        for failure in failures.values():
            if isinstance(failure, InvalidRequestError | AccessDeniedError):
                raise failure
        if failures and all(isinstance(failure, TlsError) for failure in failures.values()):
            raise next(iter(failures.values()))
        asked = "; ".join(str(failure) for failure in failures.values()) or "no broker is one at present"
        raise UnavailableError(f"no master found: {asked}")

    def ask_all(
        self, addresses: Sequence[str], deadline: Deadline
    ) -> Iterator[tuple[str, pb.StatusResponse | DLedgerError]]:
        """Status of several brokers at once, answers as they come; the rest is cancelled when the caller stops."""
        request = pb.StatusRequest().SerializeToString()
        answers: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        calls: dict[str, Any] = {}
        twice: set[str] = set()

        def ask(address: str) -> None:
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel(address).unary_unary(
                options.method(SERVICE, "Status"), request_serializer=None, response_deserializer=None
            )
            try:
                call = method.future(request, timeout=max(deadline.remaining_s, 0.001))
            except ValueError as error:
                raise UnavailableError(f"the connection to {address} is closed") from error
            calls[address] = call
            call.add_done_callback(partial(_put, answers, address))

        try:
            for address in addresses:
                ask(address)
            while calls:
                try:
                    address, call = answers.get(timeout=deadline.remaining_s + 0.1)
                except Empty:
                    for late in calls:
                        self.brokers.note_tried(late)
                        yield late, RequestTimeoutError(f"no answer of {late} in time")
                    return
                del calls[address]
                if address not in twice and is_challenge(call):
                    twice.add(address)
                    ask(address)
                    continue
                answer = _status_or_error(address, call)
                if isinstance(answer, DLedgerError):
                    self.brokers.note_tried(address)
                    answer = self._channel_maker.diagnose(answer, address)
                else:
                    self.brokers.learn(address, answer)
                yield address, answer
        finally:
            for call in calls.values():
                call.cancel()


def _put(answers: SimpleQueue[tuple[str, Any]], address: str, call: object) -> None:
    answers.put((address, call))


def _status_or_error(address: str, call: Any) -> pb.StatusResponse | DLedgerError:  # noqa: ANN401  # untyped in gRPC
    try:
        return parse_answer(pb.StatusResponse, call.result(), address)
    except grpc.RpcError as error:
        return failure_of(error, address, sent=False)
    except grpc.FutureCancelledError:
        return UnavailableError(f"the request to {address} was cancelled")
    except DLedgerError as error:
        return error
