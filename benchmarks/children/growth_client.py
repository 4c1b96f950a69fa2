"""Many clients, or one with a given load: ``python -m benchmarks.children.growth_client GROUP ADDRESS…``.

Commands are JSON lines on stdin, responses go to stdout; it exits when stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from benchmarks import stats
from dledger.client.aio import DLedgerClient
from dledger.sending.futures import AsyncSentItem

TICK_S: Final = 0.001
"""Between two looks at the schedule of an offered load."""
CONNECTING_MAX: Final = 20
"""Clients that look for the leader at the same time: a thousand of them, in one process, would time each other out."""
TIMEOUT_S: Final = 60.0
"""A load of more than the group takes must get late, not fail."""


def summary(took_s: Sequence[float], seconds: float) -> dict[str, object]:
    """Rate and latencies in milliseconds."""
    ms = [one * 1e3 for one in took_s]
    return {"per_second": len(ms) / seconds, "p50": stats.median(ms), "p99": stats.percentile(ms, 99)}


async def append_by_many(
    addresses: Sequence[str], group: str, clients: int, seconds: float, body_bytes: int
) -> dict[str, object]:
    """Each of some clients, with a connection of its own, appends one entry after the other."""
    body = os.urandom(body_bytes)
    took: list[float] = []

    async def one(client: DLedgerClient, until: float) -> None:
        while (began := time.perf_counter()) < until:
            await client.append(body)
            took.append(time.perf_counter() - began)

    async with AsyncExitStack() as stack:
        some = [
            await stack.enter_async_context(DLedgerClient(addresses, group=group, timeout_s=TIMEOUT_S))
            for _ in range(clients)
        ]
        for at in range(0, clients, CONNECTING_MAX):  # so that all are connected
            await asyncio.gather(*(client.append(body) for client in some[at : at + CONNECTING_MAX]))
        began = time.perf_counter()
        await asyncio.gather(*(one(client, began + seconds) for client in some))
        return summary(took, time.perf_counter() - began)


async def offer(
    addresses: Sequence[str], group: str, per_second: float, seconds: float, body_bytes: int
) -> dict[str, object]:
    """One client's appends by a schedule, however long they take; each counts from the time it was due at."""
    body = os.urandom(body_bytes)
    took: list[float] = []
    waiting: asyncio.Queue[tuple[float, AsyncSentItem[Any]] | None] = asyncio.Queue()  # Any: where it is stored

    async def settle() -> None:
        while (one := await waiting.get()) is not None:
            due, item = one
            await item
            took.append(time.perf_counter() - due)

    async with DLedgerClient(addresses, group=group, timeout_s=TIMEOUT_S) as client:
        await client.append(body)
        settling = asyncio.create_task(settle())
        began, sent = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            while sent < passed * per_second:
                waiting.put_nowait((began + sent / per_second, await client.submit(body)))
                sent += 1
            await asyncio.sleep(TICK_S)
        waiting.put_nowait(None)
        await settling
        return summary(took, time.perf_counter() - began)


def main() -> None:
    """Serve until stdin closes."""
    group, *addresses = sys.argv[1:]
    for text in sys.stdin:
        command = json.loads(text)
        body_bytes, seconds = command["body_bytes"], command["seconds"]
        work: Coroutine[Any, Any, dict[str, object]]  # Any: nothing is sent to it
        if command["do"] == "many":
            work = append_by_many(addresses, group, command["clients"], seconds, body_bytes)
        else:
            work = offer(addresses, group, command["per_second"], seconds, body_bytes)
        sys.stdout.write(json.dumps(asyncio.run(work)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
