"""One producer of a group of brokers: ``python -m benchmarks.children.send_client TOPIC ADDRESS…``.

Commands are JSON lines on stdin, responses go to stdout; it exits when stdin is closed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Final

from benchmarks.sending import send_rate
from dledger.errors import DLedgerError
from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message

BODY_BYTES: Final = 1024
TIMEOUT_S: Final = 30.0
"""A message must outlast a failover."""


def send_singly(producer: Producer, message: Message, seconds: float, interval_s: float) -> dict[str, object]:
    """One message after the other, the next one ``interval_s`` after the last was due, or once that is answered.

    How long each took that was acknowledged, in milliseconds; how many were not.
    """
    took: list[float] = []
    failed = 0
    due = time.perf_counter()
    end = due + seconds
    while (now := time.perf_counter()) < end:
        if due > now:
            time.sleep(due - now)
        began = time.perf_counter()
        try:
            producer.send(message)
        except DLedgerError:
            failed += 1
        else:
            took.append((time.perf_counter() - began) * 1e3)
        due = max(due + interval_s, time.perf_counter())
    return {"took": took, "failed": failed}


def main() -> None:
    """Serve until stdin closes."""
    topic, *addresses = sys.argv[1:]
    message = Message(topic, os.urandom(BODY_BYTES))
    with Producer(addresses, timeout_s=TIMEOUT_S) as producer:
        for line in sys.stdin:
            command = json.loads(line)
            answer: dict[str, object]
            if command["do"] == "rate":
                send_rate(producer, message, command["warmup_seconds"])
                answer = {"per_second": send_rate(producer, message, command["seconds"])}
            else:
                answer = send_singly(producer, message, command["seconds"], command["interval_s"])
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
