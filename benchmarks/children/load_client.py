"""The pipelining client process: ``python -m benchmarks.children.load_client [--tls DIR] GROUP ADDRESS…``.

Commands are JSON lines on stdin, responses go to stdout; it exits when stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks import stats
from dledger.client import AppendFuture, DLedgerClient
from dledger.client.aio import DLedgerClient as AsyncClient
from dledger.remoting.client import DisconnectedError, RemotingClient, UnreachableError
from dledger.remoting.connection import REQUESTS_MAX
from dledger.remoting.frame import Frame
from dledger.remoting.log_codec import UNORDERED, LogCode, encode_append, error_of
from dledger.rpc.clients.codec import Append
from dledger_cli.local.group import client_security

CONNECTION_REQUESTS: Final = REQUESTS_MAX - 24
"""Single requests on one connection: a node reads no more from one that has ``REQUESTS_MAX`` in progress."""


class Pipeline:
    """Keeps at most ``window`` appends outstanding, like a program that sends records and checks each result."""

    def __init__(self, client: DLedgerClient, window: int) -> None:
        self._client = client
        self._window = window
        self._outstanding: deque[AppendFuture] = deque()
        self.acknowledged = 0

    def run(self, body: bytes, seconds: float) -> float:
        """Append for this many seconds; returns acknowledged appends per second. Raises the first append's error, if
        any.
        """
        outstanding, window, append = self._outstanding, self._window, self._client.submit
        first, started = self.acknowledged, time.perf_counter()
        while (now := time.perf_counter()) < started + seconds:
            while len(outstanding) < window:
                outstanding.append(append(body))
            self._settle()
        return (self.acknowledged - first) / (now - started)

    def drain(self) -> None:
        """Wait for everything outstanding."""
        self._client.flush()
        while self._outstanding:
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest append, then remove all that are done."""
        outstanding = self._outstanding
        outstanding.popleft().result()
        self.acknowledged += 1
        while outstanding and outstanding[0].done():
            outstanding.popleft().result()
            self.acknowledged += 1


def measure(client: DLedgerClient, command: Mapping[str, Any]) -> dict[str, object]:  # Any: the values of a JSON object
    """Append with ``window`` outstanding; returns entries acknowledged per second after the warm-up."""
    body = os.urandom(command["body_bytes"])
    pipeline = Pipeline(client, command["window"])
    pipeline.run(body, command["warmup_seconds"])
    per_second = pipeline.run(body, command["seconds"])
    pipeline.drain()
    return {"per_second": per_second}


def append_in_bulk(client: DLedgerClient, command: Mapping[str, Any]) -> dict[str, object]:  # Any: as above
    """``callers`` threads append ``entries`` at a time and wait; entries acknowledged per second after the warm-up."""
    bodies = [os.urandom(command["body_bytes"])] * command["entries"]

    def append_until(deadline: float) -> int:
        appended = 0
        while time.perf_counter() < deadline:
            appended += len(client.append_many(bodies))
        return appended

    def rate(seconds: float) -> float:
        started = time.perf_counter()
        deadlines = [started + seconds] * command["callers"]
        return sum(pool.map(append_until, deadlines)) / (time.perf_counter() - started)

    with ThreadPoolExecutor(command["callers"]) as pool:
        rate(command["warmup_seconds"])
        return {"per_second": rate(command["seconds"])}


def read_in_bulk(client: DLedgerClient, command: Mapping[str, Any]) -> dict[str, object]:  # Any: as above
    """Read the whole log at the leader, again and again; megabytes per second of whole records."""
    started = time.perf_counter()
    received = 0
    while (now := time.perf_counter()) < started + command["seconds"]:
        received += sum(len(chunk.data) for chunk in client.fetch_log(0))
    return {"per_second": received / 1e6 / (now - started)}


async def pend(address: str, group: str, command: Mapping[str, Any]) -> dict[str, object]:  # Any: as above
    """Send ``count`` single appends at once, each as a separate request, and report their results."""
    body = encode_append(UNORDERED, Append(group, [os.urandom(command["body_bytes"])]))
    async with AsyncExitStack() as stack:
        calls = []
        for at in range(0, command["count"], CONNECTION_REQUESTS):
            link = RemotingClient()
            stack.push_async_callback(link.close)
            count = min(CONNECTION_REQUESTS, command["count"] - at)
            calls += [failure_of(link, address, body, command["timeout_seconds"]) for _ in range(count)]
        errors = [error for error in await asyncio.gather(*calls) if error is not None]
    return {"acknowledged": len(calls) - len(errors), "failed": len(errors), "first_failure": "".join(errors[:1])}


async def send_commands(
    addresses: Sequence[str],
    group: str,
    command: Mapping[str, Any],  # Any: as above
) -> dict[str, object]:
    """``callers`` tasks each send one command at a time on one client; commands per second, and their median."""
    body = os.urandom(command["body_bytes"])

    async def call_until(deadline: float) -> list[float]:
        took: list[float] = []
        while (began := time.perf_counter()) < deadline:
            await client.command(body)
            took.append((time.perf_counter() - began) * 1e3)
        return took

    async def run(seconds: float) -> list[float]:
        deadline = time.perf_counter() + seconds
        calls = await asyncio.gather(*(call_until(deadline) for _ in range(command["callers"])))
        return [one for took in calls for one in took]

    async with AsyncClient(addresses, group=group) as client:
        await run(command["warmup_seconds"])
        took = await run(command["seconds"])
    return {"per_second": len(took) / command["seconds"], "p50_ms": stats.median(took)}


async def failure_of(link: RemotingClient, address: str, body: bytes, timeout_s: float) -> str | None:
    """Append one entry; returns its error, or None."""
    try:
        answer = await link.call(address, Frame(LogCode.APPEND, 0, body=body), timeout_s)
    except (UnreachableError, DisconnectedError, TimeoutError) as error:
        return repr(error)
    return repr(error_of(answer, address)) if answer.code else None


def main() -> None:
    """Serve until stdin closes."""
    words = sys.argv[1:]
    security = None
    if words[0] == "--tls":
        security = client_security(Path(words[1]))
        words = words[2:]
    group, *addresses = words
    actions: dict[str, Callable[[Mapping[str, Any]], dict[str, object]]] = {  # Any: the values of a JSON object
        "measure": lambda command: measure(client, command),
        "bulk": lambda command: append_in_bulk(client, command),
        "read": lambda command: read_in_bulk(client, command),
        "commands": lambda command: asyncio.run(send_commands(addresses, group, command)),
        "pend": lambda command: asyncio.run(pend(command["address"], group, command)),
    }
    with DLedgerClient(addresses, group=group, security=security) as client:
        for line in sys.stdin:
            command = json.loads(line)
            sys.stdout.write(json.dumps(actions[command["do"]](command)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
