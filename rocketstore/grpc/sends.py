"""SendMessage: checked and encoded here, stored by ``rocketstore.broker.sending``, recognized when it is sent again.

Clients repeat a send that took too long, under the same id. ``DuplicateWindow`` knows such ids, in the leader's memory,
for a short time: a repetition gets the answer of the first. See ``docs/protocol.md`` for what that means over
failovers. With transactions: EndTransaction, and the question about those whose end was not heard of.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from dledger.errors import CorruptLogError, InvalidRequestError, ShutdownError, told
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import HalfCheck
from rocketstore.broker.refusal import Refusal, RefusalKind, kind_of
from rocketstore.broker.sending import MessageSource, SendBatch
from rocketstore.broker.transactions.run import EndedBeforeError, EndingError, EndRefusedError
from rocketstore.grpc import messages
from rocketstore.grpc.calls import OK, GatewayCall, RejectedError, name_of, status_of
from rocketstore.grpc.messages import check_topic_name, to_client
from rocketstore.grpc.registry import Registry
from rocketstore.message.message import PROPERTY_UNIQUE_KEY, Message
from rocketstore.message.properties import find_property
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.state.changes import TopicConfig
from rocketstore.types import PutMessageStatus, PutResult, StoredPlace

KEPT_S: Final = 10.0
"""How long a message is remembered."""
KEPT_MAX: Final = 200_000
"""Messages of all owners; one owner may have ``account_share_percent`` of them."""
OWNERS_MAX: Final = 4096
"""Beyond, those are forgotten of whom nothing was heard for ``KEPT_S``."""


class _Sent(NamedTuple):
    at: float
    result: asyncio.Future[PutResult]


class DuplicateWindow:
    """On the loop. Owners (accounts, or addresses) cannot see each other's messages, nor push them out."""

    def __init__(self, now: Callable[[], float], share_percent: int, kept_max: int = KEPT_MAX) -> None:
        self._now = now
        self._share = max(1, kept_max * share_percent // 100)
        self._kept_max = kept_max
        self._owners: dict[str, OrderedDict[tuple[str, str], _Sent]] = {}
        self._kept = 0
        self.recognized = 0
        """How many messages were sent again."""

    def __len__(self) -> int:
        """How many are remembered."""
        return self._kept

    def find(self, owner: str, topic: str, message_id: str) -> asyncio.Future[PutResult] | None:
        """The result of a message that was sent before, perhaps not there yet."""
        sent = self._owners.get(owner)
        found = None if sent is None else sent.get((topic, message_id))
        if found is None or found.at < self._now() - KEPT_S:
            return None
        self.recognized += 1
        return found.result

    def begin(self, owner: str, topic: str, message_id: str) -> asyncio.Future[PutResult]:
        """Remember a message that is being sent; give its result to ``settle``."""
        result: asyncio.Future[PutResult] = asyncio.get_running_loop().create_future()
        sent = self._owners.setdefault(owner, OrderedDict())
        if sent.pop((topic, message_id), None) is not None:
            self._kept -= 1
        sent[topic, message_id] = _Sent(self._now(), result)
        self._kept += 1
        self._make_room(owner, sent)
        return result

    def settle(
        self, owner: str, topic: str, message_id: str, begun: asyncio.Future[PutResult], result: PutResult
    ) -> None:
        """The result of a message is known. One that is not stored for sure is forgotten: sent again, it is stored."""
        if not begun.done():
            begun.set_result(result)
        if result.ok and result.outcome == "stored":
            return
        sent = self._owners.get(owner)
        found = None if sent is None else sent.get((topic, message_id))
        if sent is not None and found is not None and found.result is begun:
            del sent[topic, message_id]
            self._kept -= 1
            if not sent:
                del self._owners[owner]

    def _make_room(self, owner: str, sent: OrderedDict[tuple[str, str], _Sent]) -> None:
        """Forget what is old, and the oldest of clients that have too many."""
        too_old = self._now() - KEPT_S
        while sent and (next(iter(sent.values())).at < too_old or len(sent) > self._share):
            sent.popitem(last=False)
            self._kept -= 1
        while self._kept > self._kept_max:
            longest = max(self._owners, key=lambda one: len(self._owners[one]))
            self._owners[longest].popitem(last=False)
            self._kept -= 1
            if not self._owners[longest] and longest != owner:
                del self._owners[longest]
        if len(self._owners) > OWNERS_MAX:
            self._owners = {name: one for name, one in self._owners.items() if one and _newest(one) >= too_old}
            self._kept = sum(map(len, self._owners.values()))


def _newest(sent: OrderedDict[tuple[str, str], _Sent]) -> float:
    return next(reversed(sent.values())).at


BATCH_MAX: Final = 1024
"""Messages of one request; clients send one."""
SUSPECT_S: Final = 15.0
"""For how long after it has become the leader it looks in the log for messages that its predecessor may have taken."""
_STATUSES: Final = {
    PutMessageStatus.FLUSH_DISK_TIMEOUT: pb.MASTER_PERSISTENCE_TIMEOUT,
    PutMessageStatus.FLUSH_SLAVE_TIMEOUT: pb.SLAVE_PERSISTENCE_TIMEOUT,
    PutMessageStatus.SLAVE_NOT_AVAILABLE: pb.HA_NOT_AVAILABLE,
}
Recall = Callable[[str, str], Awaitable[str]]
"""Have a message (by topic and recall handle) not delivered; returns its id. Raises ``Refusal``: ``NO_MESSAGE`` for one
that was delivered or recalled, ``INVALID`` for no handle of the broker's.
"""


class _First(NamedTuple):
    """A message that is not known to have been sent before, and where its result goes."""

    message: Message
    message_id: str
    result: asyncio.Future[PutResult]


class Sends:
    """On the loop."""

    def __init__(self, broker: Broker, registry: Registry) -> None:
        self._broker = broker
        self._registry = registry
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self.window: Final = DuplicateWindow(loop.time, broker.config.access.account_share_percent)
        self._leads_since = -SUSPECT_S
        self._leads_since_ms = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Store nothing more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def leads(self) -> None:
        """This broker has become the leader just now."""
        self._leads_since = self._now()
        self._leads_since_ms = self._broker.loop.clock.wall_ms()

    async def send(self, call: GatewayCall, request: pbs.SendMessageRequest) -> pbs.SendMessageResponse:
        """SendMessage. Raises ``RejectedError`` and ``Refusal``; nothing is stored then, or it is unknown."""
        given = request.messages
        if not given or len(given) > BATCH_MAX:
            raise RejectedError(pb.BAD_REQUEST, f"{len(given)} messages: a request has 1 to {BATCH_MAX}")
        found = self._to_store(call, given)
        if len({one.topic for one in found}) > 1:
            raise RejectedError(pb.BAD_REQUEST, "the messages of one request are for one topic")
        name = found[0].topic
        topic = self._broker.topics.find(name)
        for message, one in zip(found, given, strict=True):
            self._choose_queue(message, one, topic)
        await self._registry.published(call, name)
        results = await self._store(call, found)
        return self._answer(given, results)

    def _to_store(self, call: GatewayCall, given: Sequence[pb.Message]) -> list[Message]:
        """Raises ``RejectedError``. Compressed bodies may have the size of one message together: a request of a few
        megabytes could become gigabytes.
        """
        config, found = self._broker.config, list[Message]()
        unpacked_bytes_max = body_bytes_max = config.store.max_message_size
        for one in given:
            made = messages.to_store(
                call,
                one,
                self._broker.store_host,
                body_bytes_max,
                unpacked_bytes_max,
                may_be_empty=config.grpc_empty_bodies,
            )
            if one.system_properties.body_encoding == pb.GZIP:
                unpacked_bytes_max -= len(made.body)
            found.append(made)
        return found

    def _choose_queue(self, message: Message, given: pb.Message, topic: TopicConfig | None) -> None:
        """The queue is the server's choice: by message group, by priority, or in turn."""
        if topic is None:  # it is created, and its queues are numbered then
            if given.system_properties.message_group:
                message.queue_id = 0
            return
        system, queues = given.system_properties, max(topic.write_queues, 1)
        if system.message_group:
            message.queue_id = zlib.crc32(system.message_group.encode()) % queues
        elif system.HasField("priority"):
            message.queue_id = min(system.priority, queues - 1)
        else:
            message.queue_id = self._broker.topics.next_queue(topic)

    # -- storing -------------------------------------------------------------------------------------------------------

    async def _store(self, call: GatewayCall, found: Sequence[Message]) -> Sequence[PutResult]:
        """One result per message. A call that is given up meanwhile changes nothing: its repetition gets them."""
        owner, window = call.quota.owner, self.window
        results: list[asyncio.Future[PutResult]] = []
        first: list[_First] = []
        for message in found:
            message_id = find_property(message.property_string, PROPERTY_UNIQUE_KEY) or ""
            result = window.find(owner, message.topic, message_id)
            if result is None:
                result = window.begin(owner, message.topic, message_id)
                first.append(_First(message, message_id, result))
            results.append(result)
        if first:
            if call.may_be_repeated or self._now() - self._leads_since < SUSPECT_S:
                task = asyncio.get_running_loop().create_task(self._put_unless_stored(call, first))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._put(call, first)
        return [await asyncio.shield(one) for one in results]

    def _put(self, call: GatewayCall, first: Sequence[_First]) -> None:
        owner, settle = call.quota.owner, self.window.settle

        def done(results: Sequence[PutResult]) -> None:
            for one, result in zip(first, results, strict=True):
                settle(owner, one.message.topic, one.message_id, one.result, result)

        stored = [one.message for one in first]
        size = sum(len(one.body) + len(one.property_string) for one in stored)
        self._broker.sending.submit(MessageSource(call.quota), SendBatch(stored, size), done)

    async def _put_unless_stored(self, call: GatewayCall, first: Sequence[_First]) -> None:
        """Store what the log does not hold yet."""
        left: list[_First] = []
        try:
            for one in first:
                known = None
                if call.may_be_repeated or one.message.born_timestamp <= self._leads_since_ms:
                    known = await self._stored_before(one.message, one.message_id)
                if known is None:
                    left.append(one)
                else:
                    self.window.settle(call.quota.owner, one.message.topic, one.message_id, one.result, known)
        except BaseException:
            lost = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason="it is stopping")
            for one in first:
                self.window.settle(call.quota.owner, one.message.topic, one.message_id, one.result, lost)
            raise
        if left:
            self._put(call, left)

    async def _stored_before(self, message: Message, message_id: str) -> PutResult | None:
        """A message with this id that the log holds already: its sender has not heard of it, and sends it again."""
        store = self._broker.store
        try:
            records = await self._broker.loop.readers.run(
                lambda: store.query(message.topic, message_id, 1, 0, 1 << 62, unique=True)
            )
            one = decode_record(records[0]) if records else None
        except (CorruptLogError, CorruptRecordError, InvalidRequestError, ShutdownError):
            return None
        if one is None or one.unique_key != message_id:
            return None
        self.window.recognized += 1
        place = StoredPlace(one.offset, one.size, one.queue_id, one.queue_offset, one.store_timestamp)
        return PutResult(PutMessageStatus.PUT_OK, place)

    # -- answering -----------------------------------------------------------------------------------------------------

    def _answer(self, given: Sequence[pb.Message], results: Sequence[PutResult]) -> pbs.SendMessageResponse:
        gone = [one for one in results if _is_elsewhere(one)]
        if len(gone) == len(results):
            raise Refusal.of(gone[0])
        answer = pbs.SendMessageResponse()
        for one, result in zip(given, results, strict=True):
            entry = answer.entries.add(message_id=one.system_properties.message_id)
            entry.status.CopyFrom(_status(result, one.system_properties.message_type))
            stored = result.stored
            if stored is None or entry.status.code != pb.OK:
                continue
            entry.offset = stored.queue_offset
            kind = one.system_properties.message_type
            if kind == pb.TRANSACTION:
                entry.transaction_id = transaction_id(stored)
            entry.recall_handle = result.handle
        codes = {one.status.code for one in answer.entries}
        if len(codes) > 1:
            answer.status.CopyFrom(pb.Status(code=pb.MULTIPLE_RESULTS, message="see each message's own result"))
        else:
            answer.status.CopyFrom(answer.entries[0].status)
        return answer


def _is_elsewhere(result: PutResult) -> bool:
    """Whether another broker may take the message, or have taken it: calls are passed on to it."""
    return not result.ok and (kind_of(result) is RefusalKind.UNAVAILABLE or result.outcome == "unknown")


def _status(result: PutResult, kind: pb.MessageType) -> pb.Status:
    if result.status is PutMessageStatus.PUT_OK:
        return OK
    if result.ok:
        return pb.Status(code=_STATUSES[result.status], message=result.reason or str(result.status))
    if kind == pb.DELAY and result.status is PutMessageStatus.MESSAGE_ILLEGAL:
        return pb.Status(code=pb.ILLEGAL_DELIVERY_TIME, message=told(result.reason))
    return status_of(Refusal.of(result))


def transaction_id(half: StoredPlace) -> str:
    """Names a half message; opaque to clients."""
    return f"{half.queue_offset:x}-{half.offset:x}"


def parse_transaction_id(text: str) -> tuple[int, int]:
    """Queue offset and position of a half message. Raises ``RejectedError``."""
    first, _, second = text.partition("-")
    try:
        found = int(first, 16), int(second, 16)
    except ValueError:
        found = -1, -1
    if min(found) < 0 or max(found) >= 1 << 62:
        raise RejectedError(pb.INVALID_TRANSACTION_ID, f"no transaction has the id {text[:64]!r}")
    return found


class Recalls:
    """On the loop."""

    def __init__(self, recall: Recall) -> None:
        self._recall = recall

    async def recall(self, call: GatewayCall, request: pbs.RecallMessageRequest) -> pbs.RecallMessageResponse:
        """RecallMessage. That there is no such message says nothing if a leader that was lost may have recalled it."""
        topic = check_topic_name(name_of(request.topic))
        try:
            message_id = await self._recall(topic, request.recall_handle)
        except Refusal as error:
            if error.kind is not RefusalKind.NO_MESSAGE or not call.may_be_repeated:
                raise
            told = f"the leader before this one may have recalled the message, for this very call: {error}"
            raise RejectedError(pb.SLAVE_PERSISTENCE_TIMEOUT, told) from None
        return pbs.RecallMessageResponse(status=OK, message_id=message_id)


class TransactionCalls:
    """On the loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def end(self, _: GatewayCall, request: pbs.EndTransactionRequest) -> pbs.EndTransactionResponse:
        """EndTransaction. A resolution that is not known yet keeps the message, and its producer is asked again."""
        topic = check_topic_name(name_of(request.topic))
        queue_offset, offset = parse_transaction_id(request.transaction_id)
        is_commit = request.resolution == pb.COMMIT
        if request.resolution not in (pb.COMMIT, pb.ROLLBACK):
            self._broker.mastership.require()
            return pbs.EndTransactionResponse(status=OK)
        try:
            await self._broker.ends.end(queue_offset, offset, topic, commit=is_commit)
        except EndingError as error:  # who passes on calls asks again, until that is done
            raise Refusal(RefusalKind.UNAVAILABLE, str(error)) from None
        except EndedBeforeError as error:
            await self._check_same_end(topic, request.message_id, is_commit=is_commit, reason=str(error))
        except EndRefusedError as error:
            raise RejectedError(pb.INVALID_TRANSACTION_ID, str(error)) from None
        return pbs.EndTransactionResponse(status=OK)

    async def _check_same_end(self, topic: str, message_id: str, *, is_commit: bool, reason: str) -> None:
        """A producer that repeats how a transaction ends has been heard. Raises ``RejectedError`` if it ended in the
        other way: nobody can take that back.
        """
        store = self._broker.store
        find = partial(store.query, topic, message_id, 1, 0, 1 << 62, unique=True)
        try:
            is_committed = bool(await self._broker.loop.readers.run(find))
        except (CorruptLogError, InvalidRequestError, ShutdownError):
            is_committed = False
        if is_committed != is_commit:
            how = "committed" if is_committed else "rolled back, or never was"
            raise RejectedError(pb.INVALID_TRANSACTION_ID, f"{reason}; it was {how}")

    def question(self, check: HalfCheck) -> bytes:
        """The command that asks a producer what became of a transaction. Raises ``CorruptRecordError``."""
        message = to_client(check.record, self._broker.config.store.max_message_size)
        message.system_properties.message_type = pb.TRANSACTION
        command = pbs.RecoverOrphanedTransactionCommand(
            message=message, transaction_id=f"{check.queue_offset:x}-{check.offset:x}"
        )
        return pbs.TelemetryCommand(recover_orphaned_transaction_command=command).SerializeToString()
