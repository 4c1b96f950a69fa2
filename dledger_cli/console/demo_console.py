"""A demo's console: local processes to act on, and a little load so that something moves.

Failed requests are ignored, whatever a kill or pause does to them: the load is only for show. The demo itself proves
that nothing is lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dledger.errors import ConfigError, DLedgerError
from dledger_cli.broker_target import BrokerTarget
from dledger_cli.connection import GroupTarget
from dledger_cli.console.control import LocalControl
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.local.group import HOST, READY_WORDS, START_TIMEOUT_S, LocalGroupError, wait_until

if TYPE_CHECKING:
    from dledger_cli.local.brokers import LocalBrokers
    from dledger_cli.local.group import LocalGroup

TIMEOUT_S: Final = 5.0
LOG_NAME: Final = "console.log"
DEMO_PORT: Final = 8088
APPENDS_PER_S: Final = 40
SENDS_PER_S: Final = 20
TOPIC: Final = "orders"
QUEUES: Final = 4
_GOODS: Final = ("espresso", "flat white", "matcha ☕", "crème brûlée", "brioche")


def console_of(group: LocalGroup, *, port: int | None = None) -> ConsoleServer:
    """A console for the group with all buttons, not started. Without ``port``: the default one, or any if that is
    taken.
    """
    target = GroupTarget(tuple(group.addresses), group.name, TIMEOUT_S)
    brokers = BrokerTarget(target.bootstrap, TIMEOUT_S)
    control = LocalControl(target, group)
    return ConsoleServer(
        target, brokers, place=ListenAddress(port=DEMO_PORT if port is None else port), control=control
    )


@contextmanager
def open_console(group: LocalGroup, *, port: int | None = None) -> Iterator[ConsoleServer]:
    """The same, running during the block."""
    server = console_of(group, port=port)
    try:
        server.start()
    except ConfigError:
        server.stop()
        if port is not None:
            raise
        server = console_of(group, port=0)
        server.start()
    try:
        yield server
    finally:
        server.stop()


class DetachedConsole:
    """A console in a process of its own, which outlives the demo that started it, as its group does.

    Started and listening once created, at the usual port, or at any if that is taken.

    Raises ``LocalGroupError`` with the end of its log if it does not start.
    """

    def __init__(self, group: LocalGroup, *, port: int = DEMO_PORT) -> None:
        self._log_file = group.directory / LOG_NAME
        try:
            self._process, self.url = self._start(group, port)
        except LocalGroupError:
            self._process, self.url = self._start(group, 0)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def close(self) -> None:
        """End it now. Idempotent."""
        self._process.kill()
        self._process.wait()

    def _start(self, group: LocalGroup, port: int) -> tuple[subprocess.Popen[bytes], str]:
        words = [sys.executable, "-m", "dledger_cli.entry", "console", "--group", group.name]
        words += ["--nodes", ",".join(group.addresses), "--listen", f"{HOST}:{port}"]
        with self._log_file.open("wb") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=group.environment() | {"DLEDGER_LOG_FORMAT": "text"},
                start_new_session=True,  # Ctrl-C is for the demo
            )
        try:
            wait_until(
                lambda: process.poll() is not None or _address(self._log_file) != "",
                START_TIMEOUT_S,
                "the console is not ready",
            )
        except BaseException:
            process.kill()
            process.wait()
            raise
        if url := _address(self._log_file):
            return process, url
        raise LocalGroupError(f"the console ended: {self._log_file.read_text(errors='replace')[-1000:]}")


@contextmanager
def appending(group: LocalGroup, per_s: float = APPENDS_PER_S) -> Iterator[None]:
    """Append lines during the block."""
    with group.client(TIMEOUT_S) as client, _repeating(1 / per_s, lambda number: client.append(_line(number))):
        yield


@contextmanager
def trading(brokers: LocalBrokers, per_s: float = SENDS_PER_S) -> Iterator[None]:
    """Send orders during the block; two groups consume them, one of them slowly."""
    from rocketstore.client import Admin, Consumer, Message, Producer, TopicInfo

    addresses = brokers.addresses
    with Admin(addresses) as admin:
        admin.put_topic(TopicInfo(TOPIC, QUEUES, QUEUES))
    with (
        Producer(addresses, enable_idempotence=False) as producer,
        Consumer(addresses, group="billing", topics=TOPIC, start="first", commit_s=1.0) as billing,
        Consumer(addresses, group="audit", topics=TOPIC, start="first", commit_s=2.0, pull_messages=4) as audit,
    ):

        def send(number: int) -> None:
            key = f"order-{number}"
            tags = "new" if number % 3 else "changed"
            producer.send(Message(TOPIC, _line(number), tags=tags, keys=key), key=key)

        with (
            _repeating(1 / per_s, send),
            _repeating(0.01, lambda _: billing.poll(64, 0.5)),
            _repeating(1.5 / per_s, lambda _: audit.poll(1, 0.5)),
        ):
            yield


def _address(log_file: Path) -> str:
    """Where the console listens, as it said; empty before."""
    _, found, rest = log_file.read_text(errors="replace").partition(READY_WORDS)
    return rest.split("\n")[0].strip() if found and "\n" in rest else ""


def _line(number: int) -> bytes:
    if number % 50 == 49:
        return bytes(range(256))  # not all bodies are text
    order = {"order": number, "what": _GOODS[number % len(_GOODS)], "cups": 1 + number % 3}
    return json.dumps(order, ensure_ascii=False).encode()


@contextmanager
def _repeating(every_s: float, work: Callable[[int], object]) -> Iterator[None]:
    """Call ``work`` with 0, 1, … on a thread until the block ends, ignoring failures."""
    ended = threading.Event()

    def repeat() -> None:
        number = 0
        while not ended.wait(every_s):
            with suppress(DLedgerError):
                work(number)
            number += 1

    thread = threading.Thread(target=repeat, name="dledger-demo-load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * TIMEOUT_S)
