"""Requests before they are carried out: which operation each is, by its code, the topics and groups it names, and the
decoding of what clients send of themselves.

A heartbeat of a thousand subscriptions takes five milliseconds to decode, and a hostile one of the same size thirty
times that: small bodies are decoded at once, large ones on a thread, one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from dledger.access.quota import TooManyWaitsError
from dledger.errors import DLedgerError
from dledger.errors import Outcome as TheirOutcome
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from dledger.remoting.server import Answer, Handler, Refused
from rocketstore.broker import permissions
from rocketstore.broker.permissions import NAME_CHARS_MAX, Need, Operation, checked_name
from rocketstore.broker.popping.copies import origin_of_retry
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import CommitGroupOffsets, CommitPosition, FetchOffsets
from rocketstore.remoting.groups import (
    CheckClientBody,
    HeartbeatData,
    LockQueuesBody,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
)
from rocketstore.remoting.headers import EndTransactionHeader, SendBackHeader, read_header
from rocketstore.remoting.pop import AckEntry, BatchAckBody, HandleEntry, QueryAssignmentBody, SetRequestModeBody
from rocketstore.remoting.topics import TopicConfigList
from rocketstore.types import Outcome


class Names(NamedTuple):
    """The topics and groups that a request names."""

    topics: Iterable[str] = ()
    groups: Iterable[str] = ()


class Request(NamedTuple):
    """A request of one code. ``names`` raises ``RequestError``."""

    operation: Operation
    names: Callable[[Frame], Names]

    def needs(self, frame: Frame) -> tuple[Need, ...]:
        """The permissions it requires."""
        return permissions.needs(self.operation, *self.names(frame))

    @property
    def rule(self) -> permissions.Rule:
        """That of its operation."""
        return permissions.RULES[self.operation]


def _field(frame: Frame, name: str) -> str:
    found = frame.fields.get(name)
    if found is None:
        raise RequestError(f"the custom field <{name}> is null")
    return found


def _optional(frame: Frame, name: str) -> tuple[str, ...]:
    found = frame.fields.get(name)
    return (found,) if found else ()


# -- what requests name ------------------------------------------------------------------------------------------------


def _nothing(_frame: Frame) -> Names:
    return Names()


def _in(operation: Operation, *, topic: str = "", group: str = "") -> Request:
    """The names of the fields with the topic and the group."""

    def names(frame: Frame) -> Names:
        return Names((_field(frame, topic),) if topic else (), (_field(frame, group),) if group else ())

    return Request(operation, names)


def _group_and_perhaps_topic(frame: Frame) -> Names:
    return Names(_optional(frame, "topic"), (_field(frame, "consumerGroup"),))


def _topic_and_perhaps_group(frame: Frame) -> Names:
    return Names((_field(frame, "topic"),), _optional(frame, "consumerGroup"))


def _group_left(frame: Frame) -> Names:
    return Names((), _optional(frame, "consumerGroup"))  # C++ leaves out what it is not in by an empty name


def _heartbeat(frame: Frame) -> Names:
    """Every group that the client consumes in, and every topic that it subscribes to."""
    consumers = HeartbeatData.decode(frame.body).consumer_data_set
    topics = [one.topic for data in consumers for one in data.subscription_data_set]
    return Names(topics, [data.group_name for data in consumers])


def _locks(frame: Frame) -> Names:
    wanted = LockQueuesBody.decode(frame.body)
    return Names([one.topic for one in wanted.mq_set], (wanted.consumer_group,))


def _fetched(frame: Frame) -> Names:
    wanted = FetchOffsets.decode(frame.body)
    return Names([topic for topic, _ in wanted.queues], (wanted.group,))


def _committed(frame: Frame) -> Names:
    wanted = CommitGroupOffsets.decode(frame.body)
    return Names([topic for topic, *_ in wanted.offsets], (wanted.group,))


def _reached(frame: Frame) -> Names:
    wanted = CommitPosition.decode(frame.body)
    return Names(wanted.topics, (wanted.group,))


def _subscription(frame: Frame) -> Names:
    wanted = CheckClientBody.decode(frame.body)
    return Names((wanted.subscription_data.topic,), (wanted.group,))


def _popped(frame: Frame) -> Names:
    group = _field(frame, "consumerGroup")
    return Names((origin_of_retry(group, _field(frame, "topic")),), (group,))


def _acknowledged(frame: Frame) -> Names:
    body = BatchAckBody.decode(frame.body)
    acks: tuple[AckEntry | HandleEntry, ...] = (*body.acks, *body.by_handle)
    topics = {origin_of_retry(one.consumer_group, one.topic) for one in acks}
    return Names(topics, {one.consumer_group for one in acks})


def _assigned(frame: Frame) -> Names:
    wanted = QueryAssignmentBody.decode(frame.body)
    return Names((wanted.topic,), (wanted.consumer_group,))


_READ_ALL: Final = Request(Operation.READ_ALL, _nothing)
_CHANGE: Final = Request(Operation.CHANGE, _nothing)
_LIST: Final = Request(Operation.LIST, _nothing)
_OBSERVE: Final = Request(Operation.OBSERVE, _nothing)
_PULL: Final = _in(Operation.PULL, topic="topic", group="consumerGroup")
_POP: Final = Request(Operation.PULL, _popped)
_OFFSETS: Final = _in(Operation.OFFSETS, topic="topic", group="consumerGroup")
_QUEUE: Final = _in(Operation.QUEUE, topic="topic")
_TOPIC: Final = _in(Operation.DESCRIBE, topic="topic")
_MEMBERS: Final = _in(Operation.MEMBERS, group="consumerGroup")
_CODE: Final = RequestCode

REQUESTS: Final[Mapping[int, Request]] = {
    # producers
    _CODE.SEND_MESSAGE: _in(Operation.SEND, topic="topic"),
    _CODE.SEND_MESSAGE_V2: _in(Operation.SEND, topic="b"),
    _CODE.SEND_BATCH_MESSAGE: _in(Operation.SEND, topic="b"),
    _CODE.SEND_REPLY_MESSAGE: _in(Operation.SEND, topic="topic"),
    _CODE.SEND_REPLY_MESSAGE_V2: _in(Operation.SEND, topic="b"),
    OwnCode.SEND_NUMBERED: Request(Operation.SEND_SEVERAL, _nothing),
    OwnCode.NEXT_NUMBER: Request(Operation.ASK_NUMBER, _nothing),
    _CODE.END_TRANSACTION: Request(Operation.END_TRANSACTION, _nothing),
    _CODE.RECALL_MESSAGE: _in(Operation.SEND, topic="topic"),
    # consumers
    _CODE.PULL_MESSAGE: _PULL,
    _CODE.LITE_PULL_MESSAGE: _PULL,
    _CODE.QUERY_CONSUMER_OFFSET: _OFFSETS,
    _CODE.UPDATE_CONSUMER_OFFSET: _OFFSETS,
    OwnCode.FETCH_OFFSETS: Request(Operation.OFFSETS, _fetched),
    OwnCode.COMMIT_OFFSETS: Request(Operation.OFFSETS, _committed),
    OwnCode.COMMIT_POSITION: Request(Operation.OFFSETS, _reached),
    _CODE.SEARCH_OFFSET_BY_TIMESTAMP: _QUEUE,
    _CODE.GET_MAX_OFFSET: _QUEUE,
    _CODE.GET_MIN_OFFSET: _QUEUE,
    _CODE.GET_EARLIEST_MSG_STORETIME: _QUEUE,
    _CODE.CONSUMER_SEND_MSG_BACK: _in(Operation.SEND_BACK, group="group"),
    _CODE.HEART_BEAT: Request(Operation.JOIN, _heartbeat),
    _CODE.UNREGISTER_CLIENT: Request(Operation.LEAVE, _group_left),
    _CODE.GET_CONSUMER_LIST_BY_GROUP: _MEMBERS,
    _CODE.LOCK_BATCH_MQ: Request(Operation.LOCK, _locks),
    _CODE.UNLOCK_BATCH_MQ: Request(Operation.LOCK, _locks),
    _CODE.CHECK_CLIENT_CONFIG: Request(Operation.JOIN, _subscription),
    # consumers of single messages
    _CODE.POP_MESSAGE: _POP,
    _CODE.PEEK_MESSAGE: _POP,
    _CODE.NOTIFICATION: _POP,
    _CODE.POLLING_INFO: _POP,
    _CODE.ACK_MESSAGE: _POP,
    _CODE.CHANGE_MESSAGE_INVISIBLETIME: _POP,
    _CODE.BATCH_ACK_MESSAGE: Request(Operation.PULL, _acknowledged),
    _CODE.QUERY_ASSIGNMENT: Request(Operation.MEMBERS, _assigned),
    # messages
    _CODE.QUERY_MESSAGE: _in(Operation.QUERY, topic="topic"),
    _CODE.VIEW_MESSAGE_BY_ID: Request(Operation.VIEW, _nothing),
    # questions
    _CODE.GET_ALL_TOPIC_CONFIG: _LIST,
    _CODE.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _LIST,
    _CODE.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _LIST,
    _CODE.GET_ALL_MESSAGE_REQUEST_MODE: _LIST,
    _CODE.GET_ALL_PRODUCER_INFO: _LIST,
    _CODE.GET_BROKER_RUNTIME_INFO: _OBSERVE,
    _CODE.GET_BROKER_HA_STATUS: _OBSERVE,
    _CODE.GET_ROUTEINFO_BY_TOPIC: _OBSERVE,  # as of a name server, which has no accounts
    _CODE.GET_BROKER_CLUSTER_INFO: _OBSERVE,
    _CODE.GET_TOPIC_CONFIG: _TOPIC,
    _CODE.GET_SUBSCRIPTIONGROUP_CONFIG: _in(Operation.DESCRIBE, group="group"),
    _CODE.GET_TOPIC_STATS_INFO: _TOPIC,
    _CODE.QUERY_TOPIC_CONSUME_BY_WHO: _TOPIC,
    _CODE.GET_CONSUMER_CONNECTION_LIST: _MEMBERS,
    _CODE.GET_PRODUCER_CONNECTION_LIST: _in(Operation.MEMBERS, group="producerGroup"),
    _CODE.GET_CONSUME_STATS: Request(Operation.DESCRIBE, _group_and_perhaps_topic),
    _CODE.QUERY_CONSUME_TIME_SPAN: _in(Operation.DESCRIBE, topic="topic", group="group"),
    _CODE.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _in(Operation.MEMBERS, topic="topic", group="group"),
    _CODE.GET_CONSUMER_RUNNING_INFO: _MEMBERS,
    _CODE.QUERY_CONSUME_QUEUE: Request(Operation.DESCRIBE, _topic_and_perhaps_group),
    # of all topics or all groups at once; the offsets of all, which slaves fetch
    _CODE.GET_BROKER_CONFIG: _READ_ALL,
    _CODE.GET_ALL_CONSUMER_OFFSET: _READ_ALL,
    _CODE.GET_ALL_DELAY_OFFSET: _READ_ALL,
    _CODE.GET_BROKER_CONSUME_STATS: _READ_ALL,
    _CODE.QUERY_CORRECTION_OFFSET: _READ_ALL,
    _CODE.VIEW_BROKER_STATS_DATA: _READ_ALL,
    _CODE.GET_BROKER_CLUSTER_ACL_INFO: _READ_ALL,
    OwnCode.LIST_TIMED: _READ_ALL,
    # never carried out: the rules are a file
    _CODE.UPDATE_AND_CREATE_ACL_CONFIG: _READ_ALL,
    _CODE.DELETE_ACL_CONFIG: _READ_ALL,
    _CODE.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: _READ_ALL,
    # changes
    _CODE.UPDATE_AND_CREATE_TOPIC: _CHANGE,
    _CODE.UPDATE_AND_CREATE_TOPIC_LIST: _CHANGE,
    _CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _CHANGE,
    _CODE.DELETE_TOPIC_IN_BROKER: _CHANGE,
    _CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _CHANGE,
    _CODE.DELETE_SUBSCRIPTIONGROUP: _CHANGE,
    _CODE.SET_MESSAGE_REQUEST_MODE: _CHANGE,
    _CODE.UPDATE_BROKER_CONFIG: _CHANGE,
    _CODE.INVOKE_BROKER_TO_RESET_OFFSET: _CHANGE,
    _CODE.CLONE_GROUP_OFFSET: _CHANGE,
    _CODE.CONSUME_MESSAGE_DIRECTLY: _CHANGE,
    _CODE.RESUME_CHECK_HALF_MESSAGE: _CHANGE,
    _CODE.CLEAN_EXPIRED_CONSUMEQUEUE: _CHANGE,
    _CODE.CLEAN_UNUSED_TOPIC: _CHANGE,
    _CODE.DELETE_EXPIRED_COMMITLOG: _CHANGE,
}
"""By request code. A broker never gets the codes that only name servers or clients serve."""

IN_BODY: Final = frozenset(
    {
        _CODE.HEART_BEAT,
        _CODE.LOCK_BATCH_MQ,
        _CODE.UNLOCK_BATCH_MQ,
        _CODE.CHECK_CLIENT_CONFIG,
        _CODE.BATCH_ACK_MESSAGE,
        _CODE.QUERY_ASSIGNMENT,
        OwnCode.FETCH_OFFSETS,
        OwnCode.COMMIT_OFFSETS,
        OwnCode.COMMIT_POSITION,
    }
)
"""Requests whose needs are in their bodies, which may be large."""

RECORDS: Final[Mapping[int, Callable[[Frame], int]]] = {
    _CODE.CONSUMER_SEND_MSG_BACK: lambda frame: read_header(SendBackHeader, frame.fields).offset,
    _CODE.END_TRANSACTION: lambda frame: read_header(EndTransactionHeader, frame.fields).commit_log_offset,
}
"""Requests about a message somewhere in the log, and where it is."""


def resource_of(frame: Frame) -> str:
    """The object of an administrator's request, for the audit log."""
    if frame.code == RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP:
        return f"group:{checked_name(SubscriptionGroupConfig.decode(frame.body).group_name)}"
    if frame.code == RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST:
        return _several("group", [one.group_name for one in SubscriptionGroupList.decode(frame.body).group_config_list])
    if frame.code == RequestCode.SET_MESSAGE_REQUEST_MODE:
        return f"group:{checked_name(SetRequestModeBody.decode(frame.body).consumer_group)}"
    if frame.code == RequestCode.UPDATE_AND_CREATE_TOPIC_LIST:
        return _several("topic", [one.topic_name for one in TopicConfigList.decode(frame.body).topic_config_list])
    for kind, names in (("topic", ("topic",)), ("group", ("consumerGroup", "groupName", "group", "destGroup"))):
        for name in names:
            found = frame.fields.get(name, "")
            if found and len(found) <= NAME_CHARS_MAX:
                return f"{kind}:{found}"
    return ""


def _several(kind: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{kind}:{checked_name(names[0])}{more}" if names else ""


_NAMES: Final[Mapping[int, str]] = {one.value: one.name for one in (*RequestCode, *OwnCode)}


def action_of(frame: Frame) -> str:
    """The request's name, for people."""
    return _NAMES.get(frame.code) or f"request {frame.code}"


AT_ONCE_BYTES_MAX: Final = 16 * 1024
"""Larger bodies are decoded by a thread: about eighty subscriptions."""
REST: Final = 3
"""A host's next large body waits this many times the processor time of the last one: threads share the interpreter."""
REST_S_MAX: Final = 1.0
_P = ParamSpec("_P")
_T = TypeVar("_T")
CODES: Final = {  # the broker's refusals as RocketMQ's response codes
    RefusalKind.INVALID: AnswerCode.SYSTEM_ERROR,
    RefusalKind.ILLEGAL_MESSAGE: AnswerCode.MESSAGE_ILLEGAL,
    RefusalKind.WRONG_MESSAGE_TYPE: AnswerCode.MESSAGE_ILLEGAL,
    RefusalKind.WRONG_FILTER: AnswerCode.SUBSCRIPTION_PARSE_FAILED,
    RefusalKind.NO_TOPIC: AnswerCode.TOPIC_NOT_EXIST,
    RefusalKind.NO_QUEUE: AnswerCode.SYSTEM_ERROR,
    RefusalKind.NO_GROUP: AnswerCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    RefusalKind.NO_MESSAGE: AnswerCode.SYSTEM_ERROR,
    RefusalKind.NO_OFFSET: AnswerCode.QUERY_NOT_FOUND,
    RefusalKind.NO_CLIENT: AnswerCode.CONSUMER_NOT_ONLINE,
    RefusalKind.NOT_PERMITTED: AnswerCode.NO_PERMISSION,
    RefusalKind.TOO_MANY: AnswerCode.SYSTEM_BUSY,
    RefusalKind.BUSY: AnswerCode.SYSTEM_ERROR,
    RefusalKind.UNAVAILABLE: AnswerCode.SERVICE_NOT_AVAILABLE,
    RefusalKind.TOO_LATE: AnswerCode.SYSTEM_ERROR,
    RefusalKind.FAILED: AnswerCode.SYSTEM_ERROR,
}
"""By kind. Java's clients try another broker for 1, 14, 16 and 17, and none for 2 and 13."""


class BodyDecoder:
    """On the loop."""

    def __init__(self, readers: ReadThreads) -> None:
        self._readers = readers
        self._turns: WeakKeyDictionary[RemotingConnection, asyncio.Lock] = WeakKeyDictionary()
        self._hosts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._thread = asyncio.Lock()

    def in_turn(self, handler: Handler) -> Handler:
        """``handler``, for one such request of a connection at a time: small ones must not overtake large ones."""

        async def handle(connection: RemotingConnection, frame: Frame) -> Answer:
            turn = self._turns.get(connection)
            if turn is None:
                turn = self._turns[connection] = asyncio.Lock()
            async with turn:
                return await handler(connection, frame)

        return handle

    async def run(
        self,
        connection: RemotingConnection,
        frame: Frame,
        decode: Callable[_P, _T],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """The result of ``decode``, which works on the frame's body. Raises what it raises."""
        if len(frame.body) <= AT_ONCE_BYTES_MAX:
            return decode(*args, **kwargs)
        host = self._hosts.get(connection.counted_as)
        if host is None:
            host = self._hosts[connection.counted_as] = asyncio.Lock()
        await host.acquire()
        spent_s: list[float] = []
        try:
            async with self._thread:
                return await self._readers.run(_timed, spent_s, partial(decode, *args, **kwargs))
        finally:
            asyncio.get_running_loop().call_later(min(REST * sum(spent_s), REST_S_MAX), host.release)


def _timed(spent_s: list[float], decode: Callable[[], _T]) -> _T:
    """Decode, and note the thread's processor time."""
    began = time.thread_time()
    try:
        return decode()
    finally:
        spent_s.append(time.thread_time() - began)


def told_outcome(outcome: Outcome) -> TheirOutcome:
    """The outcome as callers are told it."""
    return "not_applied" if outcome == "not_applied" else "unknown"


def refusal_of(error: Exception) -> Refused | None:
    """The answer to what the broker refuses; None: it is no refusal."""
    if isinstance(error, Refusal):
        return Refused(CODES[error.kind], told_outcome(error.outcome))
    if isinstance(error, TooManyWaitsError):
        return Refused(AnswerCode.SYSTEM_BUSY, error.outcome)
    return Refused(AnswerCode.SYSTEM_ERROR, error.outcome) if isinstance(error, DLedgerError) else None
