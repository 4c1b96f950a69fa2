"""Runs the real consumers."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import pytest

from dledger.errors import DLedgerError
from rocketstore.client.aio import assignment, broker_session, cluster, consumer, queue_reader, rebalancer, routes
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.received import ConsumedMessage
from tests.sim_consumer.broker import ModelBroker
from tests.sim_consumer.remoting import ModelPort, ServerLoop

GROUP: Final = "g"
TOPIC: Final = "T"
RETRIES: Final = 3
PAUSE_S: Final = 0.02
TIMEOUT_S: Final = 5.0
CONSUME_TIMEOUT_S: Final = 0.6
Handle = Callable[["Driver", int, bytes, int], None]
"""Gets a message's place in the log, its body, and how often it was tried before. Raises what a handler raises."""


@contextmanager
def fast() -> Iterator[None]:
    """Whatever clients do from time to time happens often, so that seconds show what takes hours."""
    with pytest.MonkeyPatch.context() as patch:
        for module, times in {
            routes: {"REFRESH_S": 0.05, "UNKNOWN_REFRESH_S": 0.02},
            cluster: {"PAUSE_S_MAX": 0.1, "INTERVAL_S": 0.5, "LOOK_S": 0.05},
            queue_reader: {"BEYOND_END_S": 0.1, "REFUSED_PAUSE_S": 0.05, "PAUSE_S_MAX": 0.1},
            rebalancer: {"LOOK_S": 0.05, "MEMBERS_S": 0.3, "SETTLE_LOOK_S": 0.01},
            broker_session: {
                "REBALANCE_S": 0.3,
                "RETRY_S": 0.05,
                "SETTLE_S": 0.05,
                "TAKE_OVER_S": 0.1,
                "RENEW_S": 0.5,
            },
            assignment: {"LOCKED_PAUSE_S": 0.05},
            consumer: {
                "LOOK_S": 0.05,
                "ORDERED_PAUSE_S": 0.05,
                "AGAIN_S_MIN": 0.05,
                "AGAIN_S_MAX": 0.1,
                "LATE_S": 0.2,
            },
        }.items():
            for name, seconds in times.items():
                patch.setattr(module, name, seconds)
        yield


class ProcessLoop(asyncio.SelectorEventLoop):
    """The loop of a member that may be killed: the kernel would then close what it has connected."""

    def __init__(self) -> None:
        super().__init__()
        self._made: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()

    async def create_connection(self, *given: Any, **options: Any) -> Any:  # noqa: ANN401  # as asyncio's own
        made = await super().create_connection(*given, **options)
        self._made.add(made[0])
        return made

    def hang_up(self) -> None:
        """Close every connection, as the end of a process does."""
        for one in tuple(self._made):
            one.abort()


class Driver:
    """One consumer in a thread of its own: ``assigned`` polls all queues, ``member`` and ``in_order`` run."""

    def __init__(
        self, kind: str, broker: ModelBroker, servers: ServerLoop, handle: Handle, start: str, pull_max: int
    ) -> None:
        self.is_dead = False
        """Whether it was killed: then nothing counts that its handlers do."""
        self._kind = kind.removeprefix("rocketmq ")
        self._handle = handle
        self._start = start
        self._port = ModelPort(broker, servers, pull_max, rocketmq=kind.startswith("rocketmq "))
        self._ending = asyncio.Event()
        self._loop = ProcessLoop()
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Join, in the background, however long that takes."""
        self._thread.start()

    def stop(self) -> None:
        """Leave, as a program does that ends: what is done is committed."""
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def kill(self) -> None:
        """As SIGKILL does it."""
        self._port.cut()  # first: the dead neither commit nor send back
        self.is_dead = True
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def _cancel(self) -> None:
        self._ending.set()
        if self._main is not None:
            self._main.cancel()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(self._live())
        self._port.cut()

    async def _live(self) -> None:
        self._main = asyncio.current_task()
        while not self._ending.is_set():
            consumer = self._consumer()
            try:
                await (self._poll(consumer) if self._kind == "assigned" else self._members(consumer))
            except DLedgerError:
                await asyncio.sleep(PAUSE_S)
            finally:
                if self.is_dead:
                    self._loop.hang_up()
                else:
                    with suppress(DLedgerError):
                        await consumer.close()

    def _consumer(self) -> Consumer:
        return Consumer(
            self._port.address,
            group=GROUP,
            topics=TOPIC,
            assign="all" if self._kind == "assigned" else None,
            ordered=self._kind == "in_order",
            start=self._start,  # type: ignore[arg-type]  # first or last
            retries_max=RETRIES,
            commit_s=0.05,
            timeout_s=TIMEOUT_S,
            pull_wait_s=0.1,
            pending_span_max=20,
            consume_timeout_s=CONSUME_TIMEOUT_S,
        )

    async def _poll(self, consumer: Consumer) -> None:
        await consumer.start()
        while not self._ending.is_set():
            try:
                messages = await consumer.poll(4, 0.05)
            except DLedgerError:
                await asyncio.sleep(PAUSE_S)
                continue
            for one in messages:
                await self._until_done(one)

    async def _until_done(self, one: ConsumedMessage) -> None:
        tries = 0
        while not self.is_dead:
            try:
                await asyncio.to_thread(self._handle, self, one.decode().offset, one.body, tries)
            except BaseException:  # noqa: BLE001  # it tries again, and the dead wait for their cancellation
                tries += 1
                await asyncio.sleep(PAUSE_S)
            else:
                return

    async def _members(self, consumer: Consumer) -> None:
        async def handle(message: ConsumedMessage) -> None:
            await asyncio.to_thread(self._handle, self, message.decode().offset, message.body, message.attempts)

        running = asyncio.ensure_future(consumer.run(handle))
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait([running, ending], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                with suppress(DLedgerError):
                    await consumer.close()
            await running
        finally:
            ending.cancel()
