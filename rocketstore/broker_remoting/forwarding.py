"""A slave passes on to the master what only the master may do.

A client learns of a new master when it next asks a name server, by default every 30 s. Until then it talks to the old
one, if that still runs, and gets the new one's answers from there. Nothing is passed on twice, and nothing while no
master is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from dledger.access.quota import HostQuota
from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import AnswerCode, FrameError
from dledger.remoting.connection import DisconnectedError, Place, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import ACCESS_KEY, FLAG_ONEWAY, Frame
from dledger.remoting.server import LITTLE, Answer, Direct, Handler
from dledger.values import parse_address
from rocketstore.broker.broker import Broker
from rocketstore.remoting.codes import RequestCode

FORWARDED: Final = frozenset(
    {
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.END_TRANSACTION,
        RequestCode.RECALL_MESSAGE,
        RequestCode.UPDATE_CONSUMER_OFFSET,
        RequestCode.LOCK_BATCH_MQ,
        RequestCode.UNLOCK_BATCH_MQ,
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.CLONE_GROUP_OFFSET,
        RequestCode.POP_MESSAGE,
        RequestCode.PEEK_MESSAGE,
        RequestCode.NOTIFICATION,
        RequestCode.ACK_MESSAGE,
        RequestCode.BATCH_ACK_MESSAGE,
        RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    }
)
_WAITING: Final = frozenset({RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION})
"""Requests that may wait for messages: for ``pollTime`` ms."""
BORN_HOST: Final = "_bornHost"
"""Ours, in a request that was passed on: where it came from. Believed of members of the group only."""
TIMEOUT_S: Final = 2.8
"""Clients give up after 3 s."""
POLL_S_MAX: Final = 30.0
"""How much longer the master may wait for messages."""
UNDER_WAY_MAX: Final = 4096
"""Of all clients together; one host may have ``account_share_percent`` of them."""


class Forwarding:
    """On the loop."""

    def __init__(self, broker: Broker, client: RemotingClient) -> None:
        """``client`` checks the names of those it dials, if it uses TLS."""
        self._broker = broker
        self._is_masters_name_checked = broker.store.log.is_replicated or broker.config.effective_security.has_tls
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()
        self._quota = HostQuota(UNDER_WAY_MAX, UNDER_WAY_MAX * broker.config.access.account_share_percent // 100)
        if broker.store.log.is_replicated:
            broker.member_hosts.start()

    def direct(self, take: Direct) -> Direct:
        """``take``, at the master."""

        def take_or_forward(connection: RemotingConnection, frame: Frame) -> None:
            if self._master_for(frame):
                task = asyncio.get_running_loop().create_task(self._forward_direct(connection, frame))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                take(connection, frame)

        return take_or_forward

    def awaited(self, handler: Handler) -> Handler:
        """``handler``, at the master."""

        async def handle_or_forward(connection: RemotingConnection, frame: Frame) -> Answer:
            if self._master_for(frame):
                return await self._forward(connection, frame)
            return await handler(connection, frame)

        return handle_or_forward

    def origin_of(self, connection: RemotingConnection, frame: Frame) -> Place:
        """Where a request came from, also if another member has passed it on."""
        text = frame.fields.get(BORN_HOST)
        if text is None or connection.place.host not in self._broker.member_hosts.known:
            return connection.place
        try:
            return Place(*parse_address(text))
        except ValueError:
            return connection.place

    async def close(self) -> None:
        """Give up on what is under way."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _master_for(self, frame: Frame) -> str:
        """The master's address if this is for it and not for us; empty otherwise."""
        broker = self._broker
        if broker.mastership.is_master or frame.code not in FORWARDED:
            return ""
        if BORN_HOST in frame.fields:
            return ""  # it was passed on already
        view = broker.mastership.view()
        return view.leader_address if view.leader != broker.config.node_id else ""

    async def _forward_direct(self, connection: RemotingConnection, frame: Frame) -> None:
        answer: Answer = None
        try:
            answer = await self._forward(connection, frame)
        except asyncio.CancelledError:
            answer = frame.answer(AnswerCode.SYSTEM_ERROR, "this broker is stopping: the request may still be done")
            raise
        finally:
            connection.done(frame, answer)

    async def _forward(self, connection: RemotingConnection, frame: Frame) -> Answer:
        master, host = self._master_for(frame), connection.counted_as
        refusal = ""
        if not master:
            refusal = "the master is unknown"
        elif ACCESS_KEY in frame.fields and not self._is_masters_name_checked:
            refusal = "does not pass on signed requests to an address of which only a name server says that it is the "
            refusal += "master: send to the master, or use TLS"
        elif not self._quota.has_room(host, little=connection.under_way <= LITTLE):
            refusal = "too many requests to the master are in progress, or too many of your host"
        if refusal:
            return frame.answer(AnswerCode.SERVICE_NOT_AVAILABLE, f"this broker is a slave, and {refusal}")
        self._quota.change(host, 1)
        try:
            return await self._ask_master(master, connection, frame)
        finally:
            self._quota.change(host, -1)

    async def _ask_master(self, master: str, connection: RemotingConnection, frame: Frame) -> Answer:
        timeout_s = TIMEOUT_S + (_poll_s(frame) if frame.code in _WAITING else 0.0)
        fields: Mapping[str, str] = {**frame.fields, BORN_HOST: str(connection.place)}
        request = frame._replace(fields=fields)
        try:
            if frame.flag & FLAG_ONEWAY:
                await self._client.tell(master, request)
                return None
            found = await self._client.call(master, request, timeout_s)
        except (UnreachableError, TooManyCallsError, FrameError) as error:
            return frame.answer(AnswerCode.SERVICE_NOT_AVAILABLE, f"this broker is a slave: {error}")
        except (DisconnectedError, TimeoutError) as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            return frame.answer(AnswerCode.SYSTEM_ERROR, f"the master may have done it, or not: {reason}")
        return found._replace(opaque=frame.opaque, form=frame.form)


def _poll_s(frame: Frame) -> float:
    text = frame.fields.get("pollTime", "")
    return min(int(text) / 1000, POLL_S_MAX) if text.isascii() and text.isdecimal() and len(text) < 10 else 0.0
