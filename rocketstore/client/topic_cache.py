"""A client's cache of topics, so that sending needs no lookup."""

from __future__ import annotations

import threading
import time
from typing import Final

from dledger.errors import AccessDeniedError, DLedgerError
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import NotFoundError
from rocketstore.client.methods import LIST_TOPICS, QUEUE_RANGE
from rocketstore.client.topics import TopicInfo, topic_of
from rocketstore.pb import broker_pb2 as pb

REFRESH_S: Final = 30.0
"""Maximum age of cached topics."""
UNKNOWN_REFRESH_S: Final = 0.5
"""How often a topic that does not exist is looked up."""


class TopicCache:
    """Has at most one request in progress, which all callers share."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # guards the fields below, and is held during a request
        self._topics: dict[str, TopicInfo] = {}
        self._asked_at = float("-inf")
        self._forgotten_at = float("-inf")
        self._asks = 0
        self._failure: DLedgerError | None = None
        """The error of the last request."""

    def find(self, name: str) -> TopicInfo | None:
        """The topic, or None if no broker knows it (yet). Raises the request's error if nothing is cached."""
        topic = self._topics.get(name)
        age_s = time.monotonic() - self._asked_at
        if age_s < (REFRESH_S if topic is not None else UNKNOWN_REFRESH_S):
            return topic
        if topic is not None and self._lock.locked():  # a request is in progress: the cached topic will do
            return topic
        asks = self._asks
        with self._lock:
            if self._asks == asks:  # otherwise another one finished while we waited, at most one request's time
                self._refresh()
            if topic is None and self._failure is not None:
                raise self._failure
            return self._topics.get(name)

    def forget(self) -> None:
        """Refresh at the next lookup, but not more often than for an unknown topic. On any thread."""
        now_s = time.monotonic()
        if now_s - self._forgotten_at >= UNKNOWN_REFRESH_S:
            self._forgotten_at, self._asked_at = now_s, float("-inf")

    def _refresh(self) -> None:
        try:
            answer = self._connection.ask_reader(LIST_TOPICS, pb.ListTopicsRequest(), self._connection.deadline())
        except DLedgerError as error:
            self._failure = error
        else:
            self._failure = None
            self._topics = {topic.name: topic for topic in map(topic_of, answer.topics)}
            self._asked_at = time.monotonic()
        self._asks += 1


def no_such_topic(connection: BrokerConnection, name: str) -> DLedgerError:
    """The error for a topic missing from the list: it does not exist, or (if we sign requests) access may be denied."""
    missing = NotFoundError(f"topic {name} does not exist")
    if not connection.signs:
        return missing
    try:
        request = pb.QueueRequest(topic=name, queue_id=0)
        reader = connection.seeker.reader(connection.deadline())
        connection.ask(QUEUE_RANGE, request, reader, connection.deadline())
    except AccessDeniedError as error:
        return error
    except DLedgerError:
        return missing
    return missing
