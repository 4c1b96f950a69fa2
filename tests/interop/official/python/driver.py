"""RocketMQ's official Python client behind lines of JSON: the protocol is in ``README.md`` beside it."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TextIO

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)
from rocketmq.grpc_protocol import FilterType

ALWAYS: Final = -1
RESOLUTIONS: Final = {
    "commit": TransactionResolution.COMMIT,
    "rollback": TransactionResolution.ROLLBACK,
    "unknown": TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED,
}
Request = dict[str, Any]  # Any: of JSON


class Driver:
    """The clients by their names, and the messages received by numbers."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._messages: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._loads: dict[str, Load] = {}

    def say(self, line: Request) -> None:
        """Write a line."""
        with self._lock:
            self._out.write(json.dumps(line) + "\n")
            self._out.flush()

    def answer(self, request: Request) -> None:
        """Do what a request says, and answer it."""
        try:
            done: Callable[[Request], Request | None] = getattr(self, f"do_{request['op']}")
            self.say({"id": request["id"], "ok": done(request) or {}})
        except Exception as error:
            self.say({"id": request["id"], "error": f"{type(error).__name__}: {error}"})

    def do_producer(self, request: Request) -> None:
        checker = None if request.get("check") is None else _Checker(self, request["check"], request["name"])
        topics = request.get("topics") or None
        made = Producer(_configuration(request), topics, checker, tls_enable=bool(request.get("tls")))
        made.startup()
        self._clients[request["name"]] = made

    def do_send(self, request: Request) -> Request:
        producer = self._clients[request["client"]]
        message, how = _message(request), request.get("transaction")
        if how is None:
            return _receipt(producer.send(message))
        transaction = producer.begin_transaction()
        receipt = producer.send(message, transaction)
        if how != "open":
            (transaction.commit if how == "commit" else transaction.rollback)()
        return _receipt(receipt)

    def do_recall(self, request: Request) -> Request:
        return {"message_id": self._clients[request["client"]].recall_message(request["topic"], request["handle"])}

    def do_load(self, request: Request) -> None:
        self._loads[request["name"]] = Load(self._clients[request["client"]], request)

    def do_loaded(self, request: Request) -> Request:
        return self._loads.pop(request["name"]).end()

    def do_simple(self, request: Request) -> None:
        made = SimpleConsumer(
            _configuration(request),
            request["group"],
            _subscriptions(request),
            await_duration=request.get("await_s", 5),
            tls_enable=bool(request.get("tls")),
        )
        made.startup()
        self._clients[request["name"]] = made

    def do_receive(self, request: Request) -> Request:
        consumer = self._clients[request["client"]]
        found = consumer.receive(request.get("max", 32), request.get("invisible_ms", 30_000) // 1000)
        return {"messages": [self._told(one) for one in found or ()]}

    def do_ack(self, request: Request) -> None:
        self._clients[request["client"]].ack(self._messages[request["message"]])

    def do_change(self, request: Request) -> None:
        message = self._messages[request["message"]]
        self._clients[request["client"]].change_invisible_duration(message, request["ms"] // 1000)

    def do_push(self, request: Request) -> None:
        made = PushConsumer(
            _configuration(request),
            request["group"],
            _Listener(self, request),
            _subscriptions(request),
            consumption_thread_count=request.get("threads", 4),
            tls_enable=bool(request.get("tls")),
        )
        made.startup()
        self._clients[request["name"]] = made

    def do_close(self, request: Request) -> None:
        self._clients.pop(request["name"]).shutdown()

    def _told(self, message: Any) -> Request:  # Any: rocketmq's have no types
        number = next(self._numbers)
        self._messages[number] = message
        return {"n": number, **told(message)}


class Load:
    """Sends one message after the other, in several threads, until it is ended."""

    def __init__(self, producer: Any, request: Request) -> None:
        self._producer = producer
        self._request = request
        self._ended = threading.Event()
        self._sent: list[list[object]] = []
        self._errors: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(request.get("threads", 1))]
        for one in self._threads:
            one.start()

    def _run(self, thread: int) -> None:
        for number in itertools.count():
            if self._ended.is_set():
                return
            body, began_ms = f"{self._request['name']}-{thread}-{number}", now_ms()
            try:
                receipt = self._producer.send(_message({**self._request, "body": body}))
            except Exception as error:
                self._errors.append(f"{body}: {type(error).__name__}: {error}")
            else:
                self._sent.append([body, receipt.message_id, began_ms, now_ms()])
            self._ended.wait(self._request.get("pause_ms", 0) / 1000)

    def end(self) -> Request:
        """What was acknowledged, and what failed."""
        self._ended.set()
        for one in self._threads:
            one.join()
        return {"sent": self._sent, "errors": self._errors}


class _Checker(TransactionChecker):  # type: ignore[misc]  # its base has no types
    def __init__(self, driver: Driver, says: str, name: str) -> None:
        self._driver, self._says, self._name = driver, says, name

    def check(self, message: Any) -> Any:
        self._driver.say({"event": "check", "from": self._name, "message": told(message)})
        return RESOLUTIONS[self._says]


class _Listener(MessageListener):  # type: ignore[misc]
    def __init__(self, driver: Driver, request: Request) -> None:
        self._driver, self._name = driver, request["name"]
        self._fails: dict[str, int] = request.get("fail", {})
        self._hold_s = request.get("hold_ms", 0) / 1000
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def consume(self, message: Any) -> Any:
        what = told(message)
        with self._lock:
            self._seen[what["body"]] += 1
            times = self._fails.get(what["body"], self._fails.get("*", 0))
            failed = times == ALWAYS or self._seen[what["body"]] <= times
        at_ms = now_ms()
        self._driver.say({"event": "message", "from": self._name, "message": what, "failed": failed, "at_ms": at_ms})
        time.sleep(self._hold_s)
        return ConsumeResult.FAILURE if failed else ConsumeResult.SUCCESS


def _configuration(request: Request) -> Any:
    key = request.get("key")
    return ClientConfiguration(request["endpoints"], Credentials(*key) if key else Credentials())


def _subscriptions(request: Request) -> Request:
    kind = FilterType.SQL if request.get("sql") else FilterType.TAG
    return {topic: FilterExpression(expression, kind) for topic, expression in request["subscriptions"].items()}


def _message(request: Request) -> Any:
    message = Message()
    message.topic = request["topic"]
    message.body = (request["body"] + "x" * request.get("pad", 0)).encode()
    if request.get("tag"):
        message.tag = request["tag"]
    for key in request.get("keys", ()):
        message.keys = key  # it adds it to those it has
    if request.get("group"):
        message.message_group = request["group"]
    if request.get("delay_ms"):
        message.delivery_timestamp = int(time.time() + request["delay_ms"] / 1000)
    if request.get("priority") is not None:
        message.priority = request["priority"]
    for key, value in request.get("properties", {}).items():
        message.add_property(key, value)
    return message


def _receipt(receipt: Any) -> Request:
    said = {"message_id": receipt.message_id, "recall_handle": receipt.recall_handle}
    return {name: value for name, value in said.items() if value}


def now_ms() -> int:
    """Unix time."""
    return int(1000 * time.time())


def told(message: Any) -> Request:
    """A message as JSON."""
    return {
        "id": message.message_id,
        "topic": message.topic,
        "body": message.body.decode()[:200],
        "size": len(message.body),
        "tag": message.tag,
        "keys": sorted(message.keys or ()),
        "group": message.message_group,
        "priority": message.priority,
        "properties": dict(message.properties or {}),
        "attempt": message.delivery_attempt,
        "corrupted": bool(message.corrupted),
    }


def main() -> None:
    """Answer requests, each in a thread of its own, until the input ends."""
    out, sys.stdout = sys.stdout, sys.stderr
    driver = Driver(out)
    with ThreadPoolExecutor(32) as pool:
        for line in sys.stdin:
            pool.submit(driver.answer, json.loads(line))


if __name__ == "__main__":
    main()
