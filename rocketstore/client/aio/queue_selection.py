"""Which queue a message goes to: the one of its sharding key, or the next in turn at a broker that works."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

from rocketstore.client.aio.errors import ClientError, ForbiddenError, NoQueueError, NotFoundError
from rocketstore.client.aio.outgoing import CREATED_QUEUES, CREATING_TOPIC, OutgoingMessage, queue_number_of_key
from rocketstore.client.aio.routes import ROUTES_MAX, RouteCache, TopicRoute
from rocketstore.remoting.bodies.queues import MessageQueue

AVOIDED_S: Final = 5.0
"""How long a broker that failed gets no messages that may go to another."""
RUN_MAX: Final = 32
"""Messages in a row for one queue, of those that may go to any."""
ELSEWHERE_MAX: Final = 3
"""How many brokers one message is offered to before a pause; RocketMQ's ``retryTimesWhenSendFailed`` of 2."""
_TURNS: Final = 1 << 16
OnFailure: TypeAlias = Callable[[str, ClientError], object]
"""Is told of each request that failed, repeated or not: the broker's name, and why."""


class QueueSelector:
    """Chooses queues; it remembers which brokers failed lately."""

    def __init__(self, routes: RouteCache, on_failure: OnFailure | None = None) -> None:
        self._routes = routes
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        # Not always the first queue: many short-lived producers would fill it, and leave the others empty.
        self._turn = random.randrange(_TURNS)
        self._avoided: dict[str, float] = {}  # until when, by broker name
        self._used: dict[str, TopicRoute] = {}  # the last one by which a topic's messages were placed

    def avoid(self, broker: str) -> None:
        """Prefer other brokers for a while: this one failed, or took too long."""
        self._avoided[broker] = self._loop.time() + AVOIDED_S

    def note_failure(self, broker: str, failure: ClientError) -> None:
        """A request to this broker failed, repeated or not."""
        self.avoid(broker)
        if self._on_failure is not None:
            self._on_failure(broker, failure)

    def works_again(self, broker: str) -> None:
        """It has taken a message."""
        self._avoided.pop(broker, None)

    def next(self, route: TopicRoute, tried: Collection[str] = ()) -> MessageQueue:
        """The next queue in turn, at a broker with a master and without a recent failure, if there is one.

        ``tried``: names of brokers that the message was offered to already. Raises ``ForbiddenError`` if the topic
        cannot be written.
        """
        queues = _writable(route)
        self._turn += 1
        chosen = queues[self._turn % len(queues)]
        if not self._avoided and not tried and self._has_master(chosen.broker_name):
            return chosen
        now = self._loop.time()
        self._avoided = {name: until for name, until in self._avoided.items() if until > now}
        others = [one for one in queues if one.broker_name not in tried] or queues
        sound = [one for one in others if self._is_sound(one.broker_name)]
        usable = sound or others
        return usable[self._turn % len(usable)]

    def spread(self, route: TopicRoute, messages: Sequence[OutgoingMessage]) -> None:
        """Give messages for any queue one each: all queues in turn, and few in a row the same one.

        A batch then has several messages of a queue, and a small block is spread over as many queues as it can be.
        Raises ``ForbiddenError``.
        """
        run = min(RUN_MAX, -(-len(messages) // len(_writable(route)))) or 1
        for start in range(0, len(messages), run):
            some = messages[start : start + run]
            queue = self.next(route, some[0].tried)  # one that was offered elsewhere comes alone
            for one in some:
                one.queue = queue

    def choose(self, route: TopicRoute, message: OutgoingMessage) -> MessageQueue:
        """The queue of a message by its key or its caller's choice, else the next one. Raises ``RefusedError``."""
        if message.key is not None:
            return self.of_key(route, message.key)
        return self.next(route) if message.wanted is None else self.named(route, message.wanted)

    def of_key(self, route: TopicRoute, key: str) -> MessageQueue:
        """The queue of a sharding key: always the same while the topic's queues are.

        So it may be at a broker that has no master now. Raises ``ForbiddenError``.
        """
        queues = _writable(route) and route.writable
        return queues[queue_number_of_key(key, len(queues))]

    def named(self, route: TopicRoute, queue: MessageQueue | int) -> MessageQueue:
        """A queue given by number, if that is enough, or by broker and number. Raises ``NoQueueError``."""
        if isinstance(queue, MessageQueue):
            if queue in route.writable:
                return queue
            raise NoQueueError(f"topic {route.topic} has no writable queue {queue.queue_id} at {queue.broker_name}")
        found = [one for one in route.writable if one.queue_id == queue]
        if len(found) == 1:
            return found[0]
        if not found:
            raise NoQueueError(f"topic {route.topic} has no writable queue {queue}")
        names = ", ".join(one.broker_name for one in found)
        raise NoQueueError(f"topic {route.topic} has a queue {queue} at each of {names}: give a MessageQueue")

    def has_lost_queues(self, route: TopicRoute) -> bool:
        """Whether a queue is missing in this route that its topic had at the last call."""
        before = self._used.pop(route.topic, route)
        self._used[route.topic] = route
        if len(self._used) > ROUTES_MAX:
            self._used.pop(next(iter(self._used)))
        return before is not route and not set(before.writable) <= set(route.writable)

    def route(self, topic: str) -> TopicRoute | None:
        """The route, or that of a topic that the first message creates; None: it is not known at once."""
        route = self._routes.at_once(topic)
        if route is None:
            default = self._routes.at_once(CREATING_TOPIC)
            route = None if default is None else creating_route(topic, default)
        return route

    def is_elsewhere_left(self, topic: str, tried: Sequence[str]) -> bool:
        """Whether there is another broker to offer a message to, before a pause."""
        if len(set(tried)) >= ELSEWHERE_MAX:
            return False
        route = self.route(topic)
        return route is not None and any(one.is_writable and one.broker not in tried for one in route.parts)

    def _has_master(self, name: str) -> bool:
        broker = self._routes.broker(name)
        return broker is not None and bool(broker.master)

    def _is_sound(self, name: str) -> bool:
        return name not in self._avoided and self._has_master(name)


def no_queues_yet(topic: str) -> NotFoundError:
    """The error for a key, or a number, of a queue of a topic that the first message creates."""
    return NotFoundError(
        f"topic {topic} does not exist, so neither a key nor a number can choose one of its queues: create it first"
    )


def creating_route(topic: str, default: TopicRoute) -> TopicRoute:
    """The route of a topic that does not exist yet, by that of the topic that others are created from."""
    parts = tuple(
        one.__class__(one.broker, one.read_queues, min(one.write_queues, CREATED_QUEUES), one.permission)
        for one in default.parts
    )
    return TopicRoute(topic, parts)


def _writable(route: TopicRoute) -> Sequence[MessageQueue]:
    if not route.in_turn:
        raise ForbiddenError(f"topic {route.topic} does not allow writes")
    return route.in_turn
