"""The single peer port: passes pushes to the push server and relays everything else to the gRPC server.

Only votes, heartbeats, handshakes, health and reflection are relayed: a few small messages per second.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from dledger.errors import InvalidRequestError, TlsError
from dledger.rpc import tls
from dledger.rpc.bridge import LoopBridge, LoopThread, Report, log_failure
from dledger.rpc.front_door import FIRST_BYTES_TIMEOUT_S, DoorLimits, FrontDoor, Take, Verdict, listen
from dledger.rpc.peers import push_frames
from dledger.rpc.peers.push_frames import Frame, FrameType
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.rpc.tls_stream import TlsStream

_LOG = logging.getLogger(__name__)

REASONS_MAX: Final = 32
"""The limit of distinct refusals logged: anyone may connect, and fill logs."""
RELAYED_MAX: Final = 128
"""The limit of relayed connections. A member has one or two of them, and is never silent for long: it pings."""
_HANDSHAKE_BYTES: Final = 16 * 1024
_HANDSHAKE_BYTES_MAX: Final = 256 * 1024

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
        self._take_push = take_push
        self._tls = tls_keeper
        self._reasons: set[str] = set()
        self._loop = LoopThread(name, report)
        self._bridge: LoopBridge | None = None
        self._door: FrontDoor | None = None

    def start(self, host: str, port: int, grpc_socket: str) -> None:
        """Listen, and relay gRPC to ``grpc_socket``. Raises ``ConfigError`` if it cannot listen."""
        listening = listen(host, port, "peer")
        self.port = listening[0].getsockname()[1]
        limits = DoorLimits(RELAYED_MAX, first_bytes_timeout_s=FIRST_BYTES_TIMEOUT_S)
        self._door = FrontDoor("peer", self._look, grpc_socket, limits)
        self._bridge = bridge = self._loop.start()
        bridge.post(partial(self._door.open, listening))

    def close(self) -> None:
        """Close everything and join the thread. Idempotent."""
        if self._bridge is not None and self._door is not None:
            bridge, self._bridge = self._bridge, None
            bridge.run(self._door.close())
        self._loop.stop()

    def _look(self, head: bytes) -> Verdict | Take | int:
        if len(head) < len(push_frames.PREAMBLE):
            return len(push_frames.PREAMBLE)
        is_push = head.startswith((push_frames.PREAMBLE, push_frames.TLS_PREAMBLE))
        return self._take if is_push else Verdict.RELAY

    async def _take(self, link: socket.socket) -> None:
        """Receive enough of a push connection to identify the peer, then pass it to the push server."""
        try:
            found = await self._begin(link)
        except InvalidRequestError as error:
            self._refuse(link, str(error))
            return
        except BaseException:
            link.close()
            raise
        if found is None:
            self._refuse_unlike(link)
            return
        link.setblocking(True)
        try:
            self._take_push(link, found)
        except TlsError as error:
            self._complain(str(error))

    async def _begin(self, link: socket.socket) -> TlsStream | Frame | None:
        """Do the TLS handshake or receive the first frame; None if one side uses TLS and the other does not."""
        push_frames.tune(link)
        head = await self._exactly(link, len(push_frames.PREAMBLE))
        if head == push_frames.TLS_PREAMBLE and self._tls is not None:
            return await self._shake_hands(link, TlsStream(self._tls.accepting(), server_side=True))
        if head == push_frames.PREAMBLE and self._tls is None:
            return await self._first_frame(link)
        return None

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


async def _receive(link: socket.socket, bytes_max: int) -> bytes:
    """Receive some bytes. Raises ``EOFError`` at the end."""
    data = await asyncio.get_running_loop().sock_recv(link, bytes_max)
    if not data:
        raise EOFError("connection closed")
    return data


def _host_of(link: socket.socket) -> str:
    return str(link.getpeername()[0])
