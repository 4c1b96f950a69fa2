"""PULL_MESSAGE and LITE_PULL_MESSAGE: RocketMQ's checks and codes for the broker's own pulls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Final, NamedTuple

from dledger.access.quota import Quota
from dledger.access.rules import AccessRules
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame, head_of
from dledger.remoting.server import Handler
from dledger.rpc.clients.connections import Leases
from rocketstore.broker.broker import Broker
from rocketstore.broker.groups import Groups
from rocketstore.broker.pull import Pull
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker_remoting.access import RemotingAccess
from rocketstore.broker_remoting.links import RemotingLink
from rocketstore.remoting.bodies.routes import MASTER_ID
from rocketstore.remoting.headers import PullAnswer, PullHeader, write_header
from rocketstore.remoting.pull_frames import found_head, read_pull
from rocketstore.state.changes import GroupConfig
from rocketstore.types import GetMessageStatus, GetResult, MessageModel

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
