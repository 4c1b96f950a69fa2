"""Timed messages of one broker: how many are delivered within a second of their time while others are sent.

``python -m benchmarks.timed --count 100000 --within 60`` starts a plain broker in a process of its own, sends that many
messages that are due within so many seconds, goes on sending ordinary ones, and reads the delivered ones: a delivered
record's store time less the time it was due is how late it was. ``load`` (of the last minute) and the broker's share of
a processor while it delivers say whether the machine left it enough.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from rocketstore.broker_config import BrokerConfig
from rocketstore.client import Consumer, Message, Producer
from rocketstore.config import MIB, MessageStoreConfig
from rocketstore.server import BrokerServer

_TOPIC = "timed"
_OTHERS = "others"
_WINDOW = 1000
"""Messages on their way to the broker."""


def _serve(root: str, link: Connection) -> None:
    store = MessageStoreConfig(store_path_root_dir=Path(root), mapped_file_size_commit_log=256 * MIB)
    broker = BrokerServer(BrokerConfig(store=store, listen_port=0, grpc_server_port=0, vip_port=0)).start()
    link.send(broker.address)
    while link.recv():
        link.send({"cpu_s": time.process_time(), "skipped": broker.timed.counts().skipped})
    broker.stop()


def _send_others(address: str, stopped: threading.Event, rate: int) -> None:
    with Producer(address) as producer:
        while not stopped.wait(0.05):
            for _ in range(rate // 20):
                producer.submit(Message(_OTHERS, bytes(1000)))


def measure(count: int, within_s: float, others: int) -> dict[str, object]:
    """The share on time, and percentiles of how late messages were (ms)."""
    with tempfile.TemporaryDirectory() as root:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(root, theirs))
        process.start()
        address = ours.recv()
        stopped = threading.Event()
        try:
            with Producer(address, timeout_s=30) as producer:
                producer.send(Message(_TOPIC, b""))
                began = time.monotonic()
                start_ms = int(time.time() * 1000) + count + 3000
                dues = [start_ms + random.randrange(round(within_s * 1000)) for _ in range(count)]
                for at in range(0, count, _WINDOW):
                    window = dues[at : at + _WINDOW]
                    sent = [producer.submit(Message(_TOPIC, bytes(100), deliver_at=due)) for due in window]
                    for future in sent:
                        future.result()
                took_s = time.monotonic() - began
            thread = threading.Thread(target=_send_others, args=(address, stopped, others))
            thread.start()
            late: list[int] = []
            deadline = time.monotonic() + start_ms / 1000 - time.time() + within_s + 60
            with Consumer(address, group="g", topics=[_TOPIC], start="first", timeout_s=30) as consumer:
                while len(late) < count and time.monotonic() < deadline:
                    found = consumer.poll(1024, timeout_s=1)
                    if not late:
                        ours.send(True)
                        before, began = ours.recv(), time.monotonic()
                    dues_of = [(message, message.properties.get("TIMER_OUT_MS")) for message in found]
                    late += [message.store_timestamp - int(text) for message, text in dues_of if text]
            stopped.set()
            thread.join()
            ours.send(True)
            after = ours.recv()
            delivered_s = time.monotonic() - began
            ours.send(False)
        finally:
            stopped.set()
            process.join(30)
            process.kill()
    late.sort()
    return {
        "messages": count,
        "due_within_s": within_s,
        "others_per_s": others,
        "taken_in_per_s": round(count / took_s),
        "sending_took_s": round(took_s, 1),
        "delivered": len(late),
        "within_1_s": sum(one <= 1000 for one in late) / count,
        "early": sum(one < 0 for one in late),
        "late_ms": {name: late[min(len(late) - 1, int(len(late) * part))] for name, part in _PARTS},
        "skipped": after["skipped"],
        "broker_cpu_percent": round((after["cpu_s"] - before["cpu_s"]) * 100 / delivered_s),
        "load": os.getloadavg()[0],
    }


_PARTS = (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--within", type=float, default=60.0)
    parser.add_argument("--others", type=int, default=1000)
    given = parser.parse_args()
    sys.stdout.write(json.dumps(measure(given.count, given.within, given.others), indent=2) + "\n")


if __name__ == "__main__":
    main()
