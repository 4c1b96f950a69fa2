"""The pipelining client process: ``python -m benchmarks.children.load_client [--tls DIR] GROUP ADDRESS…``.

Commands are JSON lines on stdin, responses go to stdout; it exits when stdin is closed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from cluster.local.tls import client_security
from dledger.client import AppendFuture, ClientSecurity, DLedgerClient
from dledger.errors import ResponseCode
from dledger.pb import client_pb2 as pb
from dledger.rpc import options


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


def pend(address: str, group: str, command: Mapping[str, Any]) -> dict[str, object]:  # Any: as above
    """Send ``count`` single appends at once, each as a separate request, and report their results."""
    request = pb.AppendRequest(group=group, bodies=[os.urandom(command["body_bytes"])]).SerializeToString()
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(options.method(options.LOG_SERVICE, "Append"), _raw, _raw)
        calls = [call.future(request, timeout=command["timeout_seconds"]) for _ in range(command["count"])]
        errors = [error for error in map(failure_of, calls) if error is not None]
    return {"acknowledged": len(calls) - len(errors), "failed": len(errors), "first_failure": "".join(errors[:1])}


def failure_of(call: grpc.Future[bytes]) -> str | None:
    """Wait for one append; returns its error, or None."""
    error = call.exception()
    if error is not None:
        return repr(error)
    status = pb.AppendResponse.FromString(call.result()).status
    return None if status.code == ResponseCode.SUCCESS else f"{status.error}: {status.message}"


def _raw(message: bytes) -> bytes:
    return message


def main() -> None:
    """Serve until stdin closes."""
    words = sys.argv[1:]
    security = None
    if words[0] == "--tls":
        security = client_security(Path(words[1]))
        words = words[2:]
    group, *addresses = words
    actions: dict[str, Callable[[Mapping[str, Any]], dict[str, object]]] = {  # Any: the values of a JSON object
        "measure": lambda command: _with_client(addresses, group, security, command),
        "pend": lambda command: pend(command["address"], group, command),
    }
    for line in sys.stdin:
        command = json.loads(line)
        sys.stdout.write(json.dumps(actions[command["do"]](command)) + "\n")
        sys.stdout.flush()


def _with_client(
    addresses: list[str],
    group: str,
    security: ClientSecurity | None,
    command: Mapping[str, Any],  # Any: as above
) -> dict[str, object]:
    with DLedgerClient(addresses, group=group, security=security) as client:
        return measure(client, command)


if __name__ == "__main__":
    main()
