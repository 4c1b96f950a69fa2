"""RocketMQ 5's official client for Python under load: ``gateway_client.py ENDPOINTS``.

A line of JSON in, one out: ``{"do": "send" | "pop" | "timed", …}``. Each answer has ``count``, ``failed`` and what the
processors did for it (``cpu_s``), beside the figures of the command.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer, SimpleConsumer

Command = dict[str, Any]  # Any: of JSON
Untyped = Any  # Any: the client has no types
RECEIVED: Final = 32
INVISIBLE_S: Final = 60
AWAIT_S: Final = 5
"""How long a receive waits, unless the command says ``await_s``: the least that Apache's proxy takes."""
IDLE_MAX: Final = 2
"""Receives without a message, after which there is none left."""
FIRST: Final = b"first"
"""The message that a producer begins with."""
FIRST_S: Final = 60.0
FIRST_INVISIBLE_S: Final = 10
SLACK_S: Final = 30.0
"""How long a timed message is waited for after the last one was due."""


class GatewayLoad:
    """The clients of this process; a topic's producer and a group's consumers stay for the next command."""

    def __init__(self, endpoints: str) -> None:
        self._configuration = ClientConfiguration(endpoints, Credentials())
        self._producers: dict[str, Untyped] = {}

    def do(self, command: Command) -> Command:
        """Carry one out."""
        done: Callable[[Command], Command] = getattr(self, f"do_{command['do']}")
        began, cpu_s = time.time(), time.process_time()
        figures = done(command)
        return {"began": began, "ended": time.time(), "cpu_s": time.process_time() - cpu_s, **figures}

    def do_send(self, command: Command) -> Command:
        """Send for ``seconds``, with ``window`` messages under way."""
        producer = self._producer(command["topic"])
        body, window = bytes(command["body_bytes"]), threading.Semaphore(command["window"])
        counts = Counts()
        end = time.monotonic() + command["seconds"]
        while time.monotonic() < end:
            window.acquire()
            counts.add(producer.send_async(_message(command["topic"], body)), window)
        for _ in range(command["window"]):
            window.acquire()
        return counts.told()

    def do_pop(self, command: Command) -> Command:
        """Receive and acknowledge, by ``consumers`` of them, until nothing is left or ``seconds`` are over."""
        end = time.monotonic() + command["seconds"]
        with ThreadPoolExecutor(command["consumers"]) as pool:
            found = list(pool.map(lambda _: self._pop(command, end), range(command["consumers"])))
        count, failed, last = zip(*found, strict=True)
        return {"count": sum(count), "failed": sum(failed), "ended": max(last)}

    def _pop(self, command: Command, end: float) -> tuple[int, int, float]:
        """How many, how many calls failed, and when the last one succeeded."""
        consumer = self._consumer(command)
        acknowledged, failed, idle, last = 0, 0, 0, 0.0
        with ThreadPoolExecutor(RECEIVED) as pool:
            while time.monotonic() < end and idle < IDLE_MAX:
                found = consumer.receive(RECEIVED, INVISIBLE_S) or []
                done = sum(pool.map(partial(_acknowledged, consumer), found))
                acknowledged, failed = acknowledged + done, failed + len(found) - done
                idle, last = (0, time.time()) if found else (idle + 1, last)
        consumer.shutdown()
        return acknowledged, failed, last

    def do_timed(self, command: Command) -> Command:
        """Send ``count`` messages that are due within ``within_s``, and consume them: how late each was (ms)."""
        topic, count, within_s = command["topic"], command["count"], command["within_s"]
        consumer, producer = self._consumer(command), self._producer(topic, is_timed=True)
        window, counts = threading.Semaphore(command["window"]), Counts()
        first = int(time.time()) + command["ahead_s"]
        for number in range(count):
            window.acquire()
            due = first + number * within_s // count
            counts.add(producer.send_async(_message(topic, str(due).encode(), due)), window)
        for _ in range(command["window"]):
            window.acquire()
        late_ms: list[float] = []
        end = first + within_s + SLACK_S
        while len(late_ms) < count and time.time() < end:
            found = consumer.receive(RECEIVED, INVISIBLE_S) or []
            now = time.time()
            late_ms += [1000 * (now - int(one.body)) for one in found if one.body != FIRST]
            for one in found:
                consumer.ack_async(one)
        consumer.shutdown()
        return {**counts.told(), "late_ms": late_ms}

    def _producer(self, topic: str, *, is_timed: bool = False) -> Untyped:
        if topic not in self._producers:
            made = self._producers[topic] = Producer(self._configuration, [topic])
            made.startup()
            first = _message(topic, FIRST, int(time.time()) if is_timed else None)
            _done_first(lambda: made.send(first))
        return self._producers[topic]

    def _consumer(self, command: Command) -> Untyped:
        subscription, await_s = {command["topic"]: FilterExpression()}, command.get("await_s", AWAIT_S)
        made = SimpleConsumer(self._configuration, command["group"], subscription, await_duration=await_s)
        made.startup()
        _done_first(lambda: made.receive(1, FIRST_INVISIBLE_S))
        return made


class Counts:
    """What became of calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._failed = 0
        self._failure = ""

    def add(self, call: Future[Untyped], window: threading.Semaphore) -> None:
        """One that leaves the window when it is answered."""

        def done(call: Future[Untyped]) -> None:
            failure = call.exception()
            with self._lock:
                self._count += failure is None
                self._failed += failure is not None
                self._failure = self._failure if failure is None else f"{type(failure).__name__}: {failure}"
            window.release()

        call.add_done_callback(done)

    def told(self) -> Command:
        """As an answer has it."""
        return {"count": self._count, "failed": self._failed, "failure": self._failure}


def _acknowledged(consumer: Untyped, message: Untyped) -> bool:
    """Whether it was: on a busy machine, a call may have no answer in time."""
    try:
        consumer.ack(message)
    except Exception:  # noqa: BLE001  # of any kind, and counted
        return False
    return True


def _done_first(call: Callable[[], object]) -> None:
    """Until it succeeds: a gateway that has just started may not know the topic yet, or Apache's not the client."""
    give_up = time.monotonic() + FIRST_S
    while True:
        try:
            call()
        except Exception:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)
        else:
            return


def _message(topic: str, body: bytes, due: int | None = None) -> Untyped:
    message = Message()
    message.topic, message.body = topic, body
    if due is not None:
        message.delivery_timestamp = due
    return message


def main() -> None:
    """Until the input ends."""
    out, sys.stdout = sys.stdout, sys.stderr
    load = GatewayLoad(sys.argv[1])
    for line in sys.stdin:
        out.write(json.dumps(load.do(json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
