"""Administrators' requests to a client through its broker: its progress, to consume one message, to go back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from dledger.remoting.codes import AnswerCode, FrameError, Language, RequestError
from dledger.remoting.connection import DisconnectedError, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import Client, ClientTables
from rocketstore.broker_remoting.administration import Administration
from rocketstore.broker_remoting.links import RemotingLink, connection_of
from rocketstore.broker_remoting.queries import Queries
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.bodies.stats import ConsumerStatusBody, QueueOffsetForC, ResetOffsetBody, ResetOffsetBodyForC
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import (
    ConsumeDirectlyHeader,
    ConsumerStatusHeader,
    ResetClientOffsetHeader,
    RunningInfoHeader,
    read_header,
    write_header,
)

CALL_S_MAX: Final = 10.0
"""How long a client may take to answer; RocketMQ's."""
STATUS_S_MAX: Final = 5.0
CALLS_MAX: Final = 256
"""Calls to clients that may be under way."""
CLIENTS_MAX: Final = 1024
"""Of a group that is asked or told as a whole."""
ASKED_AT_ONCE: Final = 64
"""Clients of groups that are asked where they are."""


class ClientCalls:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration, clients: ClientTables, queries: Queries) -> None:
        self._broker = broker
        self._admin = admin
        self._clients = clients
        self._queries = queries
        self._under_way = 0
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)

    async def running_info(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_CONSUMER_RUNNING_INFO."""
        header = read_header(RunningInfoHeader, frame.fields)
        client = self._client(header.consumer_group, header.client_id)
        return await self._pass_on(frame, client, Frame(frame.code, 0, write_header(header), frame.body))

    async def consume_directly(self, _: RemotingConnection, frame: Frame) -> Frame:
        """CONSUME_MESSAGE_DIRECTLY."""
        header = read_header(ConsumeDirectlyHeader, frame.fields)
        client = self._client(header.consumer_group, header.client_id)
        _host, offset = parse_offset_message_id(header.msg_id)
        record = await self._admin.read(self._queries.record_at, offset)
        if record is None:
            raise RequestError(f"can not find message by the id {header.msg_id}")
        named = ConsumeDirectlyHeader(header.consumer_group, header.client_id, header.msg_id, self._broker.config.name)
        return await self._pass_on(frame, client, Frame(frame.code, 0, write_header(named), record))

    async def status(self, _: RemotingConnection, frame: Frame) -> Frame:
        """INVOKE_BROKER_TO_GET_CONSUMER_STATUS: where each client of a group is, or the one that is named."""
        header = read_header(ConsumerStatusHeader, frame.fields)
        clients = [one for one in self._online(header.group) if header.client_addr in ("", one.client_id)]
        if not clients:
            who = f" with the id {header.client_addr}" if header.client_addr else ""
            raise RequestError(f"No Any Consumer online in the consumer group: [{header.group}]{who}")
        asked = ConsumerStatusHeader(header.topic, header.group)
        request = Frame(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, 0, write_header(asked))
        answers = await asyncio.gather(*(self._status_of(one, request) for one in clients))
        table = {one.client_id: found for one, found in zip(clients, answers, strict=True) if found is not None}
        silent = [one.client_id for one in clients if one.client_id not in table]
        if not table:
            raise RequestError(f"no consumer of {header.group} has answered: {', '.join(silent)}")
        remark = f"these have not answered: {', '.join(silent)}" if silent else ""
        return frame.answer(remark=remark, body=await self._admin.read(ConsumerStatusBody({}, table).encode))

    async def reset(self, _: RemotingConnection, frame: Frame) -> Frame:
        """INVOKE_BROKER_TO_RESET_OFFSET: the clients of the group go to a time, and commit where that is.

        Nothing changes here: the answer names clients that are offline, and mqadmin commits the offsets itself.
        """
        header = read_header(ResetClientOffsetHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        broker, topic = self._broker, self._broker.topics.require_seen(header.topic)
        targets = await self._admin.read(
            broker.stats.reset_targets, header.group, topic, header.timestamp, is_forced=header.is_force
        )
        table = {MessageQueue(topic.name, broker.config.name, queue_id): at for queue_id, at in targets.items()}
        clients = self._online(header.group)
        if not clients:
            reason = (
                f"Consumer not online, so can not reset offset, Group: {header.group} Topic: {header.topic} "
                f"Timestamp: {header.timestamp}"
            )
            raise RequestError(reason, AnswerCode.CONSUMER_NOT_ONLINE)
        body = ResetOffsetBody(table).encode()
        for_clients = _for_c(table) if frame.language == Language.CPP else body
        request = Frame(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, 0, write_header(header), for_clients)
        deaf = [one.client_id for one in clients if not _tell(one, request)]
        remark = f"these do not take what they are sent: {', '.join(deaf)}" if deaf else ""
        return frame.answer(remark=remark, body=body)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _client(self, group: str, client_id: str) -> Client:
        client = self._clients.consumer(group, client_id)
        if client is None:
            raise RequestError(f"The Consumer <{group}> <{client_id}> not online")
        return client

    def _online(self, group: str) -> list[Client]:
        found = self._clients.consumers(group)
        clients = [] if found is None else list(found.clients.values())
        if len(clients) > CLIENTS_MAX:
            raise RequestError(f"the group {group} has {len(clients)} clients here, more than {CLIENTS_MAX}")
        return clients

    async def _pass_on(self, frame: Frame, client: Client, request: Frame) -> Frame:
        """The client's answer as it is."""
        try:
            answer = await self._call(client, request, CALL_S_MAX)
        except TimeoutError as error:
            reason = f"consumer <{client.client_id}> has not answered within {CALL_S_MAX:g} s"
            raise RequestError(reason, AnswerCode.CONSUME_MSG_TIMEOUT) from error
        return frame.answer(answer.code, answer.remark, answer.fields, answer.body)

    async def _call(self, client: Client, request: Frame, timeout_s: float) -> Frame:
        if self._under_way >= CALLS_MAX:
            reason = f"[OVERLOAD] {self._under_way} clients have yet to answer, try again later"
            raise RequestError(reason, AnswerCode.SYSTEM_BUSY)
        self._under_way += 1
        try:
            return await connection_of(client.link).call(request, timeout_s)
        except (DisconnectedError, TooManyCallsError, FrameError) as error:
            raise RequestError(f"consumer <{client.client_id}>: {error}") from error
        finally:
            self._under_way -= 1

    async def _status_of(self, client: Client, request: Frame) -> dict[MessageQueue, int] | None:
        """None: no answer, or none that can be read."""
        try:
            async with self._asking:
                answer = await self._call(client, request, STATUS_S_MAX)
            if answer.code:
                return None
            found = await self._admin.read(ConsumerStatusBody.decode, answer.body)
        except (TimeoutError, RequestError):
            return None
        return dict(found.message_queue_table)


def _for_c(table: dict[MessageQueue, int]) -> bytes:
    places: Sequence[QueueOffsetForC] = [
        QueueOffsetForC(one.topic, one.broker_name, one.queue_id, offset) for one, offset in table.items()
    ]
    return ResetOffsetBodyForC(tuple(places)).encode()


def _tell(client: Client, request: Frame) -> bool:
    """Returns whether it could be sent; clients that use gRPC take no such requests."""
    return isinstance(client.link, RemotingLink) and client.link.connection.tell(request)
