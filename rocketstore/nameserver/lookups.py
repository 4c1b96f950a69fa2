"""Requests to name servers, ours or Java's: routes of topics, brokers.

Name servers do not know each other, and a restarted one is empty for half a minute. So the last one that answered is
asked first, and the others if it does not answer or does not know the topic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

from dledger.remoting.client import UnreachableError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import DisconnectedError
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.nameserver.errors import NameServerError
from rocketstore.remoting.bodies.routes import ClusterInfo, TopicList, TopicRouteData
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import RouteHeader, write_header

REFRESH_S: Final = 30.0
"""RocketMQ's ``pollNameServerInterval``: an older route is requested again."""
TIMEOUT_S: Final = 3.0
ROUTES_MAX: Final = 4096
"""The limit of cached routes; the oldest is removed first."""


class Frames(Protocol):
    """The transport of requests."""

    def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        """Return the answer. Raises ``UnreachableError``, ``DisconnectedError`` and ``TimeoutError``."""


class NameServers:
    """Sends requests over ``frames``, which the caller closes; ``timeout_s`` applies to each name server."""

    def __init__(
        self,
        addresses: Sequence[str],
        frames: Frames,
        *,
        timeout_s: float = TIMEOUT_S,
        refresh_s: float = REFRESH_S,
    ) -> None:
        if not addresses:
            raise ValueError("no name server given")
        self._addresses = tuple(addresses)
        self._frames = frames
        self._timeout_s = timeout_s
        self._refresh_s = refresh_s
        self._first = 0
        self._routes: dict[str, tuple[float, TopicRouteData]] = {}

    def route(self, topic: str, *, refresh: bool = False) -> TopicRouteData | None:
        """Return where a topic is, None if no name server knows it. Routes are cached; ``refresh`` asks again.

        If no name server answers, the cached route stays valid. Raises ``NameServerError`` if there is none.
        """
        asked_at = time.monotonic()
        known = self._routes.get(topic)
        if known is not None and not refresh and asked_at - known[0] < self._refresh_s:
            return known[1]
        request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, 0, write_header(RouteHeader(topic, True)))
        try:
            body = self._ask(request, AnswerCode.TOPIC_NOT_EXIST)
            found = TopicRouteData.decode(body) if body is not None else None
        except RequestError as error:
            raise NameServerError(f"route of topic {topic}: {error}") from error
        except NameServerError:
            if known is None:
                raise
            return known[1]
        self._routes.pop(topic, None)
        if found is not None:
            self._routes[topic] = asked_at, found
            if len(self._routes) > ROUTES_MAX:
                self._routes.pop(next(iter(self._routes)), None)
        return found

    def clusters(self) -> ClusterInfo:
        """Return all brokers known to a name server. Raises ``NameServerError``."""
        body = self._ask(Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0))
        try:
            return ClusterInfo.decode(body or b"{}")
        except RequestError as error:
            raise NameServerError(f"clusters: {error}") from error

    def topics(self) -> tuple[str, ...]:
        """Return the names of all topics. Raises ``NameServerError``."""
        body = self._ask(Frame(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, 0))
        try:
            return TopicList.decode(body or b"{}").topic_list
        except RequestError as error:
            raise NameServerError(f"topics: {error}") from error

    def _ask(self, request: Frame, unknown: int | None = None) -> bytes | None:
        """Return the body of an answer; None if all answers have the code ``unknown``. Raises ``NameServerError``."""
        reasons: list[str] = []
        is_unknown = False
        first = self._first
        for step in range(len(self._addresses)):
            at = (first + step) % len(self._addresses)
            address = self._addresses[at]
            try:
                answer = self._frames.call(address, request, self._timeout_s)
            except (UnreachableError, DisconnectedError, TimeoutError) as error:
                reasons.append(str(error) or f"{address} did not answer within {self._timeout_s:g} s")
                continue
            if answer.code == AnswerCode.SUCCESS:
                self._first = at
                return answer.body
            if answer.code == unknown:
                is_unknown = True
            elif answer.code == AnswerCode.REQUEST_CODE_NOT_SUPPORTED:
                reasons.append(f"{address} is not a name server but perhaps a broker: {answer.remark.strip()}")
            else:
                reasons.append(f"{address} answered with code {answer.code}: {answer.remark.strip()}")
        if is_unknown:
            return None
        raise NameServerError(f"no name server answered: {'; '.join(reasons)}")
