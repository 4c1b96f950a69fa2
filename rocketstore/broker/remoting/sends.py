"""Sends over remoting: those of one turn of the event loop, of all connections, reach the store together.

While others are being stored, they wait for more, but not long: a request that is stored alone costs ten times as much
as one of fifty, on every member.

A request of one message is refused by itself. A batch is stored entirely or not at all, for it has one answer. So
several of them are, too; if one is refused for what it holds, each is stored by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple

from dledger.access.permissions import DEAD_PREFIX, RETRY_PREFIX
from dledger.access.quota import Quota
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import Place, RemotingConnection
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import FLAG_ONEWAY, Frame
from rocketstore.broker.codec import SendCall
from rocketstore.broker.hosts import host_address
from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.remoting.access import OriginOf, QuotaOf
from rocketstore.broker.remoting.topic_table import sendable_system_topic
from rocketstore.broker.retries import Retries
from rocketstore.broker.transactions.begins import Begun, HalfRefusedError
from rocketstore.config import KIB
from rocketstore.message.batch import CorruptBatchError, expand_batch
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TRANSACTION,
    PROPERTY_WAIT,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION,
    HostAddress,
    Message,
)
from rocketstore.message.properties import decode_properties
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import SendAnswer, SendHeader, write_header
from rocketstore.remoting.send_frames import StoredAnswers, read_send
from rocketstore.state.changes import TopicConfig
from rocketstore.types import PutMessageStatus, PutResult

ANSWER_S_MAX: Final = 2.5
"""Clients hang up after 3 s, and lose what else is under way: a slow send is answered before."""
CREATE_S_MAX: Final = 1.2
"""How much of that a message may wait for its topic."""
FLIGHTS_MAX: Final = 2
"""While as many groups of requests are being stored, the next ones gather,"""
GATHER_S_MAX: Final = 0.005
"""at most for this long,"""
GATHER_BYTES_MAX: Final = 64 * KIB
"""and only up to this size: more would hardly make each cheaper."""
REGION: Final = "DefaultRegion"
PROPERTY_CLUSTER: Final = "CLUSTER"

_HOST_FLAGS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
_DROPPED: Final = (f"{PROPERTY_WAIT}\x01", f"{PROPERTY_CLUSTER}\x01")
_NOT_WAITING: Final = f"{PROPERTY_WAIT}\x01false"
_DELAY: Final = f"{PROPERTY_DELAY}\x01"
_TRANSACTION: Final = f"{PROPERTY_TRANSACTION}\x01true"
_GROUP: Final = f"{PROPERTY_PRODUCER_GROUP}\x01"
_WAIT: Final = f"{PROPERTY_WAIT}\x01"
_WAITING: Final = f"{_WAIT}true"
_ENDS: Final = ("", "\x02")
_SPECIAL: Final = (_WAIT, f"{PROPERTY_CLUSTER}\x01", f"{PROPERTY_TRANSACTION}\x01", _DELAY, "\x02\x02")
"""What makes properties unusual, wherever it is in them."""
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
_NOT_BEGUN: Final = _REFUSED | {PutMessageStatus.OS_PAGECACHE_BUSY: AnswerCode.SYSTEM_BUSY}
_BAD: Final = frozenset({PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED})
"""Of messages that can never be stored."""
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
    half_of: str
    """The producer group whose transaction it begins; empty: it is an ordinary message."""
    begun: Begun | None = None
    """Set once it has begun."""


class _Flight:
    """Requests that are being stored together; without a timer they have been answered."""

    __slots__ = ("sends", "timer")

    def __init__(self, sends: list[_Send]) -> None:
        self.sends = sends
        self.timer: asyncio.TimerHandle | None = None


class _Done:
    """Requests of one connection that are stored, and their answers."""

    __slots__ = ("answers", "requests", "size")

    def __init__(self) -> None:
        self.requests: list[Frame] = []
        self.answers: list[bytes] = []
        self.size = 0


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
        self._gathered_bytes = 0
        self._gathering: asyncio.TimerHandle | None = None
        """Ends the wait for more."""
        self._stores_soon = False
        """Whether what is gathered is stored at the end of this turn of the loop."""
        self._flights = 0
        self._creating: dict[str, list[_Send]] = {}

    def take(self, connection: RemotingConnection, frame: Frame) -> None:
        """Store what is sent, and answer. Raises ``RequestError``: it is refused at once."""
        header = read_send(frame.fields, short=frame.code not in _LONG_NAMES)
        target = None
        if header.topic.startswith(RETRY_PREFIX):
            target = self._retries.target_of(header.topic, header.reconsume_times, header.max_reconsume_times)
        send = self._read(connection, frame, header, target)
        name = send.messages[0].topic
        waiting = self._creating.get(name)
        if waiting is not None:
            waiting.append(send)
        elif (topic := self._parts.topics.find(name)) is None:
            self._begin_to_create(send, header, target or sendable_system_topic(self._parts.config, name))
        else:
            self._gather(send, topic)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read(
        self, connection: RemotingConnection, frame: Frame, header: SendHeader, target: TopicConfig | None
    ) -> _Send:
        """What is sent; ``target`` is the topic to which it goes if that is not the one it names."""
        parts = self._parts
        parts.mastership.require()
        is_batch = frame.code == RequestCode.SEND_BATCH_MESSAGE
        quota = self._quota_of(connection, frame)
        if quota.is_full:
            raise RequestError(f"[OVERLOAD] {quota.full_error()}", AnswerCode.SYSTEM_BUSY)
        if parts.sender.is_full:
            raise RequestError("[OVERLOAD] too many messages are waiting to be stored", AnswerCode.SYSTEM_BUSY)
        is_dead = target is not None and target.name.startswith(DEAD_PREFIX)
        text = header.properties
        usual = usual_properties(text)
        if usual is not None and not header.sys_flag & SYS_FLAG_TRANSACTION:
            joined, wait, half_of = (f"{usual}\x02{self._cluster}" if usual else self._cluster), True, ""
        else:
            joined, wait, half_of = self._joined(header, is_batch=is_batch, is_dead=is_dead)
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
        encoded = joined.encode("utf-8", "replace")
        if usual is None and _DELAY in text and not is_dead:
            message.properties = decode_properties(encoded)
        else:
            message.property_string = encoded
        messages = self._expanded(message) if is_batch else [message]
        return _Send(connection, frame, messages, wait, is_batch, quota, len(frame.body) + len(text), half_of)

    def _expanded(self, batch: Message) -> list[Message]:
        """The messages of a batch. Raises ``RequestError`` before any is made, unless one of them is to blame."""
        most = self._parts.config.store.max_message_size
        if len(batch.body) > most:
            reason = f"the batch has {len(batch.body)} bytes; at most {most} are allowed (max_message_size)"
            raise RequestError(reason, AnswerCode.MESSAGE_ILLEGAL)
        try:
            messages = expand_batch(batch)
        except CorruptBatchError as error:
            raise RequestError(str(error), AnswerCode.MESSAGE_ILLEGAL) from error
        if not messages:
            raise RequestError("a batch without messages", AnswerCode.MESSAGE_ILLEGAL)
        return messages

    def _joined(self, header: SendHeader, *, is_batch: bool, is_dead: bool) -> tuple[str, bool, str]:
        """The property string to be stored, whether to wait, and the producer group of a half message."""
        text = header.properties
        given = text.split("\x02")
        segments = [one for one in given if one and not one.startswith(_DROPPED)]
        segments.append(self._cluster)
        half_of = ""
        if _TRANSACTION in segments:
            segments = [one for one in segments if not one.startswith(_GROUP)]
            half_of = self._check_begin(header, given, is_plain=not (is_batch or _DELAY in text))
            segments += [one for one in given if one.startswith(_WAIT)]
            segments.append(f"{_GROUP}{half_of}")
        elif header.sys_flag & SYS_FLAG_TRANSACTION:
            raise RequestError(f"a message of a transaction without {_TRANSACTION!r}", AnswerCode.MESSAGE_ILLEGAL)
        if is_dead:
            segments = [one for one in segments if not one.startswith(_DELAY)]
        return "\x02".join(segments), _NOT_WAITING not in given, half_of

    def _check_begin(self, header: SendHeader, given: Sequence[str], *, is_plain: bool) -> str:
        """The producer group of a half message. Raises ``RequestError``: it may begin no transaction, or not now."""
        named = (one.removeprefix(_GROUP) for one in given if one.startswith(_GROUP))
        group = next(filter(None, named), header.producer_group)
        try:
            self._parts.halves.check_begin(group, is_plain=is_plain)
        except HalfRefusedError as error:
            raise RequestError(str(error), _NOT_BEGUN[error.status]) from None
        return group

    def _refusal(self, send: _Send, topic: TopicConfig | None) -> tuple[AnswerCode, str] | None:
        """Why the topic or the queue does not do; chooses the queue if the client left that to us."""
        topics, first = self._parts.topics, send.messages[0]
        if topic is None:
            reason = topics.missing(first.topic).reason
            return AnswerCode.TOPIC_NOT_EXIST, f"topic[{first.topic}] not exist: {reason}"
        problem = topics.write_problem(topic, max(first.queue_id, -1))
        if problem:
            is_topics = topics.write_problem(topic, -1)
            return AnswerCode.NO_PERMISSION if is_topics else AnswerCode.SYSTEM_ERROR, is_topics or problem
        if send.half_of:
            problem = self._parts.halves.problem(first)
            if problem:
                return AnswerCode.MESSAGE_ILLEGAL, problem
        if first.queue_id < 0:
            queue_id = topics.next_queue(topic)
            for one in send.messages:
                one.queue_id = queue_id
        return None

    # -- storing -------------------------------------------------------------------------------------------------------

    def _begin_to_create(self, send: _Send, header: SendHeader, target: TopicConfig | None) -> None:
        topic = send.messages[0].topic
        if target is None and not self._parts.topics.may_create(topic):
            self._gather(send, None)
            return
        self._creating[topic] = [send]
        task = asyncio.get_running_loop().create_task(self._create(topic, target, header, send.quota.owner))
        task.add_done_callback(partial(self._created, topic))

    async def _create(self, topic: str, target: TopicConfig | None, header: SendHeader, owner: str) -> None:
        async with asyncio.timeout(CREATE_S_MAX):
            if target is None:
                await self._parts.topics.create_default(topic, owner, header.default_topic_queue_nums)
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
                self._gather(send, self._parts.topics.find(topic))
            elif isinstance(failure, TimeoutError):
                reason = f"topic {topic} has not been created within {CREATE_S_MAX:g} s: the message is not stored"
                self._refuse(send, AnswerCode.SERVICE_NOT_AVAILABLE, reason)
            else:
                self._refuse(send, AnswerCode.TOPIC_NOT_EXIST, str(failure))

    def _gather(self, send: _Send, topic: TopicConfig | None) -> None:
        refusal = self._refusal(send, topic)
        if refusal is not None:
            self._refuse(send, *refusal)
            return
        send.quota.take(len(send.messages), send.size)
        if send.half_of:
            send = send._replace(begun=self._parts.halves.begin(send.messages[0], send.half_of))
        self._gathered.append(send)
        self._gathered_bytes += send.size
        if self._flights < FLIGHTS_MAX or self._gathered_bytes >= GATHER_BYTES_MAX or send.half_of:
            self._store_soon()
        elif self._gathering is None and not self._stores_soon:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_S_MAX, self._store_gathered)

    def _store_soon(self) -> None:
        if self._stores_soon:
            return
        if self._gathering is not None:
            self._gathering.cancel()
        self._stores_soon = True
        asyncio.get_running_loop().call_soon(self._store_gathered)

    def _store_gathered(self) -> None:
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        self._gathering, self._stores_soon = None, False
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
        call = SendCall(0, messages, first.wait, size, together=first.is_batch, own=bool(first.half_of))
        flight = _Flight(sends)
        self._flights += 1
        flight.timer = asyncio.get_running_loop().call_later(ANSWER_S_MAX, self._late, flight)
        self._parts.sender.submit(call, partial(self._stored, flight))

    def _late(self, flight: _Flight) -> None:
        flight.timer = None
        for send in flight.sends:
            self._refuse(send, AnswerCode.SYSTEM_ERROR, _LATE)

    def _stored(self, flight: _Flight, results: Sequence[PutResult]) -> None:
        self._flights -= 1
        if self._gathered:
            self._store_soon()
        timer, at = flight.timer, 0
        if timer is not None:
            timer.cancel()
            if len(flight.sends) > 1 and flight.sends[0].is_batch and any(one.status in _BAD for one in results):
                for send in flight.sends:
                    self._store([send])
                return
            if len(results) == len(flight.sends) and not flight.sends[0].half_of:
                self._answer_singles(flight.sends, results)
                return
        for send in flight.sends:
            count = len(send.messages)
            send.quota.give(count, send.size)
            if send.begun is not None:
                self._parts.halves.stored(send.begun)
            if timer is not None:
                self._answer(send, results[at : at + count])
            at += count

    # -- answering -----------------------------------------------------------------------------------------------------

    def _answer_singles(self, sends: Sequence[_Send], results: Sequence[PutResult]) -> None:
        """Requests of one ordinary message each: what is done for a connection once need not be done for each."""
        done: dict[tuple[RemotingConnection, Quota], _Done] = {}
        prefix, encode = self._id_prefix, self._stored_answers.encode
        for send, result in zip(sends, results, strict=True):
            stored = result.stored
            if stored is None or result.status is not _PUT_OK:
                send.quota.give(1, send.size)
                self._answer(send, (result,))
                continue
            key = (send.connection, send.quota)
            one = done.get(key)
            if one is None:
                one = done[key] = _Done()
            frame = send.frame
            one.size += send.size
            one.requests.append(frame)
            if not frame.flag & FLAG_ONEWAY:
                one.answers.append(encode(frame, f"{prefix}{stored.offset:016X}", stored.queue_id, stored.queue_offset))
        for (connection, quota), one in done.items():
            quota.give(len(one.requests), one.size)
            connection.let_all_go(one.requests)
            connection.send(*one.answers)

    def _answer(self, send: _Send, results: Sequence[PutResult]) -> None:
        refused = [one for one in results if one.stored is None or one.status not in _STORED]
        if refused:  # of a batch, all are: say what is wrong with the one that is to blame
            why = next((one for one in refused if one.status is not PutMessageStatus.OUT_OF_ORDER_SEQUENCE), refused[0])
            self._refuse(send, _code_of(why), why.reason or str(why.status))
            return
        first = results[0].stored
        assert first is not None
        queue_id = first.queue_id if send.begun is None else send.begun.queue_id
        ids = ",".join(f"{self._id_prefix}{one.stored.offset:016X}" for one in results if one.stored is not None)
        fields = write_header(SendAnswer(ids, queue_id, first.queue_offset))
        fields |= _OTHERS
        code = next((_STORED[one.status] for one in results if one.status in _STORED), AnswerCode.SUCCESS)
        send.connection.done(send.frame, send.frame.answer(code, "", fields))

    def _refuse(self, send: _Send, code: AnswerCode, reason: str) -> None:
        send.connection.done(send.frame, send.frame.answer(code, reason))


def usual_properties(text: str) -> str | None:
    """The properties without ``WAIT=true``; None if there is more to do about them than to append others."""
    at = text.find(_WAITING)
    if at >= 0:
        before, behind = text[:at], text[at + len(_WAITING) :]
        if before[-1:] not in _ENDS or behind[:1] not in _ENDS:
            return None
        text = before + behind[1:] if behind else before[:-1]
    for special in _SPECIAL:
        if special in text:
            return None
    return None if text[:1] == "\x02" or text[-1:] == "\x02" else text


def _fit(one: _Send, other: _Send) -> bool:
    """Whether they may be stored together."""
    return (one.is_batch, one.wait, bool(one.half_of)) == (other.is_batch, other.wait, bool(other.half_of))


@lru_cache(maxsize=1024)
def _host_of(place: Place) -> HostAddress:
    return host_address(place.host, place.port)


def _code_of(result: PutResult) -> AnswerCode:
    if result.outcome == "unknown":
        return AnswerCode.SYSTEM_ERROR
    return _REFUSED.get(result.status, AnswerCode.SYSTEM_ERROR)
