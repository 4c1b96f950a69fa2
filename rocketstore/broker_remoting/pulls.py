"""Pulls and offsets: PULL_MESSAGE and LITE_PULL_MESSAGE, how far groups are, and where queues begin and end.

Pulls have RocketMQ's checks and codes. Those that find messages are read and answered without the general machinery: a
busy consumer sends thousands a second. Frames of any other shape are left to that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Final, NamedTuple

from dledger.access.quota import Quota
from dledger.access.rules import AccessRules
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import FRAME_BYTES_MAX, Frame, HeaderForm, encode, head_of
from dledger.remoting.server import Handler
from dledger.rpc.clients.connections import Leases
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import ClientTables, Subscription
from rocketstore.broker.groups import Groups
from rocketstore.broker.offsets import NONE, Offsets
from rocketstore.broker.pull import Pull
from rocketstore.broker.reading import SQL92
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker_remoting.access import RemotingAccess
from rocketstore.broker_remoting.administration import Administration
from rocketstore.broker_remoting.clients import RemotingLink, data_of
from rocketstore.broker_remoting.requests import BodyDecoder
from rocketstore.remoting.extensions import (
    CommitGroupOffsets,
    CommitPosition,
    FetchedOffsets,
    FetchOffsets,
    encode_committed,
    encode_reached,
)
from rocketstore.remoting.groups import ConsumeQueueBody, ConsumeQueueData, CorrectionOffsets
from rocketstore.remoting.headers import (
    CloneOffsetHeader,
    ConsumeQueueHeader,
    CorrectionOffsetHeader,
    GroupQueueHeader,
    OffsetAnswer,
    OffsetByTimeHeader,
    PullAnswer,
    PullHeader,
    QueueHeader,
    TimestampAnswer,
    UpdateOffsetHeader,
    read_header,
    write_header,
)
from rocketstore.remoting.topics import MASTER_ID
from rocketstore.state.changes import GroupConfig
from rocketstore.types import GetMessageStatus, GetResult, MessageModel

_NAMES: Final = (
    "consumerGroup",
    "topic",
    "queueId",
    "queueOffset",
    "maxMsgNums",
    "sysFlag",
    "commitOffset",
    "suspendTimeoutMillis",
    "subVersion",
)
_INT32_END: Final = 1 << 31
_INT64_END: Final = 1 << 63
_PLACE: Final = 2_000_000_001
"""Stands for the opaque in the template."""
_REMARK: Final = "FOUND"


def read_pull(fields: Mapping[str, str]) -> PullHeader:
    """As ``read_header``. Raises ``RequestError``."""
    try:
        group, topic, *texts = map(fields.__getitem__, _NAMES)
        digits = "".join(texts)
        queue_id, offset, count, flag, commit, wait_ms, version = map(int, texts)
    except (KeyError, ValueError):
        return read_header(PullHeader, fields)
    fits = max(queue_id, count, flag) < _INT32_END and max(offset, commit, wait_ms, version) < _INT64_END
    if not (fits and digits.isascii() and digits.isdecimal()):
        return read_header(PullHeader, fields)
    others = fields.get("subscription", ""), fields.get("expressionType", "")
    return PullHeader(group, topic, queue_id, offset, count, flag, commit, wait_ms, version, *others)


def found_head(request: Frame, answer: PullAnswer, body_bytes: int) -> bytes:
    """The part of the frame before the messages. Raises ``FrameError`` if they do not fit into one."""
    if request.form is not HeaderForm.JSON or body_bytes > FRAME_BYTES_MAX // 2:
        return head_of(request.answer(0, _REMARK, write_header(answer)), body_bytes)
    numbers = answer.next_begin_offset, answer.min_offset, answer.max_offset, answer.incarnation
    header = _TEMPLATE % (*numbers, request.opaque)
    return (len(header) + 4 + body_bytes).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header


def _template() -> bytes:
    frame = Frame(0, _PLACE).answer(0, _REMARK, write_header(PullAnswer(0, -1, -2, -3, -4)))
    header = encode(frame)[8:].replace(str(_PLACE).encode(), b"%d")
    for number in (b'"-1"', b'"-2"', b'"-3"', b'"-4"'):
        header = header.replace(number, b'"%d"')
    return header


_TEMPLATE: Final = _template()


COMMIT_OFFSET: Final = 1
"""System flag of a pull: its ``commit_offset`` is valid."""
SUSPEND: Final = 2
"""The pull may wait for messages."""
SUBSCRIPTION: Final = 4
"""The pull contains its subscription; otherwise the heartbeat's applies."""
MESSAGES_MAX: Final = 4096
SLAVE_PAUSE_S: Final = 1.0
"""A slave may be behind the master, or have less: only a master moves a consumer. Clients pull again at once, so the
answer waits, if it may.
"""
_CODES: Final = {
    GetMessageStatus.FOUND: AnswerCode.SUCCESS,
    GetMessageStatus.NO_MATCHED_MESSAGE: AnswerCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.MESSAGE_WAS_REMOVING: AnswerCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.OFFSET_FOUND_NULL: AnswerCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_ONE: AnswerCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_BADLY: AnswerCode.PULL_OFFSET_MOVED,
    GetMessageStatus.OFFSET_TOO_SMALL: AnswerCode.PULL_OFFSET_MOVED,
}
_EMPTY: Final = frozenset({GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, GetMessageStatus.NO_MESSAGE_IN_QUEUE})


class _Admitted(NamedTuple):
    """A pull that may be answered: what its sender may occupy, and the rules that admitted it."""

    pull: Pull
    quota: Quota
    rules: AccessRules | None
    group: GroupConfig


class RemotingPulls:
    """On the loop."""

    def __init__(
        self,
        broker: Broker,
        groups: Groups,
        access: RemotingAccess,
        link_of: Callable[[RemotingConnection], RemotingLink],
    ) -> None:
        self._link_of = link_of
        self._access = access
        self._broker = broker
        self._groups = groups
        self._waiting = WaitingTasks()

    def pull(self, connection: RemotingConnection, frame: Frame) -> Handler | None:
        """Answer at once with messages that are in memory; otherwise returns the handler that may wait for some.

        Raises ``RequestError`` and the broker's refusals, like that handler.
        """
        admitted = self._admitted(connection, frame)
        incarnation = self._broker.store.incarnation
        with Leases(self._broker.shares.room, admitted.quota) as leases:
            if not connection.is_full:
                with _refusals(admitted.pull.topic):
                    result = self._broker.pulling.pull_at_once(admitted.pull, leases)
                if result is not None:
                    answer = self._header(result, admitted.group, result.next_offset, incarnation)
                    head = found_head(frame, answer, sum(map(len, result.records)))
                    connection.send(head, *result.records)
                    connection.flush()
                    return partial(self._taken, leases.move()) if connection.is_full else None
        return partial(self._answer, admitted)

    def closed(self, connection: RemotingConnection) -> None:
        """Drop the waiting pulls of a closed connection."""
        self._waiting.closed(connection)

    def _admitted(self, connection: RemotingConnection, frame: Frame) -> _Admitted:
        broker = self._broker
        header = read_pull(frame.fields)
        broker.mastership.require_caught_up()
        if broker.mastership.is_master:
            broker.popping.use.pulled(header.consumer_group, header.topic)
        group = self._groups.retries.group(header.consumer_group)
        if not group.consume_enable:
            reason = f"subscription group no permission, {group.name}: it is not allowed to consume (consumeEnable)"
            raise RequestError(reason, AnswerCode.NO_PERMISSION)
        kind, expression = self._wanted(connection, header, group)
        pull = Pull(
            header.consumer_group,
            header.topic,
            header.queue_id,
            max(header.queue_offset, 0),
            min(max(header.max_msg_nums, 1), MESSAGES_MAX),
            0,
            expression,
            max(header.suspend_timeout_millis, 0) if header.sys_flag & SUSPEND else 0,
            kind,
        )
        quota = self._access.quota_of(connection, frame)
        if header.sys_flag & COMMIT_OFFSET:
            broker.offsets.commit_soon(
                quota.owner, header.consumer_group, header.topic, header.queue_id, header.commit_offset
            )
        return _Admitted(pull, quota, self._access.rules, group)

    async def _answer(self, admitted: _Admitted, connection: RemotingConnection, frame: Frame) -> None:
        if connection.is_closed:  # before this task began; nothing would cancel it
            return
        broker, pull, quota, rules, group = self._broker, *admitted
        incarnation = broker.store.incarnation
        may_wait = quota.wait("pulls_waiting_max") if pull.wait_ms else nullcontext()
        with self._waiting.cancelled_with(connection), Leases(broker.shares.room, quota) as leases:
            with may_wait, _refusals(pull.topic):
                result = await broker.pulling.pull(pull, leases)
            self._access.admit_again(connection, frame, rules)
            code, next_offset = _code(result, pull.offset), result.next_offset
            if code == AnswerCode.PULL_OFFSET_MOVED and not broker.mastership.is_master:
                await asyncio.sleep(min(pull.wait_ms / 1000, SLAVE_PAUSE_S))
                code, next_offset = AnswerCode.PULL_NOT_FOUND, pull.offset
            fields = write_header(self._header(result, group, next_offset, incarnation))
            answer = frame.answer(code, str(result.status), fields)
            connection.send(head_of(answer, sum(map(len, result.records))), *result.records)
            del result  # the connection has its own copy of what it cannot send at once
            await connection.taken()

    def _header(self, result: GetResult, group: GroupConfig, next_offset: int, incarnation: int) -> PullAnswer:
        """``incarnation``: before the messages were read; one that has ended meanwhile is not told."""
        kept = incarnation if incarnation == self._broker.store.incarnation else 0
        return PullAnswer(self._suggested(result, group), next_offset, result.min_offset, result.max_offset, kept)

    def _suggested(self, result: GetResult, group: GroupConfig) -> int:
        """The broker id to pull from next: a slave's for who reads what is no longer in memory, if that is wanted."""
        if not self._broker.config.slave_read_enable:
            return MASTER_ID
        return group.broker_id_when_slow if result.suggest_slave else group.broker_id

    async def _taken(self, leases: Leases, connection: RemotingConnection, _frame: Frame) -> None:
        """Keep the room of an answer until the client has read it."""
        with self._waiting.cancelled_with(connection), leases:
            await connection.taken()

    def _wanted(self, connection: RemotingConnection, header: PullHeader, settings: GroupConfig) -> tuple[str, str]:
        """The kind of filter and the expression to use: the request's, or its sender's by the heartbeats.

        Raises ``RequestError`` with the code that tells clients how to react.
        """
        if header.sys_flag & SUBSCRIPTION:
            return header.expression_type, header.subscription
        group = self._groups.clients.consumers(header.consumer_group)
        if group is None:
            raise RequestError(
                f"the consumer's group info not exist: {header.consumer_group} has sent no heartbeat to this broker",
                AnswerCode.SUBSCRIPTION_NOT_EXIST,
            )
        if group.message_model is MessageModel.BROADCASTING and not settings.consume_broadcast_enable:
            reason = f"the consumer group[{settings.name}] can not consume by broadcast way (consumeBroadcastEnable)"
            raise RequestError(reason, AnswerCode.NO_PERMISSION)
        found = group.subscriptions.get(header.topic)
        if found is None:
            reason = f"the consumer's subscription not exist: {header.consumer_group} does not subscribe {header.topic}"
            raise RequestError(reason, AnswerCode.SUBSCRIPTION_NOT_EXIST)
        if group.version_of(self._link_of(connection), header.topic) < header.sub_version:
            raise RequestError("the consumer's subscription not latest", AnswerCode.SUBSCRIPTION_NOT_LATEST)
        return found.kind, found.expression


@contextmanager
def _refusals(topic: str) -> Iterator[None]:
    """Turn the refusals of a pull into answers that tell clients how to react."""
    try:
        yield
    except Refusal as error:
        if error.kind is RefusalKind.NO_TOPIC:
            raise RequestError(f"topic[{topic}] not exist: {error}", AnswerCode.TOPIC_NOT_EXIST) from error
        raise


def _code(result: GetResult, asked: int) -> AnswerCode:
    if result.status in _EMPTY:
        return AnswerCode.PULL_NOT_FOUND if asked == 0 else AnswerCode.PULL_OFFSET_MOVED
    return _CODES[result.status]


class WaitingTasks:
    """Requests that wait for messages, and end with their connection. On the loop."""

    def __init__(self) -> None:
        self._tasks: dict[RemotingConnection, set[asyncio.Task[None]]] = {}

    @contextmanager
    def cancelled_with(self, connection: RemotingConnection) -> Iterator[None]:
        """While this runs, the end of the connection cancels the current task."""
        task = asyncio.current_task()
        assert task is not None
        waiting = self._tasks.setdefault(connection, set())
        waiting.add(task)
        try:
            yield
        finally:
            waiting.discard(task)
            if not waiting:
                self._tasks.pop(connection, None)

    def closed(self, connection: RemotingConnection) -> None:
        """Cancel what waits on a closed connection."""
        for task in tuple(self._tasks.get(connection, ())):
            task.cancel()


class OffsetRequests:
    """On the loop."""

    def __init__(
        self, offsets: Offsets, quota_of: Callable[[RemotingConnection, Frame], Quota], decoder: BodyDecoder
    ) -> None:
        self._offsets = offsets
        self._quota_of = quota_of
        self._decoder = decoder

    async def query(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CONSUMER_OFFSET: a group without an offset starts a short queue at its begin, unless it asks not to."""
        header = read_header(GroupQueueHeader, frame.fields)
        found = await self._offsets.of_group(
            header.consumer_group,
            header.topic,
            header.queue_id,
            begins_short_queues=header.set_zero_if_not_found,
        )
        if found == NONE:
            raise RequestError(
                f"Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first: {header.consumer_group} has no "
                "offset here",
                AnswerCode.QUERY_NOT_FOUND,
            )
        return _offset(frame, found)

    async def update(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_CONSUMER_OFFSET."""
        header = read_header(UpdateOffsetHeader, frame.fields)
        owner = self._quota_of(connection, frame).owner
        await self._offsets.commit(owner, header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        return frame.answer()

    async def fetch_many(self, _: RemotingConnection, frame: Frame) -> Frame:
        """FETCH_OFFSETS."""
        wanted = FetchOffsets.decode(frame.body)
        return frame.answer(body=FetchedOffsets(*self._offsets.fetch_many(wanted.group, wanted.queues)).encode())

    async def commit_many(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """COMMIT_OFFSETS."""
        wanted = CommitGroupOffsets.decode(frame.body)
        owner = self._quota_of(connection, frame).owner
        current = await self._offsets.commit_many(
            owner, wanted.group, wanted.offsets, wanted.incarnation, rewind=wanted.rewind
        )
        return frame.answer(body=encode_committed(current))

    async def commit_position(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """COMMIT_POSITION."""
        wanted = await self._decoder.run(connection, frame, CommitPosition.decode, frame.body)
        owner = self._quota_of(connection, frame).owner
        reached = await self._offsets.commit_position(owner, wanted.group, wanted.position, wanted.topics)
        return frame.answer(body=encode_reached(reached))

    async def maximum(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_MAX_OFFSET."""
        header = read_header(QueueHeader, frame.fields)
        return _offset(frame, (await self._offsets.bounds(header.topic, header.queue_id))[1])

    async def minimum(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_MIN_OFFSET."""
        header = read_header(QueueHeader, frame.fields)
        return _offset(frame, (await self._offsets.bounds(header.topic, header.queue_id))[0])

    async def by_time(self, _: RemotingConnection, frame: Frame) -> Frame:
        """SEARCH_OFFSET_BY_TIMESTAMP."""
        header = read_header(OffsetByTimeHeader, frame.fields)
        return _offset(frame, await self._offsets.by_time(header.topic, header.queue_id, header.timestamp))

    async def earliest_time(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_EARLIEST_MSG_STORETIME."""
        header = read_header(QueueHeader, frame.fields)
        found = await self._offsets.earliest_time(header.topic, header.queue_id)
        return frame.answer(fields=write_header(TimestampAnswer(found)))


def _offset(frame: Frame, offset: int) -> Frame:
    return frame.answer(fields=write_header(OffsetAnswer(offset)))


UNITS_MAX: Final = 4096


"""Units of a queue in one answer."""


class Progress:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration, clients: ClientTables) -> None:
        self._broker = broker
        self._admin = admin
        self._clients = clients

    async def clone(self, _: RemotingConnection, frame: Frame) -> Frame:
        """CLONE_GROUP_OFFSET: one topic's, or all; unless ``offline``, only of topics that the group subscribes to."""
        header = read_header(CloneOffsetHeader, frame.fields)
        group = self._clients.consumers(header.dest_group)
        subscribed = group.subscriptions.keys() if group is not None and not header.offline else ()
        await self._broker.offsets.clone(header.src_group, header.dest_group, header.topic, subscribed)
        return frame.answer()

    async def correction(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CORRECTION_OFFSET: the lowest offsets of all groups but some. RocketMQ deletes the offsets of these."""
        header = read_header(CorrectionOffsetHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        topic = self._broker.topics.require_seen(header.topic).name
        left_out = frozenset(header.filter_groups.split(","))
        lowest = await self._admin.read(self._broker.stats.lowest_offsets, topic, left_out, header.compare_group)
        return frame.answer(body=CorrectionOffsets(lowest).encode())

    async def units(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CONSUME_QUEUE."""
        header = read_header(ConsumeQueueHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        self._broker.topics.require_seen(header.topic)
        if not 0 < header.count <= UNITS_MAX:
            raise RequestError(f"count is {header.count}: 1 to {UNITS_MAX} units of a queue can be asked for")
        group = self._clients.consumers(header.consumer_group) if header.consumer_group else None
        subscription = None if group is None else group.subscriptions.get(header.topic)
        wanted = None if subscription is None else await self._may_match(subscription)
        return frame.answer(body=await self._admin.read(self._units, header, subscription, wanted))

    async def _may_match(self, subscription: Subscription) -> Callable[[int], bool]:
        """Whether a unit's tags code may be one of a wanted message: all that a queue tells."""
        found = await self._broker.filters.of(subscription.kind, subscription.expression)
        return (lambda _code: True) if found is None or found.codes is None else found.codes.__contains__

    def _units(
        self, header: ConsumeQueueHeader, subscription: Subscription | None, wanted: Callable[[int], bool] | None
    ) -> bytes:
        found = self._broker.stats.units(header.topic, header.queue_id, header.index, header.count)
        if found is None:
            raise RequestError(f"{header.queue_id}@{header.topic} is not exist!")
        units = tuple(
            ConsumeQueueData(one.offset, one.size, one.tags_code, eval=wanted is not None and wanted(one.tags_code))
            for one in found.units
        )
        shown = None if subscription is None else data_of(subscription)
        filter_data = _filter_data(header, subscription)
        return ConsumeQueueBody(units, found.end, found.begin, shown, filter_data).encode()


def _filter_data(header: ConsumeQueueHeader, subscription: Subscription | None) -> str:
    """A group's condition as RocketMQ reports it, as JSON."""
    if not header.consumer_group:
        return ""
    if subscription is None:
        return f"{header.consumer_group}@{header.topic} is not online!"
    if subscription.kind != SQL92:
        return "null"
    data = {
        "clientVersion": subscription.version,
        "consumerGroup": header.consumer_group,
        "expression": subscription.expression,
        "expressionType": subscription.kind,
        "topic": header.topic,
    }
    return json.dumps(data, indent="\t")
