"""The single peer port: passes pushes to the push server and relays everything else to the gRPC server.

gRPC cannot share a port and does not serve sockets accepted by others, so a connection whose first bytes are not those
of a push connection is relayed to it through a Unix socket, TLS and all. Only votes, heartbeats, handshakes, health and
reflection take that path: a few small messages per second.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

from dledger.errors import ConfigError, InvalidRequestError, TlsError
from dledger.rpc import options, tls
from dledger.rpc.bridge import LoopBridge, LoopThread, Report, log_failure
from dledger.rpc.peers import push_frames
from dledger.rpc.peers.push_frames import Frame, FrameType
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.rpc.tls_stream import TlsStream

_LOG = logging.getLogger(__name__)

FIRST_BYTES_TIMEOUT_S: Final = 5.0
"""How long a new connection may take to identify itself, including its TLS handshake or its first frame."""
REASONS_MAX: Final = 32
"""The limit of distinct refusals logged: anyone may connect, and fill logs."""
UNKNOWN_MAX: Final = 256
"""The limit of connections not identified yet; one more closes the oldest of the host with the most.

Silent ones occupy no place and no thread that a member needs, because these are assigned only after identification.
"""
RELAYED_MAX: Final = 128
"""The limit of connections relayed to the gRPC server, of three descriptors each; one more closes the longest silent.

A member has one or two of them, and is never silent for long: it pings.
"""
_HANDSHAKE_BYTES: Final = 16 * 1024
_HANDSHAKE_BYTES_MAX: Final = 256 * 1024
_CHUNK_BYTES: Final = 64 * 1024
_BACKLOG: Final = 1024
_ACCEPT_PAUSE_S: Final = 0.1

TakePush = Callable[[socket.socket, TlsStream | Frame], None]
"""Takes a push connection with its TLS (handshake done), or without TLS its first frame. Raises ``TlsError``."""


class PeerListener:
    """Listens from ``start`` to ``close``, on its own event loop: neither clients nor pushes can delay it."""

    def __init__(
        self,
        name: str,
        take_push: TakePush,
        tls_keeper: TlsKeeper | None = None,
        report: Report = log_failure,
    ) -> None:
        self.port = 0
        """The port listened on, once started."""
        self._grpc_socket = ""
        self._take_push = take_push
        self._tls = tls_keeper
        self._reasons: set[str] = set()
        self._loop = LoopThread(name, report)
        self._bridge: LoopBridge | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unknown: dict[asyncio.Task[None], str] = {}  # with their hosts, in order of arrival
        self._heard_at: dict[asyncio.Task[None], float] = {}  # of relayed connections
        self._listening: list[socket.socket] = []

    def start(self, host: str, port: int, grpc_socket: str) -> None:
        """Listen, and relay gRPC to ``grpc_socket``. Raises ``ConfigError`` if it cannot listen."""
        self._grpc_socket = grpc_socket
        listening = _listen(host, port)
        self.port = listening[0].getsockname()[1]
        self._bridge = bridge = self._loop.start()
        bridge.post(partial(self._listen, listening))

    def close(self) -> None:
        """Close everything and join the thread. Idempotent."""
        if self._bridge is not None:
            bridge, self._bridge = self._bridge, None
            bridge.run(self._end())
        self._loop.stop()

    async def _end(self) -> None:
        for one in self._listening:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _listen(self, listening: Iterable[socket.socket]) -> None:
        for one in listening:
            self._listening.append(one)
            asyncio.get_running_loop().add_reader(one, self._accept, one)

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection. Not with ``sock_accept``: cancelling it could lose a connection just accepted."""
        loop = asyncio.get_running_loop()
        try:
            link, address = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer hung up already
            return
        except OSError as error:  # out of descriptors: it stays acceptable, so pause accepting
            _LOG.warning("cannot accept a connection to the peer port: %s", error)
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listening)
            return
        link.setblocking(False)
        if len(self._unknown) >= UNKNOWN_MAX:
            self._make_room()
        task = loop.create_task(self._sort(link))
        self._tasks.add(task)
        self._unknown[task] = str(address[0])
        task.add_done_callback(self._forget)
        # A task cancelled before its first step closes nothing itself.
        task.add_done_callback(partial(_close_if_cancelled, link))

    def _make_room(self) -> None:
        """Close the oldest unidentified connection of the host with the most."""
        (host, _), *_ = Counter(self._unknown.values()).most_common(1)
        oldest = next(task for task, its_host in self._unknown.items() if its_host == host)
        del self._unknown[oldest]
        oldest.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._unknown.pop(task, None)
        self._heard_at.pop(task, None)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def _sort(self, link: socket.socket) -> None:
        found: TlsStream | Frame | None = None
        try:
            push_frames.tune(link)
            async with asyncio.timeout(FIRST_BYTES_TIMEOUT_S):
                head = await self._exactly(link, len(push_frames.PREAMBLE))
                if head == push_frames.TLS_PREAMBLE and self._tls is not None:
                    found = await self._shake_hands(link, TlsStream(self._tls.accepting(), server_side=True))
                elif head == push_frames.PREAMBLE and self._tls is None:
                    found = await self._first_frame(link)
        except InvalidRequestError as error:
            self._refuse(link, str(error))
            return
        except (OSError, EOFError, TimeoutError):
            link.close()
            return
        task = asyncio.current_task()
        if task is None or task not in self._unknown:  # it was just closed to make room
            link.close()
            return
        del self._unknown[task]
        if found is not None:
            link.setblocking(True)
            try:
                self._take_push(link, found)
            except TlsError as error:
                self._complain(str(error))
        elif head in (push_frames.PREAMBLE, push_frames.TLS_PREAMBLE):
            self._refuse_unlike(link)
        else:
            await self._relay(link, head, task)

    async def _exactly(self, link: socket.socket, count: int) -> bytes:
        """Receive exactly ``count`` bytes. Raises ``EOFError``."""
        received = b""
        while len(received) < count:
            received += await _receive(link, count - len(received))
        return received

    async def _first_frame(self, link: socket.socket) -> Frame:
        """Receive it here, and not on a thread of its own, which a silent peer would occupy. Raises ``EOFError``."""
        header = await self._exactly(link, push_frames.HEADER_BYTES)
        kind, length = push_frames.parse_header(header, push_frames.HANDSHAKE_BYTES_MAX)
        return kind, await self._exactly(link, length)

    async def _shake_hands(self, link: socket.socket, stream: TlsStream) -> TlsStream:
        """Do the handshake here, and not on a thread of its own: the peer is unknown until it is done."""
        received_bytes = 0
        try:
            while not stream.agreed:
                data = await _receive(link, _HANDSHAKE_BYTES)
                received_bytes += len(data)
                if received_bytes > _HANDSHAKE_BYTES_MAX:
                    raise EOFError("TLS handshake timed out")
                await asyncio.get_running_loop().sock_sendall(link, stream.shake_hands(data))
        except ssl.SSLError as error:
            self._complain(tls.explain(error, f"a peer at {_host_of(link)}"))
            await asyncio.get_running_loop().sock_sendall(link, stream.due())
            raise
        return stream

    def _refuse_unlike(self, link: socket.socket) -> None:
        """One side uses TLS and the other does not: refuse in plaintext."""
        if self._tls is not None:
            reason = (
                "this node accepts only TLS from its peers: set tls_cert_path, tls_key_path and tls_trust_cert_path"
            )
        else:
            reason = "this node does not use TLS: configure certificates on all members, or on none"
        self._refuse(link, reason)

    def _refuse(self, link: socket.socket, reason: str) -> None:
        with suppress(OSError):  # it is already closed
            self._complain(f"a push connection from {_host_of(link)} is refused: {reason}")
            link.send(push_frames.pack(FrameType.REFUSAL, reason.encode()))
        link.close()

    def _complain(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) < REASONS_MAX:
            self._reasons.add(reason)
            _LOG.warning("%s", reason)

    async def _relay(self, link: socket.socket, head: bytes, task: asyncio.Task[None]) -> None:
        now = asyncio.get_running_loop().time
        if len(self._heard_at) >= RELAYED_MAX:
            silent = min(self._heard_at, key=self._heard_at.__getitem__)
            del self._heard_at[silent]
            silent.cancel()
        self._heard_at[task] = now()

        def heard() -> None:
            if task in self._heard_at:
                self._heard_at[task] = now()

        reader, writer = await asyncio.open_connection(sock=link)
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._grpc_socket)
            try:
                inner_writer.write(head)
                await _race(_pump(reader, inner_writer, heard), _pump(inner_reader, writer))
            finally:
                inner_writer.close()
        except OSError:  # the gRPC server has been stopped
            return
        finally:
            writer.close()


async def _receive(link: socket.socket, bytes_max: int) -> bytes:
    """Receive some bytes. Raises ``EOFError`` at the end."""
    data = await asyncio.get_running_loop().sock_recv(link, bytes_max)
    if not data:
        raise EOFError("connection closed")
    return data


def _host_of(link: socket.socket) -> str:
    return str(link.getpeername()[0])


def _close_if_cancelled(link: socket.socket, task: asyncio.Task[None]) -> None:
    if task.cancelled():
        link.close()


async def _race(*works: Coroutine[object, object, None]) -> None:
    """Run all until the first ends."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Callable[[], None] | None = None
) -> None:
    with suppress(OSError):  # either side hung up: so does the relay
        while data := await reader.read(_CHUNK_BYTES):
            if heard is not None:
                heard()
            writer.write(data)
            await writer.drain()


def _listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of ``host`` (``localhost`` has two), on the same port."""
    listening: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind, protocol)
            listening.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and host:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            one.bind((address[0], listening[0].getsockname()[1] if len(listening) > 1 else port, *address[2:]))
            one.listen(_BACKLOG)
            one.setblocking(False)
    except OSError as error:
        for one in listening:
            one.close()
        raise ConfigError([options.bind_problem(host, port, "peer")]) from error
    return listening
