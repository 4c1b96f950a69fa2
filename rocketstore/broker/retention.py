"""Topics whose messages can be read for a shorter time than the log keeps them (``retention``).

All topics share the log's files, so the messages stay there until the log's own retention removes them: it is the
queues that begin later. The master decides where, and writes it to the broker's state: every member, and every later
master, lets them begin at the same place, whatever its clock says. A retention that is raised or removed afterwards
brings nothing back.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from dledger.clock import Clock
from dledger.errors import DLedgerError
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal
from rocketstore.broker.state_changes import StateChanges
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import TopicConfig
from rocketstore.store.message_store import MessageStore

ROUND_S: Final = 30.0
"""How often the begins are looked at, and so the longest time that a message can be read beyond its retention."""
_LOG: Final = logging.getLogger("rocketstore")


class TopicRetention:
    """On the loop, where ``start`` begins its task; ``close`` ends it."""

    def __init__(
        self,
        store: MessageStore,
        state: BrokerState,
        mastership: Mastership,
        changes: StateChanges,
        readers: ReadThreads,
        clock: Clock,
    ) -> None:
        self._store = store
        self._state = state
        self._mastership = mastership
        self._changes = changes
        self._readers = readers
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look every ``ROUND_S``."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="topic retention")

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """One round, on the master; elsewhere nothing."""
        for topic in self._state.topics():
            if not self._mastership.is_master:
                return
            if topic.retention_ms:
                await self._expire(topic)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            try:
                await self.look()
            except (DLedgerError, Refusal) as error:  # the next round says it again
                _LOG.warning("messages of a topic that are past its retention can still be read: %s", error)

    async def _expire(self, topic: TopicConfig) -> None:
        """One change of the state at most for all queues of a topic."""
        before_ms = self._clock.wall_ms() - topic.retention_ms
        begins: list[tuple[int, int]] = []
        for queue_id in range(topic.queues):
            begin = await self._readers.run(self._store.offset_by_time, topic.name, queue_id, before_ms)
            now = max(self._state.begin_offset(topic.name, queue_id), self._store.min_offset(topic.name, queue_id))
            if begin > now:
                begins.append((queue_id, begin))
        if begins and self._state.topic(topic.name) == topic:  # neither deleted nor changed meanwhile
            await self._changes.make(partial(self._state.expire_messages, topic.name, begins))
