"""The wire format of pushes: frames on a plain TCP or TLS connection, because a gRPC message costs ten times as much.

A gRPC message costs a Python process about 0.1 ms and four thread switches on either side; on an idle group that was
half of an append's latency. Pushes need nothing that this pays for: one long-lived connection, one kind of message per
direction.

After ``PREAMBLE``, which distinguishes such a connection from a gRPC one on the same port, both sides send frames: the
type (1 byte), the payload's length (4 bytes, big-endian), and the payload, which is protobuf of ``raft.proto``.
``TLS_PREAMBLE``, sent in plaintext, is followed by a TLS handshake first, with certificates on both sides.

    leader   -> HANDSHAKE                      then PUSH ...
    follower -> HANDSHAKE_ANSWER, or REFUSAL   then PUSH_ANSWER ..., REFUSAL last of all

The payload of a ``REFUSAL`` is a sentence (UTF-8) for people: why the connection ends.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from enum import IntEnum
from struct import Struct
from typing import Final

from dledger.errors import InvalidRequestError

PREAMBLE: Final = b"DLP1"
TLS_PREAMBLE: Final = b"DLPS"
HANDSHAKE_BYTES_MAX: Final = 64 * 1024
"""The longest frame accepted before the handshake is done, and the longest answer."""
_HEADER: Final = Struct(">BI")
HEADER_BYTES: Final = _HEADER.size

# A peer behind a dead link answers no probe: the connection ends after about idle + count * interval, or when bytes
# sent were not acknowledged for the user timeout. The same 3.5 s as gRPC's pings need on the other connections.
_KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 2),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 2),
    (socket.TCP_USER_TIMEOUT, 3500),
)


class FrameType(IntEnum):
    """The content of a frame."""

    HANDSHAKE = 1
    HANDSHAKE_ANSWER = 2
    PUSH = 3
    PUSH_ANSWER = 4
    REFUSAL = 5


Frame = tuple[FrameType, bytes]


def tune(link: socket.socket) -> None:
    """Send without delay, and detect a dead peer."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def pack(kind: FrameType, *payload: bytes) -> bytes:
    """A frame of a payload in pieces."""
    return b"".join((_HEADER.pack(kind, sum(map(len, payload))), *payload))


def pack_head(kind: FrameType, length: int, *first: bytes) -> bytes:
    """The head of a frame whose payload has ``length`` bytes, including ``first``."""
    return b"".join((_HEADER.pack(kind, length), *first))


def receive(link: socket.socket, bytes_max: int, hurry: Callable[[], None] | None = None) -> Frame | None:
    """The next frame on a blocking socket; None at the stream's end. Raises ``InvalidRequestError`` and ``OSError``.

    ``hurry`` is called before every wait; it may shorten the socket's timeout.
    """
    header = _receive_exactly(link, _HEADER.size, hurry)
    if header is None:
        return None
    kind, length = parse_header(header, bytes_max)
    payload = _receive_exactly(link, length, hurry) if length else b""
    return None if payload is None else (kind, payload)


def _receive_exactly(link: socket.socket, length: int, hurry: Callable[[], None] | None) -> bytes | None:
    if hurry is not None:
        hurry()
    received = link.recv(length, socket.MSG_WAITALL)
    while len(received) < length:  # a socket with a timeout returns what it has
        if hurry is not None:
            hurry()
        more = link.recv(length - len(received), socket.MSG_WAITALL)
        if not more:
            return None
        received += more
    return received


class FrameBuffer:
    """Splits received bytes into frames."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that ``data`` completes. Raises ``InvalidRequestError``."""
        self.add(data)
        while (frame := self.take()) is not None:
            yield frame

    def add(self, data: bytes) -> None:
        """Append received bytes."""
        self._received += data

    def begin(self) -> tuple[FrameType, memoryview, int] | None:
        """For a partly received frame: a buffer for its whole payload, and how much of it is filled.

        The caller must fill the rest before anything else is taken. None if not even the header is complete.
        """
        received = self._received
        if len(received) < _HEADER.size:
            return None
        kind, length = parse_header(received, self.bytes_max)
        have = len(received) - _HEADER.size
        room = memoryview(bytearray(length))
        room[:have] = received[_HEADER.size :]
        received.clear()
        return kind, room, have

    def take(self) -> Frame | None:
        """The next frame, if it is complete. Raises ``InvalidRequestError``."""
        received = self._received
        if len(received) < _HEADER.size:
            return None
        kind, length = parse_header(received, self.bytes_max)
        end = _HEADER.size + length
        if len(received) < end:
            return None
        with memoryview(received) as view:
            payload = bytes(view[_HEADER.size : end])
        del received[:end]
        return kind, payload


def parse_header(header: bytes | bytearray, bytes_max: int) -> tuple[FrameType, int]:
    """A frame's type and the length of its payload. Raises ``InvalidRequestError``."""
    code, length = _HEADER.unpack_from(header)
    try:
        kind = FrameType(code)
    except ValueError as error:
        raise InvalidRequestError(f"frame type {code} is unknown: not a push connection") from error
    if length > bytes_max:
        raise InvalidRequestError(f"{kind.name} frame of {length} bytes: at most {bytes_max} are allowed")
    return kind, length
