"""QueryAssignment, ReceiveMessage, and what consumers say of a message then: pop, as the protocol has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from google.protobuf.duration_pb2 import Duration

from dledger.rpc.clients.connections import Leases
from rocketstore.broker.broker import Broker
from rocketstore.broker.permissions import Need, Operation, needs
from rocketstore.broker.popping.requests import (
    ANY_QUEUE,
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    MESSAGES_MAX,
    WAIT_MS_MAX,
    Ack,
    ChangeInvisible,
    DeadLetter,
    PoppedRecord,
    PopResult,
    Receive,
)
from rocketstore.broker.popping.service import ACKS_MAX
from rocketstore.broker.reading import SQL92, TAG
from rocketstore.broker.refusal import Refusal
from rocketstore.grpc.calls import OK, GatewayCall, RejectedError, name_of
from rocketstore.grpc.messages import REPACKED_BYTES_MAX, is_compressed, set_ms, to_client
from rocketstore.grpc.registry import Registry
from rocketstore.grpc.routes import RouteCalls
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs

ANSWER_S: Final = 0.2
"""A receive is answered so long before the call must be."""
UNTOLD_WAIT_SHARE: Final = 0.5
"""Of a call's time, that a receive waits whose client does not say for how long."""
BODY_BYTES_MAX: Final = 64 << 20
"""The longest body that is decompressed for a client."""
_INVALID: Final = pb.Status(
    code=pb.INVALID_RECEIPT_HANDLE,
    message="the message was acknowledged before, or its time is over and it was delivered again",
)

_Consuming = (
    pbs.QueryAssignmentRequest
    | pbs.AckMessageRequest
    | pbs.ChangeInvisibleDurationRequest
    | pbs.ForwardMessageToDeadLetterQueueRequest
)


class Receives:
    """On the loop, of the leader."""

    def __init__(self, broker: Broker, registry: Registry, routes: RouteCalls) -> None:
        self._broker = broker
        self._registry = registry
        self._routes = routes
        registry.add_gone_listener(broker.popping.client_gone)

    # -- who gets what -------------------------------------------------------------------------------------------------

    async def assignment(self, _: GatewayCall, request: pbs.QueryAssignmentRequest) -> pbs.QueryAssignmentResponse:
        """QueryAssignment: every consumer may have messages of every queue; of an ordered group it asks for each."""
        ordered = self._broker.groups.retries.group(name_of(request.group)).ordered
        answer = pbs.QueryAssignmentResponse(status=OK)
        for topic, broker in await self._routes.places(name_of(request.topic), request.endpoints):
            for queue_id in range(topic.read_queues) if ordered else (ANY_QUEUE,):
                answer.assignments.add().message_queue.CopyFrom(self._routes.queue(topic, queue_id, broker))
        return answer

    async def receive(
        self, call: GatewayCall, request: pbs.ReceiveMessageRequest
    ) -> Sequence[pbs.ReceiveMessageResponse]:
        """ReceiveMessage."""
        wish = self._wish(call, request)
        with Leases(self._broker.shares.room, call.quota) as leases, call.quota.wait("pulls_waiting_max"):
            found = await self._broker.popping.receive(wish, leases, call.quota.owner)
        if not found.messages:
            code = pb.TOO_MANY_REQUESTS if found.full else pb.MESSAGE_NOT_FOUND
            why = (
                f"group {wish.group} has as many messages under way as it may have: acknowledge some first"
                if found.full
                else "no message arrived in time"
            )
            return [pbs.ReceiveMessageResponse(status=pb.Status(code=code, message=why))]
        answers = [pbs.ReceiveMessageResponse(status=OK)]
        now_ms = self._broker.loop.clock.wall_ms()
        answers += await self._delivered(wish, found.messages, now_ms)
        last = pbs.ReceiveMessageResponse()
        set_ms(last.delivery_timestamp, now_ms)
        return [*answers, last]

    async def _delivered(
        self, wish: Receive, found: Sequence[PoppedRecord], now_ms: int
    ) -> list[pbs.ReceiveMessageResponse]:
        """As clients can read them: unpacked off the loop, and those that no longer fit come again."""
        if not any(map(is_compressed, (one.record for one in found))):
            return [_delivered(one, wish.topic, now_ms) for one in found]
        answers: list[pbs.ReceiveMessageResponse] = []
        grown, done = 0, 0
        try:
            for one in found:
                answer = await self._broker.loop.readers.run(_delivered, one, wish.topic, now_ms)
                grown += max(0, len(answer.message.body) - len(one.record))
                if answers and grown > REPACKED_BYTES_MAX:
                    break
                answers.append(answer)
            done = len(answers)
        finally:
            left = [one.handle for one in found[done:]]
            if left:
                with suppress(Refusal):
                    self._broker.popping.give_back(wish.group, wish.topic, left)
        return answers

    def _wish(self, call: GatewayCall, request: pbs.ReceiveMessageRequest) -> Receive:
        """Raises ``RejectedError``, ``Refusal``."""
        group, topic = name_of(request.group), name_of(request.message_queue.topic)
        ordered = self._broker.groups.retries.group(group).ordered
        filter_ = request.filter_expression
        kind = SQL92 if filter_.type == pb.SQL else TAG
        invisible_ms = 0
        if not request.auto_renew:
            invisible_ms = duration_ms(request.invisible_duration)
            if not INVISIBLE_MS_MIN <= invisible_ms <= INVISIBLE_MS_MAX:
                raise RejectedError(
                    pb.ILLEGAL_INVISIBLE_TIME,
                    f"a message can be invisible for 1 s to 12 h, not for {invisible_ms / 1000:g} s",
                )
        # A simple consumer names the queue whose turn it is, though another one may have messages; that of Node.js
        # always names the first.
        queue_id = request.message_queue.id if ordered and request.auto_renew else ANY_QUEUE
        return Receive(
            group,
            topic,
            queue_id,
            max(1, min(request.batch_size, MESSAGES_MAX)),
            max(invisible_ms, INVISIBLE_MS_MIN),
            self._wait_ms(call, request),
            kind,
            filter_.expression or "*",
            request.attempt_id,
            call.client_id,
            since_ms=self._registry.subscribed_since_ms(group, topic),
            auto_renew=request.auto_renew,
        )

    @staticmethod
    def _wait_ms(call: GatewayCall, request: pbs.ReceiveMessageRequest) -> int:
        remaining_ms = int((call.remaining_s() - ANSWER_S) * 1000)
        if request.HasField("long_polling_timeout"):
            wait_ms = duration_ms(request.long_polling_timeout)
        else:
            wait_ms = int(remaining_ms * UNTOLD_WAIT_SHARE)
        return max(0, min(wait_ms, remaining_ms, WAIT_MS_MAX))

    # -- what became of it ---------------------------------------------------------------------------------------------

    async def ack(self, call: GatewayCall, request: pbs.AckMessageRequest) -> pbs.AckMessageResponse:
        """AckMessage."""
        group, topic = name_of(request.group), name_of(request.topic)
        if not 0 < len(request.entries) <= ACKS_MAX:
            raise RejectedError(pb.BAD_REQUEST, f"1 to {ACKS_MAX} messages are acknowledged at a time")
        acks = [Ack(group, topic, one.receipt_handle) for one in request.entries]
        results = await self._broker.popping.ack(acks, call.quota.owner)
        answer = pbs.AckMessageResponse()
        for one, result in zip(request.entries, results, strict=True):
            answer.entries.add(message_id=one.message_id, receipt_handle=one.receipt_handle, status=_status(result))
        kinds = Counter(results)
        status = (
            pb.Status(code=pb.MULTIPLE_RESULTS, message="see each entry") if len(kinds) > 1 else _status(results[0])
        )
        answer.status.CopyFrom(status)
        return answer

    async def change_invisible(
        self, call: GatewayCall, request: pbs.ChangeInvisibleDurationRequest
    ) -> pbs.ChangeInvisibleDurationResponse:
        """ChangeInvisibleDuration."""
        change = ChangeInvisible(
            name_of(request.group),
            name_of(request.topic),
            request.receipt_handle,
            duration_ms(request.invisible_duration),
            request.suspend,
            self._is_push(call),
        )
        if not 0 <= change.duration_ms <= INVISIBLE_MS_MAX:
            raise RejectedError(pb.ILLEGAL_INVISIBLE_TIME, "a message can be invisible for 0 s to 12 h")
        changed = await self._broker.popping.change_invisible(change, call.quota.owner)
        return pbs.ChangeInvisibleDurationResponse(status=_status(changed.result), receipt_handle=changed.handle)

    async def dead_letter(
        self, call: GatewayCall, request: pbs.ForwardMessageToDeadLetterQueueRequest
    ) -> pbs.ForwardMessageToDeadLetterQueueResponse:
        """ForwardMessageToDeadLetterQueue."""
        reason = f"its consumer gave it up after {max(request.delivery_attempt, 1)} attempts"
        dead = DeadLetter(name_of(request.group), name_of(request.topic), request.receipt_handle, reason)
        result = await self._broker.popping.dead_letter(dead, call.quota.owner)
        return pbs.ForwardMessageToDeadLetterQueueResponse(status=_status(result))

    async def undelivered(self, _: GatewayCall, request: pbs.AckMessageRequest) -> pbs.AckMessageResponse:
        """Between members only: the client of a receive was gone before its answer, with these messages, was there."""
        handles = [one.receipt_handle for one in request.entries[:MESSAGES_MAX]]
        self._broker.popping.give_back(name_of(request.group), name_of(request.topic), handles)
        return pbs.AckMessageResponse(status=OK)

    def _is_push(self, call: GatewayCall) -> bool:
        """Unless it is known to be another one."""
        client = self._registry.find(call.client_id)
        settings = None if client is None else client.settings
        return settings is None or settings.client_type == pb.PUSH_CONSUMER


def _delivered(one: PoppedRecord, topic: str, now_ms: int) -> pbs.ReceiveMessageResponse:
    answer = pbs.ReceiveMessageResponse(message=to_client(one.record, BODY_BYTES_MAX, topic=topic))
    system = answer.message.system_properties
    system.receipt_handle, system.delivery_attempt = one.handle, one.attempt
    invisible_ms = max(0, one.visible_at_ms - now_ms)
    system.invisible_duration.seconds, rest = divmod(invisible_ms, 1000)
    system.invisible_duration.nanos = rest * 1_000_000
    return answer


def _status(result: PopResult) -> pb.Status:
    return OK if result is PopResult.OK else _INVALID


def returned(data: bytes, answers: Sequence[bytes]) -> pbs.AckMessageRequest | None:
    """For ``undelivered``: the messages in the answers to a receive, whose request was ``data``; None without any."""
    found = [pbs.ReceiveMessageResponse.FromString(one).message for one in answers]
    handles = [one.system_properties.receipt_handle for one in found]
    entries = [pbs.AckMessageEntry(receipt_handle=one) for one in handles if one]
    asked = pbs.ReceiveMessageRequest.FromString(data)
    return (
        pbs.AckMessageRequest(group=asked.group, topic=asked.message_queue.topic, entries=entries) if entries else None
    )


def duration_ms(duration: Duration) -> int:
    """In whole milliseconds."""
    return duration.seconds * 1000 + duration.nanos // 1_000_000


def consuming(request: _Consuming) -> Sequence[Need]:
    """The permissions to consume a topic in a group."""
    return needs(Operation.PULL, [request.topic.name], [request.group.name])


def receive_needs(request: pbs.ReceiveMessageRequest) -> Sequence[Need]:
    """The same, of a request that names a queue."""
    return needs(Operation.PULL, [request.message_queue.topic.name], [request.group.name])
