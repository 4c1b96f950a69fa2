"""The console as a server: its socket, its event loop on its own thread, and shutdown.

A request must arrive within ``REQUEST_TIMEOUT_S``, however slowly it trickles in; uvicorn would wait for one forever,
and ``timeout_keep_alive`` only applies between requests. If there is no room for another connection, the one that has
been without a request for longest is closed; ``limit_concurrency`` would refuse the newcomer instead.

A demo's console also acts on local processes, and has a little load so that something moves. Failed requests of that
load are ignored, whatever a kill or pause does to them: the demo itself proves that nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dledger import __version__
from dledger.errors import ConfigError, DLedgerError, InvalidRequestError
from dledger.values import address_text
from dledger_cli.console.app import Console
from dledger_cli.console.control import ClusterControl, LocalControl
from dledger_cli.console.group_page import GroupPage
from dledger_cli.console.guard import ConsoleRules
from dledger_cli.console.history import History
from dledger_cli.console.overview import FleetPace, Overview
from dledger_cli.console.sampler import SamplePace
from dledger_cli.local.group import HOST, READY_WORDS, START_TIMEOUT_S, LocalGroupError, wait_until
from dledger_cli.targets import BrokerTarget, GroupTarget

if TYPE_CHECKING:
    from types import TracebackType

    from dledger_cli.local.brokers import LocalBrokers
    from dledger_cli.local.group import LocalGroup
    from dledger_cli.targets import BrokerTarget, GroupTarget

_START_S: Final = 60.0
STOP_TIMEOUT_S: Final = 5.0
REQUEST_HEAD_BYTES_MAX: Final = 16 * 1024
CONNECTIONS_MAX: Final = 256
REQUEST_TIMEOUT_S: Final = 10.0
_LOOK_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a console listens. ``certificate`` and ``key``: PEM files for HTTPS."""

    host: str = "127.0.0.1"
    port: int = 8080
    certificate: Path | None = None
    key: Path | None = None


class ConsoleServer:
    """Runs on its own threads between ``start`` and ``stop``; usable as a context manager."""

    def __init__(
        self,
        target: GroupTarget,
        brokers: BrokerTarget,
        *,
        place: ListenAddress | None = None,
        rules: ConsoleRules | None = None,
        control: ClusterControl | None = None,
        pace: SamplePace | None = None,
        fleet_pace: FleetPace | None = None,
    ) -> None:
        self._place = place or ListenAddress()
        if brokers.name_servers:
            self._shown: GroupPage | Overview = Overview(
                target, brokers, control=control, pace=pace, fleet_pace=fleet_pace
            )
        else:
            self._shown = GroupPage(target, brokers, control, pace)
        self._console = Console(self._shown, rules or ConsoleRules(), __version__, self._fail)
        self._socket: socket.socket | None = None
        self._uvicorn: CalmServer | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._stopping = threading.Lock()
        self.fatal: BaseException | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def history(self) -> History:
        """The group's history, if the console shows only one."""
        if isinstance(self._shown, Overview):
            raise InvalidRequestError("this console shows many groups")
        return self._shown.history

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._socket.getsockname()[1]) if self._socket is not None else self._place.port

    @property
    def url(self) -> str:
        """The URL for a browser on this machine."""
        host = self._place.host
        if host in ("0.0.0.0", "::", ""):
            host = "127.0.0.1"
        scheme = "https" if self._place.certificate is not None else "http"
        return f"{scheme}://{address_text(host, self.port)}/"

    def start(self) -> None:
        """Listen and start polling. Raises ``ConfigError`` if it cannot listen there."""
        self._socket = _listen(self._place)
        config = uvicorn.Config(
            self._console.asgi,
            log_config=None,
            access_log=False,
            server_header=False,
            http=PatientForAWhile,
            ws="none",
            lifespan="on",
            loop="asyncio",
            limit_concurrency=2 * CONNECTIONS_MAX,  # the protocol frees connections before this limit is reached
            timeout_keep_alive=10,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=REQUEST_HEAD_BYTES_MAX,
            ssl_certfile=self._place.certificate,
            ssl_keyfile=self._place.key,
        )
        try:
            config.load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            self._socket.close()
            raise ConfigError([f"cannot use the console's certificate and key: {error}"]) from error
        self._uvicorn = CalmServer(config)
        self._thread = threading.Thread(
            target=self._serve, args=(self._uvicorn, self._socket), name="dledger-console-http", daemon=True
        )
        self._thread.start()
        if isinstance(self._shown, GroupPage):
            self._shown.start()
        give_up_at = time.monotonic() + _START_S
        while not self._uvicorn.started and time.monotonic() < give_up_at and not self._ended.wait(0.01):
            pass

    def stop(self) -> None:
        """Close all streams, then the server, then the sampler. Idempotent."""
        with self._stopping:
            if self._uvicorn is not None and self._thread is not None and self._thread.is_alive():
                self._uvicorn.end()
                self._shown.hang_up()
                self._thread.join(STOP_TIMEOUT_S)
            if isinstance(self._shown, GroupPage):
                self._shown.close()
            self._ended.set()
            if self._socket is not None:
                self._socket.close()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit status once it has ended; None on timeout."""
        if not self._ended.wait(timeout_s):
            return None
        return 1 if self.fatal is not None else 0

    def _fail(self, failure: BaseException) -> None:
        """End the server: a page that is no longer kept up to date must not look as if it were."""
        self.fatal = failure
        if self._uvicorn is not None:
            self._uvicorn.end()

    def _serve(self, server: CalmServer, listening: socket.socket) -> None:
        ended_by_us = False
        try:
            server.run(sockets=[listening])
            ended_by_us = server.should_exit
        finally:
            if not ended_by_us:
                self.fatal = RuntimeError("the console's HTTP server stopped unexpectedly")
            self._ended.set()


class PatientForAWhile(H11Protocol):
    """Uvicorn's protocol with a time limit for requests."""

    _begun_at = 0.0
    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base has it
        """Start waiting for a request."""
        super().connection_made(transport)
        self._begun_at = self.loop.time()
        self._look()
        if len(self.connections) >= CONNECTIONS_MAX:
            silent = [one for one in self.connections if isinstance(one, PatientForAWhile) and one.asks_nothing]
            silent.remove(self)
            if silent:
                min(silent, key=lambda one: one._begun_at).transport.abort()  # always an instance of this class

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._looking is not None:
            self._looking.cancel()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._begun_at = self.loop.time()
        super().on_response_complete()

    @property
    def asks_nothing(self) -> bool:
        """Whether no complete request has arrived."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    def _look(self) -> None:
        if self.asks_nothing and self.loop.time() - self._begun_at > REQUEST_TIMEOUT_S:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._looking = self.loop.call_later(_LOOK_INTERVAL_S, self._look)


class CalmServer(uvicorn.Server):
    """Uvicorn's server, which does what it has to do now and then once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()

    async def main_loop(self) -> None:
        """Until it should exit."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _LOOK_INTERVAL_S)

    def end(self) -> None:
        """Exit now. On any thread."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._ending.set)


def _listen(place: ListenAddress) -> socket.socket:
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            [f"the console cannot listen on {place.host}:{place.port}: {error.strerror or error}"]
        ) from error


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
