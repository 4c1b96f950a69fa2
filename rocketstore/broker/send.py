"""Sends: chooses queues, refuses invalid messages before the store sees them, and limits pending messages.

Order. Messages of one stream reach the store in the order in which they were sent, including those that wait until
their topic has been created.

Flow control. Beyond ``send_pending_messages_max`` or ``send_pending_bytes_max``, no stream is read until something has
been answered (which holds producers back through gRPC), and single sends are refused as busy. One stream may use only a
part of that, so that it cannot keep others out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import grpc

from dledger.access.quota import Quota
from dledger.conditions import Conditions
from dledger.rpc.bridge import LoopBridge, LoopCallback
from dledger.rpc.clients.calls import Call
from dledger.rpc.options import limit_metadata
from dledger.values import MIB
from rocketstore.broker.codec import ResultEncoder, SendCall
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.refusal import Refusal
from rocketstore.broker.topics import Topics
from rocketstore.broker.transactions.begins import Begun, HalfMessages, HalfRefusedError
from rocketstore.message.checks import TIMED_MARK, check_client_topic, check_keys, check_message, check_timed
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TRANSACTION,
    SYS_FLAG_TRANSACTION,
    Message,
)
from rocketstore.message.producer_names import MEMORY_KEY
from rocketstore.store.message_store import MessageStore
from rocketstore.types import PutMessageStatus, PutResult

STREAM_REQUESTS_PENDING_MAX: Final = 1024
STREAM_MESSAGES_PENDING_MAX: Final = 16_384
STREAM_BYTES_PENDING_MAX: Final = 16 * MIB

_ILLEGAL: Final = frozenset({PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED})

SendDone = Callable[[Sequence[PutResult]], None]
StreamContext = grpc.aio.ServicerContext[bytes, bytes]


class SendHandler:
    """Passes validated requests to the store. Lives on the event loop."""

    def __init__(  # one parameter per part of the broker
        self,
        live: LiveConfig,
        store: MessageStore,
        topics: Topics,
        bridge: LoopBridge,
        halves: HalfMessages,
        *,
        mastership: Mastership,
        conditions: Conditions,
    ) -> None:
        self._conditions = conditions
        self.messages_pending = 0
        self.bytes_pending = 0
        self._live = live
        self._store = store
        self._topics = topics
        self._bridge = bridge
        self._halves = halves
        self._mastership = mastership
        self._room_wanted: set[asyncio.Event] = set()

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be accepted for now."""
        config = self._live.now
        return (
            self.messages_pending >= config.send_pending_messages_max
            or self.bytes_pending >= config.send_pending_bytes_max
        )

    async def send(self, request: SendCall) -> Sequence[PutResult]:
        """Handle a single request."""
        if self.is_full or (request.quota is not None and request.quota.is_full):
            busy = PutResult(
                PutMessageStatus.OS_PAGECACHE_BUSY,
                outcome="not_applied",
                reason=f"broker busy: {self.messages_pending} messages are waiting to be stored "
                "(send_pending_messages_max)"
                if self.is_full or request.quota is None
                else str(request.quota.full_error()),
            )
            self._conditions.limit(busy.reason)
            return [busy] * len(request.messages)
        await self.ensure_topics(request)
        outcome: LoopCallback[Sequence[PutResult]] = LoopCallback(self._bridge)
        self.submit(request, outcome.done)
        return await outcome.future

    async def ensure_topics(self, request: SendCall) -> None:
        """Create missing topics if this broker may; messages for a topic that could not be created are refused."""
        owner = "" if request.quota is None else request.quota.owner
        for name in {one.topic for one in request.messages}:
            if self._topics.find(name) is None and name not in request.denied and self._topics.may_create(name):
                await self._topics.create_default(name, owner)

    def submit(self, request: SendCall, done: SendDone) -> None:
        """Pass a request to the store; ``done`` is called once, on the loop, with one result per message."""
        count = len(request.messages)
        self.messages_pending += count
        self.bytes_pending += request.size
        if request.quota is not None:
            request.quota.take(count, request.size)
        denied: dict[int, PutResult] = {}
        if request.denied:
            places = enumerate(request.messages)
            denied = {at: request.denied[one.topic] for at, one in places if one.topic in request.denied}
        begun: list[Begun] = []
        if request.own:
            refused = denied
        elif request.again:
            refused = self._unplaced(request.messages)
        else:
            refused = self._refusals(request.messages, denied, begun) | denied
        self._store_allowed(request, refused, partial(self._halves.all_stored, begun, done) if begun else done)

    def _store_allowed(self, request: SendCall, refused: dict[int, PutResult], done: SendDone) -> None:
        """Store what was not refused. The store accepts or refuses its input as a whole: what it refuses is then left
        out.

        It decides before ``submit`` returns, so a later request cannot overtake the rest of this one. Of numbered
        messages none is left out, because the numbers of the following ones would no longer match the producer's.
        """
        messages = request.messages
        if refused and (request.producer is not None or request.together):
            self._bridge.post(partial(self._answered, request, _refused_wholly(refused, len(messages)), done))
            return
        allowed = [one for at, one in enumerate(messages) if at not in refused] if refused else messages

        def stored(results: Sequence[PutResult]) -> None:  # on any thread
            if len(allowed) > 1 and results[0].status in _ILLEGAL:
                illegal = self._illegal(messages, refused)
                if illegal:
                    self._store_allowed(request, refused | illegal, done)
                    return
            merged = _merge(results, refused, len(messages)) if refused else results
            self._bridge.post(partial(self._answered, request, merged, done))

        if allowed:
            self._store.submit(allowed, stored, wait=request.wait, own=request.again, producer=request.producer)
        else:
            stored(())

    def _answered(self, request: SendCall, results: Sequence[PutResult], done: SendDone) -> None:
        """On the loop: what the request took up is free again."""
        messages = len(request.messages)
        if request.quota is not None:
            request.quota.give(messages, request.size)
        self.messages_pending -= messages
        self.bytes_pending -= request.size
        if self._room_wanted and not self.is_full:
            for room in self._room_wanted:
                room.set()
        done(results)

    def _illegal(self, messages: Sequence[Message], refused: Mapping[int, PutResult]) -> dict[int, PutResult]:
        found = {at: check_message(one, self._live.now.store) for at, one in enumerate(messages) if at not in refused}
        return {at: refusal for at, refusal in found.items() if refusal is not None}

    async def wait_room(self, room: asyncio.Event) -> None:
        """Wait until ``room`` is set, or any request was answered."""
        room.clear()
        self._room_wanted.add(room)
        try:
            await room.wait()
        finally:
            self._room_wanted.discard(room)

    def _refusals(
        self, messages: Sequence[Message], denied: Mapping[int, PutResult], begun: list[Begun]
    ) -> dict[int, PutResult]:
        """The refused messages by place; sets the queues of the others. Half messages are added to ``begun``: from then
        on they are of another topic, so what is ``denied`` must not get that far.
        """
        if not self._mastership.is_master:
            return dict.fromkeys(range(len(messages)), self._mastership.refusal())
        refused: dict[int, PutResult] = {}
        name, queues = "", 0
        keys_max = self._live.now.store.message_keys_max
        for at, message in enumerate(messages):
            if message.topic != name:
                name = message.topic
                queues = self._writable_queues(name)
            if 0 <= message.queue_id < queues and not message.sys_flag & SYS_FLAG_TRANSACTION:
                text = message.property_string
                if len(text) < 2 * keys_max and not message.properties and TIMED_MARK not in text:
                    continue  # the usual case: everything below costs ten times as much
                problem = None
            elif at in denied:
                continue
            else:
                problem = self._place(message)
                if problem is None and message.sys_flag & SYS_FLAG_TRANSACTION:
                    problem = self._begin(message, at, begun)
            if problem is None and (illegal := check_keys(message, keys_max) or check_timed(message)):
                problem = _refusal(PutMessageStatus.MESSAGE_ILLEGAL, illegal)
            if problem is not None:
                refused[at] = problem
        return refused

    def _unplaced(self, messages: Sequence[Message]) -> dict[int, PutResult]:
        """Those of messages to be stored again that have no place here, with the reason."""
        if not self._mastership.is_master:
            return dict.fromkeys(range(len(messages)), self._mastership.refusal())
        found = {at: self._place(message) for at, message in enumerate(messages)}
        return {at: problem for at, problem in found.items() if problem is not None}

    def _writable_queues(self, name: str) -> int:
        topic = None if check_client_topic(name) else self._topics.find(name)
        return 0 if topic is None or self._topics.write_problem(topic, -1) else topic.write_queues

    def _place(self, message: Message) -> PutResult | None:
        """Choose the queue if the producer did not; returns the reason for a refusal, or None."""
        topic = self._topics.find(message.topic)
        if topic is None or check_client_topic(message.topic):
            return self._topics.missing(message.topic)
        problem = self._topics.write_problem(topic, message.queue_id)
        if problem:
            return _refusal(PutMessageStatus.MESSAGE_ILLEGAL, problem)
        if message.queue_id < 0:
            message.queue_id = self._topics.next_queue(topic)
        return None

    def _begin(self, message: Message, place: int, begun: list[Begun]) -> PutResult | None:
        """Make it a half message; or the reason for a refusal."""
        properties = message.properties  # those of a transaction are not kept as text
        group = properties.get(PROPERTY_PRODUCER_GROUP, "")
        problem = self._halves.problem(message)
        if properties.get(PROPERTY_TRANSACTION, "").lower() != "true":
            problem = f"a message that begins a transaction needs the property {PROPERTY_TRANSACTION}=true"
        if problem:
            return _refusal(PutMessageStatus.MESSAGE_ILLEGAL, problem)
        try:
            self._halves.check_begin(group, is_plain=PROPERTY_DELAY not in properties)
        except HalfRefusedError as refused:
            return refused.result
        begun.append(self._halves.begin(message, group, place))
        return None

    def refusal_when_stopping(self) -> PutResult:
        """The result of requests that were not accepted any more."""
        return PutResult(
            PutMessageStatus.SERVICE_NOT_AVAILABLE,
            outcome="not_applied",
            reason="this broker is stopping",
            leader=self._mastership.leader_address,
        )


def _refusal(status: PutMessageStatus, reason: str) -> PutResult:
    return PutResult(status, outcome="not_applied", reason=reason)


def _refused_wholly(refused: Mapping[int, PutResult], count: int) -> list[PutResult]:
    """The results of a numbered request in which some messages are refused."""
    why = f"message {min(refused)} of the request was refused, and a numbered request is stored entirely or not at all"
    other = _refusal(PutMessageStatus.OUT_OF_ORDER_SEQUENCE, why)
    return [refused.get(at, other) for at in range(count)]


def _merge(results: Sequence[PutResult], refused: Mapping[int, PutResult], count: int) -> Sequence[PutResult]:
    stored = iter(results)
    return [refused[at] if at in refused else next(stored) for at in range(count)]


class SendStream:
    """One producer's stream: stores requests as they arrive, and writes results when they are known.

    ``memory`` identifies the broker's producer table if it is lost when the broker ends: a producer that resends
    messages of unknown outcome learns from a changed name that nobody knows it any more.
    """

    def __init__(
        self,
        call: Call,
        sender: SendHandler,
        decode: Callable[[bytes], SendCall],
        encoder: ResultEncoder,
        request_bytes_max: int,
        memory: str = "",
    ) -> None:
        self._context = call.context
        self._connection = call.connection
        self._told = limit_metadata(request_bytes_max) + (((MEMORY_KEY, memory),) if memory else ())
        self._sender = sender
        self._decode = decode
        self._encoder = encoder
        self._answers: deque[tuple[SendCall, Sequence[PutResult]]] = deque()
        self._answer_ready = asyncio.Event()
        self._room = asyncio.Event()
        self._requests_pending = 0
        self._messages_pending = 0
        self._bytes_pending = 0
        self._ended = False
        self._left = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until the client ends the stream or ``stop`` is set, and everything accepted is answered.

        Raises ``InvalidRequestError``, and after ``stop`` ``Refusal``, which refuses everything not accepted.
        """
        # Tells the client that the stream is established: earlier failures mean that nothing was sent.
        await self._context.send_initial_metadata(self._told)
        writer = asyncio.create_task(self._write_answers())
        reader = asyncio.create_task(self._read_requests())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((reader, writer, stopping), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            elif writer.done():  # no more results will be written, so waiting for room would never end
                await writer
                return
            else:  # nothing more is accepted from here on, so the refusal below applies to everything unanswered
                reader.cancel()
                await asyncio.wait((reader,))
            self._ended = True
            self._answer_ready.set()
            await writer
            if stop.is_set():
                raise Refusal.of(self._sender.refusal_when_stopping())
        finally:
            for task in (reader, writer, stopping):
                task.cancel()
            self._left = True
            while self._answers:
                self._drop_answer()

    async def _read_requests(self) -> None:
        while isinstance(data := await self._context.read(), bytes):
            request = self._decode(data)
            await self._sender.ensure_topics(request)
            self._take(request)
            await self._wait_room(request.quota)

    async def _wait_room(self, quota: Quota | None) -> None:
        while True:
            if quota is not None and quota.is_full:  # other streams of the same client count, too
                await quota.wait_room(self._room)
            elif self._is_full or self._sender.is_full:
                await self._sender.wait_room(self._room)
            else:
                return

    @property
    def _is_full(self) -> bool:
        return (
            self._requests_pending >= STREAM_REQUESTS_PENDING_MAX
            or self._messages_pending >= STREAM_MESSAGES_PENDING_MAX
            or self._bytes_pending >= STREAM_BYTES_PENDING_MAX
        )

    def _take(self, request: SendCall) -> None:
        self._requests_pending += 1
        self._messages_pending += len(request.messages)
        self._bytes_pending += request.size
        self._sender.submit(request, partial(self._on_done, request))

    def _on_done(self, request: SendCall, results: Sequence[PutResult]) -> None:
        if self._left:
            return
        if request.quota is not None:  # until the client has read the result
            request.quota.take(len(request.messages), 0)
        self._answers.append((request, results))
        self._answer_ready.set()

    async def _write_answers(self) -> None:
        while True:
            while self._answers:
                request, results = self._answers[0]
                answer = self._encoder.encode(request.request_id, results, packed=request.packed)
                with self._connection.writing():
                    await self._context.write(answer)
                # Only now: a client that reads no results must not fill the memory with them.
                self._drop_answer()
                self._requests_pending -= 1
                self._messages_pending -= len(request.messages)
                self._bytes_pending -= request.size
                self._room.set()
            if self._ended and not self._requests_pending:
                return
            self._answer_ready.clear()
            await self._answer_ready.wait()

    def _drop_answer(self) -> None:
        request, _ = self._answers.popleft()
        if request.quota is not None:
            request.quota.give(len(request.messages), 0)
