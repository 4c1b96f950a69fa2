"""How clients reach brokers: channels, which brokers there are, who is the master, and retried unary calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

import tenacity
from google.protobuf.message import DecodeError, Message

from dledger.client.channels import Channels, Seeker, Service
from dledger.client.discovery import Directory, Report, parse_addresses
from dledger.client.security import ChannelMaker, ClientSecurity
from dledger.client.shared import Deadline, retry_options
from dledger.errors import DLedgerError, LeaderHint, UnavailableError
from dledger.types import NodeId
from rocketstore.client.errors import BadAnswerError, NotMasterError, failure_of, hint_of, is_retried_read
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import BrokerRole

SERVICE: Final = "rocketstore.v1.BrokerService"
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


def report_of_broker(status: pb.StatusResponse) -> Report:
    """A broker's status as a report."""
    leader = LeaderHint(NodeId(status.leader), status.leader_address) if status.leader else None
    return Report(status.node_id, is_master(status), status.term, leader, dict(status.members))


class BrokerConnection:
    """Channels to all brokers and calls on them. Thread-safe; every call ends by its deadline.

    ``addresses``: one or more brokers' listen addresses (``host:port``); the others of the group are learnt.
    """

    def __init__(
        self, addresses: Sequence[str] | str, *, timeout_s: float = 5.0, security: ClientSecurity | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self.directory = Directory(parse_addresses(addresses), leader_is="master")
        self._maker = ChannelMaker(security, self.directory.addresses)
        self.channels = Channels(self._maker, Service(SERVICE, failure_of))
        self.seeker = Seeker(self.directory, self.ask_all, report_of_broker)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.channels.closing.is_set()

    def close(self) -> None:
        """Close every channel; calls under way fail. Idempotent."""
        self.channels.close()

    @property
    def signs(self) -> bool:
        """Whether requests are signed with an access key."""
        return bool(self._maker.security.access_key)

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        """A deadline from now on, by default after the connection's own timeout."""
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    # --- calls ------------------------------------------------------------------------------------------------------

    def ask(self, method: Method[AnswerT], request: Message, address: str, deadline: Deadline) -> AnswerT:
        """One attempt at one broker."""
        data = self.channels.call(method.name, address, request.SerializeToString(), deadline, changes=True)
        return parse_answer(method.answer, data, address)

    def ask_master(self, method: Method[AnswerT], request: Message, deadline: Deadline) -> AnswerT:
        """Ask the master, wherever it is by then; only for requests that may be repeated."""
        return self._ask_until(method, request, deadline, self.seeker.leader)

    def ask_reader(self, method: Method[AnswerT], request: Message, deadline: Deadline) -> AnswerT:
        """Ask the master, or any living broker while there is none."""
        return self._ask_until(method, request, deadline, self.seeker.reader)

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
                self.directory.note_failure(address, error)
                raise

        return self.retry(deadline, attempt)

    def retry(self, deadline: Deadline, attempt: Callable[[], _T]) -> _T:
        """Repeat what may be repeated, with growing pauses, until the deadline."""
        try:
            return attempt()  # the usual case pays nothing for the machinery below
        except DLedgerError as error:
            if self.closed or deadline.expired or not is_retried_read(error):
                raise
        goes_on = lambda error: not self.closed and is_retried_read(error)  # noqa: E731
        return tenacity.Retrying(**retry_options(deadline, goes_on))(attempt)

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
        self.directory.learn(address, report_of_broker(status))
        if not is_master(status):
            raise NotMasterError(f"{address} is no master now", leader=hint_of(status.leader_address))

    def ask_all(
        self, addresses: Collection[str], deadline: Deadline
    ) -> Iterator[tuple[str, pb.StatusResponse | DLedgerError]]:
        """Status of several brokers at once, answers as they come; the rest is cancelled when the caller stops."""
        request = pb.StatusRequest().SerializeToString()
        parse = partial(parse_answer, pb.StatusResponse)
        return self.channels.ask_all(STATUS.name, request, parse, addresses, deadline)
