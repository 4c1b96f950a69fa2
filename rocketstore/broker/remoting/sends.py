"""Sends over remoting: those of one turn of the event loop, of all connections, reach the store together.

A request of one message is refused by itself. A batch is stored entirely or not at all, for it has one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final, NamedTuple

from dledger.access.permissions import DEAD_PREFIX, RETRY_PREFIX
from dledger.access.quota import Quota
from rocketstore.broker.codec import SendCall
from rocketstore.broker.hosts import host_address
from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.remoting.access import OriginOf, QuotaOf
from rocketstore.broker.remoting.retries import Retries
from rocketstore.broker.transactions.messages import PROPERTY_PRODUCER_GROUP, make_half
from rocketstore.message.batch import expand_batch
from rocketstore.message.checks import check_client_topic, check_keys, check_message
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
from rocketstore.remoting.headers import SendAnswer, SendHeader, write_header
from rocketstore.remoting.send_frames import StoredAnswers, read_send
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult

ANSWER_S_MAX: Final = 2.5
"""Clients hang up after 3 s, and lose what else is under way: a slow send is answered before."""
CREATE_S_MAX: Final = 1.2
"""How much of that a message may wait for its topic."""
REGION: Final = "DefaultRegion"
PROPERTY_CLUSTER: Final = "CLUSTER"

_HOST_FLAGS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
_DROPPED: Final = (f"{PROPERTY_WAIT}\x01", f"{PROPERTY_CLUSTER}\x01")
_NOT_WAITING: Final = f"{PROPERTY_WAIT}\x01false"
_DELAY: Final = f"{PROPERTY_DELAY}\x01"
_TRANSACTION: Final = f"{PROPERTY_TRANSACTION}\x01true"
_GROUP: Final = f"{PROPERTY_PRODUCER_GROUP}\x01"
_WAIT: Final = f"{PROPERTY_WAIT}\x01"
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
_OTHERS: Final = {"MSG_REGION": REGION, "TRACE_ON": "true"}
_PUT_OK: Final = PutMessageStatus.PUT_OK
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
    is_half: bool
    asked_queue_id: int = -1
    """Where the transaction would end, if it begins one."""


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
        self._stored_answers = StoredAnswers(_OTHERS)
        self._gathered: list[_Send] = []
        self._creating: dict[str, list[_Send]] = {}

    def take(self, connection: RemotingConnection, frame: Frame) -> None:
        """Store what is sent, and answer. Raises ``RequestError``: it is refused at once."""
        header = read_send(frame.fields, short=frame.code not in _LONG_NAMES)
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
        given = text.split("\x02")
        segments = [one for one in given if one and not one.startswith(_DROPPED)]
        segments.append(self._cluster)
        is_half = _TRANSACTION in segments
        if is_half:
            segments += self._begin_transaction(header, text, is_batch)
        elif header.sys_flag & SYS_FLAG_TRANSACTION:
            raise RequestError(f"a message of a transaction without {_TRANSACTION!r}", AnswerCode.MESSAGE_ILLEGAL)
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
        if _DELAY in text and not is_dead:
            message.properties = decode_properties(joined)
        else:
            message.property_string = joined
        messages = expand_batch(message) if is_batch else [message]
        if not messages:
            raise RequestError("a batch without messages", AnswerCode.MESSAGE_ILLEGAL)
        wait = _NOT_WAITING not in given
        return _Send(connection, frame, messages, wait, is_batch, quota, len(frame.body) + len(text), is_half)

    def _begin_transaction(self, header: SendHeader, text: str, is_batch: bool) -> list[str]:
        """What else a half message says. Raises ``RequestError``: there may be no such transaction, or none now."""
        parts = self._parts
        if parts.config.reject_transaction_message:
            reason = "this broker takes no transactional messages (rejectTransactionMessage)"
            raise RequestError(reason, AnswerCode.NO_PERMISSION)
        if is_batch or _DELAY in text:
            raise RequestError("a transaction is of one message, without delay", AnswerCode.MESSAGE_ILLEGAL)
        added = [one for one in text.split("\x02") if one.startswith(_WAIT)]
        group = next((one.removeprefix(_GROUP) for one in text.split("\x02") if one.startswith(_GROUP)), "")
        if not group:
            group = header.producer_group
            added.append(f"{_GROUP}{group}")
        if not parts.transactions.is_running:
            raise RequestError("this broker is not quite the master yet", AnswerCode.SERVICE_NOT_AVAILABLE)
        problem = parts.transactions.refusal(group)
        if problem:
            raise RequestError(problem, AnswerCode.SYSTEM_BUSY)
        return added

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
        if send.is_half:
            problem = self._half_problem(first)
            if problem:
                return AnswerCode.MESSAGE_ILLEGAL, problem
        if first.queue_id < 0:
            queue_id = topics.next_queue(topic)
            for one in send.messages:
                one.queue_id = queue_id
        return None

    def _half_problem(self, message: Message) -> str:
        """Why a half message does not do. Its commit must fit into a record, too, and the real topic may be longer."""
        config = self._parts.config.store
        probe = replace(message, queue_id=max(message.queue_id, 0))
        make_half(probe)
        probe.topic = message.topic
        refusal = check_message(probe, config)
        problem = check_client_topic(message.topic) or check_keys(message, config.message_keys_max)
        return problem or ("" if refusal is None else refusal.reason)

    # -- storing -------------------------------------------------------------------------------------------------------

    async def _create(self, topic: str, target: TopicConfig | None, header: SendHeader, owner: str) -> None:
        async with asyncio.timeout(CREATE_S_MAX):
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
            elif isinstance(failure, TimeoutError):
                reason = f"topic {topic} has not been created within {CREATE_S_MAX:g} s: the message is not stored"
                self._refuse(send, AnswerCode.SERVICE_NOT_AVAILABLE, reason)
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
        if send.is_half:
            queue_id = send.messages[0].queue_id
            make_half(send.messages[0])
            send = send._replace(asked_queue_id=queue_id)
        self._gathered.append(send)

    def _store_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        together: list[_Send] = []
        for send in gathered:
            if together and not _fit(together[0], send):
                self._store(together)
                together = []
            together.append(send)
        self._store(together)

    def _store(self, sends: list[_Send]) -> None:
        messages = [message for send in sends for message in send.messages]
        first = sends[0]
        size = sum(send.size for send in sends)
        call = SendCall(0, messages, first.wait, size, together=first.is_batch, own=first.is_half)
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
        queue_id = send.asked_queue_id if send.is_half else first.queue_id
        if len(results) == 1 and results[0].status is _PUT_OK:
            message_id = f"{self._id_prefix}{first.offset:016X}"
            if not send.frame.is_oneway:
                answer = self._stored_answers.encode(send.frame, message_id, queue_id, first.queue_offset)
                send.connection.send(answer)
            send.connection.let_go(send.frame)
            return
        ids = ",".join(f"{self._id_prefix}{one.stored.offset:016X}" for one in results if one.stored is not None)
        fields = write_header(SendAnswer(ids, queue_id, first.queue_offset))
        fields |= _OTHERS
        code = next((_STORED[one.status] for one in results if one.status in _STORED), AnswerCode.SUCCESS)
        send.connection.done(send.frame, send.frame.answer(code, "", fields))

    def _refuse(self, send: _Send, code: AnswerCode, reason: str) -> None:
        send.connection.done(send.frame, send.frame.answer(code, reason))


def _fit(one: _Send, other: _Send) -> bool:
    """Whether they may be stored together."""
    return not (one.is_batch or other.is_batch) and (one.wait, one.is_half) == (other.wait, other.is_half)


@lru_cache(maxsize=1024)
def _host_of(place: Place) -> HostAddress:
    return host_address(place.host, place.port)


def _code_of(result: PutResult) -> AnswerCode:
    if result.outcome == "unknown":
        return AnswerCode.SYSTEM_ERROR
    return _REFUSED.get(result.status, AnswerCode.SYSTEM_ERROR)
