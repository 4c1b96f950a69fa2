"""The blocking ``Consumer`` and ``SimpleConsumer``: the asyncio ones on the clients' thread, and handlers on threads of
their own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from inspect import iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar, Unpack

from rocketstore.client.aio import consumer as aio_consumer
from rocketstore.client.aio import simple_consumer as aio_simple
from rocketstore.client.aio.consumer import WORKERS
from rocketstore.client.aio.errors import ClientClosedError, NotFoundError
from rocketstore.client.aio.simple_consumer import RECEIVE_MAX, SIMPLE_WORKERS, SimpleOptions, SimpleSettings
from rocketstore.client.loop_thread import SHARED, BlockingClient

if TYPE_CHECKING:
    from dledger.client.shared import ClientSecurity
    from rocketstore.client.aio.assignment import Delivery
    from rocketstore.client.aio.consumer_options import ConsumerOptions, ConsumerSettings, Topics
    from rocketstore.client.aio.offsets import Start
    from rocketstore.client.aio.rebalancer import Assign
    from rocketstore.client.aio.received import ConsumedMessage, PoppedMessage
    from rocketstore.remoting.topics import MessageQueue

AHEAD_MAX: Final = 64
"""Messages that an iteration takes from the clients' thread at once."""
REPORT_S: Final = 1.0
"""How long those that it has completed may be unreported to that thread, which commits them."""
_T = TypeVar("_T")


class Consumer(BlockingClient):
    """Messages of some topics, shared with the other members of a group or read alone: see ``aio.Consumer``.

    One thread polls or iterates; the other methods may be called by any.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str | None = None,
        *,
        name_servers: Sequence[str] | str | None = None,
        group: str = "",
        topics: Topics,
        assign: Assign | None = None,
        security: ClientSecurity | None = None,
        options: ConsumerOptions | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self._consumer = aio_consumer.Consumer(
            addresses,
            name_servers=name_servers,
            group=group,
            topics=topics,
            assign=assign,
            security=security,
            options=options,
            **settings,
        )
        self.group: Final = group
        self.client_id: Final = self._consumer.client_id
        self.options: Final = self._consumer.options
        self._done: list[Delivery] = []  # of an iteration, not reported yet
        self._handling = threading.local()
        super().__init__(self._consumer)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._is_closed and not self._thread.is_left_behind:
                self._done.clear()
                self._run(self._consumer.__aexit__(kind, error, trace))
        finally:
            self.close()

    # -- messages ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the group, and return when this consumer knows its queues: see ``aio.Consumer.start``."""
        self._run(self._consumer.start())

    def poll(self, max_messages: int = 1024, timeout_s: float = 1.0) -> list[ConsumedMessage]:
        """Up to ``max_messages`` of one queue; those of earlier polls count as done: see ``aio.Consumer.poll``."""
        return self._run(self._consumer.poll(max_messages, timeout_s))

    def __iter__(self) -> Iterator[ConsumedMessage]:
        """Every message until the consumer is closed, waiting for more. Requesting the next completes the last."""
        while True:
            try:
                ahead = self._run(self._consumer.take_singly(AHEAD_MAX, self._take_done()))
            except ClientClosedError:
                if self._is_closed:
                    return
                raise
            handed_out, reported_at = 0, time.monotonic()
            try:
                for one in ahead:
                    if time.monotonic() >= reported_at + REPORT_S and not self._is_closed:
                        reported_at = time.monotonic()
                        self._run(self._consumer.finish(self._take_done()))
                    handed_out += 1
                    self._done.append(one)  # it is done with the next one, with a commit, and with an orderly end
                    yield one.messages[0]
            finally:
                if handed_out < len(ahead) and not self._is_closed:
                    self._run(self._consumer.return_unused(ahead[handed_out:]))

    def run(self, handler: Callable[[ConsumedMessage], object], *, workers: int = WORKERS) -> None:
        """Call ``handler`` with each message, on ``workers`` threads, until the consumer is closed.

        It is closed by another thread, a signal handler or the handler itself. See ``aio.Consumer.run``; an interrupt
        (Ctrl-C) waits for handlers that are at work.
        """
        _check_handler(handler)
        self._run_handlers(lambda messages: handler(messages[0]), workers, 1)

    def run_batches(
        self, handler: Callable[[Sequence[ConsumedMessage]], object], *, workers: int = WORKERS, batch_max: int = 100
    ) -> None:
        """As ``run``, but with up to ``batch_max`` messages of one queue at a time, which are done or fail together."""
        _check_handler(handler)
        self._run_handlers(handler, workers, batch_max)

    def _run_handlers(
        self, handler: Callable[[Sequence[ConsumedMessage]], object], workers: int, batch_max: int
    ) -> None:
        with ThreadPoolExecutor(max(workers, 1), "rocketmq-handler") as pool:

            def call(messages: Sequence[ConsumedMessage]) -> None:
                self._handling.is_here = True
                try:
                    handler(messages)
                finally:
                    self._handling.is_here = False

            async def handle(messages: Sequence[ConsumedMessage]) -> None:
                called = asyncio.get_running_loop().run_in_executor(pool, call, messages)
                try:
                    await asyncio.shield(called)
                except asyncio.CancelledError:  # a thread cannot be cancelled, and may yet succeed
                    await asyncio.wait([called])
                    called.result()

            try:
                self._run(self._consumer.run_batches(handle, workers=workers, batch_max=batch_max))
            except ClientClosedError:
                if not self._is_closed:
                    raise

    def retry(self, message: ConsumedMessage, delay_level: int = 0) -> None:
        """The message failed: deliver it again later: see ``aio.Consumer.retry``."""
        self._run(self._consumer.retry(message, delay_level))

    # -- offsets -------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit what is done; what ``poll`` returned counts as done, of an iteration, too."""
        self._run(self._consumer.commit(self._take_done()))

    def seek(self, queue: MessageQueue, to: Start) -> None:
        """Continue in a queue at an offset, ``"first"`` or ``"last"``: see ``aio.Consumer.seek``."""
        self._run(self._consumer.seek(queue, to))

    def seek_to_time(self, time_ms: int, *queues: MessageQueue) -> None:
        """Continue in these queues, or all, at the first message stored at a time (ms since 1970) or later."""
        self._run(self._consumer.seek_to_time(time_ms, *queues))

    def pause(self, *queues: MessageQueue) -> None:
        """Hand out nothing of these queues, or of all, until ``resume``."""
        self._run(_called(self._consumer.pause, *queues))

    def resume(self, *queues: MessageQueue) -> None:
        """Hand out messages of these queues, or of all, again."""
        self._run(_called(self._consumer.resume, *queues))

    @property
    def queues(self) -> list[MessageQueue]:
        """The queues that this consumer has now."""
        return self._run(_called(lambda: self._consumer.queues))

    def positions(self) -> dict[MessageQueue, int]:
        """For each queue that it has, the offset of the next message to hand out."""
        return self._run(_called(self._consumer.positions))

    def lag(self) -> dict[MessageQueue, int]:
        """For each queue of this consumer, how many messages follow those that are all done; -1: unknown."""
        return self._run(_called(self._consumer.lag))

    @property
    def skipped(self) -> int:
        """How many offsets were skipped because their messages no longer exist."""
        return self._consumer.skipped

    def close(self) -> None:
        """Wait for handlers, commit what is done, and leave the group: see ``aio.Consumer.close``. Idempotent.

        A handler that calls it is not waited for: it returns at once, and ``run`` returns when the consumer is closed.
        """
        if getattr(self._handling, "is_here", False):
            self._is_closed = True
            SHARED.close_later(self._client)
            return
        if self._done and not self._is_closed and not self._thread.is_left_behind:
            self._run(self._consumer.finish(self._take_done()))
        super().close()

    def _take_done(self) -> list[Delivery]:
        done, self._done = self._done, []
        return done


async def _called(function: Callable[..., _T], *arguments: object) -> _T:
    """On the clients' thread, which everything of the consumer belongs to."""
    return function(*arguments)


def _check_handler(handler: Callable[..., object]) -> None:
    """Refuse one whose calls would do nothing, or fail, for every message."""
    if not callable(handler):
        raise TypeError(f"a handler must be callable, not {handler!r}")
    if iscoroutinefunction(handler):
        raise TypeError("a handler of this consumer is a function: coroutine functions are for rocketstore.client.aio")


class SimpleConsumer(BlockingClient):
    """Messages that are acknowledged one by one: see ``aio.SimpleConsumer``. Any thread may call its methods."""

    def __init__(
        self,
        addresses: Sequence[str] | str | None = None,
        *,
        name_servers: Sequence[str] | str | None = None,
        group: str,
        topics: Topics,
        security: ClientSecurity | None = None,
        options: SimpleOptions | None = None,
        **settings: Unpack[SimpleSettings],
    ) -> None:
        self._consumer = aio_simple.SimpleConsumer(
            addresses,
            name_servers=name_servers,
            group=group,
            topics=topics,
            security=security,
            options=options,
            **settings,
        )
        self.group: Final = group
        self.client_id: Final = self._consumer.client_id
        self.options: Final = self._consumer.options
        self._handling = threading.local()
        super().__init__(self._consumer)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Connect: see ``aio.SimpleConsumer.start``."""
        self._run(self._consumer.start())

    def receive(self, max_messages: int = RECEIVE_MAX, wait_s: float | None = None) -> list[PoppedMessage]:
        """Up to ``max_messages``, at least one unless none arrives in time: see ``aio.SimpleConsumer.receive``."""
        return self._run(self._consumer.receive(max_messages, wait_s))

    def __iter__(self) -> Iterator[PoppedMessage]:
        """Every message until the consumer is closed, waiting for more. Requesting the next acknowledges the last."""
        while True:
            try:
                found = self.receive(1)
            except ClientClosedError:
                if self._is_closed:
                    return
                raise
            for one in found:
                yield one
                with suppress(NotFoundError):  # it took too long, and comes again
                    self.ack(one)

    def ack(self, *messages: PoppedMessage) -> None:
        """These are done, whatever fails: see ``aio.SimpleConsumer.ack``."""
        self._run(self._consumer.ack(*messages))

    def change_invisible(self, message: PoppedMessage, seconds: float, *, is_attempt: bool = True) -> None:
        """Keep a message longer, or give it back: see ``aio.SimpleConsumer.change_invisible``."""
        self._run(self._consumer.change_invisible(message, seconds, is_attempt=is_attempt))

    def run(self, handler: Callable[[PoppedMessage], object], *, workers: int = SIMPLE_WORKERS) -> None:
        """Call ``handler`` with each message, on ``workers`` threads, until the consumer is closed.

        It is closed by another thread, a signal handler or the handler itself. See ``aio.SimpleConsumer.run``.
        """
        if not callable(handler):
            raise TypeError(f"a handler must be callable, not {handler!r}")
        if iscoroutinefunction(handler):
            raise TypeError("a handler here is a function: coroutine functions are for rocketstore.client.aio")
        with ThreadPoolExecutor(max(workers, 1), "rocketmq-handler") as pool:

            def call(message: PoppedMessage) -> None:
                self._handling.is_here = True
                try:
                    handler(message)
                finally:
                    self._handling.is_here = False

            async def handle(message: PoppedMessage) -> None:
                called = asyncio.get_running_loop().run_in_executor(pool, call, message)
                try:
                    await asyncio.shield(called)
                except asyncio.CancelledError:  # a thread cannot be cancelled, and may yet succeed
                    await asyncio.wait([called])
                    called.result()

            try:
                self._run(self._consumer.run(handle, workers=workers))
            except ClientClosedError:
                if not self._is_closed:
                    raise

    def close(self) -> None:
        """Wait for handlers, give back what was not handed out, and leave the group. Idempotent.

        A handler that calls it is not waited for: it returns at once, and ``run`` returns when the consumer is closed.
        """
        if getattr(self._handling, "is_here", False):
            self._is_closed = True
            SHARED.close_later(self._client)
            return
        super().close()
