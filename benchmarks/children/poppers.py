"""Consumers that acknowledge message by message: ``python -m benchmarks.children.poppers GROUP COUNT UNTIL ADDRESSES``.

``COUNT`` consumers, which end when all together have acknowledged ``UNTIL`` messages. Then it writes as JSON when they
began, when the last message was acknowledged, and how many were.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Final

from rocketstore.client.aio.received import PoppedMessage
from rocketstore.client.aio.simple_consumer import RECEIVE_MAX, SimpleConsumer

TOPIC: Final = "bench"


class Poppers:
    """All consumers of this process."""

    def __init__(self, group: str, addresses: str) -> None:
        self._group = group
        self._addresses = addresses
        self.acknowledged = 0
        self.ended_at = 0.0

    async def run(self, count: int, until: int) -> None:
        """Until so many messages are acknowledged."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self._consume(until))

    async def _consume(self, until: int) -> None:
        async with SimpleConsumer(self._addresses, group=self._group, topics=TOPIC, start="first") as consumer:
            acknowledging: asyncio.Task[None] | None = None
            while self.acknowledged < until:
                messages = await consumer.receive(RECEIVE_MAX, 1.0)
                if acknowledging is not None:
                    await acknowledging
                acknowledging = asyncio.create_task(self._acknowledge(consumer, messages)) if messages else None
            if acknowledging is not None:
                await acknowledging

    async def _acknowledge(self, consumer: SimpleConsumer, messages: list[PoppedMessage]) -> None:
        """While the next ones are asked for."""
        await consumer.ack(*messages)
        self.acknowledged += len(messages)
        self.ended_at = time.time()


def main() -> None:
    """See the module."""
    group, count, until, addresses = sys.argv[1:]
    poppers = Poppers(group, addresses)
    began = time.time()
    asyncio.run(poppers.run(int(count), int(until)))
    found = {"began": began, "ended": poppers.ended_at, "acknowledged": poppers.acknowledged}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
