"""RocketMQ's C++ client, by its Python wrapper: sends numbered messages for so many seconds, or receives them.

``client.py load NAME_SERVERS TOPIC SECONDS`` and ``client.py consume NAME_SERVERS TOPIC COUNT``, as the programs in Go
and Java. It needs the package ``rocketmq`` on its path.
"""

from __future__ import annotations

import sys
import threading
import time

from rocketmq.client import Message, Producer, PushConsumer

TIMEOUT_S = 120
PAUSE_S = 0.02


def load(name_servers: str, topic: str, seconds: int) -> None:
    """Send one after the other, whatever fails."""
    producer = Producer("interop-cpp")
    producer.set_namesrv_addr(name_servers)
    producer.start()
    begin, number = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        message = Message(topic)
        message.set_body(str(number).encode())
        try:
            result = producer.send_sync(message)
        except Exception:
            time.sleep(PAUSE_S)
        else:
            if result.status == 0:
                print(">", number, int(time.time() * 1000), flush=True)
        number += 1
    producer.shutdown()


def consume(name_servers: str, topic: str, count: int) -> None:
    """Receive until all are there."""
    found: set[int] = set()
    everything = threading.Event()

    def take(message: object) -> None:
        found.add(int(message.body))  # type: ignore[attr-defined]
        if len(found) == count:
            everything.set()

    consumer = PushConsumer("interop-cpp")
    consumer.set_namesrv_addr(name_servers)
    consumer.subscribe(topic, take)
    consumer.start()
    if not everything.wait(TIMEOUT_S):
        sys.exit(f"received {len(found)} of {count} messages")
    consumer.shutdown()
    for number in sorted(found):
        print(">", number)


if __name__ == "__main__":
    {"load": load, "consume": consume}[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]))
