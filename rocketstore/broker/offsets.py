"""The progress of groups, and the bounds of queues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from dledger.errors import DLedgerError
from rocketstore.broker.mastership import Mastership, StateChanges, StateDone
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal
from rocketstore.broker.topics import CreationQuota, Topics
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import OFFSETS_MAX, QueueOffset, check_group
from rocketstore.store.message_store import MessageStore
from rocketstore.types import PutResult, QueueKey

_LOG: Final = logging.getLogger(__name__)
NONE: Final = -1
"""In the place of a group's offset, and of the time of a message that does not exist."""
PULLED_INTERVAL_S: Final = 0.2
"""Offsets committed with pulls are replicated this often: a busy consumer commits with each of thousands of pulls."""
PULLED_MAX: Final = 4096
"""Maximum of them that wait for that; then they are replicated at once."""
DISPATCH_WAIT_S: Final = 2.0
"""How long to wait for messages that are in the log, but not in their queues yet."""
_COMMITTED_AT_ONCE: Final = 512
"""Offsets per change of the broker state."""


class _Pulled(NamedTuple):
    """An offset committed with a pull, and the group's offset before: another one by now is newer."""

    offset: int
    before: int


class Offsets:
    """On the loop. Masters commit; every node answers what it knows, unless stated otherwise. ``owner``: who asks."""

    def __init__(
        self,
        store: MessageStore,
        state: BrokerState,
        mastership: Mastership,
        topics: Topics,
        changes: StateChanges,
        readers: ReadThreads,
        made_groups: CreationQuota,
    ) -> None:
        self._store = store
        self._state = state
        self._mastership = mastership
        self._topics = topics
        self._changes = changes
        self._readers = readers
        self._made_groups = made_groups
        self._positions = _LogPositions(store, topics)
        self._pulled: dict[tuple[str, str, int], _Pulled] = {}
        self._pulled_timer: asyncio.TimerHandle | None = None

    # -- of groups -----------------------------------------------------------------------------------------------------

    async def of_group(self, group: str, topic: str, queue_id: int, *, begins_short_queues: bool) -> int:
        """A group's offset; ``NONE`` if it has none, or 0 in a short queue if the group begins those at once.

        Raises ``Refusal``.
        """
        self._mastership.require_caught_up()
        found = self._state.offset(group, topic, queue_id)
        if found != NONE:
            return found
        low, high = await self.bounds(topic, queue_id)
        is_late = low > 0 or not begins_short_queues or await self._is_long(topic, queue_id, high)
        return NONE if is_late else 0

    async def commit(self, owner: str, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Any offset, also backwards; but not beyond the end. Raises ``LimitReachedError`` and ``Refusal``."""
        self._mastership.require()
        self.take_group(owner, group)
        self._pulled.pop((group, topic, queue_id), None)  # it is older
        await self._changes.make(partial(self._begin_commit, group, topic, queue_id, offset))

    def fetch_many(self, group: str, queues: Sequence[QueueKey]) -> tuple[int, list[int]]:
        """The incarnation of the master's state, and a group's offsets in these queues. Raises ``Refusal``: only the
        master knows them for certain.
        """
        self._mastership.require()
        self._mastership.require_caught_up()
        incarnation = self._store.incarnation
        return incarnation, [self._state.offset(group, topic, queue_id) for topic, queue_id in queues]

    async def commit_many(
        self, owner: str, group: str, offsets: Sequence[tuple[str, int, int]], incarnation: int, *, rewind: bool
    ) -> int:
        """Not beyond the end, and backwards only to ``rewind``. Returns the incarnation of the state: nothing is done
        for another one (0: whichever). Raises ``LimitReachedError`` and ``Refusal``.
        """
        self._mastership.require()
        self.take_group(owner, group)
        current = self._store.incarnation
        if incarnation in (0, current):
            for topic, queue_id, _offset in offsets:
                self._pulled.pop((group, topic, queue_id), None)  # it is older
            await self._changes.make(lambda done: self._state.commit_offsets(group, offsets, rewind, done))
        return current

    async def clone(self, source: str, target: str, topic: str, only: Collection[str]) -> None:
        """Commit a group's offsets for another one: a topic's, or all for an empty name; ``only`` in some if there are.

        Raises ``Refusal``.
        """
        self._mastership.require()
        offsets = [
            one
            for one in self._state.offsets(source, topic)
            if self._topics.seen(one.topic) is not None and (not only or one.topic in only)
        ]
        for start in range(0, len(offsets), OFFSETS_MAX):
            some = offsets[start : start + OFFSETS_MAX]
            await self._changes.make(partial(self._state.commit_offsets, target, some, True))

    async def commit_position(self, owner: str, group: str, position: int, topics: Sequence[str]) -> list[QueueOffset]:
        """A group that reads the log itself has consumed everything of these topics before ``position``; the offsets
        that this means, of which none moves back. Raises ``Refusal``.
        """
        self._mastership.require()
        self.take_group(owner, group)
        reached = (await self._readers.run(self._positions.of_position, position, topics)).offsets
        noted = {(one.topic, one.queue_id): one.offset for one in self._state.offsets(group)}
        news = [one for one in reached if one.offset > noted.get((one.topic, one.queue_id), NONE)]
        for start in range(0, len(news), _COMMITTED_AT_ONCE):
            some = news[start : start + _COMMITTED_AT_ONCE]
            await self._changes.make(partial(self._state.commit_offsets, group, some, False))
        return list(reached)

    def commit_soon(self, owner: str, group: str, topic: str, queue_id: int, offset: int) -> None:
        """The offset committed with a pull: the last one counts, soon, and the pull does not depend on it."""
        if not self._mastership.is_master:
            return
        try:
            self.take_group(owner, group)
        except DLedgerError as error:
            _LOG.debug("an offset of %.200s: %s", group, error)
            return
        key = group, topic, queue_id
        waiting = self._pulled.get(key)
        before = self._state.offset(*key) if waiting is None else waiting.before
        if waiting is None and offset == before:
            return
        self._pulled[key] = _Pulled(offset, before)
        if len(self._pulled) >= PULLED_MAX:
            self._commit_pulled()
        elif self._pulled_timer is None:
            self._pulled_timer = asyncio.get_running_loop().call_later(PULLED_INTERVAL_S, self._commit_pulled)

    def take_group(self, owner: str, group: str) -> None:
        """Raises ``LimitReachedError`` if the group would be new, and exceed what ``owner`` may make."""
        if not self._state.has_group(group):
            check_group(group)
            self._made_groups.take(owner, group, 1)

    def close(self) -> None:
        self._commit_pulled()

    # -- of queues -----------------------------------------------------------------------------------------------------

    async def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The first offset of a queue, and the one after its last; 0 if it does not exist. Raises ``Refusal``."""
        self._mastership.require_caught_up()
        if not self._is_readable(topic, queue_id):
            return 0, 0
        return await self._readers.run(self.bounds_of, topic, queue_id)

    async def by_time(self, topic: str, queue_id: int, time_ms: int) -> int:
        """The first message at that time or later; 0 if the queue does not exist."""
        if not self._is_readable(topic, queue_id):
            return 0
        found = await self._readers.run(self._store.offset_by_time, topic, queue_id, time_ms)
        return max(found, self._topics.begin_offset(topic, queue_id))

    async def earliest_time(self, topic: str, queue_id: int) -> int:
        """When the first message was stored, ms since 1970; ``NONE`` if there is none. Raises ``Refusal``."""
        low, high = await self.bounds(topic, queue_id)
        return await self._readers.run(self._store.store_time, topic, queue_id, low) if high > low else NONE

    def bounds_of(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The bounds of any queue. May wait for a disk."""
        low = max(self._store.min_offset(topic, queue_id), self._topics.begin_offset(topic, queue_id), 0)
        return low, max(self._store.max_offset(topic, queue_id), low)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin_commit(self, group: str, topic: str, queue_id: int, offset: int, done: StateDone) -> None:
        """Consumers commit every queue every 5 s: an unchanged offset must cost nothing, and it may go back."""
        goes_back = offset < self._state.offset(group, topic, queue_id)
        self._state.commit_offsets(group, [(topic, queue_id, offset)], goes_back, done)

    def _commit_pulled(self) -> None:
        if self._pulled_timer is not None:
            self._pulled_timer.cancel()
            self._pulled_timer = None
        pulled, self._pulled = self._pulled, {}
        if not self._mastership.is_master:
            return
        for (group, topic, queue_id), (offset, before) in pulled.items():
            if self._state.offset(group, topic, queue_id) != before:
                continue  # it was reset or committed otherwise meanwhile
            said = f"offset {offset} of {group} for queue {queue_id} of {topic}"
            try:
                self._begin_commit(group, topic, queue_id, offset, partial(_log_failure, said))
            except DLedgerError as error:
                _LOG.debug("%s: %s", said, error)

    def _is_readable(self, topic: str, queue_id: int) -> bool:
        try:
            self._topics.check_readable(topic, queue_id)
        except Refusal:
            return False
        return True

    async def _is_long(self, topic: str, queue_id: int, high: int) -> bool:
        """Whether the begin of a queue is too far back for a group to start there implicitly."""
        if not high:
            return False
        position = await self._readers.run(self._store.position_of, topic, queue_id, 0)
        return self._store.log.max_offset - position > self._store.memory_bytes_max


def _log_failure(said: str, result: PutResult) -> None:
    if not result.ok:
        _LOG.debug("%s: %s", said, result.reason)


@dataclass(frozen=True, slots=True)
class Reached:
    """Queue offsets, and the log position they correspond to: lower than requested if dispatch is behind."""

    offsets: tuple[QueueOffset, ...]
    position: int


class _LogPositions:
    """Converts a position in the raw log to queue offsets.

    A reader of the raw log (a Spark stream) has one number for all queues. For tools that show a group's lag, it is
    converted to offsets: in each queue, that of the first message whose record starts at or after the position.

    Looks up queue offsets. May block, so for threads only.
    """

    def __init__(self, store: MessageStore, topics: Topics) -> None:
        self._store = store
        self._topics = topics

    def of_position(self, position: int, topics: Iterable[str]) -> Reached:
        """For these topics, or for all if none are given. Raises ``Refusal`` for an unknown topic."""
        wanted = frozenset(topics)
        for name in sorted(wanted):
            self._topics.require(name)
        if self._store.dispatch_position < position:
            self._store.wait_dispatched(DISPATCH_WAIT_S)
        position = min(position, self._store.dispatch_position)  # before reading the queues, which only grow
        offsets = (
            QueueOffset(topic, queue_id, self._offset(topic, queue_id, position))
            for topic, queue_id in sorted(self._store.queues())
            if (topic in wanted if wanted else topic not in NO_SEND_TOPICS and self._topics.find(topic) is not None)
        )
        return Reached(tuple(offsets), position)

    def _offset(self, topic: str, queue_id: int, position: int) -> int:
        found = self._store.offset_by_position(topic, queue_id, position)
        return max(found, self._topics.begin_offset(topic, queue_id))
