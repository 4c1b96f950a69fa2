"""Brokers' requests to a consumer: that members have changed, to reset offsets, for its progress."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.client.aio.assignment import DeliveryQueue
from rocketstore.client.aio.broker_session import Subscriptions
from rocketstore.client.aio.rebalancer import Rebalancer
from rocketstore.remoting.bodies.clients import ConsumerRunningInfo, ProcessQueueInfo
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.bodies.stats import ConsumerStatusBody, ResetOffsetBody
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import ResetClientOffsetHeader, read_header

_log = logging.getLogger(__name__)
BYTES_PER_MIB: Final = 1 << 20


class ConsumerRequests:
    """Answers them on the loop, at once."""

    def __init__(self, subscriptions: Subscriptions, deliveries: DeliveryQueue, rebalancer: Rebalancer) -> None:
        self._subscriptions = subscriptions
        self._deliveries = deliveries
        self._rebalancer = rebalancer

    def take(self, connection: RemotingConnection, request: Frame) -> None:
        """Carry out a request, and answer it if an answer is expected."""
        try:
            answer = self._answer(request)
        except RequestError as error:
            answer = request.answer(error.code, str(error))
        except Exception as error:  # noqa: BLE001  # whatever a server sends must not end the connection's reading
            _log.exception("request %d of %s failed, unexpectedly", request.code, connection.place)
            answer = request.answer(AnswerCode.SYSTEM_ERROR, repr(error))
        connection.done(request, answer)

    def _answer(self, request: Frame) -> Frame:
        match request.code:
            case RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
                self._rebalancer.members_changed()
                return request.answer()
            case RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
                self._reset(read_header(ResetClientOffsetHeader, request.fields), request.body)
                return request.answer()
            case RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
                positions = {queue: one.in_flight.done for queue, one in self._deliveries.assignments.items()}
                topic = request.fields.get("topic", "")
                table = {queue: offset for queue, offset in positions.items() if topic in ("", queue.topic)}
                return request.answer(body=ConsumerStatusBody(table, {}).encode())
            case RequestCode.GET_CONSUMER_RUNNING_INFO:
                return request.answer(body=self._running_info().encode())
        reason = f"this Python client does not answer requests of code {request.code}"
        return request.answer(AnswerCode.REQUEST_CODE_NOT_SUPPORTED, reason)

    def _reset(self, header: ResetClientOffsetHeader, body: bytes) -> None:
        if header.group != self._subscriptions.group:
            return
        table: Mapping[MessageQueue, int] = ResetOffsetBody.decode(body).offset_table
        held = self._deliveries.assignments
        for queue, offset in table.items():
            assignment = held.get(queue)
            if assignment is None or queue.topic != header.topic or offset < 0:
                continue
            _log.warning(
                "group %s: its offset in queue %d of %s is reset to %d",
                header.group,
                queue.queue_id,
                queue.topic,
                offset,
            )
            self._deliveries.go_to(assignment, offset)
            assignment.may_rewind = True

    def _running_info(self) -> ConsumerRunningInfo:
        subscriptions, held = self._subscriptions, self._deliveries.assignments
        return ConsumerRunningInfo(
            {
                "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
                "PROP_CONSUMEORDERLY": str(subscriptions.options.ordered).lower(),
            },
            tuple(subscriptions.wanted(topic).subscription(topic) for topic in subscriptions.expressions),
            {
                queue: ProcessQueueInfo(
                    commit_offset=max(one.committed or 0, 0),
                    cached_msg_count=len(one.rest) + one.out,
                    cached_msg_size_in_mi_b=one.in_flight.size // BYTES_PER_MIB,
                    locked=one.usable_until != float("inf"),
                )
                for queue, one in held.items()
            },
        )
