"""``ClusterConsumer``: reads a topic from all the groups of brokers that have it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, Self, Unpack

from dledger.client.discovery import Addresses
from dledger.client.security import ClientSecurity
from dledger.client.shared import Deadline
from dledger.errors import ConfigError, DLedgerError, UnavailableError
from rocketstore.client.aio.received import ReceivedMessage
from rocketstore.client.consumer import Consumer, ConsumerOptions, ConsumerSettings
from rocketstore.client.errors import MessageRefusedError, NotFoundError
from rocketstore.client.group_offsets import Start
from rocketstore.client.routes import Routes
from rocketstore.nameserver.groups import BrokerGroup

_log = logging.getLogger(__name__)
ROUTE_INTERVAL_S: Final = 5.0
"""How often it is looked whether the topic has come to further groups; routes are refreshed every 30 s."""
START_AGAIN_S: Final = 1.0
"""How long to wait before a group that could not be read is tried again."""


class ClusterConsumer:
    """Needs no address of a broker: it asks ``name_servers`` for the groups that have the topic, also for new ones.

    Each group has its own ``Consumer``, whose promises and options are described there, and which commits in the
    background. A group that does not answer delays no other: it is read once it does. Groups that get the topic later
    are read from their first message, so that nothing is missed. With ``instance`` (i, n), it reads every n-th queue of
    each group. Only one thread may poll; ``commit``, ``seek`` and ``close`` may be called by others.
    """

    def __init__(
        self,
        name_servers: Sequence[str] | str,
        *,
        group: str,
        topic: str,
        options: ConsumerOptions | None = None,
        security: ClientSecurity | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self.group = group
        self.topic = topic
        self._options = options or ConsumerOptions(**settings)
        if self._options.queues is not None:
            raise ConfigError(["queues of the same number are in several groups: give instance, or read one group"])
        self._security = security or ClientSecurity()
        self._routes = Routes(name_servers, self._options.timeout_s, self._security)
        self._lock = threading.Lock()  # guards the fields below
        self._parts: tuple[_Part, ...] = ()  # replaced, never changed
        self._started = False
        self._turn = 0
        self._news = threading.Event()  # set when a group has news
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._look_after, name=f"rocketstore-cluster-{topic}", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(lambda one: one.__exit__(kind, error, trace))

    # --- messages ---------------------------------------------------------------------------------------------------

    def poll(self, max_messages: int = 1024, timeout_s: float = 1.0) -> list[ReceivedMessage]:
        """Up to ``max_messages`` of one queue, at least one unless none arrives within ``timeout_s``.

        Messages of earlier polls count as done. The first call waits for the first group that can be read, for up to
        the consumer's own ``timeout_s`` and longer, and raises the error if there is none. Otherwise raises what
        ``Consumer.poll`` raises.
        """
        self._start()
        deadline = Deadline(timeout_s)
        while True:
            self._news.clear()
            parts = self._parts
            for _ in range(len(parts)):
                self._turn += 1
                part = parts[self._turn % len(parts)]
                if part.is_started and (messages := part.consumer.poll(max_messages, 0)):
                    return messages
            if not self._news.wait(deadline.remaining_s) and deadline.expired:
                return []
            if self._closing.is_set():
                raise UnavailableError("the consumer is closed")

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Every message until the consumer is closed, waiting for more. Requesting the next completes the last."""
        while not self._closing.is_set():
            try:
                yield from self.poll(1, 1.0)
            except UnavailableError:
                if not self._closing.is_set():
                    raise

    # --- offsets ----------------------------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """How many offsets were skipped because their messages no longer exist."""
        return sum(one.consumer.skipped for one in self._parts)

    def positions(self) -> dict[tuple[str, int], int]:
        """By group and queue, the offset of the next message from ``poll``; without groups not read yet."""
        self._start()
        return {
            (part.name, queue_id): offset
            for part in self._parts
            if part.is_started
            for queue_id, offset in part.consumer.positions().items()
        }

    def lag(self) -> dict[tuple[str, int], int]:
        """By group and queue, how many messages follow its position; -1: unknown, as for a group not read yet."""
        self._start()
        return {
            (part.name, queue_id): lag
            for part in self._parts
            for queue_id, lag in (part.consumer.lag() if part.is_started else {-1: -1}).items()
        }

    def commit(self) -> None:
        """Commit everything returned so far, in every group; then raise the first error, if there was one."""
        _for_all([one for one in self._parts if one.is_started], lambda one: one.consumer.commit())

    def seek(self, broker_name: str, queue_id: int, offset: int) -> None:
        """Continue a group's queue at ``offset``; the next commit may then go back. Raises ``NotFoundError``."""
        self._start()
        for one in self._parts:
            if one.name == broker_name:
                one.consumer.seek(queue_id, offset)
                return
        raise NotFoundError(f"topic {self.topic} is not read from {broker_name}")

    def seek_to(self, start: Start) -> None:
        """Move every queue to its first message, after its last, or to the first one stored at a time (ms)."""
        self._start()
        _for_all(self._parts, lambda one: one.consumer.seek_to(start))

    # --- start and end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Commit what was returned so far, then close all connections. Raises if a commit failed. Idempotent."""
        self._close(lambda one: one.close())

    def _close(self, close: Callable[[Consumer], None]) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._news.set()
        self._routes.close()  # a lookup in progress ends
        if self._started:
            self._watch.join()
        for one in self._parts:
            one.stop()
        _for_all(self._parts, lambda one: one.close(close))

    def _start(self) -> None:
        """Find the groups; returns when one of them can be read. Raises why none can."""
        with self._lock:
            if self._closing.is_set():
                raise UnavailableError("the consumer is closed")
            if not self._started:
                self._add(self._readable(), self._options.start)
                self._started = True
                self._watch.start()
        deadline = Deadline(self._options.timeout_s)
        while not any(one.is_started for one in self._parts):
            self._news.wait(deadline.remaining_s)
            self._news.clear()
            if self._closing.is_set():
                raise UnavailableError("the consumer is closed")
            if deadline.expired and not any(one.is_started for one in self._parts):
                late = UnavailableError(f"no group answered within {deadline.timeout_s:g} s")
                raise next((one.failure for one in self._parts if one.failure is not None), late)

    def _readable(self) -> Sequence[BrokerGroup]:
        route = self._routes.find(self.topic)
        if route is None:
            raise NotFoundError(f"topic {self.topic} does not exist: no name server has a route to it")
        if not route.readable:
            raise MessageRefusedError(f"topic {self.topic} does not allow reads")
        return route.readable

    def _add(self, groups: Sequence[BrokerGroup], start: Start) -> None:
        known = {one.name for one in self._parts}
        options = replace(self._options, start=start, auto_commit_s=None)
        for one in groups:
            if one.name in known:
                continue
            consumer = _PartConsumer(
                self._routes.directory(one),
                group=self.group,
                topic=self.topic,
                options=options,
                security=self._security,
                news=self._news,
            )
            self._parts += (_Part(one.name, consumer, self._options.auto_commit_s, self._news),)

    def _look_after(self) -> None:
        while not self._closing.wait(ROUTE_INTERVAL_S):
            try:
                self._add(self._readable(), "first")
            except DLedgerError as error:  # the groups known so far are read all the same
                _log.debug("cannot look for further groups with topic %s: %s", self.topic, error)


class _Relay(threading.Event):
    """Sets another event, too."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def set(self) -> None:
        super().set()
        self._other.set()


class _PartConsumer(Consumer):
    """The consumer of one group, which reports its news and commits on the thread of ``_Part``."""

    def __init__(
        self,
        addresses: Addresses,
        *,
        group: str,
        topic: str,
        options: ConsumerOptions,
        security: ClientSecurity,
        news: threading.Event,
    ) -> None:
        super().__init__(addresses, group=group, topic=topic, options=options, security=security)
        self._news = _Relay(news)

    def commit_finished(self) -> None:
        """Commit what later polls have shown to be done."""
        self._commit(finished_only=True)

    def abort(self) -> None:
        """Let calls in progress fail."""
        self._connection.close()


class _Part:
    """One group: a thread starts its consumer, again until that succeeds, and then commits from time to time."""

    def __init__(self, name: str, consumer: _PartConsumer, auto_commit_s: float | None, news: threading.Event) -> None:
        self.name = name
        self.consumer = consumer
        self.is_started = False
        self.failure: DLedgerError | None = None
        self._auto_commit_s = auto_commit_s
        self._news = news
        self._aborted = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rocketstore-cluster-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread soon."""
        self._closing.set()
        if not self.is_started:
            self._aborted = True
            self.consumer.abort()

    def close(self, close: Callable[[Consumer], None]) -> None:
        """Close the consumer after ``stop``."""
        self._thread.join()
        try:
            close(self.consumer)
        except DLedgerError:
            if not self._aborted:  # otherwise it has returned nothing that could be committed
                raise

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                if self.is_started:
                    self.consumer.commit_finished()
                else:
                    self.consumer.positions()
                    self.is_started = True
                self.failure = None
            except DLedgerError as error:
                if str(error) != str(self.failure) and not self._closing.is_set():
                    what = "commit the offsets at" if self.is_started else "read from"
                    _log.warning("cannot %s %s, and will try again: %s", what, self.name, error)
                self.failure = error
            self._news.set()
            self._closing.wait(self._auto_commit_s if self.is_started else START_AGAIN_S)


def _for_all(parts: Sequence[_Part], action: Callable[[_Part], None]) -> None:
    """Raises the first error, after all have had their turn."""
    errors: list[DLedgerError] = []
    for one in parts:
        try:
            action(one)
        except DLedgerError as error:
            errors.append(error)
    if errors:
        raise errors[0]
