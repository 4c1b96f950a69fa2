"""The blocking ``SimpleConsumer``: ``aio.SimpleConsumer`` on the clients' thread, handlers on threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from inspect import iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, Unpack

from rocketstore.client.aio import simple_consumer as aio_consumer
from rocketstore.client.aio.errors import ClientClosedError, NotFoundError
from rocketstore.client.aio.simple_consumer import RECEIVE_MAX, WORKERS
from rocketstore.client.loop_thread import SHARED, BlockingClient

if TYPE_CHECKING:
    from dledger.client.shared import ClientSecurity
    from rocketstore.client.aio.expressions import Topics
    from rocketstore.client.aio.popped import PoppedMessage
    from rocketstore.client.aio.simple_consumer import SimpleOptions, SimpleSettings


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
        self._consumer = aio_consumer.SimpleConsumer(
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

    def run(self, handler: Callable[[PoppedMessage], object], *, workers: int = WORKERS) -> None:
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
