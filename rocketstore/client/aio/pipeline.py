"""Sends messages: chooses their queues, has them numbered where the broker does that, and gives each its outcome.

Messages are handled in blocks: those that are added in one turn of the loop, or handed over by another thread. So
routes and queues are looked up once for many of them. How requests are made, and repeated, is the business of
``queue_sends`` and ``numbered``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Final, Literal

from dledger.errors import ConfigError
from rocketstore.client.aio.cluster import PAUSE_S, PAUSE_S_MAX, Cluster, numbers_messages
from rocketstore.client.aio.errors import (
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    NoQueueError,
    RequestNotKnownError,
    SendResult,
    may_repeat,
    may_send_elsewhere,
)
from rocketstore.client.aio.numbered import ONLY_OURS, NamedSends, NumberedSender
from rocketstore.client.aio.outgoing import CREATING_TOPIC, OutgoingMessage, PendingMessages, PipelineLimits, identify
from rocketstore.client.aio.queue_sends import OnFailure, QueueSelector, QueueSends, in_time, no_queues_yet
from rocketstore.client.aio.routes import TopicRoute, no_such_topic
from rocketstore.message.message import SYS_FLAG_PREPARED
from rocketstore.remoting.topics import MessageQueue

_log = logging.getLogger(__name__)
NAMED_MAX: Final = 1024
"""Producers with names of the application, of one ``Producer``."""
_UNKNOWN: Final = object()


class _Replaced:
    """Messages of a topic whose queues are gone, until the route is known anew and others have their outcomes."""

    def __init__(self, why: ClientError) -> None:
        self.why = why
        self.messages: list[OutgoingMessage] = []
        self.under_way: set[OutgoingMessage] = set()
        """Messages under way that may have to be placed again, too: in front of those that have come later."""
        self.is_settled = asyncio.Event()

    def settle(self, messages: Iterable[OutgoingMessage]) -> None:
        """These have their outcomes, or are in ``messages``."""
        self.under_way.difference_update(messages)
        if not self.under_way:
            self.is_settled.set()

    async def wait(self) -> None:
        """Return once nothing is under way."""
        while self.under_way:
            self.is_settled.clear()
            await self.is_settled.wait()


class SendPipeline:
    """Use it on the cluster's loop. ``group`` is the producer group that requests name."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        limits: PipelineLimits,
        *,
        idempotence: bool | Literal["auto"] = "auto",
        allow_duplicates: bool = False,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._cluster = cluster
        self._idempotence = idempotence
        self._loop = asyncio.get_running_loop()
        self.pending: Final = PendingMessages(limits, self._settle_replaced)
        self.selector: Final = QueueSelector(cluster.routes, on_failure)
        self._queue_sends = QueueSends(
            cluster, self.selector, self.pending, group, limits, self._place_anew, allow_duplicates=allow_duplicates
        )
        self._numbered: dict[str, NumberedSender | None] = {}  # by broker name; None: it does not number messages
        self._undecided: dict[str, list[OutgoingMessage]] = {}
        """Messages for brokers of which it is being found out whether they do."""
        self._named: dict[str, NamedSends] = {}  # under numbers of the application
        self._added: list[OutgoingMessage] = []  # in this turn of the loop
        self._unplaced: dict[str, list[OutgoingMessage]] = {}  # by topic: its route is being looked up
        self._replaced: dict[str, _Replaced] = {}  # by topic
        self._turns = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._has_ended = False
        """Whether nothing more is sent, though messages may still have no outcome."""

    # -- adding --------------------------------------------------------------------------------------------------------

    def add(self, message: OutgoingMessage) -> None:
        """Send a message soon, together with others of this turn of the loop; its future gets its outcome within the
        cluster's ``timeout_s`` of its turn. Raises ``ClientClosedError``.
        """
        self._check()
        message.deadline = self._loop.time() + self._cluster.timeout_s
        self.pending.add((message,))
        if not self._added:
            self._loop.call_soon(self._begin_added)
        self._added.append(message)

    def add_all(self, messages: Sequence[OutgoingMessage]) -> None:
        """Send messages at once. Raises ``ClientClosedError``."""
        self._check()
        deadline = self._loop.time() + self._cluster.timeout_s
        for message in messages:
            message.deadline = deadline
        self.pending.add(messages)
        self._begin(messages)

    async def close(self, timeout_s: float) -> None:
        """Send what is pending, at most for ``timeout_s``; then what is left fails. Idempotent."""
        self._is_closing = True
        self.pending.let_in()
        try:
            async with asyncio.timeout(timeout_s):
                await self.pending.flush()
        except TimeoutError:
            pass
        self._has_ended = True
        if len(self.pending):
            _log.warning("the producer is closed before %d messages have an outcome", len(self.pending))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._queue_sends.close()
        for sender in (*self._numbered.values(), *self._named.values()):
            if sender is not None:
                await sender.close()
        self.pending.fail_all(ClientClosedError("the producer was closed before the message was sent"))
        self._unplaced.clear()

    def named(self, name: str, broker: str) -> NamedSends:
        """The messages under numbers of the application's producer ``name``. Raises ``ConfigError`` for too many."""
        self._check()
        found = self._named.get(name)
        if found is None:
            if len(self._named) >= NAMED_MAX:
                raise ConfigError([f"{NAMED_MAX} numbered producers are open: close those that are done"])
            found = self._named[name] = NamedSends(self._cluster, self.selector, self.pending, name, broker)
        return found

    async def close_named(self, name: str) -> None:
        """Send what was submitted under a name, and forget it. Idempotent."""
        await self.pending.flush()
        found = self._named.pop(name, None)
        if found is not None:
            await found.close()

    # -- routes --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._is_closing:
            raise ClientClosedError("this producer is closed")

    def _begin_added(self) -> None:
        added, self._added = self._added, []
        self._begin(added)

    def _begin(self, messages: Sequence[OutgoingMessage]) -> None:
        """Place messages whose topics have a known route; look the others up."""
        identify(messages, time.time_ns() // 1_000_000)
        topic = ""
        some: list[OutgoingMessage] = []
        for message in messages:
            if message.message.topic != topic:
                self._of_topic(topic, some)
                topic, some = message.message.topic, []
            some.append(message)
        self._of_topic(topic, some)

    def _of_topic(self, topic: str, messages: list[OutgoingMessage]) -> None:
        if not messages:
            return
        unplaced = self._unplaced.get(topic)
        if unplaced is not None:
            unplaced += messages
            return
        route = self._cluster.routes.at_once(topic)
        if route is None:
            self._unplaced[topic] = messages
            self._start(self._find_route(topic))
        elif self.selector.has_lost_queues(route) and (under_way := self.pending.keyed(topic)):
            self._replace(topic, NoQueueError(f"topic {topic} has fewer queues now")).under_way |= under_way
            self._unplaced[topic] += messages
        else:
            self._place(messages, route)

    async def _find_route(self, topic: str) -> None:
        """Place the messages of a topic without a known route, once it is known or they have no more time."""
        route: TopicRoute | None = None
        failure: ClientError | None = None
        pause_s = PAUSE_S
        while True:
            try:
                route, failure = await self._cluster.routes.find(topic), None
                if route is None:
                    await self._cluster.routes.find(CREATING_TOPIC)
            except ClientError as error:
                failure = error
            if failure is None or not may_repeat(failure, harmless=True):
                break
            left = self._unplaced[topic] = in_time(self.pending, self._unplaced[topic], failure)
            if not left:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        unplaced = self._unplaced.pop(topic)
        found = route or self.selector.route(topic)
        if failure is not None:
            self.pending.fail(unplaced, failure)
        elif found is None:
            self.pending.fail(unplaced, no_such_topic(topic, by_name_servers=self._cluster.by_name_servers))
        elif route is None:
            self.pending.fail([one for one in unplaced if not one.is_free], no_queues_yet(topic))
            self._place([one for one in unplaced if one.is_free], found)
        else:
            self._of_topic(topic, unplaced)

    # -- queues --------------------------------------------------------------------------------------------------------

    def _place(self, messages: Sequence[OutgoingMessage], route: TopicRoute) -> None:
        """Choose queues, and send from there; or let it fail."""
        placed: list[OutgoingMessage] = []
        for message in messages:
            if message.key is not None or message.wanted is not None:
                try:
                    message.queue = self.selector.choose(route, message)
                    if not message.turn:
                        message.turn = self._turns = self._turns + 1
                except ClientError as error:
                    self.pending.fail((message,), error)
                    continue
            placed.append(message)
        if not self._may_be_numbered(route):
            self._queue_sends.add(placed)
            return
        halves = [one for one in placed if one.sys_flag & SYS_FLAG_PREPARED]
        if halves:  # which are never numbered
            self._queue_sends.add(halves)
            placed = [one for one in placed if not one.sys_flag & SYS_FLAG_PREPARED]
        free = [one for one in placed if one.queue is None]
        try:
            self.selector.spread(route, free)
        except ClientError as error:
            self.pending.fail(free, error)
            placed = [one for one in placed if one.queue is not None]
        for name, some in _by_broker(placed):
            self._number(name, some)

    def _may_be_numbered(self, route: TopicRoute) -> bool:
        """Whether one of the route's brokers numbers messages, or all must."""
        if self._idempotence != "auto":
            return self._idempotence
        return any(self._numbered.get(one.broker, _UNKNOWN) is not None for one in route.parts)

    def _place_anew(self, messages: Sequence[OutgoingMessage], why: ClientError) -> None:
        """Choose queues anew for messages whose queues are gone, unless their callers chose them.

        Later messages for their topic wait behind them, so that each key keeps its order.
        """
        now = self._loop.time()
        anew = [one for one in messages if one.wanted is None and one.deadline > now and not self._has_ended]
        kept = set(anew)
        self.pending.fail([one for one in messages if one not in kept], why)
        for topic in {one.message.topic for one in anew}:
            some = [one for one in anew if one.message.topic == topic]
            for one in some:
                one.queue, one.tried = None, ()
            replaced = self._replaced.get(topic)
            if replaced is None and topic in self._unplaced:  # its route is being looked up already
                self._unplaced[topic][:0] = sorted(some, key=lambda one: one.turn)
                continue
            replaced = replaced or self._replace(topic, why)
            replaced.messages += some
            replaced.settle(some)

    def _replace(self, topic: str, why: ClientError) -> _Replaced:
        """From now on, messages for this topic wait for those under way."""
        replaced = self._replaced[topic] = _Replaced(why)
        self._unplaced[topic] = []
        self._start(self._place_replaced(topic, replaced))
        return replaced

    async def _place_replaced(self, topic: str, replaced: _Replaced) -> None:
        with suppress(ClientError):  # the next attempt says what is the matter
            await self._cluster.routes.refresh(topic)
        await replaced.wait()
        del self._replaced[topic]
        waiting = [*in_time(self.pending, replaced.messages, replaced.why), *self._unplaced.pop(topic)]
        self._of_topic(topic, sorted(waiting, key=lambda one: one.turn or math.inf))

    def _moved(self, message: OutgoingMessage, name: str) -> bool:
        """Offer a message that this broker does not take to another one, if it may go there."""
        topic = message.message.topic
        if self._has_ended or not message.is_free or message.deadline <= self._loop.time():
            return False
        message.tried = (*message.tried, name)
        route = self.selector.route(topic)
        if route is None or not self.selector.is_elsewhere_left(topic, message.tried):
            return False
        message.queue = None
        self._place((message,), route)
        return True

    # -- numbered messages ---------------------------------------------------------------------------------------------

    def _number(self, name: str, messages: list[OutgoingMessage]) -> None:
        """Have messages for a broker numbered if it does that, once that is known."""
        if name not in self._numbered:
            undecided = self._undecided.get(name)
            if undecided is None:
                self._undecided[name] = messages
                self._start(self._find_out(name))
            else:
                undecided += messages
            return
        sender = self._numbered[name]
        if sender is not None:
            sender.add(messages)
        elif self._idempotence == "auto":
            for message in messages:
                if message.is_free:
                    message.first, message.queue = message.queue, None
            self._queue_sends.add(messages)
        else:
            reason = f'the broker {name} does not number messages, {ONLY_OURS}: use enable_idempotence="auto" or False'
            self.pending.fail(messages, RequestNotKnownError(reason))

    async def _find_out(self, name: str) -> None:
        """Whether a broker numbers messages; those that may go to another one do so if it cannot be asked."""
        pause_s = PAUSE_S
        while self._undecided[name]:
            broker = self._cluster.routes.broker(name)
            try:
                self._numbered[name] = await self._sender_for(name, "" if broker is None else broker.master)
                break
            except ClientError as error:
                self._move_undecided(name, error)
            if self._undecided[name]:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
                with suppress(ClientError, TimeoutError):  # the next attempt says what is the matter
                    async with asyncio.timeout(PAUSE_S_MAX):
                        await self._cluster.routes.refresh_brokers()
        waiting = self._undecided.pop(name)
        if waiting:
            self._number(name, waiting)

    async def _sender_for(self, name: str, master: str) -> NumberedSender | None:
        if not master:
            raise BrokerUnreachableError(f"brokers {name} have no master now")
        if not await numbers_messages(self._cluster, master):
            return None
        several = len(self._cluster.routes.brokers) > 1  # then there is time for another one
        timeout_s = self._cluster.timeout_s / (2 if several else 1)
        limits = self.pending.limits
        return NumberedSender(self._cluster, name, timeout_s, limits, self._numbered_done, self.selector.note_failure)

    def _move_undecided(self, name: str, error: ClientError) -> None:
        self.selector.avoid(name)
        error.outcome = "not_applied"
        waiting, self._undecided[name] = self._undecided[name], []
        left = [one for one in waiting if not self._moved(one, name)]
        if may_repeat(error, harmless=True):
            self._undecided[name][:0] = in_time(self.pending, left, error)
        else:  # it would be refused again
            self.pending.fail(left, error)

    def _numbered_done(
        self, name: str, messages: Sequence[OutgoingMessage], outcomes: Sequence[SendResult | ClientError]
    ) -> None:
        """Give numbered messages their outcomes, or another try at another broker."""
        failed = [one for one in outcomes if isinstance(one, ClientError)]
        if not failed:
            self._stored(name, messages, outcomes)
            return
        stored: list[OutgoingMessage] = []
        results: list[SendResult | ClientError] = []
        gone: list[OutgoingMessage] = []
        why: NoQueueError | None = None
        for message, outcome in zip(messages, outcomes, strict=True):
            if isinstance(outcome, ClientError):
                self._cluster.routes.doubt(message.message.topic)
                if isinstance(outcome, NoQueueError) and outcome.outcome == "not_applied":
                    gone.append(message)
                    why = outcome
                elif may_send_elsewhere(outcome) and self._moved(message, name):
                    self.selector.avoid(name)
                else:
                    self.pending.fail((message,), outcome)
            else:
                stored.append(message)
                results.append(outcome)
        if stored:
            self._stored(name, stored, results)
        if why is not None:
            self._place_anew(gone, why)
        self._settle_replaced(messages)

    def _settle_replaced(self, messages: Iterable[OutgoingMessage]) -> None:
        for replaced in self._replaced.values():
            replaced.settle(messages)

    def _stored(
        self, name: str, messages: Sequence[OutgoingMessage], results: Sequence[SendResult | ClientError]
    ) -> None:
        self.selector.works_again(name)
        for topic in {one.message.topic for one in messages}:
            self._cluster.routes.now_exists(topic)
        self.pending.settle(messages, results)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _by_broker(messages: Sequence[OutgoingMessage]) -> Iterable[tuple[str, list[OutgoingMessage]]]:
    """Messages whose queues are chosen, by their brokers' names."""
    found: dict[str, list[OutgoingMessage]] = {}
    queue: MessageQueue | None = None
    some: list[OutgoingMessage] = []
    for message in messages:
        if message.queue is not queue:
            queue = message.queue
            assert queue is not None, "it was chosen"
            some = found.setdefault(queue.broker_name, [])
        some.append(message)
    return found.items()
