"""The metrics endpoint of one server process: the collectors and the port.

The port is open before the server is created, so that a long recovery can be watched, and a port in use is reported at
once.

Its HTTP port serves ``/metrics``, ``/healthz`` (alive) and ``/readyz`` (ready to serve). One thread accepts, and one
thread per request responds, with limits on the number of requests and on their time. A client that connects and sends
nothing, or sends slowly, must not keep a probe out, because the node would then be restarted: if there is no room for
another request, the oldest incomplete one is closed. prometheus_client's own server has a thread per connection without
a limit or time-out, and no other pages.
"""

from __future__ import annotations

import logging
import selectors
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from dledger.errors import ConfigError, DLedgerError
from dledger.types import LogIndex, Position
from dledger.values import address_text, is_loopback
from dledger_cli.metrics.collectors import BrokerMetrics, Collection, MetricsSource, NameServerMetrics, NodeMetrics
from dledger_cli.metrics.recorder import MetricsRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from dledger.hosted_groups import GroupsServer, HostedGroups, MemberT
    from dledger.server import DLedgerServer
    from rocketstore.nameserver.server import NameServer
    from rocketstore.server import BrokerServer, BrokersServer


@dataclass(slots=True)
class _Probes:
    alive: Callable[[], tuple[bool, str]]
    ready: Callable[[], tuple[bool, str]]


class Exporter:
    """A context manager that serves the port. The constructor raises ``ConfigError`` if the port is in use."""

    def __init__(self, host: str, port: int) -> None:
        self.instruments = MetricsRecorder()
        """To be passed to the server."""
        self._recorders: dict[str, MetricsRecorder] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._probes = _Probes(alive=lambda: (True, "starting"), ready=lambda: (False, "starting"))
        self._port = MetricsPort(
            host,
            port,
            {
                "/metrics": self._metrics,
                "/healthz": text_page(lambda: self._probes.alive()),
                "/readyz": text_page(lambda: self._probes.ready()),
            },
        )

    def __enter__(self) -> Self:
        self._port.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._port.stop()

    @property
    def port(self) -> int:
        """The port listened on."""
        return self._port.port

    def instruments_of(self, group: str) -> MetricsRecorder:
        """To be passed to the member of one of several groups."""
        return self._recorders.setdefault(group, MetricsRecorder())

    def watch_groups(self, server: GroupsServer) -> None:
        """Export the members of several groups, created with ``instruments_of``; call before starting them.

        Ready: all of them are.
        """
        nodes = []
        for group, member in server.servers.items():
            recorder = self.instruments_of(group)
            member.add_role_change_handler(recorder)
            nodes.append(NodeMetrics(member, recorder))
        self._registry.register(Collection(lambda: nodes))
        self._probes = _Probes(alive=lambda: _alive(server.fatal), ready=lambda: _all_ready(server, _node_ready))

    def watch_node(self, server: DLedgerServer) -> None:
        """Export a node created with ``instruments``; call before starting it."""
        server.add_role_change_handler(self.instruments)
        metrics = NodeMetrics(server, self.instruments)
        self._registry.register(Collection(lambda: [metrics]))
        self._probes = _Probes(
            alive=lambda: _alive(server.fatal),
            ready=lambda: _node_ready(server),
        )

    def watch_broker(self, broker: BrokerServer) -> None:
        """Export a broker created with ``instruments``, and its node; call before starting it."""
        sources = _sources_of(broker, self.instruments)
        self._registry.register(Collection(lambda: sources))
        self._probes = _Probes(alive=lambda: _alive(broker.fatal), ready=lambda: _broker_ready(broker))

    def watch_brokers(self, server: BrokersServer) -> None:
        """Export several brokers, created with ``instruments_of``, and their nodes; call before starting them.

        Ready: all of them are. One that has failed is told of by the conditions of the others only.
        """
        sources = {group: _sources_of(one, self.instruments_of(group)) for group, one in server.servers.items()}

        def living() -> list[MetricsSource]:
            failed = server.failures  # their stores are closed
            return [source for group, its in sources.items() if group not in failed for source in its]

        self._registry.register(Collection(living))
        self._probes = _Probes(alive=lambda: _alive(server.fatal), ready=lambda: _all_ready(server, _broker_ready))

    def watch_name_server(self, server: NameServer) -> None:
        """Export a name server; call before starting it."""
        self._registry.register(NameServerMetrics(server))
        self._probes = _Probes(
            alive=lambda: _alive(server.fatal),
            ready=lambda: (server.measure().connections >= 0, "ready"),  # the loop has answered
        )

    def _metrics(self) -> tuple[HTTPStatus, str, bytes]:
        """Always in the plain text format: OpenMetrics costs half as much again."""
        encode, kind = choose_encoder("")
        return HTTPStatus.OK, kind, encode(self._registry)


def _alive(fatal: BaseException | None) -> tuple[bool, str]:
    return (True, "alive") if fatal is None else (False, f"failed: {fatal}")


def _sources_of(broker: BrokerServer, recorder: MetricsRecorder) -> list[MetricsSource]:
    """The metrics of a broker, and of its node, if any."""
    node, sources = broker.node, list[MetricsSource]()
    if node is not None:
        node.add_role_change_handler(recorder)

        def applied() -> LogIndex:
            return node.log.last_index_before(Position(broker.store.dispatch_position))

        sources.append(NodeMetrics(node, recorder, applied))
    return [*sources, BrokerMetrics(broker, recorder)]


def _all_ready(server: HostedGroups[MemberT], ready_of: Callable[[MemberT], tuple[bool, str]]) -> tuple[bool, str]:
    for group, member in server.servers.items():
        if (error := server.failures.get(group)) is not None:
            return False, f"group {group} has failed: {error}"
        ready, why = ready_of(member)
        if not ready:
            return False, f"group {group}: {why}"
    return True, "ready"


def _node_ready(server: DLedgerServer) -> tuple[bool, str]:
    return _ready(known=server.fatal is None and server.status().leader is not None, lost=server.removed)


def _broker_ready(broker: BrokerServer) -> tuple[bool, str]:
    return _ready(known=broker.is_ready)


def _ready(*, known: bool, lost: str = "") -> tuple[bool, str]:
    if lost:
        return False, lost
    return (True, "ready") if known else (False, "no known leader")


_log = logging.getLogger(__name__)

REQUESTS_MAX: Final = 8
"""Concurrent requests."""
REQUEST_TIMEOUT_S: Final = 5.0
"""How long a request may take to arrive, and its response to be read."""
_OTHER_NAME: Final = "metrics are for this machine only: use localhost or the address\n"
_TEXT: Final = "text/plain; charset=utf-8"

_Request = socket.socket | tuple[bytes, socket.socket]

Page = Callable[[], tuple[HTTPStatus, str, bytes]]
"""A path's response: status, content type and body."""


class MetricsPort:
    """Listens once constructed, serves between ``start`` and ``stop``. Raises ``ConfigError`` if the port is taken."""

    def __init__(self, host: str, port: int, pages: dict[str, Page]) -> None:
        try:
            self._server = _Server(host, port, pages)
        except (OSError, OverflowError) as error:
            where = address_text(host, port)
            raise ConfigError(
                [
                    f"cannot serve metrics at {where} (metrics_host, metrics_port): the port is in use, or this "
                    f"machine does not have that address ({error})"
                ]
            ) from error
        self._awake, self._wake = socket.socketpair()  # writing to one ends the wait on the other
        self._thread = threading.Thread(target=self._serve, name="dledger-metrics")
        self.port: Final = int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and close the port. Idempotent."""
        if self._thread.is_alive():
            self._wake.send(b"x")
            self._thread.join()
        self._server.server_close()
        self._awake.close()
        self._wake.close()

    def _serve(self) -> None:
        """Replaces the base class's loop, which checks several times a second whether to stop.

        Waits without a timeout, or until the deadline of an incomplete request.
        """
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._server, selectors.EVENT_READ)
            waiting.register(self._awake, selectors.EVENT_READ)
            while True:
                found = {key.fileobj for key, _ in waiting.select(self._server.hang_up_on_slow())}
                if self._awake in found:
                    return
                if found:
                    self._server.handle_request()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    timeout = 0  # the connection is already there, or gone again
    allow_reuse_address = True

    def __init__(self, host: str, port: int, pages: dict[str, Page]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = pages
        self.is_local = is_loopback(host)
        self._lock = threading.Lock()  # guards what follows
        self._unheard: dict[object, float] = {}  # connections with incomplete requests, by start time, oldest first
        self._answered: set[object] = set()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As in the base class, but without a DNS lookup of our own name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "metrics", self.server_address[1]

    def hang_up_on_slow(self) -> float | None:
        """Close connections whose requests take too long; returns when to check again, None if none is incomplete."""
        now = time.monotonic()
        with self._lock:
            for request in [one for one, since in self._unheard.items() if now - since >= REQUEST_TIMEOUT_S]:
                self._hang_up(request)
            oldest = next(iter(self._unheard.values()), None)
        return None if oldest is None else max(0.0, oldest + REQUEST_TIMEOUT_S - now)

    def process_request(self, request: _Request, client_address: object) -> None:
        with self._lock:
            if len(self._unheard) + len(self._answered) >= REQUESTS_MAX:
                if not self._unheard:
                    self.shutdown_request(request)
                    return
                self._hang_up(next(iter(self._unheard)))
            self._unheard[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: _Request, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._unheard.pop(request, None)
                self._answered.discard(request)

    def heard(self, request: object) -> bool:
        """Mark the request as complete; False if it was closed in the meantime."""
        with self._lock:
            if self._unheard.pop(request, None) is None:
                return False
            self._answered.add(request)
            return True

    def _hang_up(self, request: object) -> None:
        """Its thread reads the end of the stream, and ends."""
        del self._unheard[request]
        if isinstance(request, socket.socket):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: _Request, client_address: object) -> None:  # noqa: ARG002
        """Ignore clients that disconnect."""
        _log.debug("a metrics request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "dledger", ""

    def do_GET(self) -> None:  # the name required by the base class
        """Respond with the path's page."""
        if not self.server.heard(self.request):
            return
        page = self.server.pages.get(self.path.partition("?")[0])
        if self.server.is_local and not is_loopback(self.headers.get("Host", "localhost")):
            # A web page in a browser on this machine could rebind its name to this address and read the response.
            status, kind, body = HTTPStatus.MISDIRECTED_REQUEST, _TEXT, _OTHER_NAME.encode()
        elif page is None:
            status, kind, body = HTTPStatus.NOT_FOUND, _TEXT, ("try " + ", ".join(self.server.pages) + "\n").encode()
        else:
            try:
                status, kind, body = page()
            except DLedgerError as error:  # the server is starting or stopping
                status, kind, body = HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{error}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  # as the base calls it

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as the base has it
        _log.debug(format, *args)


def text_page(look: Callable[[], tuple[bool, str]]) -> Page:
    """A one-line page about whether a condition holds: 200 or 503."""

    def page() -> tuple[HTTPStatus, str, bytes]:
        good, words = look()
        return HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{words}\n".encode()

    return page
