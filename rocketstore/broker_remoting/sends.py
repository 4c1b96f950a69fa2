"""Sends over remoting: decoded here, stored by ``rocketstore.broker.sending``, and answered together by connection.

There is a frame for every message, so the frames of sends are read and answered without the general machinery; those of
any other shape are left to that. With timed messages: RECALL_MESSAGE of RocketMQ 5, and our LIST_TIMED.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from secrets import token_hex
from typing import Final

from dledger.access.rules import DEAD_PREFIX, RETRY_PREFIX
from dledger.errors import DLedgerError
from dledger.remoting.codes import OUTCOME_FIELD, AnswerCode, RequestError
from dledger.remoting.connection import Place, RemotingConnection
from dledger.remoting.frame import FLAG_ONEWAY, Frame, HeaderForm, encode
from dledger.rpc.loops import LoopCallback
from dledger.types import ProducerBatch
from rocketstore.broker.broker import Broker
from rocketstore.broker.mastership import host_address
from rocketstore.broker.refusal import Refusal, RefusalKind, kind_of
from rocketstore.broker.sending import MessageSource, SendBatch
from rocketstore.broker.timed.listing import TimedList, TimedListEntry, list_timed
from rocketstore.broker.transactions.service import Resumptions
from rocketstore.broker_remoting.access import OriginOf, RemotingAccess
from rocketstore.broker_remoting.requests import CODES, told_outcome
from rocketstore.commit_log.replicated import status_of
from rocketstore.message.batch import CorruptBatchError, expand_batch
from rocketstore.message.checks import SEQUENCE_MAX, check_producer_name
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TRANSACTION,
    PROPERTY_WAIT,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_PREPARED,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION,
    HostAddress,
    Message,
)
from rocketstore.message.properties import decode_properties
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import (
    NumberedSend,
    TimedMessageBody,
    TimedMessagesBody,
    decode_name,
    encode_next,
    encode_stored,
)
from rocketstore.remoting.headers import (
    EndTransactionHeader,
    ListTimedHeader,
    RecallAnswer,
    RecallHeader,
    ResumeCheckHeader,
    SendAnswer,
    SendHeader,
    read_header,
    write_header,
)
from rocketstore.types import PutMessageStatus, PutResult, StoredPlace

_SHORT: Final = ("a", "b", "c", "d", "e", "f", "g", "h")
_LONG: Final = (
    "producerGroup",
    "topic",
    "defaultTopic",
    "defaultTopicQueueNums",
    "queueId",
    "sysFlag",
    "bornTimestamp",
    "flag",
)
_SHORT_REST: Final = ("i", "j", "k", "l", "m")
_LONG_REST: Final = ("properties", "reconsumeTimes", "unitMode", "maxReconsumeTimes", "batch")
_PLACE: Final = 2_000_000_001
"""Stands for a number in a template; no answer has it for its own."""


def read_send(fields: Mapping[str, str], *, short: bool) -> SendHeader:
    """As ``read_header``. Raises ``RequestError``."""
    names = _SHORT if short else _LONG
    try:
        group, topic, default_topic, queues, queue_id, sys_flag, born, flag = map(fields.__getitem__, names)
        numbers = int(queues), int(queue_id), int(sys_flag), int(born), int(flag)
        properties, times, unit, most, batch = map(fields.get, _SHORT_REST if short else _LONG_REST)
        return SendHeader(
            group,
            topic,
            default_topic,
            *numbers,
            properties or "",
            int(times) if times else 0,
            (unit or "").lower() == "true",
            int(most) if most else -1,
            (batch or "").lower() == "true",
        )
    except (KeyError, ValueError):
        return read_header(SendHeader, fields, short=short)


class StoredAnswers:
    """Answers to messages that are stored; ``others`` are fields that all of them have."""

    def __init__(self, others: Mapping[str, str]) -> None:
        self._others = dict(others)
        frame = Frame(0, 0).answer(fields=self._fields("%s", -1, -2))._replace(opaque=_PLACE)
        header = encode(frame)[8:].replace(b"%s", b"%b").replace(b'"-1"', b'"%d"').replace(b'"-2"', b'"%d"')
        self._header = header.replace(str(_PLACE).encode(), b"%d")

    def encode(self, request: Frame, message_id: str, queue_id: int, queue_offset: int) -> bytes:
        """The whole frame."""
        if request.form is not HeaderForm.JSON:
            return encode(request.answer(fields=self._fields(message_id, queue_id, queue_offset)))
        header = self._header % (message_id.encode(), queue_id, queue_offset, request.opaque)
        return (len(header) + 4).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header

    def _fields(self, message_id: str, queue_id: int, queue_offset: int) -> dict[str, str]:
        return write_header(SendAnswer(message_id, queue_id, queue_offset)) | self._others


ANSWER_S_MAX: Final = 2.5
"""Clients hang up after 3 s, and lose what else is under way: a slow send is answered before."""
REGION: Final = "DefaultRegion"
PROPERTY_CLUSTER: Final = "CLUSTER"

_HOST_FLAGS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
_DROPPED: Final = (f"{PROPERTY_WAIT}\x01", f"{PROPERTY_CLUSTER}\x01")
_NOT_WAITING: Final = f"{PROPERTY_WAIT}\x01false"
_DELAY: Final = f"{PROPERTY_DELAY}\x01"
_TRANSACTION: Final = f"{PROPERTY_TRANSACTION}\x01"
_GROUP: Final = f"{PROPERTY_PRODUCER_GROUP}\x01"
_WAIT: Final = f"{PROPERTY_WAIT}\x01"
_WAITING: Final = f"{_WAIT}true"
_ENDS: Final = ("", "\x02")
_SPECIAL: Final = (_WAIT, f"{PROPERTY_CLUSTER}\x01", _TRANSACTION, _DELAY, "\x02\x02")
"""Parts of properties that make them unusual, wherever they are."""
_LONG_NAMES: Final = frozenset({RequestCode.SEND_MESSAGE})
_STORED: Final = {
    PutMessageStatus.PUT_OK: AnswerCode.SUCCESS,
    PutMessageStatus.FLUSH_DISK_TIMEOUT: AnswerCode.FLUSH_DISK_TIMEOUT,
    PutMessageStatus.SLAVE_NOT_AVAILABLE: AnswerCode.SLAVE_NOT_AVAILABLE,
    PutMessageStatus.FLUSH_SLAVE_TIMEOUT: AnswerCode.FLUSH_SLAVE_TIMEOUT,
}
_OTHERS: Final = {"MSG_REGION": REGION, "TRACE_ON": "true"}
_PUT_OK: Final = PutMessageStatus.PUT_OK
_FOLLOWS: Final = PutMessageStatus.OUT_OF_ORDER_SEQUENCE
"""Of messages that are refused because another one is."""
_NUMBERED: Final = int(OwnCode.SEND_NUMBERED)
_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)
_LATE: Final = (
    f"the message was not acknowledged within {ANSWER_S_MAX:g} s: it may be stored, now or later; sending it again may "
    "store it twice"
)
_NO_TOPIC: Final = frozenset({PutMessageStatus.TOPIC_NOT_FOUND, PutMessageStatus.TOPIC_NOT_CREATED})
COMMIT: Final = 8
ROLLBACK: Final = 12
UNKNOWN: Final = 0


class _Send:
    """A request that has no answer yet, as long as it has a frame."""

    __slots__ = ("at", "connection", "frame", "sends", "size", "topic")

    def __init__(self, sends: RemotingSends, connection: RemotingConnection, frame: Frame, topic: str) -> None:
        self.sends = sends
        self.connection = connection
        self.frame: Frame | None = frame
        self.topic = topic
        self.at = sends.loop.time()

    def done(self, results: Sequence[PutResult]) -> None:
        """The broker has stored the messages, or not."""
        frame = self.frame
        if frame is None:  # it was answered when it was late
            return
        self.frame = None
        if len(results) == 1 and frame.code != _NUMBERED:
            stored = results[0].stored
            if stored is not None and results[0].status is _PUT_OK and not results[0].handle:
                self.sends.answer_stored(self.connection, frame, stored)
                return
        self.sends.answer(self, frame, results)


class RemotingSends:
    """SEND_MESSAGE, SEND_MESSAGE_V2, SEND_BATCH_MESSAGE, and our SEND_NUMBERED and NEXT_NUMBER; on the loop."""

    def __init__(self, broker: Broker, origin_of: OriginOf, access: RemotingAccess) -> None:
        self._broker = broker
        self._origin_of = origin_of
        self._access = access
        self._id_prefix = offset_message_id(broker.store_host, 0)[:-16]
        self._cluster = f"{PROPERTY_CLUSTER}\x01{broker.config.cluster_name}"
        self._alone = self._cluster.encode("utf-8", "replace")
        self._memory = "" if broker.store.log.is_replicated else token_hex(8)
        """Identifies what this broker remembers of producers, if it forgets that at its end."""
        self._stored_answers = StoredAnswers(_OTHERS)
        self._pending: deque[_Send] = deque()  # in the order in which they came, perhaps with some that are answered
        self._late_timer: asyncio.TimerHandle | None = None
        self._answers: dict[RemotingConnection, tuple[list[Frame], list[bytes]]] = {}  # of what was stored together
        self.loop = asyncio.get_running_loop()
        broker.sending.add_listener(self._flush)

    def take(self, connection: RemotingConnection, frame: Frame) -> None:
        """Store what is sent, and answer. Raises ``RequestError`` and ``Refusal``: it is refused at once."""
        header = read_send(frame.fields, short=frame.code not in _LONG_NAMES)
        caller = MessageSource(self._access.quota_of(connection, frame))
        if frame.code == _BATCH and self._is_refused(connection, frame, header.topic, caller):
            return
        self._submit(connection, frame, header.topic, caller, self._read(connection, frame, header))

    def take_numbered(self, connection: RemotingConnection, frame: Frame) -> None:
        """SEND_NUMBERED."""
        quota = self._access.quota_of(connection, frame)
        if self._is_refused(connection, frame, "", MessageSource(quota)):
            return
        wanted = NumberedSend.decode(frame.body)
        check_producer_name(wanted.producer)
        if not 0 <= wanted.sequence <= SEQUENCE_MAX:
            raise RequestError(f"a message's number must be 0 to {SEQUENCE_MAX}, not {wanted.sequence}")
        born_host = _host_of(self._origin_of(connection, frame))
        messages = []
        for one in wanted.messages:
            message = Message(one.topic, one.body, one.queue_id, {}, one.flag, one.sys_flag & ~_HOST_FLAGS, one.born_ms)
            message.born_host, message.store_host = born_host, self._broker.store_host
            self._set_properties(message, one.properties.decode("utf-8", "replace"))
            messages.append(message)
        name = self._access.own_producer(connection, frame, wanted.producer)
        producer = ProducerBatch(name, wanted.sequence, len(messages))
        denied = self._access.denied_topics(connection, frame, messages)
        caller = MessageSource(quota, denied)
        batch = SendBatch(messages, len(frame.body), wanted.wait, producer)
        self._submit(connection, frame, messages[0].topic, caller, batch)

    async def next_number(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """NEXT_NUMBER."""
        broker, name = self._broker, decode_name(frame.body)
        broker.mastership.require()
        check_producer_name(name)
        outcome: LoopCallback[int | DLedgerError] = LoopCallback(broker.loop.bridge)
        broker.store.submit_producer(self._access.own_producer(connection, frame, name), outcome.done)
        found = await outcome.future
        if isinstance(found, DLedgerError):  # whatever it is, a question changes nothing
            refused = PutResult(status_of(found), outcome="not_applied", reason=str(found))
            raise Refusal.of(refused, broker.mastership.leader_address)
        return frame.answer(body=encode_next(found, self._memory))

    # -- reading -------------------------------------------------------------------------------------------------------

    def _is_refused(self, connection: RemotingConnection, frame: Frame, topic: str, caller: MessageSource) -> bool:
        """Whether a request of many messages is refused before it is read: in that time nobody else is served."""
        problem = self._broker.sending.problem(caller)
        if problem is not None:
            connection.done(frame, _refused(frame, topic, problem, 0 if frame.code == _NUMBERED else -1))
        return problem is not None

    def _submit(
        self, connection: RemotingConnection, frame: Frame, topic: str, caller: MessageSource, batch: SendBatch
    ) -> None:
        send = _Send(self, connection, frame, topic)
        self._pending.append(send)
        if self._late_timer is None:
            self._late_timer = self.loop.call_later(ANSWER_S_MAX, self._look_for_late)
        self._broker.sending.submit(caller, batch, send.done)

    def _read(self, connection: RemotingConnection, frame: Frame, header: SendHeader) -> SendBatch:
        """The messages of a request. One that is sent to ``%RETRY%group`` may be a dead letter by now."""
        broker, name, queue_id, target = self._broker, header.topic, header.queue_id, None
        if name.startswith(RETRY_PREFIX):
            broker.mastership.require()  # a slave does not know which group there is
            target = broker.groups.retries.target_of(name, header.reconsume_times, header.max_reconsume_times)
            name, queue_id = target.name, min(queue_id, target.write_queues - 1)
        message = Message(
            name,
            frame.body,
            queue_id,
            {},
            header.flag,
            header.sys_flag & ~_HOST_FLAGS,
            header.born_timestamp,
            _host_of(self._origin_of(connection, frame)),
            broker.store_host,
            header.reconsume_times,
        )
        is_batch = frame.code == _BATCH
        wait = self._set_properties(message, header.properties, header.producer_group)
        messages = self._expanded(message) if is_batch else [message]
        size = len(frame.body) + len(header.properties)
        return SendBatch(messages, size, wait, None, is_batch, target, header.default_topic_queue_nums)

    def _set_properties(self, message: Message, text: str, group: str = "") -> bool:
        """Give a message the properties to be stored; returns whether its answer waits for the disk.

        ``group``: the producer's, if it begins a transaction and does not name it itself.
        """
        usual = usual_properties(text)
        if usual is not None and not message.sys_flag & SYS_FLAG_TRANSACTION:
            message.property_string = f"{usual}\x02{self._cluster}".encode("utf-8", "replace") if usual else self._alone
            return True
        given = text.split("\x02")
        segments = [one for one in given if one and not one.startswith(_DROPPED)]
        segments.append(self._cluster)
        if any(one.startswith(_TRANSACTION) and one[len(_TRANSACTION) :].lower() == "true" for one in segments):
            message.sys_flag |= SYS_FLAG_PREPARED  # as in RocketMQ's broker
            segments = [one for one in segments if not one.startswith(_GROUP)]
            segments += [one for one in given if one.startswith(_WAIT)]
            named = (one.removeprefix(_GROUP) for one in given if one.startswith(_GROUP))
            segments.append(f"{_GROUP}{next(filter(None, named), group)}")
        if message.topic.startswith(DEAD_PREFIX):
            segments = [one for one in segments if not one.startswith(_DELAY)]
        message.property_string = "\x02".join(segments).encode("utf-8", "replace")
        if any(one.startswith(_DELAY) for one in segments):  # it takes more than appending to delay a message
            message.properties, message.property_string = decode_properties(message.property_string), b""
        return _NOT_WAITING not in given

    def _expanded(self, batch: Message) -> list[Message]:
        """The messages of a batch. Raises ``RequestError`` before any is made, unless one of them is to blame."""
        most = self._broker.config.store.max_message_size
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

    # -- answering -----------------------------------------------------------------------------------------------------

    def _look_for_late(self) -> None:
        """Answer requests that would be late; look again when the next one would be."""
        pending, now = self._pending, self.loop.time()
        while pending and (pending[0].frame is None or now - pending[0].at >= ANSWER_S_MAX):
            send = pending.popleft()
            frame, send.frame = send.frame, None
            if frame is not None:
                send.connection.done(frame, frame.answer(AnswerCode.SYSTEM_ERROR, _LATE))
        self._late_timer = None
        if pending:
            self._late_timer = self.loop.call_later(pending[0].at + ANSWER_S_MAX - now, self._look_for_late)

    def answer_stored(self, connection: RemotingConnection, frame: Frame, stored: StoredPlace) -> None:
        """The usual case: what is done for a connection once need not be done for each of its messages."""
        found = self._answers.get(connection)
        if found is None:
            found = self._answers[connection] = [], []
        found[0].append(frame)
        if not frame.flag & FLAG_ONEWAY:
            message_id = f"{self._id_prefix}{stored.offset:016X}"
            found[1].append(self._stored_answers.encode(frame, message_id, stored.queue_id, stored.queue_offset))

    def _flush(self) -> None:
        """The broker has given the results of what was stored together."""
        answers, self._answers = self._answers, {}
        for connection, (requests, encoded) in answers.items():
            connection.let_all_go(requests)
            connection.send(*encoded)
        pending = self._pending
        while pending and pending[0].frame is None:
            pending.popleft()

    def answer(self, send: _Send, frame: Frame, results: Sequence[PutResult]) -> None:
        """Any other request is answered by itself."""
        is_numbered = frame.code == _NUMBERED
        refused = [at for at, one in enumerate(results) if not one.ok or (one.stored is None and not is_numbered)]
        if refused:  # of a batch, all are: say what is wrong with the one that is to blame
            why = next((at for at in refused if results[at].status is not _FOLLOWS), refused[0])
            send.connection.done(frame, _refused(frame, send.topic, results[why], why if is_numbered else -1))
            return
        code = next((_STORED[one.status] for one in results if one.status is not _PUT_OK), AnswerCode.SUCCESS)
        if is_numbered:
            answer = frame.answer(code, body=encode_stored(*self._broker.store_host, results))
        else:
            places = [one.stored for one in results if one.stored is not None]
            ids = ",".join(f"{self._id_prefix}{one.offset:016X}" for one in places)
            found = SendAnswer(ids, places[0].queue_id, places[0].queue_offset, recall_handle=results[0].handle)
            fields = write_header(found)
            answer = frame.answer(code, "", fields | _OTHERS)
        send.connection.done(frame, answer)


def _refused(frame: Frame, topic: str, result: PutResult, place: int) -> Frame:
    """``place`` of the message to blame, for a numbered request; RocketMQ's clients know no more than the code."""
    code = AnswerCode.SYSTEM_ERROR if result.outcome == "unknown" else CODES[kind_of(result)]
    reason = result.reason or str(result.status)
    if result.status in _NO_TOPIC:
        reason = f"topic[{topic}] not exist: {reason}"
    elif result.status is PutMessageStatus.FLOW_CONTROL:
        reason = f"[OVERLOAD] {reason}"
    fields: dict[str, str] = {OUTCOME_FIELD: told_outcome(result.outcome)}
    if place >= 0:
        fields |= {"status": result.status, "leader": result.leader, "message": str(place)}
    return frame.answer(code, reason, fields)


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


@lru_cache(maxsize=1024)
def _host_of(place: Place) -> HostAddress:
    return host_address(place.host, place.port)


class RemotingTransactions:
    """END_TRANSACTION and RESUME_CHECK_HALF_MESSAGE. On the loop."""

    def __init__(self, broker: Broker) -> None:
        self._ends = broker.ends
        self._mastership = broker.mastership
        self._resumptions = Resumptions(
            broker.store, broker.state, broker.loop.bridge, broker.loop.readers, broker.mastership, broker.store_host
        )

    async def end(self, _: RemotingConnection, frame: Frame) -> Frame:
        """END_TRANSACTION. It is oneway: what a producer does not hear of, a check will ask again."""
        header = read_header(EndTransactionHeader, frame.fields)
        if header.commit_or_rollback not in (COMMIT, ROLLBACK, UNKNOWN):
            raise RequestError(f"a transaction cannot end with {header.commit_or_rollback}")
        if header.commit_or_rollback == UNKNOWN:
            self._mastership.require()
        else:
            await self._ends.end(
                header.tran_state_table_offset,
                header.commit_log_offset,
                header.producer_group,
                commit=header.commit_or_rollback == COMMIT,
            )
        return frame.answer()

    async def resume(self, _: RemotingConnection, frame: Frame) -> Frame:
        """RESUME_CHECK_HALF_MESSAGE: begin a transaction again that was given up, once for each master."""
        await self._resumptions.resume(read_header(ResumeCheckHeader, frame.fields).msg_id)
        return frame.answer()


_FINAL: Final = (RefusalKind.INVALID, RefusalKind.NO_MESSAGE)


class RemotingTimed:
    """On the loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def recall(self, _: RemotingConnection, frame: Frame) -> Frame:
        """RECALL_MESSAGE."""
        header = read_header(RecallHeader, frame.fields)
        try:
            message_id = await self._broker.timed.recall(header.topic, header.recall_handle)
        except Refusal as error:
            if error.kind not in _FINAL:
                raise
            return frame.answer(AnswerCode.ILLEGAL_OPERATION, str(error))
        return frame.answer(fields=write_header(RecallAnswer(message_id)))

    async def list(self, _: RemotingConnection, frame: Frame) -> Frame:
        """LIST_TIMED."""
        broker, header = self._broker, read_header(ListTimedHeader, frame.fields)
        broker.mastership.require_caught_up()
        found: TimedList = await broker.loop.readers.run(
            list_timed,
            broker.store,
            broker.state,
            broker.config.name,
            topic=header.topic,
            key=header.key,
            begin=(header.from_ms, header.from_offset),
            count=header.count,
        )
        counts = await broker.loop.readers.run(broker.timed.counts)
        messages = tuple(map(_body, found.messages))
        next_ = (found.next_ms, found.next_offset)
        body = TimedMessagesBody(messages, *next_, counts.open, counts.late, counts.next_due_ms)
        return frame.answer(body=body.encode())


def _body(found: TimedListEntry) -> TimedMessageBody:
    return TimedMessageBody(
        found.topic,
        found.queue_id,
        found.due_ms,
        found.message_id,
        found.keys,
        found.tags,
        found.size,
        found.born_ms,
        found.handle,
    )
