"""The permissions that each broker method requires under access control.

Sending and ending a transaction require PUB on the topic; producer names are separate per account, so that nobody can
use up another account's numbers. Pulling and querying messages and offsets requires SUB on the topic, and for a group
also SUB on the group. Members of a group may move its offsets, also backwards (as a consumer that seeks does);
everybody else needs an administrator's key, as for creating and deleting topics. Lists show what the caller may use.
The broker's internal topics, where delayed messages of all topics wait, require an administrator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dledger.access.guard import AccessGuard, Caller, ResourceKind
from dledger.access.permissions import Permission
from dledger.core.producer_names import own_name
from dledger.errors import AccessDeniedError, InvalidRequestError
from rocketstore.broker.pull import Pull
from rocketstore.broker.transactions.messages import real_topic
from rocketstore.broker_grpc.codec import parse
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.message.message import Message
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import SCHEDULE_TOPIC, PutMessageStatus, PutResult

SUB, PUB = Permission.SUB, Permission.PUB
NOTHING_DENIED: Final[Mapping[str, PutResult]] = {}
_NOTHING: Final = ""
"""The name of no topic and no group."""


class BrokerAccess:
    """Used on the event loop. Refusals are ``AccessDeniedError`` and appear in the audit log."""

    def __init__(self, guard: AccessGuard) -> None:
        self.guard: Final = guard
        self._checks: dict[str, Callable[[Caller, bytes], None]] = {
            "Newest": self._newest,
            "QueryByKey": self._query_by_key,
            "QueueRange": self._queue_range,
            "OffsetByTime": self._offset_by_time,
            "CommitOffsets": self._commit_offsets,
            "CommitPosition": self._commit_position,
            "FetchOffsets": self._fetch_offsets,
            "Membership": self._membership,
            "LockQueues": self._lock_queues,
            "UnlockQueues": self._unlock_queues,
            "SendBack": self._send_back,
            "PutTopic": self._put_topic,
            "DeleteTopic": self._delete_topic,
            "DeleteGroup": self._delete_group,
            "Delayed": self._delayed,
        }
        self._filters: dict[str, Callable[[Caller, bytes], bytes]] = {
            "QueryById": self._readable_records,
            "ListTopics": self._usable_topics,
            "ListGroups": self._usable_groups,
        }
        self._narrowings: dict[str, Callable[[Caller, bytes], bytes]] = {
            "TopicRanges": self._readable_topics,
            "GroupOffsets": self._members_groups,
        }
        # Every account may ask who leads, query its own producers, and be a member of a producer group: a member is
        # asked only about messages of topics to which it may send.
        self._free = frozenset({"Status", "Producer", "ProducerMembership"})

    def check(self, name: str, caller: Caller, data: bytes) -> None:
        """Raises ``AccessDeniedError`` unless the caller may call this method. Unknown methods are denied."""
        if name in self._checks:
            self._checks[name](caller, data)
        elif name not in self._filters and name not in self._narrowings and name not in self._free:
            raise self.guard.denied(caller, name, "", "has no rule")

    def narrowed(self, name: str, caller: Caller, data: bytes) -> bytes:
        """The request without what the caller may not see: not even how much of it there is may be told."""
        narrow = self._narrowings.get(name)
        return data if narrow is None or caller.account.admin else narrow(caller, data)

    def filtered(self, name: str, caller: Caller, answer: bytes) -> bytes:
        """The response without what the caller may not see."""
        show = self._filters.get(name)
        return answer if show is None else show(caller, answer)

    # --- the hot paths ------------------------------------------------------------------------------------------------

    def denied_topics(self, caller: Caller, messages: Iterable[Message]) -> Mapping[str, PutResult]:
        """The topics that the caller may not send to, with the refusals of their messages."""
        denied = [name for name in {one.topic for one in messages} if not caller.may(ResourceKind.TOPIC, name, PUB)]
        if not denied:
            return NOTHING_DENIED
        return {name: self._send_refusal(caller, name) for name in denied}

    def _send_refusal(self, caller: Caller, topic: str) -> PutResult:
        error = self.guard.denied(caller, "Send", f"topic:{topic}", f"needs PUB on topic {topic}")
        return PutResult(PutMessageStatus.NO_PERMISSION, outcome="not_applied", reason=str(error))

    def own_producer(self, caller: Caller, name: str) -> str:
        """The account's name for a producer in the log, different from every other account's."""
        return own_name(caller.name, name)

    def check_pull(self, caller: Caller, pull: Pull) -> None:
        """Raises ``AccessDeniedError``."""
        self._may_read(caller, "Pull", pull.topic)
        if pull.group:
            self.guard.require(caller, "Pull", ResourceKind.GROUP, pull.group, SUB)

    def check_after_wait(self, caller: Caller, pull: Pull) -> None:
        """Like ``check_pull``, by the current rules: a pull may have waited for a minute."""
        self.guard.renew(caller, "Pull")
        self.check_pull(caller, pull)

    def check_end(self, caller: Caller, record: bytes | None) -> None:
        """Raises ``AccessDeniedError`` unless the caller may end the transaction of this half message.

        The audit log names the topic; a caller that may not send to it must not learn it.
        """
        topic = None if record is None else real_topic(record)
        if topic is None:
            raise InvalidRequestError("there is no half message at this offset")
        if not caller.may(ResourceKind.TOPIC, topic, PUB):
            self.guard.denied(caller, "EndTransaction", f"topic:{topic}", f"needs PUB on topic {topic}")
            raise AccessDeniedError(
                f"{caller.name} is not allowed to do this: EndTransaction needs PUB on the topic of that message"
            )

    # --- queries and changes ------------------------------------------------------------------------------------------

    def _may_read(self, caller: Caller, action: str, topic: str) -> None:
        if topic in NO_SEND_TOPICS:
            self.guard.require_admin(caller, action, f"topic:{topic}", changes=False)
        self.guard.require(caller, action, ResourceKind.TOPIC, topic, SUB)

    def _newest(self, caller: Caller, data: bytes) -> None:
        self._may_read(caller, "Newest", parse(pb.NewestRequest, data).topic)

    def _query_by_key(self, caller: Caller, data: bytes) -> None:
        self._may_read(caller, "QueryByKey", parse(pb.QueryByKeyRequest, data).topic)

    def _queue_range(self, caller: Caller, data: bytes) -> None:
        self._may_read(caller, "QueueRange", parse(pb.QueueRequest, data).topic)

    def _offset_by_time(self, caller: Caller, data: bytes) -> None:
        self._may_read(caller, "OffsetByTime", parse(pb.OffsetByTimeRequest, data).topic)

    def _commit_offsets(self, caller: Caller, data: bytes) -> None:
        wire = parse(pb.CommitOffsetsRequest, data)
        action = "ResetOffsets" if wire.reset else "CommitOffsets"
        self.guard.require(caller, action, ResourceKind.GROUP, wire.group, SUB)
        for topic in {one.topic for one in wire.offsets}:
            self._may_read(caller, action, topic)
        if wire.reset:
            self.guard.note(caller, action, f"group:{wire.group}")

    def _commit_position(self, caller: Caller, data: bytes) -> None:
        wire = parse(pb.CommitPositionRequest, data)
        self.guard.require(caller, "CommitPosition", ResourceKind.GROUP, wire.group, SUB)
        if not wire.topics:
            self.guard.require_admin(caller, "CommitPosition", f"group:{wire.group}", changes=False)
        for topic in set(wire.topics):
            self._may_read(caller, "CommitPosition", topic)

    def _fetch_offsets(self, caller: Caller, data: bytes) -> None:
        self.guard.require(caller, "FetchOffsets", ResourceKind.GROUP, parse(pb.FetchOffsetsRequest, data).group, SUB)

    def _membership(self, caller: Caller, data: bytes) -> None:
        wire = parse(pb.MembershipRequest, data)
        self.guard.require(caller, "Membership", ResourceKind.GROUP, wire.group, SUB)
        for one in wire.subscriptions:
            self._may_read(caller, "Membership", one.topic)

    def _lock_queues(self, caller: Caller, data: bytes) -> None:
        self.guard.require(caller, "LockQueues", ResourceKind.GROUP, parse(pb.LockQueuesRequest, data).group, SUB)

    def _unlock_queues(self, caller: Caller, data: bytes) -> None:
        self.guard.require(caller, "UnlockQueues", ResourceKind.GROUP, parse(pb.UnlockQueuesRequest, data).group, SUB)

    def _send_back(self, caller: Caller, data: bytes) -> None:
        wire = parse(pb.SendBackRequest, data)
        self.guard.require(caller, "SendBack", ResourceKind.GROUP, wire.group, SUB)
        self._may_read(caller, "SendBack", wire.topic)  # its messages become readable in the group's retry topic

    def _put_topic(self, caller: Caller, data: bytes) -> None:
        self.guard.require_admin(caller, "PutTopic", f"topic:{parse(pb.PutTopicRequest, data).topic.name}")

    def _delete_topic(self, caller: Caller, data: bytes) -> None:
        self.guard.require_admin(caller, "DeleteTopic", f"topic:{parse(pb.DeleteTopicRequest, data).name}")

    def _delete_group(self, caller: Caller, data: bytes) -> None:
        self.guard.require_admin(caller, "DeleteGroup", f"group:{parse(pb.DeleteGroupRequest, data).name}")

    def _delayed(self, caller: Caller, _data: bytes) -> None:
        self.guard.require_admin(caller, "Delayed", f"topic:{SCHEDULE_TOPIC}", changes=False)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _readable_records(self, caller: Caller, answer: bytes) -> bytes:
        for record in parse(pb.RecordsResponse, answer).records:
            try:
                topic = decode_record(record, check_crc=False).topic
            except CorruptRecordError:  # its topic is unknown
                raise self.guard.denied(caller, "QueryById", "", "found a damaged record") from None
            try:
                self._may_read(caller, "QueryById", topic)
            except AccessDeniedError:  # the audit log names the topic; a caller that may not read it must not learn it
                raise AccessDeniedError(
                    f"{caller.name} is not allowed to do this: QueryById needs SUB on the topic of that message"
                ) from None
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
