"""The messages under one name of the application's: their queues, and their way to the sender, in order."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dledger.remoting.codes import RequestError
from rocketstore.client.aio.connections import ATTEMPT_S_MAX, Deadline
from rocketstore.client.aio.errors import (
    BadAnswerError,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    NotFoundError,
)
from rocketstore.client.aio.numbered import NumberedSender, behind, check_numbers_messages
from rocketstore.client.aio.outgoing import CREATING_TOPIC, OutgoingMessage, identify
from rocketstore.client.aio.queue_selection import QueueSelector, no_queues_yet
from rocketstore.client.aio.results import SendResult
from rocketstore.client.aio.routes import RoutedBroker, TopicRoute, no_such_topic
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.codes import OwnCode
from rocketstore.remoting.numbered_sends import decode_next, encode_name

if TYPE_CHECKING:
    from rocketstore.client.aio.cluster import Cluster
    from rocketstore.client.aio.pending import PendingMessages


class NamedSends:
    """The messages under one name, on the loop: their queues, at the brokers of one name, and the sender of them."""

    def __init__(
        self, cluster: Cluster, selector: QueueSelector, pending: PendingMessages, name: str, broker: str
    ) -> None:
        self.timeout_s: Final = cluster.timeout_s
        self._cluster = cluster
        self._selector = selector
        self._pending = pending
        self._name = name
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._sender: NumberedSender | None = None
        self._added: deque[OutgoingMessage] = deque()
        self._is_scheduled = False
        self._has_failed = False  # since the next number was asked for
        self._finding: asyncio.Task[None] | None = None  # the broker, or a route
        self._here: tuple[TopicRoute | None, TopicRoute | None] = (None, None)  # a route, and its part of this broker

    def add(self, message: OutgoingMessage) -> None:
        """Send a message, together with others of this turn of the loop."""
        self._take((message,))
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._go_on)

    def add_all(self, messages: Sequence[OutgoingMessage]) -> None:
        """Send messages at once."""
        self._take(messages)
        self._go_on()

    async def next_number(self) -> int:
        """See ``NumberedProducer``."""
        await self._pending.flush()
        if self._has_failed and self._sender is not None:
            # Its last requests may still be under way: whatever becomes of them, it expects the numbers behind them.
            sender, self._sender = self._sender, None
            await sender.close()
        self._has_failed = False
        deadline = self._cluster.deadline()

        async def attempt() -> int:
            broker = await self._find_broker(deadline)
            ask, timeout_s = self._cluster.connections.ask, min(ATTEMPT_S_MAX, deadline.remaining_s)
            name = encode_name(self._name)
            answer = await ask(broker.master, OwnCode.NEXT_NUMBER, None, name, timeout_s=timeout_s)
            try:
                return decode_next(answer.body)[0]
            except RequestError as error:
                raise BadAnswerError(f"{broker.master}: {error}", outcome="not_applied") from error

        return await self._cluster.repeat(attempt, deadline, harmless=True)

    async def close(self) -> None:
        """End at once; what was not sent fails. Idempotent."""
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)
        if self._sender is not None:
            await self._sender.close()
        self._give_up(ClientClosedError("the numbered producer was closed", outcome="not_applied"))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _take(self, messages: Sequence[OutgoingMessage]) -> None:
        deadline = self._loop.time() + self.timeout_s
        for message in messages:
            message.deadline = deadline
        identify(messages, time.time_ns() // 1_000_000)
        self._pending.add(messages)
        self._added.extend(messages)

    def _go_on(self) -> None:
        """Place messages, in order, as long as their routes are known."""
        self._is_scheduled = False
        if self._finding is not None:
            return
        placed: list[OutgoingMessage] = []
        failure: ClientError | None = None
        while self._added and failure is None:
            message = self._added[0]
            route = self._cluster.routes.at_once(message.message.topic)
            if route is None or self._sender is None:
                self._finding = self._loop.create_task(self._find(message.message.topic))
                break
            try:
                message.queue = self._queue(route, message)
            except ClientError as error:
                failure = error
            else:
                placed.append(self._added.popleft())
        if placed and self._sender is not None:
            self._sender.add(placed)
        if failure is not None:
            self._give_up(failure)

    async def _find(self, topic: str) -> None:
        """The broker, and the route of a topic; then go on."""
        deadline = self._cluster.deadline()
        placed: list[OutgoingMessage] = []
        failure: ClientError | None = None
        try:
            route = await self._cluster.repeat(lambda: self._found(topic, deadline), deadline, harmless=True)
            exists = self._cluster.routes.at_once(topic) is not None
            while self._added and self._added[0].message.topic == topic:
                message = self._added[0]
                if not (exists or message.is_free):
                    raise no_queues_yet(topic)
                message.queue = self._queue(route, message)
                placed.append(self._added.popleft())
        except ClientError as error:
            error.outcome = "not_applied"
            failure = error
        finally:
            self._finding = None
        if placed and self._sender is not None:
            self._sender.add(placed)
        if failure is not None:
            self._give_up(failure)
        self._go_on()

    async def _found(self, topic: str, deadline: Deadline) -> TopicRoute:
        routes = self._cluster.routes
        if self._sender is None:
            broker = await self._find_broker(deadline)
            self._sender = NumberedSender(
                self._cluster,
                broker.name,
                self.timeout_s,
                self._pending.limits,
                self._settle,
                self._selector.note_failure,
                self._name,
            )
        if await routes.find(topic) is None:
            await routes.find(CREATING_TOPIC)
        route = self._selector.route(topic)
        if route is None:
            raise no_such_topic(topic, by_name_servers=self._cluster.by_name_servers)
        return route

    async def _find_broker(self, deadline: Deadline) -> RoutedBroker:
        """The brokers of the name, with a master. Raises ``RequestNotKnownError`` if it does not number messages."""
        broker = await self._cluster.broker(self._broker, deadline)
        if not broker.master:
            raise BrokerUnreachableError(f"brokers {broker.name} have no master now")
        await check_numbers_messages(self._cluster, broker)
        return broker

    def _queue(self, route: TopicRoute, message: OutgoingMessage) -> MessageQueue:
        """The message's queue, at this broker. Raises ``ClientError``."""
        assert self._sender is not None, "the broker was found"
        known, here = self._here
        if here is None or known is not route:
            parts = tuple(one for one in route.parts if one.broker == self._sender.broker)
            if not parts:
                raise NotFoundError(f"brokers {self._sender.broker} have no queues of topic {route.topic}")
            here = TopicRoute(route.topic, parts)
            self._here = (route, here)
        return self._selector.choose(here, message)

    def _settle(
        self, _broker: str, messages: Sequence[OutgoingMessage], outcomes: Sequence[SendResult | ClientError]
    ) -> None:
        self._pending.settle(messages, outcomes)
        failure = next((one for one in outcomes if isinstance(one, ClientError)), None)
        for topic in {one.message.topic for one in messages}:
            if failure is None:
                self._cluster.routes.now_exists(topic)
            else:
                self._cluster.routes.doubt(topic)
        if failure is not None:
            self._has_failed = True
            self._give_up(behind(failure))

    def _give_up(self, failure: ClientError) -> None:
        """Fail the messages that wait behind a missing number."""
        messages = list(self._added)
        self._added.clear()
        if messages:
            self._pending.settle(messages, [failure, *[behind(failure)] * (len(messages) - 1)])
