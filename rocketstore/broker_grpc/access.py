"""Access control over gRPC: the operation of each method, and what its requests and answers name.

Sending and ending a transaction require PUB on the topic; producer names are separate per account, so that nobody can
use up another account's numbers. Pulling and querying messages and offsets requires SUB on the topic, and for a group
also SUB on the group. Members of a group may move its offsets, also backwards (as a consumer that seeks does);
everybody else needs an administrator's key, as for creating and deleting topics. Lists show what the caller may use.
The broker's internal topics, where delayed messages of all topics wait, require an administrator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from dledger.access.guard import AccessGuard, Caller, ResourceKind
from dledger.core.producer_names import own_name
from dledger.errors import InvalidRequestError
from rocketstore.broker.permissions import RULES, SUB, Operation, denied_topics, needs, require, require_on_message
from rocketstore.broker.pull import Pull
from rocketstore.broker.transactions.messages import real_topic
from rocketstore.broker_grpc.codec import parse
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.message.message import Message
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import SCHEDULE_TOPIC, PutResult

_NOTHING: Final = ""
"""The name of no topic and no group."""
FREE: Final = frozenset({"Status", "Producer", "ProducerMembership"})
"""Every account may ask who leads, query its own producers, and be a member of a producer group: a member is asked only
about messages of topics to which it may send.
"""


class Asked(NamedTuple):
    """What a request asks for; ``resource`` is what an administrator's request is about, ``action`` the method's name
    if it is empty.
    """

    operation: Operation
    topics: Iterable[str] = ()
    groups: Iterable[str] = ()
    resource: str = ""
    action: str = ""
    is_noted: bool = False
    """Whether the audit log has it although it needs no administrator."""


def _of_topic(operation: Operation, kind: type[Any]) -> Callable[[bytes], Asked]:  # Any: generated classes
    return lambda data: Asked(operation, (parse(kind, data).topic,))


def _of_group(operation: Operation, kind: type[Any]) -> Callable[[bytes], Asked]:  # Any: generated classes
    return lambda data: Asked(operation, (), (parse(kind, data).group,))


def _commit_offsets(data: bytes) -> Asked:
    wire = parse(pb.CommitOffsetsRequest, data)
    action = "ResetOffsets" if wire.reset else "CommitOffsets"
    topics = [one.topic for one in wire.offsets]
    return Asked(Operation.OFFSETS, topics, (wire.group,), f"group:{wire.group}", action, wire.reset)


def _commit_position(data: bytes) -> Asked:
    """Without topics, of all that there are: an administrator's."""
    wire = parse(pb.CommitPositionRequest, data)
    operation = Operation.OFFSETS if wire.topics else Operation.READ_ALL
    return Asked(operation, wire.topics, (wire.group,), f"group:{wire.group}")


def _membership(data: bytes) -> Asked:
    wire = parse(pb.MembershipRequest, data)
    return Asked(Operation.JOIN, [one.topic for one in wire.subscriptions], (wire.group,))


def _send_back(data: bytes) -> Asked:
    """Its messages become readable in the group's retry topic."""
    wire = parse(pb.SendBackRequest, data)
    return Asked(Operation.SEND_BACK, (wire.topic,), (wire.group,))


METHODS: Final[Mapping[str, Callable[[bytes], Asked]]] = {
    "Newest": _of_topic(Operation.QUERY, pb.NewestRequest),
    "QueryByKey": _of_topic(Operation.QUERY, pb.QueryByKeyRequest),
    "QueueRange": _of_topic(Operation.QUEUE, pb.QueueRequest),
    "OffsetByTime": _of_topic(Operation.QUEUE, pb.OffsetByTimeRequest),
    "CommitOffsets": _commit_offsets,
    "CommitPosition": _commit_position,
    "FetchOffsets": _of_group(Operation.OFFSETS, pb.FetchOffsetsRequest),
    "Membership": _membership,
    "LockQueues": _of_group(Operation.LOCK, pb.LockQueuesRequest),
    "UnlockQueues": _of_group(Operation.LOCK, pb.UnlockQueuesRequest),
    "SendBack": _send_back,
    "PutTopic": lambda data: _change(f"topic:{parse(pb.PutTopicRequest, data).topic.name}"),
    "DeleteTopic": lambda data: _change(f"topic:{parse(pb.DeleteTopicRequest, data).name}"),
    "DeleteGroup": lambda data: _change(f"group:{parse(pb.DeleteGroupRequest, data).name}"),
    "Delayed": lambda _data: Asked(Operation.READ_ALL, resource=f"topic:{SCHEDULE_TOPIC}"),
}
"""The operation of each method, and what a request of it names."""


def _change(resource: str) -> Asked:
    return Asked(Operation.CHANGE, resource=resource)


class BrokerAccess:
    """Used on the event loop. Refusals are ``AccessDeniedError`` and appear in the audit log."""

    def __init__(self, guard: AccessGuard) -> None:
        self.guard: Final = guard
        self._filters: dict[str, Callable[[Caller, bytes], bytes]] = {
            "QueryById": self._readable_records,
            "ListTopics": self._usable_topics,
            "ListGroups": self._usable_groups,
        }
        self._narrowings: dict[str, Callable[[Caller, bytes], bytes]] = {
            "TopicRanges": self._readable_topics,
            "GroupOffsets": self._members_groups,
        }

    def check(self, name: str, caller: Caller, data: bytes) -> None:
        """Raises ``AccessDeniedError`` unless the caller may call this method. Unknown methods are denied."""
        asked = METHODS.get(name)
        if asked is not None:
            self._check(caller, asked(data), name)
        elif name not in self._filters and name not in self._narrowings and name not in FREE:
            raise self.guard.denied(caller, name, "", "has no rule")

    def _check(self, caller: Caller, asked: Asked, name: str) -> None:
        rule, action = RULES[asked.operation], asked.action or name
        for need in needs(asked.operation, asked.topics, asked.groups):
            require(self.guard, caller, action, need)
        if rule.admin:
            self.guard.require_admin(caller, action, asked.resource, changes=rule.changes)
        if asked.is_noted:
            self.guard.note(caller, action, asked.resource)

    def narrowed(self, name: str, caller: Caller, data: bytes) -> bytes:
        """The request without what the caller may not see: not even how much of it there is may be told."""
        narrow = self._narrowings.get(name)
        return data if narrow is None or caller.account.admin else narrow(caller, data)

    def filtered(self, name: str, caller: Caller, answer: bytes) -> bytes:
        """The response without what the caller may not see."""
        show = self._filters.get(name)
        return answer if show is None else show(caller, answer)

    def denied_topics(self, caller: Caller, messages: Iterable[Message]) -> Mapping[str, PutResult]:
        """The topics that the caller may not send to, with the refusals of their messages."""
        return denied_topics(self.guard, caller, "Send", {one.topic for one in messages})

    def own_producer(self, caller: Caller, name: str) -> str:
        """The account's name for a producer in the log, different from every other account's."""
        return own_name(caller.name, name)

    def check_pull(self, caller: Caller, pull: Pull) -> None:
        """Raises ``AccessDeniedError``."""
        self._check(caller, Asked(Operation.PULL, (pull.topic,), (pull.group,) if pull.group else ()), "Pull")

    def check_after_wait(self, caller: Caller, pull: Pull) -> None:
        """Like ``check_pull``, by the current rules: a pull may have waited for a minute."""
        self.guard.renew(caller, "Pull")
        self.check_pull(caller, pull)

    def check_end(self, caller: Caller, record: bytes | None) -> None:
        """Raises ``AccessDeniedError`` unless the caller may end the transaction of this half message."""
        topic = None if record is None else real_topic(record)
        if topic is None:
            raise InvalidRequestError("there is no half message at this offset")
        require_on_message(self.guard, caller, "EndTransaction", Operation.END_TRANSACTION, topic)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _readable_records(self, caller: Caller, answer: bytes) -> bytes:
        for record in parse(pb.RecordsResponse, answer).records:
            try:
                topic = decode_record(record, check_crc=False).topic
            except CorruptRecordError:  # its topic is unknown
                raise self.guard.denied(caller, "QueryById", "", "found a damaged record") from None
            require_on_message(self.guard, caller, "QueryById", Operation.VIEW, topic)
        return answer

    def _usable_topics(self, caller: Caller, answer: bytes) -> bytes:
        if caller.account.admin:
            return answer
        topics = [one for one in parse(pb.ListTopicsResponse, answer).topics if caller.account.topic(one.name)]
        return pb.ListTopicsResponse(topics=topics).SerializeToString()

    def _usable_groups(self, caller: Caller, answer: bytes) -> bytes:
        if caller.account.admin:
            return answer
        groups = [one for one in parse(pb.ListGroupsResponse, answer).groups if caller.account.group(one)]
        return pb.ListGroupsResponse(groups=groups).SerializeToString()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _readable_topics(self, caller: Caller, data: bytes) -> bytes:
        names = [
            name if name not in NO_SEND_TOPICS and caller.may(ResourceKind.TOPIC, name, SUB) else _NOTHING
            for name in parse(pb.TopicRangesRequest, data).topics
        ]
        return pb.TopicRangesRequest(topics=names).SerializeToString()

    def _members_groups(self, caller: Caller, data: bytes) -> bytes:
        names = [
            name if caller.may(ResourceKind.GROUP, name, SUB) else _NOTHING
            for name in parse(pb.GroupOffsetsRequest, data).groups
        ]
        return pb.GroupOffsetsRequest(groups=names).SerializeToString()
