"""Consumer groups with an SQL condition each: ``python -m benchmarks.children.sql_groups ADDRESS``, commands as JSON.

``join``: so many groups read the topic, each with another condition; ``count``: how many messages they were given.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Final

from rocketstore.client import Sql
from rocketstore.client.aio import Consumer
from rocketstore.client.aio.errors import ClientClosedError

REGIONS: Final = ("EU", "US", "JP", "BR")


def condition(number: int) -> str:
    """Three terms, which about one message in 50 fulfils."""
    region, other = REGIONS[number % 4], REGIONS[(number + 1) % 4]
    return (
        f"amount BETWEEN {number * 4} AND {number * 4 + 3} AND region IN ('{region}', '{other}') AND kind IS NOT NULL"
    )


class SqlGroups:
    """Those that have joined."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._consumers: list[Consumer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.received = 0

    async def join(self, count: int, topic: str) -> None:
        """Each from now on."""
        for number in range(count):
            topics = {topic: Sql(condition(number))}
            consumer = Consumer(self._address, group=f"bench-{number}", topics=topics, start="last", timeout_s=30)
            await consumer.start()
            self._consumers.append(consumer)
            self._tasks.append(asyncio.get_running_loop().create_task(self._read(consumer)))

    async def leave(self) -> None:
        """All of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for consumer in self._consumers:
            await consumer.close()

    async def _read(self, consumer: Consumer) -> None:
        with suppress(ClientClosedError):
            while True:
                self.received += len(await consumer.poll())


async def _serve() -> None:
    groups = SqlGroups(sys.argv[1])
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        if command["do"] == "join":
            await groups.join(command["count"], command["topic"])
        sys.stdout.write(json.dumps({"received": groups.received}) + "\n")
        sys.stdout.flush()
    await groups.leave()


def main() -> None:
    """Serve until stdin closes."""
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
