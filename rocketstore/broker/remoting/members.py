"""Requests of clients about themselves and each other: heartbeats, members of a group, locks on queues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from dledger.conditions import ConditionKind
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.remoting.access import QuotaOf
from rocketstore.broker.remoting.clients import ClientLink, ClientTables, Trouble
from rocketstore.broker.remoting.decoding import BodyDecoder
from rocketstore.broker.remoting.locks import QueueLocks
from rocketstore.broker.remoting.notices import Notices
from rocketstore.broker.remoting.retries import Retries, retry_topic
from rocketstore.remoting.bodies.clients import (
    HeartbeatData,
    LockedQueuesBody,
    LockQueuesBody,
    MessageModel,
)
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.headers import GroupHeader, UnregisterClientHeader, read_header
from rocketstore.state.changes import check_group
from rocketstore.types import BrokerRole

_LOG: Final = logging.getLogger("rocketstore")
HEARTBEAT_BYTES_MAX: Final = 1024 * 1024
"""A thousand subscriptions take a fifth of it, a thousand with five tags each a third."""
TROUBLES_MAX: Final = 16
"""Groups with troubles that are conditions at a time: anybody may make groups, and a node has room for few."""
TROUBLE_S: Final = 90.0
"""RocketMQ's clients send a heartbeat every 30 s."""
_KINDS: Final = {
    Trouble.SUBSCRIPTIONS: ConditionKind.DIFFERENT_SUBSCRIPTIONS,
    Trouble.CLIENT_ID: ConditionKind.SHARED_CLIENT_ID,
}
LOCKED_AT_ONCE: Final = 256
"""Queues that are locked, or unlocked, in one turn of the loop: 0.005 s."""
COMPLAINTS_MAX: Final = 64
"""The limit of groups named in logs because they have no retry topic: every heartbeat may name thousands."""


def batched(queues: Sequence[MessageQueue], count: int) -> Iterator[Sequence[MessageQueue]]:
    """Some at a time; at least once, perhaps none."""
    for begin in range(0, max(1, len(queues)), count):
        yield queues[begin : begin + count]


class Members:
    """On the loop."""

    def __init__(self, parts: BrokerParts, retries: Retries, quota_of: QuotaOf, decoder: BodyDecoder) -> None:
        self._retries = retries
        self._decoder = decoder
        self._quota_of = quota_of
        now = asyncio.get_running_loop().time
        self._parts = parts
        self._notices = Notices(self._links_to_tell)
        self.clients = ClientTables(now, self._notices.changed, parts.config.access.account_share_percent, self._told)
        self._locks = QueueLocks(now, parts.config.access.account_share_percent)
        self._complaints: set[str] = set()
        self._troubles: dict[tuple[Trouble, str], float] = {}  # until when, in the loop's time

    async def heartbeat(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """HEART_BEAT."""
        if len(frame.body) > HEARTBEAT_BYTES_MAX:
            raise RequestError(f"a heartbeat of {len(frame.body)} bytes: at most {HEARTBEAT_BYTES_MAX} are allowed")
        beat = await self._decoder.run(connection, frame, HeartbeatData.decode, frame.body)
        if connection.is_closed:  # it would never be removed, and no other consumer would get its queues
            return frame.answer()
        owner = self._quota_of(connection, frame).owner
        await self.join(connection, owner, frame.language, frame.version, beat)
        return frame.answer()

    async def join(self, link: ClientLink, owner: str, language: int, version: int, beat: HeartbeatData) -> None:
        """Record a heartbeat. Raises ``RequestError``: the client may not be in so many groups, or in this one."""
        for data in beat.consumer_data_set:
            check_group(data.group_name)
        self.clients.heartbeat(link, language, version, beat, owner)
        if self._parts.store.role is not BrokerRole.SLAVE:
            await self._make_retry_topics(owner, beat)

    async def _make_retry_topics(self, owner: str, beat: HeartbeatData) -> None:
        """Consumers subscribe to them, and pull from them, before any message was sent back."""
        for data in beat.consumer_data_set:
            group = self._retries.group(data.group_name)
            if group.retry_queues and data.message_model is not MessageModel.BROADCASTING:
                try:
                    await self._retries.ensure_topic(retry_topic(group), owner)
                except RequestError as error:
                    if len(self._complaints) < COMPLAINTS_MAX and group.name not in self._complaints:
                        self._complaints.add(group.name)
                        _LOG.warning("no topic for what %s sends back: %s", group.name, error)

    async def unregister(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """UNREGISTER_CLIENT."""
        header = read_header(UnregisterClientHeader, frame.fields)
        self.clients.unregister(connection, header.producer_group, header.consumer_group)
        return frame.answer()

    async def consumer_ids(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_CONSUMER_LIST_BY_GROUP: clients use it to divide the queues among themselves."""
        name = read_header(GroupHeader, frame.fields).consumer_group
        group = self.clients.consumers(name)
        if group is None:
            raise RequestError(f"no consumer for this group, {name}", AnswerCode.SYSTEM_ERROR)
        return frame.answer(body=group.encoded_ids())

    async def lock(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """LOCK_BATCH_MQ."""
        wanted = await self._decoder.run(connection, frame, LockQueuesBody.decode, frame.body)
        owner = self._quota_of(connection, frame).owner
        got: list[MessageQueue] = []
        for some in batched(wanted.mq_set, LOCKED_AT_ONCE):
            got += self.lock_queues(wanted.consumer_group, wanted.client_id, some, owner)
            await asyncio.sleep(0)
        answer = LockedQueuesBody(tuple(got))
        body = answer.encode() if len(got) <= LOCKED_AT_ONCE else await self._parts.readers.run(answer.encode)
        return frame.answer(body=body)

    async def unlock(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """UNLOCK_BATCH_MQ."""
        unwanted = await self._decoder.run(connection, frame, LockQueuesBody.decode, frame.body)
        for some in batched(unwanted.mq_set, LOCKED_AT_ONCE):
            self.unlock_queues(unwanted.consumer_group, unwanted.client_id, some)
            await asyncio.sleep(0)
        return frame.answer()

    def lock_queues(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], owner: str
    ) -> tuple[MessageQueue, ...]:
        """Lock or renew; returns what the client has locked now. Raises ``RequestError``: this is no master, or there
        are too many.
        """
        self._check_master()
        return self._locks.lock(group, client_id, queues, owner)

    def unlock_queues(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Unlock the client's queues."""
        self._locks.unlock(group, client_id, queues)

    def closed(self, connection: ClientLink) -> None:
        """A client has disconnected."""
        self.clients.closed(connection)

    def hang_up_on_the_silent(self) -> None:
        """Close connections of clients without a recent heartbeat."""
        for connection in self.clients.silent():
            connection.close("it sent no heartbeat for too long")

    def close(self) -> None:
        """Tell nobody about others any more."""
        self._notices.close()

    def _told(self, trouble: Trouble, group: str, message: str) -> None:
        """A heartbeat shows what is wrong with a group's members: it holds until no heartbeat has shown it for long."""
        now = asyncio.get_running_loop().time()
        key = (trouble, group)
        self._troubles = {one: until for one, until in self._troubles.items() if until > now}
        if key in self._troubles or len(self._troubles) < TROUBLES_MAX:
            self._troubles[key] = now + TROUBLE_S
            self._parts.conditions.set(_KINDS[trouble], message, subject=group, for_ms=round(TROUBLE_S * 1000))

    def _links_to_tell(self, name: str) -> tuple[ClientLink, ...]:
        group = self.clients.consumers(name)
        if group is None or not self._parts.state.group(name).notify_changes:
            return ()
        return tuple(group.clients)

    def _check_master(self) -> None:
        if self._parts.store.role is BrokerRole.SLAVE:
            raise RequestError("this broker is a slave: lock at the master", AnswerCode.SERVICE_NOT_AVAILABLE)
