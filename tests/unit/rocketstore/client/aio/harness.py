"""A broker's messages, and those that a consumer gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from rocketstore.client import Admin, ConsumedMessage, Message, Producer, TopicInfo
from rocketstore.client.aio import Consumer
from rocketstore.server import BrokerServer

TOPIC: Final = "orders"
DEADLINE_S: Final = 120.0


class Sender:
    """Sends to one queue or another of ``TOPIC``, which has what was sent when ``send`` returns."""

    def __init__(self, broker: BrokerServer) -> None:
        self._store = broker.store
        self.producer = Producer(broker.address)
        self.admin = Admin(broker.address)

    async def send(self, *bodies: bytes, queue: int = 0, tags: str = "", topic: str = TOPIC, **properties: str) -> None:
        messages = [Message(topic, body, tags=tags, properties=dict(properties)) for body in bodies]
        for one in messages:
            await asyncio.to_thread(self.producer.send, one, queue=queue)
        assert await asyncio.to_thread(self._store.wait_dispatched, DEADLINE_S)

    async def topic(self, name: str = TOPIC, queues: int = 2, permission: int = 6) -> None:
        info = TopicInfo(name, read_queues=queues, write_queues=queues, permission=permission)
        await asyncio.to_thread(self.admin.put_topic, info)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def gather(consumer: Consumer, count: int) -> list[ConsumedMessage]:
    """Messages of several polls."""
    found: list[ConsumedMessage] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            found += await consumer.poll(timeout_s=0.5)
    return found


def bodies(messages: Sequence[ConsumedMessage]) -> list[bytes]:
    return sorted(one.body for one in messages)
