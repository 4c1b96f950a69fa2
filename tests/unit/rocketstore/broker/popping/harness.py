"""Pop on a whole plain broker in this process, asked as adapters ask it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

from dledger.rpc.clients.connections import Leases
from rocketstore.broker.broker import Broker
from rocketstore.broker.popping.requests import (
    Ack,
    ChangedInvisible,
    ChangeInvisible,
    DeadLetter,
    PoppedRecord,
    PopResult,
    Receive,
    Received,
)
from rocketstore.broker.sending import SendBatch
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.pop.tables import LeaseWindow, PopPlace
from rocketstore.server import BrokerServer
from rocketstore.state.changes import GroupConfig, TopicConfig
from tests.support.waiting import wait_until
from tests.unit.rocketstore.test_server import plain

_T = TypeVar("_T")
TOPIC, GROUP = "orders", "mailer"


class PopBroker:
    """With topic ``orders`` of two queues; ``start`` it, ``stop`` it."""

    def __init__(self, path: Path, **settings: str) -> None:
        self.server = BrokerServer(plain(path, **settings)).start()
        self.run(self.broker.topics.put([TopicConfig(TOPIC, 2, 2)]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()

    @property
    def broker(self) -> Broker:
        """Its rules."""
        found = self.server._ports.broker  # there is no other way in
        assert found is not None
        return found

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """On the broker's loop."""
        return self.broker.loop.bridge.run(work)

    def send(
        self, bodies: Iterable[bytes], queue_id: int = 0, topic: str = TOPIC, properties: dict[str, str] | None = None
    ) -> None:
        """Store these, and wait until they can be read."""
        messages = [Message(topic, one, queue_id, dict(properties or {})) for one in bodies]
        results = self.run(self.broker.sending.send(None, SendBatch(messages, 100)))
        assert all(one.ok for one in results), results
        end = max(one.stored.queue_offset for one in results if one.stored is not None) + 1
        wait_until(lambda: self.broker.store.max_offset(topic, queue_id) >= end, "dispatch")

    def receive(self, group: str = GROUP, topic: str = TOPIC, **wish: Any) -> Received:  # noqa: ANN401  # its fields
        """One receive, from the first message on unless said otherwise."""
        fields: dict[str, Any] = {"from_first": True, "client_id": "c"} | wish  # Any: of its fields
        return self.run(self.received(Receive(group, topic, **fields)))

    def begin(self, **wish: Any) -> Future[Received]:  # noqa: ANN401  # its fields
        """A receive that waits half a minute; returns when it does."""
        before = self.broker.counters().pop.waiting
        fields: dict[str, Any] = {"wait_ms": 30_000, "client_id": "c"} | wish  # Any: of its fields
        asked = Receive(GROUP, TOPIC, **fields)
        waiting = asyncio.run_coroutine_threadsafe(self.received(asked), self.run(running_loop()))
        wait_until(lambda: self.broker.counters().pop.waiting > before, "the receive waits")
        return waiting

    async def received(self, wish: Receive) -> Received:
        """The same on the loop."""
        broker = self.broker
        with Leases(broker.shares.room, broker.shares.quotas.of("@test", "test", "test")) as leases:
            return await broker.popping.receive(wish, leases, "@test")

    def receive_all(self, count: int, **wish: Any) -> list[PoppedRecord]:  # noqa: ANN401  # the fields of a wish
        """So many messages."""
        found: list[PoppedRecord] = []
        while len(found) < count:
            got = self.receive(**{"wait_ms": 20_000} | wish).messages
            assert got, f"only {len(found)} of {count} messages"
            found += got
        return found

    def ack(self, messages: Sequence[PoppedRecord], group: str = GROUP, topic: str = TOPIC) -> list[PopResult]:
        """A result for each."""
        return list(self.run(self.broker.popping.ack([Ack(group, topic, one.handle) for one in messages])))

    def change(self, message: PoppedRecord, duration_ms: int, **more: bool) -> ChangedInvisible:
        """Change its time."""
        change = ChangeInvisible(GROUP, TOPIC, message.handle, duration_ms, **more)
        return self.run(self.broker.popping.change_invisible(change))

    def end_together(self, messages: Sequence[PoppedRecord]) -> None:
        """Have the leases of these end at the same time, soon, however long it took to receive them all."""

        async def change_all() -> None:
            changes = [ChangeInvisible(GROUP, TOPIC, one.handle, 500) for one in messages]
            await asyncio.gather(*map(self.broker.popping.change_invisible, changes))

        self.run(change_all())

    def give_up(self, message: PoppedRecord, reason: str = "") -> PopResult:
        """To the dead letters."""
        return self.run(self.broker.popping.dead_letter(DeadLetter(GROUP, TOPIC, message.handle, reason)))

    def put_group(self, group: GroupConfig) -> None:
        """Change a group's settings."""
        self.run(self.broker.groups.put([group]))

    def window(self, queue_id: int = 0, topic: str = TOPIC, group: str = GROUP) -> LeaseWindow:
        """What is replicated."""
        found = self.broker.state.pop.pop_window(PopPlace(group, topic, queue_id))
        assert found is not None
        return found

    def stored(self, topic: str) -> list[Message]:
        """All messages of queue 0 of a topic."""
        store = self.broker.store
        found: list[Message] = []
        while len(found) < store.max_offset(topic, 0):
            got = store.get(topic, 0, len(found), max_count=32)
            found += [decode_record(one) for one in got.records]
        return found


async def running_loop() -> asyncio.AbstractEventLoop:
    """The broker's, of what is run there."""
    return asyncio.get_running_loop()


def bodies(messages: Iterable[PoppedRecord]) -> list[bytes]:
    """Of these messages."""
    return [decode_record(one.record).body for one in messages]
