"""What a client remembers of topics, so that sending need not ask.

``make unasync`` makes ``topic_cache.py`` from ``aio_topic_cache.py``: change that one.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from dledger.errors import AccessDeniedError, DLedgerError
from rocketstore.client.aio_connection import AsyncBrokerConnection
from rocketstore.client.errors import NotFoundError
from rocketstore.client.methods import LIST_TOPICS, QUEUE_RANGE
from rocketstore.client.topics import TopicInfo, topic_of
from rocketstore.pb import broker_pb2 as pb

REFRESH_S: Final = 30.0
"""How old what is known of topics may get."""
UNKNOWN_REFRESH_S: Final = 0.5
"""How often a topic that does not exist is asked for."""


class AsyncTopicCache:
    """Asks at most one broker at a time, whoever wants to know something."""

    def __init__(self, connection: AsyncBrokerConnection) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()  # guards the fields below, and is held while asking
        self._topics: dict[str, TopicInfo] = {}
        self._asked_at = float("-inf")
        self._asks = 0
        self._failure: DLedgerError | None = None
        """Of the last ask."""

    async def find(self, name: str) -> TopicInfo | None:
        """The topic, or None if no broker knows it (yet). Raises what asking raises, if nothing is known."""
        topic = self._topics.get(name)
        age_s = time.monotonic() - self._asked_at
        if age_s < (REFRESH_S if topic is not None else UNKNOWN_REFRESH_S):
            return topic
        if topic is not None and self._lock.locked():  # somebody asks already: the old answer does
            return topic
        asks = self._asks
        async with self._lock:
            if self._asks == asks:  # else somebody asked while we waited for the lock: as long as one ask may take
                await self._refresh()
            if topic is None and self._failure is not None:
                raise self._failure
            return self._topics.get(name)

    def forget(self) -> None:
        """Ask again at the next look."""
        self._asked_at = float("-inf")

    async def _refresh(self) -> None:
        try:
            answer = await self._connection.ask_reader(LIST_TOPICS, pb.ListTopicsRequest(), self._connection.deadline())
        except DLedgerError as error:
            self._failure = error
        else:
            self._failure = None
            self._topics = {topic.name: topic for topic in map(topic_of, answer.topics)}
            self._asked_at = time.monotonic()
        self._asks += 1


async def no_such_topic(connection: AsyncBrokerConnection, name: str) -> DLedgerError:
    """Why a topic is not in the list: it does not exist, or (only who signs is shown a part) we may not use it."""
    missing = NotFoundError(f"topic {name} does not exist")
    if not connection.signs:
        return missing
    try:
        request = pb.QueueRequest(topic=name, queue_id=0)
        reader = await connection.seeker.reader(connection.deadline())
        await connection.ask(QUEUE_RANGE, request, reader, connection.deadline())
    except AccessDeniedError as error:
        return error
    except DLedgerError:
        return missing
    return missing
