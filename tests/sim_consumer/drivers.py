"""Runs the real consumers. Another client needs another ``Driver``, and what stands for its connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

import pytest

from dledger.errors import DLedgerError
from rocketstore.client import consumer, group_places
from rocketstore.client.aio.consumed_message import ConsumedMessage
from rocketstore.client.aio.consumer import Consumer as AioConsumer
from rocketstore.client.consumer import Consumer, ConsumerOptions
from rocketstore.client.group_consumer import GroupConsumer
from rocketstore.client.group_options import GroupOptions
from rocketstore.client.shares import GroupDelivery
from tests.sim_consumer.broker import ModelBroker
from tests.sim_consumer.ports import ADDRESS, ModelConnection
from tests.sim_consumer.remoting import ModelPort, ServerLoop

GROUP: Final = "g"
TOPIC: Final = "T"
RETRIES: Final = 3
PAUSE_S: Final = 0.02
TIMEOUT_S: Final = 5.0
CONSUME_TIMEOUT_S: Final = 0.6
Handle = Callable[["Driver", int, bytes, int], None]
"""Gets a message's place in the log, its body, and how often it was tried before. Raises what a handler raises."""


class Driver(Protocol):
    """One member of the group, or one consumer alone."""

    is_dead: bool
    """Whether it was killed: then nothing counts that its handlers do."""

    def start(self) -> None:
        """Join, in the background, however long that takes."""

    def stop(self) -> None:
        """Leave, as a program does that ends: what is done is committed."""

    def kill(self) -> None:
        """As SIGKILL does it."""


@contextmanager
def fast() -> Iterator[None]:
    """Whatever clients do from time to time happens often, so that seconds show what takes hours."""
    with pytest.MonkeyPatch.context() as patch:
        for module, times in {
            "topic_cache": {"REFRESH_S": 0.05, "UNKNOWN_REFRESH_S": 0.02},
            "consumer": {"LOOK_AFTER_S": 0.05},
            "fetcher": {"BEYOND_END_S": 0.1, "REFUSED_PAUSE_S": 0.05},
            "memberships": {"HEARTBEAT_S": 0.5, "RECONNECT_S_MAX": 0.1},
            "group_division": {"LOOK_S": 0.05, "MISSING_TOPIC_S": 0.1},
            "group_branch": {"LOOK_S": 0.05, "REBALANCE_S": 0.3, "SETTLE_S": 0.05, "TAKE_OVER_S": 0.1, "RENEW_S": 0.5},
            "group_consumer": {
                "LOOK_S": 0.05,
                "LOOK_LATE_S": 0.05,
                "ORDERED_PAUSE_S": 0.05,
                "AGAIN_S_MIN": 0.05,
                "AGAIN_S_MAX": 0.1,
                "LATE_S": 0.2,
            },
            "aio.routes": {"REFRESH_S": 0.05, "UNKNOWN_REFRESH_S": 0.02},
            "aio.cluster": {"PAUSE_S_MAX": 0.1},
            "aio.heartbeats": {"INTERVAL_S": 0.5, "LOOK_S": 0.05},
            "aio.queue_reader": {"BEYOND_END_S": 0.1, "REFUSED_PAUSE_S": 0.05, "PAUSE_S_MAX": 0.1},
            "aio.rebalancer": {"LOOK_S": 0.05, "MEMBERS_S": 0.3, "SETTLE_LOOK_S": 0.01},
            "aio.broker_session": {
                "REBALANCE_S": 0.3,
                "RETRY_S": 0.05,
                "SETTLE_S": 0.05,
                "TAKE_OVER_S": 0.1,
                "RENEW_S": 0.5,
            },
            "aio.assignment": {"LOCKED_PAUSE_S": 0.05},
            "aio.consumer": {
                "LOOK_S": 0.05,
                "ORDERED_PAUSE_S": 0.05,
                "AGAIN_S_MIN": 0.05,
                "AGAIN_S_MAX": 0.1,
                "LATE_S": 0.2,
            },
        }.items():
            for name, seconds in times.items():
                patch.setattr(f"rocketstore.client.{module}.{name}", seconds)
        yield


@contextmanager
def _connected(module: Any, connection: ModelConnection) -> Iterator[None]:  # noqa: ANN401  # a module
    """What is made meanwhile has this connection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BrokerConnection", lambda *_, **__: connection)
        yield


class PollDriver:
    """A ``Consumer``, whose program handles what it polls before it polls again."""

    def __init__(self, broker: ModelBroker, handle: Handle, *, start: str, pull_max: int) -> None:
        self.is_dead = False
        self._handle = handle
        self._connection = ModelConnection(broker, TIMEOUT_S, pull_max)
        self._ending = threading.Event()
        options = ConsumerOptions(
            start=start,  # type: ignore[arg-type]  # first or last
            auto_commit_s=0.05,
            timeout_s=TIMEOUT_S,
            pull_wait_ms=100,
        )
        with _connected(consumer, self._connection):
            self._consumer = Consumer(ADDRESS, group=GROUP, topic=TOPIC, options=options)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()
        with suppress(DLedgerError):
            self._consumer.close()

    def kill(self) -> None:
        self._connection.cut()  # first: the dead neither commit nor send back
        self.is_dead = True
        self.stop()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                messages = self._consumer.poll(4, 0.05)
            except DLedgerError:
                self._ending.wait(PAUSE_S)
                continue
            for one in messages:
                self._until_done(one.decode().offset, one.body)

    def _until_done(self, at: int, body: bytes) -> None:
        tries = 0
        while not self.is_dead:
            try:
                self._handle(self, at, body, tries)
            except BaseException:  # noqa: BLE001  # this program tries again
                tries += 1
                self._ending.wait(PAUSE_S)
            else:
                return


class MemberDriver:
    """A ``GroupConsumer`` with a handler."""

    def __init__(self, broker: ModelBroker, handle: Handle, *, start: str, pull_max: int, ordered: bool) -> None:
        self.is_dead = False
        self._broker = broker
        self._handle = handle
        self._ending = threading.Event()
        self._pull_max = pull_max
        self._options = GroupOptions(
            ordered=ordered,
            start=start,  # type: ignore[arg-type]  # first or last
            retries_max=RETRIES,
            commit_s=0.05,
            timeout_s=TIMEOUT_S,
            pull_wait_ms=100,
            pending_span_max=20,
            consume_timeout_s=CONSUME_TIMEOUT_S,
        )
        self._made: list[tuple[ModelConnection, GroupConsumer]] = []
        self._make()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _make(self) -> None:
        connection = ModelConnection(self._broker, TIMEOUT_S, self._pull_max)
        with _connected(group_places, connection):
            member = GroupConsumer(ADDRESS, group=GROUP, options=self._options)
        member.subscribe(TOPIC)
        self._made.append((connection, member))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        for _, member in self._made:
            with suppress(DLedgerError):
                member.close()
        self._thread.join()

    def kill(self) -> None:
        for connection, _ in self._made:
            connection.cut()
        self.is_dead = True
        self.stop()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._made[-1][1].start(self._on_message)
            except DLedgerError:
                if self._ending.wait(PAUSE_S):
                    return
                self._made[-1][1].close()
                self._make()
            else:
                return

    def _on_message(self, delivery: GroupDelivery) -> None:
        self._handle(self, delivery.message.decode().offset, delivery.body, delivery.attempts)


class AioDriver:
    """A consumer on asyncio in a thread of its own: ``assigned`` polls all queues, ``member`` and ``in_order`` run."""

    def __init__(
        self, kind: str, broker: ModelBroker, servers: ServerLoop, handle: Handle, start: str, pull_max: int
    ) -> None:
        self.is_dead = False
        self._kind = kind.removeprefix("rocketmq ")
        self._handle = handle
        self._start = start
        self._port = ModelPort(broker, servers, pull_max, rocketmq=kind.startswith("rocketmq "))
        self._ending = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def kill(self) -> None:
        self._port.cut()  # first: the dead neither commit nor send back
        self.is_dead = True
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def _cancel(self) -> None:
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
                if not self.is_dead:
                    with suppress(DLedgerError):
                        await consumer.close()

    def _consumer(self) -> AioConsumer:
        return AioConsumer(
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

    async def _poll(self, consumer: AioConsumer) -> None:
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
            except BaseException:  # this program tries again
                if self.is_dead:
                    raise
                tries += 1
                await asyncio.sleep(PAUSE_S)
            else:
                return

    async def _members(self, consumer: AioConsumer) -> None:
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


def make(kind: str, broker: ModelBroker, servers: ServerLoop, handle: Handle, *, start: str, pull_max: int) -> Driver:
    """Over remoting ``assigned``, ``member`` or ``in_order``; over gRPC ``poll``, ``group`` or ``ordered``."""
    if kind == "poll":
        return PollDriver(broker, handle, start=start, pull_max=pull_max)
    if kind in ("group", "ordered"):
        return MemberDriver(broker, handle, start=start, pull_max=pull_max, ordered=kind == "ordered")
    return AioDriver(kind, broker, servers, handle, start, pull_max)
