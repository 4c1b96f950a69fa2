"""RocketMQ 5's pop over remoting: messages one by one, their acknowledgements, and who shall pop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from dledger.access.quota import Quota
from dledger.access.rules import RETRY_PREFIX
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame, head_of
from dledger.remoting.server import Handler
from dledger.rpc.clients.connections import Leases
from rocketstore.broker.broker import Broker
from rocketstore.broker.groups import Groups
from rocketstore.broker.popping.copies import origin_of_retry
from rocketstore.broker.popping.requests import (
    ANY_QUEUE,
    MESSAGES_MAX,
    Ack,
    ChangeInvisible,
    PoppedRecord,
    PopResult,
    Receive,
)
from rocketstore.broker.popping.service import ACKED_AT_ONCE, Popping
from rocketstore.broker.reading import TAG
from rocketstore.broker_remoting.access import RemotingAccess
from rocketstore.broker_remoting.pulls import WaitingTasks
from rocketstore.message.properties import PROPERTY_CHECK_POINT
from rocketstore.message.record import PHYSICAL_OFFSET, PHYSICAL_OFFSET_AT, QueuePlace, with_property
from rocketstore.pop.tables import retry_topic_of
from rocketstore.remoting.codes import POLLING_FULL, RequestCode
from rocketstore.remoting.headers import read_header, write_header
from rocketstore.remoting.pop import (
    ACKS_MAX,
    FROM_FIRST,
    ORDERED,
    AckHeader,
    AssignmentsBody,
    BatchAckAnswer,
    BatchAckBody,
    ChangeInvisibleAnswer,
    ChangeInvisibleHeader,
    CheckPoint,
    NotificationAnswer,
    NotificationHeader,
    PeekHeader,
    PollingInfoAnswer,
    PollingInfoHeader,
    PopAnswer,
    PopHeader,
    QueryAssignmentBody,
    QueueAssignment,
    message_offsets,
    order_counts,
    start_offsets,
)
from rocketstore.remoting.topics import MessageQueue
from rocketstore.state.attributes import TopicRequestMode
from rocketstore.types import MessageModel, RequestMode

RETRIES: Final = ("1", "2")
"""Of an acknowledgement: the message is in the group's retry topic, which RocketMQ 5 names in two ways."""
FOUND: Final = "FOUND"
NOT_FOUND: Final = "NO_MESSAGE_IN_QUEUE"
AVERAGELY: Final = "AVG"
Rule = Callable[[Sequence[int], int, int], Sequence[int]]
"""The queues of one member: of all queues, its place among the members, and their number."""


class RemotingPops:
    """On the loop."""

    def __init__(self, broker: Broker, access: RemotingAccess) -> None:
        self._broker = broker
        self._groups: Groups = broker.groups
        self._pop: Popping = broker.popping
        self._access = access
        self._waiting = WaitingTasks()
        code = RequestCode
        self.handlers: Final[dict[int, Handler]] = {
            code.POP_MESSAGE: self.receive,
            code.ACK_MESSAGE: self.ack,
            code.BATCH_ACK_MESSAGE: self.ack_many,
            code.CHANGE_MESSAGE_INVISIBLETIME: self.change_invisible,
            code.QUERY_ASSIGNMENT: self.assignment,
            code.PEEK_MESSAGE: self.peek,
            code.POLLING_INFO: self.waiting,
            code.NOTIFICATION: self.notify,
        }

    def closed(self, connection: RemotingConnection) -> None:
        """Drop requests that wait on a closed connection; messages popped by it stay invisible for their time."""
        self._waiting.closed(connection)

    # -- messages ------------------------------------------------------------------------------------------------------

    async def receive(self, connection: RemotingConnection, frame: Frame) -> None:
        """POP_MESSAGE."""
        if connection.is_closed:  # before this task began; nothing would cancel it
            return
        header = read_header(PopHeader, frame.fields)
        if not 1 <= header.max_msg_nums <= MESSAGES_MAX:
            reason = f"maxMsgNums is {header.max_msg_nums}: 1 to {MESSAGES_MAX} messages are popped at a time"
            raise RequestError(reason, AnswerCode.INVALID_PARAMETER)
        self._require_order(header.consumer_group, wanted=header.order)
        quota, rules = self._access.quota_of(connection, frame), self._access.rules
        wish = Receive(
            header.consumer_group,
            header.topic,
            max(header.queue_id, ANY_QUEUE),
            header.max_msg_nums,
            header.invisible_time,
            self._wait_ms(header.poll_time),
            header.exp_type or TAG,
            header.exp or "*",
            header.attempt_id,
            str(connection.place),
            from_first=header.init_mode == FROM_FIRST,
            with_retries=not header.order,
        )
        with self._waiting.cancelled_with(connection), Leases(self._broker.shares.room, quota) as leases:
            with _room(quota, wish.wait_ms):
                found = await self._pop.receive(wish, leases, quota.owner)
            try:
                self._access.admit_again(connection, frame, rules)
            except RequestError:
                self._pop.give_back(wish.group, wish.topic, [one.handle for one in found.messages])
                raise
            now_ms = self._broker.loop.clock.wall_ms()
            if not found.messages:
                code = POLLING_FULL if found.full else AnswerCode.PULL_NOT_FOUND
                nothing = PopAnswer(now_ms, header.invisible_time, 0, found.rest)
                connection.done(frame, frame.answer(code, NOT_FOUND, write_header(nothing)))
                return
            records, answer = self._answer(header, found.messages, found.rest)
            head = head_of(frame.answer(0, FOUND, write_header(answer)), sum(map(len, records)))
            connection.send(head, *records)
            del found, records  # the connection has its own copy of what it cannot send at once
            await connection.taken()

    def _answer(self, header: PopHeader, messages: Sequence[PoppedRecord], rest: int) -> tuple[list[bytes], PopAnswer]:
        revive = ORDERED if header.order else 0
        offsets: dict[tuple[bool, int], list[int]] = {}
        counts: dict[tuple[bool, int], int] = {}
        records: list[bytes] = []
        name = self._broker.config.name
        for one in messages:
            topic, queue_id, offset = one.place
            is_retry = topic != header.topic
            offsets.setdefault((is_retry, queue_id), []).append(offset)
            counts[is_retry, queue_id] = one.attempt - 1
            popped_ms = one.visible_at_ms - header.invisible_time
            (log_offset,) = PHYSICAL_OFFSET.unpack_from(one.record, PHYSICAL_OFFSET_AT)
            times = popped_ms, header.invisible_time
            place = queue_id, offset, int(log_offset)
            point = CheckPoint(offset, *times, revive, is_retry, name, *place, one.handle)
            records.append(with_property(one.record, PROPERTY_CHECK_POINT, str(point)))
        popped_ms = max(one.visible_at_ms for one in messages) - header.invisible_time
        counted = order_counts(counts) if header.order else ""
        places = start_offsets(offsets), message_offsets(offsets)
        return records, PopAnswer(popped_ms, header.invisible_time, revive, rest, *places, counted)

    async def peek(self, connection: RemotingConnection, frame: Frame) -> None:
        """PEEK_MESSAGE: what would be popped next, without taking it."""
        header = read_header(PeekHeader, frame.fields)
        count = min(max(header.max_msg_nums, 1), MESSAGES_MAX)
        queue_id = max(header.queue_id, ANY_QUEUE)
        quota = self._access.quota_of(connection, frame)
        with self._waiting.cancelled_with(connection), Leases(self._broker.shares.room, quota) as leases:
            records = await self._pop.peek(header.consumer_group, header.topic, queue_id, count, leases)
            answer = PopAnswer(self._broker.loop.clock.wall_ms(), 0, 0, 0)
            if not records:
                found = frame.answer(AnswerCode.PULL_NOT_FOUND, NOT_FOUND, write_header(answer))
                connection.done(frame, found)
                return
            head = head_of(frame.answer(0, FOUND, write_header(answer)), sum(map(len, records)))
            connection.send(head, *records)
            await connection.taken()

    async def notify(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """NOTIFICATION: whether there is something to pop, as soon as there is."""
        header = read_header(NotificationHeader, frame.fields)
        wait_ms = self._wait_ms(header.poll_time)
        quota = self._access.quota_of(connection, frame)
        with self._waiting.cancelled_with(connection), _room(quota, wait_ms):
            queue_id = max(header.queue_id, ANY_QUEUE)
            found = await self._pop.await_message(
                header.consumer_group, header.topic, queue_id, wait_ms, str(connection.place)
            )
        return frame.answer(fields=write_header(NotificationAnswer(found)))

    async def waiting(self, _: RemotingConnection, frame: Frame) -> Frame:
        """POLLING_INFO: how many wait."""
        header = read_header(PollingInfoHeader, frame.fields)
        count = self._pop.waiting_of(header.consumer_group, header.topic)
        return frame.answer(fields=write_header(PollingInfoAnswer(count)))

    # -- what became of them -------------------------------------------------------------------------------------------

    async def ack(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """ACK_MESSAGE."""
        header = read_header(AckHeader, frame.fields)
        point = CheckPoint.parse(header.extra_info)
        acks = [self._acked(header.consumer_group, header.topic, point)]
        (result,) = await self._pop.ack(acks, self._access.quota_of(connection, frame).owner)
        return _answered(frame, [result])

    async def ack_many(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """BATCH_ACK_MESSAGE."""
        body = BatchAckBody.decode(frame.body)
        acks: list[Ack] = []
        for ack in self._all_acked(body):  # a megabyte can name millions
            if len(acks) == ACKS_MAX:
                raise RequestError(f"a request acknowledges at most {ACKS_MAX} messages", AnswerCode.INVALID_PARAMETER)
            acks.append(ack)
            if not len(acks) % ACKED_AT_ONCE:
                await asyncio.sleep(0)
        if not acks:
            raise RequestError("the request acknowledges nothing", AnswerCode.NO_MESSAGE)
        results = await self._pop.ack(acks, self._access.quota_of(connection, frame).owner)
        if body.acks:
            return _answered(frame, results)
        return frame.answer(body=BatchAckAnswer(tuple(one is PopResult.OK for one in results)).encode())

    def _all_acked(self, body: BatchAckBody) -> Iterator[Ack]:
        for named in body.by_handle:
            for handle in named.handles:
                yield Ack(named.consumer_group, named.topic, handle)
        for one in body.acks:
            numbers = one.start_offset, one.pop_time, one.invisible_time, one.revive_queue_id
            for offset in one.offsets():
                point = CheckPoint(*numbers, one.retry in RETRIES, "", one.queue_id, offset)
                yield self._acked(one.consumer_group, one.topic, point)

    async def change_invisible(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """CHANGE_MESSAGE_INVISIBLETIME."""
        header = read_header(ChangeInvisibleHeader, frame.fields)
        group, topic = header.consumer_group, origin_of_retry(header.consumer_group, header.topic)
        point = CheckPoint.parse(header.extra_info)
        handle = self._handle(group, topic, point)
        changed = await self._pop.change_invisible(
            ChangeInvisible(group, topic, handle, header.invisible_time, header.suspend),
            self._access.quota_of(connection, frame).owner,
        )
        if changed.result is not PopResult.OK:
            return _answered(frame, [changed.result])
        popped_ms = changed.visible_at_ms - header.invisible_time
        return frame.answer(
            fields=write_header(ChangeInvisibleAnswer(popped_ms, header.invisible_time, point.revive, changed.handle))
        )

    def _acked(self, group: str, topic: str, point: CheckPoint) -> Ack:
        topic = origin_of_retry(group, topic)
        return Ack(group, topic, self._handle(group, topic, point))

    def _handle(self, group: str, topic: str, point: CheckPoint) -> str:
        """The handle that the broker gave with the message, or that the numbers of a client without it stand for."""
        if point.rest:
            return point.rest
        stored_in = retry_topic_of(group, topic) if point.is_retry else topic
        place = QueuePlace(stored_in, point.queue_id, point.offset)
        return self._pop.handle_at(group, place, point.pop_time + point.invisible_time)

    # -- who pops ------------------------------------------------------------------------------------------------------

    async def assignment(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_ASSIGNMENT: this broker's queues for a client that does not divide them with others by itself.

        Retry topics are pulled, as in RocketMQ; and a broadcasting consumer gets every queue.
        """
        wanted = QueryAssignmentBody.decode(frame.body)
        rule = RULES.get(wanted.strategy_name or AVERAGELY)
        if rule is None:
            reason = f"strategyName {wanted.strategy_name[:64]!r}: use {' or '.join(RULES)}"
            raise RequestError(reason, AnswerCode.INVALID_PARAMETER)
        topic = self._broker.topics.seen(wanted.topic)
        name = self._broker.config.name
        found: list[QueueAssignment] = []
        if topic is not None:
            mode, queues = RequestMode.PULL, range(topic.read_queues)
            share: Iterable[int] = queues
            if wanted.message_model is MessageModel.CLUSTERING:
                consumers = self._groups.clients.consumers(wanted.consumer_group)
                ids = () if consumers is None else tuple(sorted(consumers.ids))
                asked = self._mode(wanted.topic, wanted.consumer_group)
                mode, share = asked.mode, shares(asked, rule, queues, ids, wanted.client_id)
            found = [QueueAssignment(MessageQueue(wanted.topic, name, queue_id), mode) for queue_id in share]
        return frame.answer(body=AssignmentsBody(tuple(found)).encode())

    def _mode(self, topic: str, group: str) -> TopicRequestMode:
        """Clients that let the broker divide the queues do so in order to pop, unless somebody has said otherwise."""
        if topic.startswith(RETRY_PREFIX):
            return TopicRequestMode(topic, group, RequestMode.PULL)
        return self._broker.state.request_mode(topic, group) or TopicRequestMode(topic, group, RequestMode.POP)

    def _wait_ms(self, poll_ms: int) -> int:
        return max(0, min(poll_ms, self._broker.config.pull_wait_ms_max))

    def _require_order(self, group: str, *, wanted: bool) -> None:
        if wanted and not self._groups.retries.group(group).ordered:
            raise RequestError(
                f"group {group} is not ordered, and its consumer wants messages in order: set the group's "
                "consumeMessageOrderly",
                AnswerCode.INVALID_PARAMETER,
            )


def _room(quota: Quota, wait_ms: int) -> AbstractContextManager[object]:
    return quota.wait("pulls_waiting_max") if wait_ms else nullcontext()


def _answered(frame: Frame, results: Sequence[PopResult]) -> Frame:
    invalid = sum(one is not PopResult.OK for one in results)
    if not invalid:
        return frame.answer()
    of_many = f"{invalid} of {len(results)} messages: " if len(results) > 1 else ""
    reason = f"{of_many}it was acknowledged before, or its time is over and it was given out again"
    return frame.answer(AnswerCode.NO_MESSAGE, reason)


def averagely(queues: Sequence[int], place: int, members: int) -> Sequence[int]:
    """RocketMQ's ``AllocateMessageQueueAveragely``: each member gets a run of queues, the first ones one more."""
    least, larger = divmod(len(queues), members)
    begin = place * least + min(place, larger)
    return queues[begin : begin + least + (place < larger)]


def by_circle(queues: Sequence[int], place: int, members: int) -> Sequence[int]:
    """RocketMQ's ``AllocateMessageQueueAveragelyByCircle``: each member gets one queue in turn."""
    return queues[place::members]


RULES: Final[dict[str, Rule]] = {AVERAGELY: averagely, "AVG_BY_CIRCLE": by_circle}
"""By the names that clients send."""


def shares(mode: TopicRequestMode, rule: Rule, queues: Sequence[int], ids: Sequence[str], me: str) -> list[int]:
    """The queues that client ``me`` shall pull or pop; ``ids``: of the group's clients, in order.

    A client that pops from all queues gets ``ANY_QUEUE``, whether or not the broker knows it. With ``share_queues`` it
    also pops from the queues of so many clients behind it, in a circle; if there are more clients than queues, from its
    own only.
    """
    is_pop, count = mode.mode is RequestMode.POP, len(ids)
    if is_pop and not 0 < mode.share_queues < count - 1:
        return [ANY_QUEUE]
    if me not in ids:
        return []
    more = mode.share_queues if is_pop and count <= len(queues) else 0
    place = ids.index(me)
    found = [one for step in range(more + 1) for one in rule(queues, (place + step) % count, count)]
    return list(dict.fromkeys(found))
