"""Producer and consumer groups: who is in them, who has which queue to itself, and which consumers hear of changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from dledger.access.rules import RETRY_PREFIX
from dledger.conditions import ConditionKind, Conditions
from rocketstore.broker.clients import ClientLink, ClientTables, Heartbeat, Trouble
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.locks import QueueLocks
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.notices import Notices
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.retries import Retries, retry_topic
from rocketstore.broker.state_changes import StateChanges
from rocketstore.broker.topics import TopicNews
from rocketstore.state.attributes import TopicRequestMode
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import GroupConfig, check_group
from rocketstore.types import MessageModel, QueueKey

_LOG: Final = logging.getLogger("rocketstore")
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


class Groups:
    """On the loop. Every node has its own members; queues are locked, and messages sent back, on the master."""

    def __init__(
        self,
        live: LiveConfig,
        state: BrokerState,
        mastership: Mastership,
        retries: Retries,
        news: TopicNews,
        changes: StateChanges,
        conditions: Conditions,
    ) -> None:
        """``news``: of topics, for a deleted group takes its retry topic along."""
        now, percent = asyncio.get_running_loop().time, live.now.access.account_share_percent
        self._state = state
        self._mastership = mastership
        self._news = news
        self._changes = changes
        self._conditions = conditions
        self._notices = Notices(self._links_to_tell)
        self._locks = QueueLocks(now, percent)
        self.retries: Final = retries
        self.clients: Final = ClientTables(now, self._notices.changed, percent, self._report)
        self._complaints: set[str] = set()
        self._troubles: dict[tuple[Trouble, str], float] = {}  # until when, in the loop's time

    async def join(self, link: ClientLink, owner: str, beat: Heartbeat) -> None:
        """Record a heartbeat, and make the retry topics of the groups it names.

        Raises ``Refusal``: the client may not be in so many groups, or in one that does not exist.
        """
        for data in beat.consumers:
            check_group(data.group)
        self.clients.heartbeat(link, beat, owner)
        if self._mastership.is_master:
            await self._make_retry_topics(owner, beat)

    async def _make_retry_topics(self, owner: str, beat: Heartbeat) -> None:
        """Consumers subscribe to them, and pull from them, before any message was sent back."""
        for data in beat.consumers:
            group = self.retries.group(data.group)
            if group.retry_queues and data.message_model is not MessageModel.BROADCASTING:
                try:
                    await self.retries.ensure_topic(retry_topic(group), owner)
                except Refusal as error:
                    if len(self._complaints) < COMPLAINTS_MAX and group.name not in self._complaints:
                        self._complaints.add(group.name)
                        _LOG.warning("no topic for what %s sends back: %s", group.name, error)

    async def lock(self, group: str, client_id: str, queues: Sequence[QueueKey], owner: str) -> list[QueueKey]:
        """Lock or renew; returns what the client has locked now. Raises ``Refusal``: this is no master, or there are
        too many.
        """
        got: list[QueueKey] = []
        for some in batched(queues):
            self._mastership.require()
            got += self._locks.lock(group, client_id, some, owner)
            await asyncio.sleep(0)
        return got

    async def unlock(self, group: str, client_id: str, queues: Sequence[QueueKey]) -> None:
        """Unlock the client's queues."""
        for some in batched(queues):
            self._locks.unlock(group, client_id, some)
            await asyncio.sleep(0)

    async def put(self, groups: Sequence[GroupConfig]) -> None:
        """Create or change groups. Raises ``Refusal``."""
        self._mastership.require()
        await self._changes.make(*[partial(self._state.put_group, one) for one in groups])

    async def delete(self, name: str, *, with_offsets: bool) -> bool:
        """Delete a group; returns whether it is gone. Raises ``Refusal``.

        A group exists as long as it has offsets, so without ``with_offsets`` it keeps them, and the default settings.
        Else what it has to try again and its dead letters are removed, too.
        """
        self._mastership.require()
        if not self._state.has_group(name) and all(one.group != name for one in self._state.request_modes()):
            return True
        if with_offsets or not self._state.offsets(name):
            await self._changes.make(partial(self._state.delete_group, name))
            self._news.tell()
            return True
        await self._changes.make(partial(self._state.put_group, GroupConfig(name)))
        return False

    async def set_request_mode(self, mode: TopicRequestMode) -> None:
        """Have a group's consumers pull a topic, or pop it. Raises ``Refusal``."""
        self._mastership.require()
        if mode.topic.startswith(RETRY_PREFIX):
            raise Refusal(RefusalKind.NOT_PERMITTED, "retry topic is not allowed to set mode: it is always pulled")
        await self._changes.make(partial(self._state.set_request_mode, mode))

    def hang_up_on_the_silent(self) -> None:
        """Close connections of clients without a recent heartbeat."""
        for link in self.clients.silent():
            link.close("it sent no heartbeat for too long")

    def close(self) -> None:
        """Tell nobody about others any more."""
        self._notices.close()

    def _report(self, trouble: Trouble, group: str, message: str) -> None:
        """A heartbeat shows what is wrong with a group's members: it holds until no heartbeat has shown it for long."""
        now = asyncio.get_running_loop().time()
        key = (trouble, group)
        self._troubles = {one: until for one, until in self._troubles.items() if until > now}
        if key in self._troubles or len(self._troubles) < TROUBLES_MAX:
            self._troubles[key] = now + TROUBLE_S
            self._conditions.set(_KINDS[trouble], message, subject=group, for_ms=round(TROUBLE_S * 1000))

    def _links_to_tell(self, name: str) -> tuple[ClientLink, ...]:
        group = self.clients.consumers(name)
        if group is None or not self._state.group(name).notify_changes:
            return ()
        return tuple(group.clients)


def batched(queues: Iterable[QueueKey]) -> Iterable[tuple[QueueKey, ...]]:
    """Some at a time; at least once, perhaps none."""
    rest = iter(queues)
    yield tuple(islice(rest, LOCKED_AT_ONCE))
    while some := tuple(islice(rest, LOCKED_AT_ONCE)):
        yield some
