"""Sends over remoting: those of one turn of the event loop, of all connections, reach the store together.

A request of one message is refused by itself. A batch is stored entirely or not at all, for it has one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple

from dledger.access.quota import Quota
from rocketstore.broker.codec import SendCall
from rocketstore.broker.hosts import host_address
from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.remoting.access import OriginOf, QuotaOf
from rocketstore.broker.remoting.retries import DEAD_PREFIX, RETRY_PREFIX, Retries
from rocketstore.message.batch import expand_batch
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_TRANSACTION,
    PROPERTY_WAIT,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION,
    HostAddress,
    Message,
)
from rocketstore.message.properties import decode_properties
from rocketstore.remoting.codes import AnswerCode, RequestCode
from rocketstore.remoting.connection import Place, RemotingConnection
from rocketstore.remoting.errors import RequestError
from rocketstore.remoting.frame import Frame
from rocketstore.remoting.headers import SendAnswer, SendHeader, read_header, write_header
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult

ANSWER_S_MAX: Final = 2.5
"""Clients hang up after 3 s, and lose what else is under way: a slow send is answered before."""
REGION: Final = "DefaultRegion"
PROPERTY_CLUSTER: Final = "CLUSTER"

_HOST_FLAGS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
_DROPPED: Final = (f"{PROPERTY_WAIT}\x01", f"{PROPERTY_CLUSTER}\x01")
_NOT_WAITING: Final = f"{PROPERTY_WAIT}\x01false"
_DELAY: Final = f"{PROPERTY_DELAY}\x01"
_TRANSACTION: Final = f"{PROPERTY_TRANSACTION}\x01true"
_LONG_NAMES: Final = frozenset({RequestCode.SEND_MESSAGE})
_STORED: Final = {
    PutMessageStatus.PUT_OK: AnswerCode.SUCCESS,
    PutMessageStatus.FLUSH_DISK_TIMEOUT: AnswerCode.FLUSH_DISK_TIMEOUT,
    PutMessageStatus.SLAVE_NOT_AVAILABLE: AnswerCode.SLAVE_NOT_AVAILABLE,
    PutMessageStatus.FLUSH_SLAVE_TIMEOUT: AnswerCode.FLUSH_SLAVE_TIMEOUT,
}
_REFUSED: Final = {
    PutMessageStatus.MESSAGE_ILLEGAL: AnswerCode.MESSAGE_ILLEGAL,
    PutMessageStatus.PROPERTIES_SIZE_EXCEEDED: AnswerCode.MESSAGE_ILLEGAL,
    PutMessageStatus.SERVICE_NOT_AVAILABLE: AnswerCode.SERVICE_NOT_AVAILABLE,
    PutMessageStatus.NO_PERMISSION: AnswerCode.NO_PERMISSION,
}
_LATE: Final = (
    f"the message was not acknowledged within {ANSWER_S_MAX:g} s: it may be stored, now or later; sending it again may "
    "store it twice"
)


class _Send(NamedTuple):
    """One request on its way."""

    connection: RemotingConnection
    frame: Frame
    messages: list[Message]
    wait: bool
    is_batch: bool
    quota: Quota
    size: int


class _Flight:
    """Requests that are being stored together; without a timer they have been answered."""

    __slots__ = ("sends", "timer")

    def __init__(self, sends: list[_Send]) -> None:
        self.sends = sends
        self.timer: asyncio.TimerHandle | None = None


class RemotingSends:
    """SEND_MESSAGE, SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE; on the loop."""

    def __init__(self, parts: BrokerParts, retries: Retries, origin_of: OriginOf, quota_of: QuotaOf) -> None:
        self._parts = parts
        self._retries = retries
        self._origin_of = origin_of
        self._quota_of = quota_of
        self._id_prefix = offset_message_id(parts.store_host, 0)[:-16]
        self._cluster = f"{PROPERTY_CLUSTER}\x01{parts.config.cluster_name}"
        self._gathered: list[_Send] = []
        self._creating: dict[str, list[_Send]] = {}

    def take(self, connection: RemotingConnection, frame: Frame) -> None:
        """Store what is sent, and answer. Raises ``RequestError``: it is refused at once."""
        header = read_header(SendHeader, frame.fields, short=frame.code not in _LONG_NAMES)
        target = self._retries.target_of(header) if header.topic.startswith(RETRY_PREFIX) else None
        send = self._read(connection, frame, header, target)
        topic = send.messages[0].topic
        waiting = self._creating.get(topic)
        if waiting is not None:
            waiting.append(send)
        elif self._parts.topics.find(topic) is None and (target is not None or self._parts.sender.may_create(topic)):
            self._creating[topic] = [send]
            task = asyncio.get_running_loop().create_task(self._create(topic, target, header, send.quota.owner))
            task.add_done_callback(partial(self._created, topic))
        else:
            self._gather(send)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read(
        self, connection: RemotingConnection, frame: Frame, header: SendHeader, target: TopicConfig | None
    ) -> _Send:
        """What is sent; ``target`` is the topic to which it goes if that is not the one it names."""
        parts = self._parts
        if parts.store.role is BrokerRole.SLAVE:
            raise RequestError("this broker is a slave: send to the master", AnswerCode.SERVICE_NOT_AVAILABLE)
        is_batch = frame.code == RequestCode.SEND_BATCH_MESSAGE
        quota = self._quota_of(connection, frame)
        if quota.is_full:
            raise RequestError(f"[OVERLOAD] {quota.full_error()}", AnswerCode.SYSTEM_BUSY)
        if parts.sender.is_full:
            raise RequestError("[OVERLOAD] too many messages are waiting to be stored", AnswerCode.SYSTEM_BUSY)
        text = header.properties
        if _TRANSACTION in text or header.sys_flag & SYS_FLAG_TRANSACTION:
            raise RequestError("this broker does not support transactions", AnswerCode.NO_PERMISSION)
        segments = [one for one in text.split("\x02") if one and not one.startswith(_DROPPED)]
        segments.append(self._cluster)
        message = Message(
            header.topic if target is None else target.name,
            frame.body,
            header.queue_id if target is None else min(header.queue_id, target.write_queues - 1),
            {},
            header.flag,
            header.sys_flag & ~_HOST_FLAGS,
            header.born_timestamp,
            _host_of(self._origin_of(connection, frame)),
            parts.store_host,
            header.reconsume_times,
        )
        is_dead = target is not None and target.name.startswith(DEAD_PREFIX)
        if is_dead:
            segments = [one for one in segments if not one.startswith(_DELAY)]
        joined = "\x02".join(segments).encode("utf-8", "replace")
        if is_batch or (_DELAY in text and not is_dead):
            message.properties = decode_properties(joined)
        else:
            message.property_string = joined
        messages = expand_batch(message) if is_batch else [message]
        if not messages:
            raise RequestError("a batch without messages", AnswerCode.MESSAGE_ILLEGAL)
        wait = _NOT_WAITING not in text
        return _Send(connection, frame, messages, wait, is_batch, quota, len(frame.body) + len(text))

    def _refusal(self, send: _Send) -> tuple[AnswerCode, str] | None:
        """Why the topic or the queue does not do; chooses the queue if the client left that to us."""
        topics, first = self._parts.topics, send.messages[0]
        topic = topics.find(first.topic)
        if topic is None:
            reason = self._parts.sender.no_topic_reason(first.topic)
            return AnswerCode.TOPIC_NOT_EXIST, f"topic[{first.topic}] not exist: {reason}"
        problem = topics.write_problem(topic, -1)
        if problem:
            return AnswerCode.NO_PERMISSION, problem
        problem = topics.write_problem(topic, max(first.queue_id, -1))
        if problem:
            return AnswerCode.SYSTEM_ERROR, problem
        if first.queue_id < 0:
            queue_id = topics.next_queue(topic)
            for one in send.messages:
                one.queue_id = queue_id
        return None

    # -- storing -------------------------------------------------------------------------------------------------------

    async def _create(self, topic: str, target: TopicConfig | None, header: SendHeader, owner: str) -> None:
        if target is None:
            await self._parts.sender.ensure_topic(topic, owner, header.default_topic_queue_nums)
        else:
            await self._retries.ensure_topic(target, owner)

    def _created(self, topic: str, task: asyncio.Task[None]) -> None:
        waiting = self._creating.pop(topic)
        if task.cancelled():
            for send in waiting:
                self._refuse(send, AnswerCode.SERVICE_NOT_AVAILABLE, "this broker is stopping")
            return
        failure = task.exception()
        for send in waiting:
            if failure is None:
                self._gather(send)
            else:
                self._refuse(send, AnswerCode.TOPIC_NOT_EXIST, str(failure))

    def _gather(self, send: _Send) -> None:
        refusal = self._refusal(send)
        if refusal is not None:
            self._refuse(send, *refusal)
            return
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._store_gathered)
        send.quota.take(len(send.messages), send.size)
        self._gathered.append(send)

    def _store_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        together: list[_Send] = []
        for send in gathered:
            if together and (send.is_batch or together[0].is_batch or send.wait != together[0].wait):
                self._store(together)
                together = []
            together.append(send)
        self._store(together)

    def _store(self, sends: list[_Send]) -> None:
        messages = [message for send in sends for message in send.messages]
        first = sends[0]
        call = SendCall(0, messages, first.wait, sum(send.size for send in sends), together=first.is_batch)
        flight = _Flight(sends)
        flight.timer = asyncio.get_running_loop().call_later(ANSWER_S_MAX, self._late, flight)
        self._parts.sender.submit(call, partial(self._stored, flight))

    def _late(self, flight: _Flight) -> None:
        flight.timer = None
        for send in flight.sends:
            self._refuse(send, AnswerCode.SYSTEM_ERROR, _LATE)

    def _stored(self, flight: _Flight, results: Sequence[PutResult]) -> None:
        timer, at = flight.timer, 0
        if timer is not None:
            timer.cancel()
        for send in flight.sends:
            count = len(send.messages)
            send.quota.give(count, send.size)
            if timer is not None:
                self._answer(send, results[at : at + count])
            at += count

    # -- answering -----------------------------------------------------------------------------------------------------

    def _answer(self, send: _Send, results: Sequence[PutResult]) -> None:
        refused = [one for one in results if one.stored is None or one.status not in _STORED]
        if refused:  # of a batch, all are: say what is wrong with the one that is to blame
            why = next((one for one in refused if one.status is not PutMessageStatus.OUT_OF_ORDER_SEQUENCE), refused[0])
            self._refuse(send, _code_of(why), why.reason or str(why.status))
            return
        first = results[0].stored
        assert first is not None
        ids = ",".join(f"{self._id_prefix}{one.stored.offset:016X}" for one in results if one.stored is not None)
        fields = write_header(SendAnswer(ids, first.queue_id, first.queue_offset))
        fields |= {"MSG_REGION": REGION, "TRACE_ON": "true"}
        code = next((_STORED[one.status] for one in results if one.status in _STORED), AnswerCode.SUCCESS)
        send.connection.done(send.frame, send.frame.answer(code, "", fields))

    def _refuse(self, send: _Send, code: AnswerCode, reason: str) -> None:
        send.connection.done(send.frame, send.frame.answer(code, reason))


@lru_cache(maxsize=1024)
def _host_of(place: Place) -> HostAddress:
    return host_address(place.host, place.port)


def _code_of(result: PutResult) -> AnswerCode:
    if result.outcome == "unknown":
        return AnswerCode.SYSTEM_ERROR
    return _REFUSED.get(result.status, AnswerCode.SYSTEM_ERROR)
