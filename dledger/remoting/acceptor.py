"""A port of remoting, plaintext or TLS by its first byte, depending on ``tls.server.mode``.

A frame begins with its length, which is below 16 MiB, so its first byte is zero; TLS begins with a handshake record.
The first byte is only peeked at: a connection is handed to its protocol unread.

Clients of other protocols are told in their own words that it is the wrong port for them. gRPC's clients try again at
once, and say nothing, if a connection merely ends; so their first call is answered (HTTP/2, RFC 9113; its headers, RFC
7541).
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import struct
from collections.abc import Callable, Iterable
from typing import Final, cast

from dledger.remoting.codes import TLS_REQUIRED, AnswerCode, FrameError
from dledger.remoting.frame import LENGTH_BYTES, PREFIX_BYTES, decode, encode
from dledger.rpc import tls
from dledger.rpc.listening import FIRST_BYTES_MAX, TLS_HANDSHAKE, Acceptor, Arrival, peek
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import TlsServerMode

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of HTTP/2."""
HEAD_BYTES: Final = 16
"""How many first bytes decide."""
_HTTP1: Final = re.compile(rb"[A-Z]{3,7} (/|http|\*)")
_HEADERS: Final = 1
_SETTINGS: Final = 4
_GOAWAY: Final = 7
_END_STREAM_AND_HEADERS: Final = 5
_FRAME_HEADER_BYTES: Final = 9
_FRAME_BYTES_MAX: Final = 16 * 1024
_STATUS_200: Final = b"\x88"
_VALUE_BYTES_MAX: Final = 126
_UNIMPLEMENTED: Final = "12"


def _is_http2(head: bytes) -> bool:
    """Whether these first bytes are HTTP/2's, as gRPC's are."""
    return head.startswith(PREFACE[:HEAD_BYTES])


def answer_to(head: bytes, reason: str) -> bytes:
    """The answer of HTTP/1.1 that shows ``reason``; empty for first bytes that are not of that protocol."""
    if not _HTTP1.match(head):
        return b""
    body = f"{reason}\n".encode()
    first = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return f"{first}Connection: close\r\n\r\n".encode() + body


class _GrpcRefusal:
    """Refuses the first call on a connection of gRPC, whose client shows ``reason`` as its error."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._received = bytearray()
        self._answer = _frame(_SETTINGS, 0, 0, b"")
        self._preface_left = len(PREFACE)
        self.is_done = False
        """Whether there is nothing more to answer, and the connection can be ended."""

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; returns those to send."""
        self._received += data
        answer, self._answer = self._answer, b""
        if self._preface_left and len(self._received) >= self._preface_left:
            del self._received[: self._preface_left]
            self._preface_left = 0
        while not self._preface_left and not self.is_done and len(self._received) >= _FRAME_HEADER_BYTES:
            length, kind = int.from_bytes(self._received[:3], "big"), self._received[3]
            stream = bytes(self._received[5:_FRAME_HEADER_BYTES])
            if length > _FRAME_BYTES_MAX:
                self.is_done = True
            elif kind == _HEADERS:
                answer += self._refusal(int.from_bytes(stream, "big"))
                self.is_done = True
            elif len(self._received) < _FRAME_HEADER_BYTES + length:
                break
            del self._received[: _FRAME_HEADER_BYTES + length]
        return answer

    def _refusal(self, stream: int) -> bytes:
        fields = {"content-type": "application/grpc", "grpc-status": _UNIMPLEMENTED, "grpc-message": self._reason}
        block = _STATUS_200 + b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        goaway = _frame(_GOAWAY, 0, 0, stream.to_bytes(4, "big") + bytes(4))
        return _frame(_HEADERS, _END_STREAM_AND_HEADERS, stream, block) + goaway


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    data = text.encode()[:_VALUE_BYTES_MAX]
    return bytes((len(data),)) + data


_LOG = logging.getLogger(__name__)

_TLS_SHUTDOWN_TIMEOUT_S: Final = 5.0
REASONS_MAX: Final = 32
"""The limit of distinct refusals logged: anyone may connect, and fill logs."""
_FRAME: Final = 0x00
_HTTP2: Final = "h2"


class RemotingAcceptor:
    """Accepts from ``open`` to ``close``, on the event loop that calls them."""

    def __init__(
        self,
        whose: str,
        factory: Callable[[], asyncio.Protocol],
        tls_keeper: TlsKeeper | None,
        mode: TlsServerMode | None,
        handshake_s_max: float,
    ) -> None:
        """``whose``: the program's name in log lines. ``factory`` makes each connection's protocol object."""
        self._whose = whose
        self._factory = factory
        self._tls = tls_keeper
        self._mode = mode or (TlsServerMode.ENFORCING if tls_keeper else TlsServerMode.PERMISSIVE)
        self._handshake_s_max = handshake_s_max
        self._acceptor = Acceptor(f"{whose}'s", self._identify, handshake_s_max)
        self._reasons: set[str] = set()
        self.stop_listening = self._acceptor.stop_listening
        self.close = self._acceptor.close
        self._grpc = "none is served"

    def open(self, listening: Iterable[socket.socket], grpc_port: int = 0) -> None:
        """Accept connections from these sockets, and own them. ``grpc_port``: what gRPC's clients are told."""
        if grpc_port:
            self._grpc = f"that is grpcServerPort, {grpc_port} here"
        self._acceptor.open(listening)

    async def _identify(self, arrival: Arrival) -> None:
        first = await peek(arrival.link)
        if first == _FRAME:
            if self._tls is not None and self._mode is TlsServerMode.ENFORCING:
                await self._refuse_plaintext(arrival)
            else:
                await self._take(arrival, None)
        elif first != TLS_HANDSHAKE:
            await self._refuse_stranger(arrival)
        elif self._tls is None:
            self._refuse(f"it uses TLS, and this {self._whose} does not: set tls_cert_path and the others")
        elif self._mode is TlsServerMode.DISABLED:
            self._refuse("it uses TLS, which is switched off (tls.server.mode=disabled)")
        else:
            await self._take(arrival, self._tls.accepting_clients())

    async def _take(self, arrival: Arrival, context: ssl.SSLContext | None) -> None:
        arrival.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        protocol: asyncio.Protocol
        timeouts = {}
        if context is None:
            protocol = self._factory()
        else:
            protocol = _Sealed(self._factory, self._refusal_of_grpc, self._handshake_s_max)
            timeouts = {"ssl_handshake_timeout": self._handshake_s_max, "ssl_shutdown_timeout": _TLS_SHUTDOWN_TIMEOUT_S}
        loop = asyncio.get_running_loop()  # it owns the socket from now on, whatever happens
        taking = loop.create_task(
            loop.connect_accepted_socket(lambda: protocol, arrival.take(), ssl=context, **timeouts)
        )
        try:
            await asyncio.shield(taking)
        except ssl.SSLError as error:
            self._complain(tls.explain(error, f"a remoting client at {arrival.host}"))
        except asyncio.CancelledError:
            if context is None:  # it is about to be made, and uvloop would not tell a protocol of its end then
                taking.add_done_callback(_abort)
            else:
                taking.cancel()
            raise

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _refuse(self, why: str) -> None:
        self._complain(f"a connection to the {self._whose}'s port is refused: {why}")

    def _refusal_of_grpc(self) -> _GrpcRefusal:
        reason = f"this is the port of RocketMQ's remoting, not of gRPC: {self._grpc}"
        self._refuse(reason)
        return _GrpcRefusal(reason)

    async def _refuse_plaintext(self, arrival: Arrival) -> None:
        """Answer the first request, so that its client need not guess why it was hung up on."""
        reason = f"this {self._whose} accepts only TLS (tls.server.mode=enforcing)"
        self._refuse(reason)
        loop = asyncio.get_running_loop()
        head, needed = b"", PREFIX_BYTES
        while len(head) < needed and (part := await loop.sock_recv(arrival.link, needed - len(head))):
            head += part
            if len(head) == PREFIX_BYTES:
                needed += int.from_bytes(head[5:], "big")
                if needed > min(LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES], "big"), FIRST_BYTES_MAX):
                    return  # it is no frame, or not the usual first one
        try:
            request = decode(memoryview(head))
        except (FrameError, struct.error):
            return
        if request.is_response or request.is_oneway:
            return
        await loop.sock_sendall(arrival.link, encode(request.answer(AnswerCode.NO_PERMISSION, reason, TLS_REQUIRED)))
        await self._end(arrival)

    async def _refuse_stranger(self, arrival: Arrival) -> None:
        """Tell a client of HTTP or gRPC, and the log, that it came to the wrong port."""
        loop = asyncio.get_running_loop()
        head = b""
        while len(head) < HEAD_BYTES and (part := await loop.sock_recv(arrival.link, FIRST_BYTES_MAX)):
            head += part
        unread = FIRST_BYTES_MAX
        if _is_http2(head):
            refusal = self._refusal_of_grpc()
            await loop.sock_sendall(arrival.link, refusal.feed(head))
            while unread > 0 and not refusal.is_done and (part := await loop.sock_recv(arrival.link, unread)):
                unread -= len(part)
                await loop.sock_sendall(arrival.link, refusal.feed(part))
        else:
            self._refuse("it begins with neither a frame nor TLS")
            answer = answer_to(head, "this is the port of RocketMQ's remoting")
            if not answer:
                return
            await loop.sock_sendall(arrival.link, answer)
        await self._end(arrival, unread)

    async def _end(self, arrival: Arrival, unread: int = FIRST_BYTES_MAX) -> None:
        """Read what is on its way: else the client might see a reset before the answer."""
        arrival.link.shutdown(socket.SHUT_WR)
        while unread > 0 and (part := await asyncio.get_running_loop().sock_recv(arrival.link, unread)):
            unread -= len(part)

    def _complain(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) < REASONS_MAX:
            self._reasons.add(reason)
            _LOG.warning("%s", reason)


class _Sealed(asyncio.Protocol):
    """A connection whose TLS handshake is done: remoting's clients agree on no protocol there, gRPC's on HTTP/2."""

    def __init__(
        self, factory: Callable[[], asyncio.Protocol], refuse_grpc: Callable[[], _GrpcRefusal], refusal_s_max: float
    ) -> None:
        self._factory = factory
        self._refuse_grpc = refuse_grpc
        self._refusal_s_max = refusal_s_max
        self._refused: tuple[asyncio.Transport, _GrpcRefusal, asyncio.TimerHandle] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Put the connection's own protocol in this one's place, unless it is gRPC's."""
        made = cast("asyncio.Transport", transport)  # uvloop's classes are not asyncio's
        agreed = made.get_extra_info("ssl_object").selected_alpn_protocol()
        if agreed == _HTTP2:
            timer = asyncio.get_running_loop().call_later(self._refusal_s_max, made.abort)
            self._refused = made, self._refuse_grpc(), timer
            return
        protocol = self._factory()
        made.set_protocol(protocol)
        protocol.connection_made(made)

    def data_received(self, data: bytes) -> None:
        """Refuse a call of gRPC."""
        if self._refused is not None:
            transport, refusal, _ = self._refused
            answer = refusal.feed(data)
            if not transport.is_closing():
                transport.write(answer)
            if refusal.is_done:
                transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        """The refused connection has ended."""
        if self._refused is not None:
            self._refused[2].cancel()


def _abort(taking: asyncio.Task[tuple[asyncio.Transport, asyncio.Protocol]]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result()[0].abort()
