"""How messages are spread over the groups of brokers that have a topic. Pure, but for the time and a first turn."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Collection, Sequence
from typing import Final

from dledger.errors import InvalidRequestError
from dledger.records import record
from rocketstore.client.errors import MessageRefusedError
from rocketstore.client.outgoing import queue_of_key
from rocketstore.nameserver.groups import BrokerGroup, TopicShare

AVOIDED_S: Final = 5.0
"""How long a group that failed gets no messages that may go to another."""
_TURNS: Final = 1 << 16


@record(frozen=True, slots=True)
class Route:
    """Where a topic is."""

    shares: tuple[TopicShare, ...]
    turns: tuple[BrokerGroup, ...]
    """A group for each queue that can be written, the groups in alternation."""

    @property
    def readable(self) -> tuple[BrokerGroup, ...]:
        """The groups from which the topic may be read."""
        return tuple(one.group for one in self.shares if one.is_readable)


def route_of(shares: Sequence[TopicShare]) -> Route:
    """The route with these shares."""
    writable = [one for one in shares if one.is_writable]
    queues = max((one.write_queues for one in writable), default=0)
    turns = tuple(one.group for queue_id in range(queues) for one in writable if queue_id < one.write_queues)
    return Route(tuple(shares), turns)


class Spread:
    """Chooses a group for each message. Thread-safe."""

    def __init__(self) -> None:
        # Not always the first group: many short-lived producers would fill it.
        self._turn = itertools.count(random.randrange(_TURNS))
        self._avoided: dict[str, float] = {}  # until when, by name; replaced, never changed, so that no lock is needed

    def avoid(self, name: str) -> None:
        """Prefer other groups for a while."""
        now = time.monotonic()
        self._avoided = {**self._still_avoided(now), name: now + AVOIDED_S}

    def next(self, topic: str, route: Route, tried: Collection[str] = ()) -> BrokerGroup:
        """The next group in turn, with a master and without a recent failure if there is one.

        Raises ``MessageRefusedError`` if the topic cannot be written.
        """
        turns = _writable(topic, route)
        turn = next(self._turn)
        chosen = turns[turn % len(turns)]
        avoided = self._avoided
        if chosen.has_master and chosen.name not in tried and chosen.name not in avoided:
            return chosen
        self._avoided = avoided = self._still_avoided(time.monotonic())
        others = [one for one in turns if one.name not in tried] or turns
        sound = [one for one in others if one.has_master and one.name not in avoided]
        usable = sound or others
        return usable[turn % len(usable)]

    def _still_avoided(self, now: float) -> dict[str, float]:
        return {one: until for one, until in self._avoided.items() if until > now}


def queue_for_key(topic: str, key: str, route: Route) -> tuple[BrokerGroup, int]:
    """The queue of a key: always the same while the topic's queues are.

    So it may be in a group that has no master now. Raises ``MessageRefusedError``.
    """
    place = queue_of_key(key, len(_writable(topic, route)))
    for one in route.shares:
        if one.is_writable:
            if place < one.write_queues:
                return one.group, place
            place -= one.write_queues
    raise MessageRefusedError(f"topic {topic} does not allow writes")  # never: place was below their sum


def named_group(topic: str, name: str, route: Route) -> BrokerGroup:
    """The group of this name, or without one the only group. Raises ``InvalidRequestError``."""
    groups = [one.group for one in route.shares if name in ("", one.group.name)]
    if len(groups) == 1:
        return groups[0]
    names = ", ".join(one.group.name for one in route.shares)
    if name:
        raise InvalidRequestError(f"topic {topic} is at {names}, not at {name}")
    raise InvalidRequestError(f"topic {topic} has queues of the same number at {names}: give broker_name, too")


def _writable(topic: str, route: Route) -> tuple[BrokerGroup, ...]:
    if not route.turns:
        raise MessageRefusedError(f"topic {topic} does not allow writes")
    return route.turns
