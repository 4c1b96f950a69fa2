"""Producer and consumer groups: who is in them, who has which queue to itself, and which consumers hear of changes.

**Locks** give a client of a group exclusive use of a queue, for ordered consumption. They are in memory, on masters. A
new master knows no locks, as in RocketMQ: clients keep theirs for 30 s without a renewal, so during that time two of
them may receive messages of one queue. A master that is cut off from its group grants locks until it steps down, after
an election timeout without a quorum, like sends that it takes and cannot store.

**Notices** tell the consumers of a group that its members have changed. Each change concerns every member, and makes
every member ask for the list: a thousand consumers that join one by one would cause half a million of both. So changes
that follow each other closely are told together, later the more consumers there are to tell.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from dledger.access.rules import RETRY_PREFIX
from dledger.conditions import ConditionKind, Conditions
from rocketstore.broker.clients import ClientLink, ClientTables, Heartbeat, Trouble
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.mastership import Mastership, StateChanges
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.retries import Retries, retry_topic
from rocketstore.broker.topics import TopicNews
from rocketstore.state.attributes import TopicRequestMode
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import GroupConfig, check_group
from rocketstore.types import MessageModel, QueueKey

INTERVAL_S: Final = 0.1
"""The least time between two rounds."""
NOTICES_PER_S: Final = 2000
"""Of all groups, on average."""
AT_ONCE_MAX: Final = 500
"""How many are told before others get their turn."""


class Notices:
    """On the loop. ``links_of`` gives the consumers of a group that are to be told."""

    def __init__(self, links_of: Callable[[str], Iterable[ClientLink]]) -> None:
        self._links_of = links_of
        self._changed: dict[str, None] = {}  # in the order of their changes
        self._links: deque[ClientLink] = deque()  # the rest of one group
        self._group = ""
        """The group of ``_links``."""
        self._timer: asyncio.Handle | None = None

    def changed(self, group: str) -> None:
        """Tell this group's consumers: in the next turn of the loop, unless others were told just now."""
        self._changed[group] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_soon(self._tell)

    def close(self) -> None:
        """Tell nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        if not self._changed and not self._links:
            self._timer = None
            return
        told = 0
        while told < AT_ONCE_MAX and (self._links or self._changed):
            if not self._links:
                self._group = next(iter(self._changed))
                del self._changed[self._group]
                self._links.extend(self._links_of(self._group))
            while self._links and told < AT_ONCE_MAX:
                self._links.popleft().members_changed(self._group)
                told += 1
        self._timer = asyncio.get_running_loop().call_later(max(INTERVAL_S, told / NOTICES_PER_S), self._tell)


LOCK_S: Final = 60.0
"""RocketMQ's: a lock not renewed for this long is free."""
LOCKS_MAX: Final = 500_000
FORGOTTEN: Final = 2
"""Expired locks that go for each one that is asked for, of the same owner and of all: faster than new ones come."""
NAME_CHARS_MAX: Final = 1024


class _Lock(NamedTuple):
    client_id: str
    renewed_at: float
    owner: str
    """Whose share of the locks it takes up: an account, or an address."""


_Key = tuple[str, str, int]
"""Group, topic and queue."""


class QueueLocks:
    """On the loop. ``now`` in seconds; ``share_percent``: of all locks, what one owner may have."""

    def __init__(self, now: Callable[[], float], share_percent: int = 100) -> None:
        self._now = now
        self._share_max = max(1, LOCKS_MAX * share_percent // 100)
        self._locks: OrderedDict[_Key, _Lock] = OrderedDict()  # the one renewed last is the last
        self._owned: dict[str, OrderedDict[_Key, None]] = {}  # in the same order

    def lock(self, group: str, client_id: str, queues: Iterable[QueueKey], owner: str = "") -> tuple[QueueKey, ...]:
        """Lock or renew; returns what the client has locked now. Raises ``Refusal`` if there are too many."""
        queues = tuple(queues)
        names = {group, client_id, *(topic for topic, _ in queues)}
        if max(map(len, names)) > NAME_CHARS_MAX:
            raise Refusal(RefusalKind.INVALID, f"a name has more than {NAME_CHARS_MAX} characters")
        now, got = self._now(), []
        for queue in queues:
            self._forget(now, self._locks)
            self._forget(now, self._owned.get(owner, ()))
            key = group, *queue
            held = self._locks.get(key)
            if held is not None and held.client_id != client_id and now - held.renewed_at <= LOCK_S:
                continue
            if held is None or held.owner != owner:
                self._check_room(owner)
            self._put(key, _Lock(client_id, now, owner))
            got.append(queue)
        return tuple(got)

    def unlock(self, group: str, client_id: str, queues: Iterable[QueueKey]) -> None:
        """Unlock the client's queues."""
        for queue in queues:
            key = group, *queue
            held = self._locks.get(key)
            if held is not None and held.client_id == client_id:
                self._drop(key)

    def _check_room(self, owner: str) -> None:
        """Raises ``Refusal``."""
        if len(self._locks) >= LOCKS_MAX:
            raise Refusal(RefusalKind.TOO_MANY, f"{LOCKS_MAX} queues are locked, the most there may be")
        if len(self._owned.get(owner, ())) >= self._share_max:
            reason = f"{self._share_max} queues are locked by this client's account or address, the most it may"
            raise Refusal(RefusalKind.TOO_MANY, f"{reason} (account_share_percent)")

    def _forget(self, now: float, oldest: Iterable[_Key]) -> None:
        for key in tuple(islice(oldest, FORGOTTEN)):
            if now - self._locks[key].renewed_at <= LOCK_S:
                return
            self._drop(key)

    def _put(self, key: _Key, lock: _Lock) -> None:
        if key in self._locks:
            self._drop(key)
        self._locks[key] = lock
        self._owned.setdefault(lock.owner, OrderedDict())[key] = None

    def _drop(self, key: _Key) -> None:
        owner = self._locks.pop(key).owner
        owned = self._owned[owner]
        del owned[key]
        if not owned:
            del self._owned[owner]


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
