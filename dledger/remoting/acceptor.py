"""Accepts remoting connections with or without TLS, depending on ``tls.server.mode``."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from dledger.access.addresses import place_of
from dledger.rpc import tls
from dledger.rpc.client_hello import HANDSHAKE_RECORD
from dledger.rpc.front_door import Take, Verdict, hang_up
from dledger.rpc.relay import peer_name
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import TlsServerMode

_LOG = logging.getLogger(__name__)

TLS_SHUTDOWN_TIMEOUT_S: Final = 5.0
REASONS_MAX: Final = 32
"""The limit of distinct refusals logged: anyone may connect, and fill logs."""
REMOTING_FRAME: Final = 0x00
"""The first byte of a remoting connection: a frame begins with its length, which is below 16 MiB."""


class RemotingAcceptor:
    """Serves a ``FrontDoor``: ``look`` for a port of remoting only, ``take_plain`` and ``take_sealed`` for any."""

    def __init__(
        self,
        whose: str,
        factory: Callable[[], asyncio.Protocol] | None,
        tls_keeper: TlsKeeper | None,
        mode: TlsServerMode | None,
        handshake_s_max: float,
        taken: Callable[[str, asyncio.Protocol], None] | None = None,
    ) -> None:
        """``factory`` makes each connection's protocol object; None: all are refused.

        ``taken`` is called with the peer, in gRPC's form, and the protocol object of each connection, before it is one.
        """
        self._whose = whose
        self._factory = factory
        self._tls = tls_keeper
        self._mode = mode or (TlsServerMode.ENFORCING if tls_keeper else TlsServerMode.PERMISSIVE)
        self._handshake_s_max = handshake_s_max
        self._taken = taken
        self._reasons: set[str] = set()

    def look(self, head: bytes) -> Verdict | Take | int:
        """Identify a connection; see ``Look``."""
        if not head:
            return 1
        if head[0] == REMOTING_FRAME:
            return self.take_plain
        return self.take_sealed if head[0] == HANDSHAKE_RECORD else Verdict.CLOSE

    async def take_plain(self, link: socket.socket) -> None:
        """Take a connection without TLS."""
        if self._tls is not None and self._mode is TlsServerMode.ENFORCING:
            self._refuse(link, f"this {self._whose} accepts only TLS (tls.server.mode=enforcing)")
        else:
            await self._take(link, None)

    async def take_sealed(self, link: socket.socket) -> None:
        """Take a connection with TLS."""
        if self._tls is None:
            self._refuse(link, f"it uses TLS, and this {self._whose} does not: set tls_cert_path and the others")
        elif self._mode is TlsServerMode.DISABLED:
            self._refuse(link, "it uses TLS, which is switched off (tls.server.mode=disabled)")
        else:
            await self._take(link, self._tls.accepting_clients())

    async def _take(self, link: socket.socket, context: ssl.SSLContext | None) -> None:
        if self._factory is None:
            self._refuse(link, f"this {self._whose} does not speak that protocol")
            return
        try:
            peer = peer_name(link)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            protocol = self._factory()
        except BaseException:
            link.close()
            raise
        if self._taken is not None:
            self._taken(peer, protocol)
        timeouts = {}
        if context is not None:
            timeouts["ssl_handshake_timeout"] = self._handshake_s_max
            timeouts["ssl_shutdown_timeout"] = TLS_SHUTDOWN_TIMEOUT_S
        loop = asyncio.get_running_loop()  # it owns the socket from now on, whatever happens
        taking = loop.create_task(loop.connect_accepted_socket(lambda: protocol, link, ssl=context, **timeouts))
        try:
            await asyncio.shield(taking)
        except ssl.SSLError as error:
            self._complain(tls.explain(error, f"a remoting client at {place_of(peer)[0]}"))
            return
        except asyncio.CancelledError:
            if context is None:  # it is about to be made, and uvloop would not tell a protocol of its end then
                taking.add_done_callback(_abort)
            else:
                taking.cancel()
            raise

    def _refuse(self, link: socket.socket, why: str) -> None:
        self._complain(f"a remoting connection is refused: {why}")
        hang_up(link)

    def _complain(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) < REASONS_MAX:
            self._reasons.add(reason)
            _LOG.warning("%s", reason)


def _abort(taking: asyncio.Task[tuple[asyncio.Transport, asyncio.Protocol]]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result()[0].abort()
