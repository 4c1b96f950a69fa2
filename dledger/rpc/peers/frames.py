"""Frames: how members' messages travel on a TCP or TLS connection.

A frame is its kind (1 byte), the payload's length (4 bytes, big-endian), and the payload, a protobuf message of
``raft.proto``. It costs a Python process a tenth of what a gRPC call does, with several thread switches on either side.

A connection serves one purpose, which its handshake names. It begins with the first byte of a frame, or with TLS, whose
first byte is another one (``TLS_RECORD``):

    dialling   -> HANDSHAKE                      then what the purpose allows
    accepting  -> HANDSHAKE_ANSWER, or REFUSAL   then the answers, REFUSAL last of all

The payload of a ``REFUSAL`` is a sentence (UTF-8) for people: why the connection ends.

``PeerConnection`` is a connection between two members on a blocking socket, through TLS or not: one thread receives,
any number send. The accepting side uses it once a peer has shaken hands, and the exchange of logs on both sides. Links,
which send to a peer all the time, do so on an event loop instead (``dledger.rpc.peers.link``).
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from enum import IntEnum
from struct import Struct
from typing import Final, Self

from dledger.errors import InvalidRequestError, TlsError
from dledger.rpc import tls
from dledger.rpc.tls import READ_BYTES, SEAL_BYTES, TlsStream
from dledger.types import NodeId

TLS_RECORD: Final = 0x16
"""The first byte of a TLS handshake (RFC 8446 §5.1); no frame begins with it."""
HANDSHAKE_BYTES_MAX: Final = 64 * 1024
"""The longest frame accepted before the handshake is done, and the longest answer to a push or a control message."""
_HEADER: Final = Struct(">BI")
HEADER_BYTES: Final = _HEADER.size

# A peer behind a dead link answers no probe: the connection ends after about idle + count * interval, or when bytes
# sent were not acknowledged for the user timeout.
_KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 2),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 2),
    (socket.TCP_USER_TIMEOUT, 3500),
)


class Purpose(IntEnum):
    """The purpose of a connection. Each has its own connection, so that a megabyte of log never delays a vote."""

    CONTROL = 1
    """Votes, heartbeats, take-leadership."""
    PUSH = 2
    LOG = 3
    """One question about the log: its bytes, or chain CRCs."""
    SNAPSHOT = 4
    """A snapshot of a state machine."""


class FrameKind(IntEnum):
    """The content of a frame."""

    HANDSHAKE = 1
    HANDSHAKE_ANSWER = 2
    REFUSAL = 3
    VOTE = 4
    VOTE_ANSWER = 5
    HEARTBEAT = 6
    HEARTBEAT_ANSWER = 7
    TAKE_LEADERSHIP = 8
    TAKE_LEADERSHIP_ANSWER = 9
    PUSH = 10
    PUSH_ANSWER = 11
    READ_LOG = 12
    READ_LOG_ANSWER = 13
    CHAIN_CRCS = 14
    CHAIN_CRCS_ANSWER = 15
    SNAPSHOT = 16
    SNAPSHOT_ANSWER = 17
    SNAPSHOT_PIECE = 18
    SNAPSHOT_PIECE_ANSWER = 19
    HEARTBEATS = 20
    HEARTBEATS_ANSWER = 21


_KINDS: Final = {kind.value: kind for kind in FrameKind}
Frame = tuple[FrameKind, bytes | memoryview]


def tune(link: socket.socket) -> None:
    """Send without delay, and detect a dead peer."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def pack(kind: FrameKind, *payload: bytes) -> bytes:
    """A frame of a payload in pieces."""
    return b"".join((_HEADER.pack(kind, sum(map(len, payload))), *payload))


def sealed(stream: TlsStream | None, kind: FrameKind, *payload: bytes) -> Iterable[bytes]:
    """A frame as it is sent: through TLS, if there is any, a large payload in several pieces.

    The pieces must be sent in the order in which they are made.
    """
    return (pack(kind, *payload),) if stream is None else _sealed(stream, kind, *payload)


def _sealed(stream: TlsStream, kind: FrameKind, *payload: bytes) -> Iterator[bytes]:
    *small, large = payload
    if len(large) <= SEAL_BYTES:
        yield stream.seal(pack(kind, *payload))
    else:
        yield stream.seal(b"".join((_HEADER.pack(kind, sum(map(len, payload))), *small)))
        view = memoryview(large)
        for start in range(0, len(large), SEAL_BYTES):
            yield stream.seal(view[start : start + SEAL_BYTES])


class FrameBuffer:
    """Splits received bytes into frames."""

    def __init__(self, bytes_max: int = HANDSHAKE_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        """The longest payload accepted."""
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that ``data`` completes. Raises ``InvalidRequestError``."""
        self._received += data
        frames: list[Frame] = []
        while self._received and (frame := self.take()) is not None:
            frames.append(frame)
        return frames

    def add(self, data: bytes | memoryview) -> None:
        self._received += data

    def begin(self) -> tuple[FrameKind, memoryview, int] | None:
        """For a partly received frame: a buffer for its whole payload, and how much of it is filled.

        The caller must fill the rest before anything else is taken. None if not even the header is complete.
        """
        received = self._received
        if len(received) < HEADER_BYTES:
            return None
        kind, length = parse_header(received, self.bytes_max)
        have = len(received) - HEADER_BYTES
        room = memoryview(bytearray(length))
        room[:have] = received[HEADER_BYTES:]
        received.clear()
        return kind, room, have

    def take(self) -> Frame | None:
        """The next frame, if it is complete. Raises ``InvalidRequestError``."""
        received = self._received
        if len(received) < HEADER_BYTES:
            return None
        kind, length = parse_header(received, self.bytes_max)
        end = HEADER_BYTES + length
        if len(received) < end:
            return None
        with memoryview(received) as view:
            payload = bytes(view[HEADER_BYTES:end])
        del received[:end]
        return kind, payload


def refusal_in(received: bytes | bytearray) -> str:
    """The sentence of the refusal with which an answer to a TLS handshake begins; empty if it does not.

    A member without TLS refuses anyone who begins with it, and says so in the clear.
    """
    try:
        frame = next(iter(FrameBuffer().feed(bytes(received))), None)
    except InvalidRequestError:
        return ""
    return bytes(frame[1]).decode(errors="replace") if frame is not None and frame[0] is FrameKind.REFUSAL else ""


def parse_header(header: bytes | bytearray, bytes_max: int) -> tuple[FrameKind, int]:
    """A frame's kind and the length of its payload. Raises ``InvalidRequestError``."""
    code, length = _HEADER.unpack_from(header)
    kind = _KINDS.get(code)
    if kind is None:
        raise InvalidRequestError(
            f"a frame of kind {code} is unknown: only members of the group connect to this port, clients to another one"
        )
    if length > bytes_max:
        raise InvalidRequestError(f"{kind.name} frame of {length} bytes: at most {bytes_max} are allowed")
    return kind, length


_SMALL_BYTES: Final = 16 * 1024
"""How much is read at a time without TLS; the rest of a large frame is received into its place."""


class PeerConnection:
    """One connection. ``frames``: what was received already. With ``deadline``, no call waits longer than until then.

    Waiting calls raise ``OSError`` (``TimeoutError`` at the deadline), and ``EOFError`` if the other side closed TLS.
    """

    def __init__(
        self,
        link: socket.socket,
        stream: TlsStream | None = None,
        received: FrameBuffer | None = None,
        names: tuple[str, ...] | None = None,
    ) -> None:
        self.names: Final = names
        """Of the other side's certificate, if that was asked for one; None: plaintext."""
        self.deadline: float | None = None
        """As a time of ``time.monotonic``; None: wait as long as it takes."""
        self._link = link
        self._tls = stream
        self._frames = received or FrameBuffer()
        self._has_decrypted = False  # TLS may hold the bytes behind a large frame: the socket would not tell of them
        self._room = memoryview(bytearray(_SMALL_BYTES if stream is None else READ_BYTES))
        self._sending = threading.Lock()  # held while a frame is sealed and sent

    @classmethod
    def dial(cls, host: str, port: int, peer: NodeId, context: ssl.SSLContext | None, deadline: float) -> Self:
        """Connect to ``peer``, with TLS if ``context`` is given. Raises ``OSError`` and ``TlsError``."""
        link = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
        try:
            tune(link)
            made = cls(link, None if context is None else TlsStream(context))
            made.deadline = deadline
            made._begin_tls(f"{peer} at {host}:{port}", peer)
        except BaseException:
            link.close()
            raise
        return made

    def _begin_tls(self, whom: str, peer: NodeId) -> None:
        stream = self._tls
        if stream is None:
            return
        data, said = b"", b""
        try:
            while True:
                self._link.sendall(stream.shake_hands(data))
                if stream.agreed:
                    break
                self._hurry()
                data = self._link.recv(READ_BYTES)
                said += data
                if not data:
                    raise ConnectionError(f"{whom} hung up during the TLS handshake")
        except ssl.SSLError as error:
            refused = refusal_in(said)
            raise TlsError(f"{whom}: {refused}" if refused else tls.explain(error, whom)) from error
        tls.check_name(tls.names_of(stream.certificate), peer, f"of {whom}")
        self._frames.add(stream.read())

    def receive(self, bytes_max: int) -> Frame | None:
        """The next frame, None at the end. Raises ``InvalidRequestError`` for one of more than ``bytes_max`` bytes."""
        received = self._frames
        received.bytes_max = bytes_max
        while (frame := received.take()) is None:
            if (begun := received.begin()) is not None:
                kind, room, have = begun
                return (kind, room) if self._fill(room[have:]) else None
            if not self._receive():
                return None
        return frame

    def _receive(self) -> bool:
        """Receive some bytes; False at the end."""
        stream = self._tls
        if stream is not None and self._has_decrypted:
            self._has_decrypted = False
            self._frames.add(stream.read())
            return True
        count = self._wait(self._room)
        if count:
            self._frames.add(self._room[:count] if stream is None else stream.read())
        return count > 0

    def _fill(self, room: memoryview) -> bool:
        """Receive the rest of a frame into its place; False at the end."""
        stream = self._tls
        if stream is None:
            while room:
                count = self._wait(room, socket.MSG_WAITALL)
                if not count:
                    return False
                room = room[count:]
            return True
        while len(room := room[stream.read_into(room) :]):
            if not self._wait(self._room):
                return False
        self._has_decrypted = True
        return True

    def _wait(self, room: memoryview, flags: int = 0) -> int:
        """Receive into ``room``, and give TLS what is its; returns the number of bytes from the socket."""
        self._hurry()
        count = self._link.recv_into(room, 0, flags)
        if self._tls is not None:
            self._tls.feed(room[:count])
            if self._tls.has_due:
                with self._sending:
                    self._link.send(self._tls.due(), socket.MSG_DONTWAIT)
        return count

    def _hurry(self) -> None:
        """Give the next wait the time that is left, however slowly bytes arrive."""
        if self.deadline is not None:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("it took too long")
            self._link.settimeout(left_s)

    def send(self, kind: FrameKind, payload: bytes) -> bool:
        """Send a frame; if the peer does not accept it at once, returns False and ends the connection.

        A peer that leaves some megabytes of answers unread is dead or broken; waiting for it would stop the flusher.
        """
        with self._sending:
            try:
                for piece in sealed(self._tls, kind, payload):
                    if self._link.send(piece, socket.MSG_DONTWAIT) != len(piece):
                        break
                else:
                    return True
            except OSError:
                pass
        self.end()
        return False

    def send_whole(self, kind: FrameKind, payload: bytes) -> None:
        """Send a frame, and wait until the peer has accepted it. Raises ``OSError``."""
        with self._sending:
            for piece in sealed(self._tls, kind, payload):
                self._hurry()
                self._link.sendall(piece)

    def end(self) -> None:
        """Make the reading thread stop."""
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed, or no longer connected
            return

    def close(self) -> None:
        """Close the socket; no other thread is sending."""
        with self._sending:
            self._link.close()
