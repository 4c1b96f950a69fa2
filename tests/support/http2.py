"""A connection that speaks just enough HTTP/2 to be a nuisance."""

from __future__ import annotations

import socket
import struct
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK: Final = 1
ENHANCE_YOUR_CALM: Final = 11


class Frame(NamedTuple):
    """One frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def goaway_code(self) -> int:
        """Why the peer hangs up."""
        return int(struct.unpack(">I", self.payload[4:8])[0])


class Http2Link:
    """A TCP connection; use as a context manager. ``recv`` gives the next frame, None once it was hung up on."""

    def __init__(self, host: str, port: int, *, timeout_s: float = 10) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._buffer = b""

    def __enter__(self) -> Http2Link:
        return self

    def __exit__(self, *_error: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> bool:
        """False if it was hung up on."""
        try:
            self._socket.sendall(data)
        except ConnectionError:
            return False
        return True

    def begin(self) -> bool:
        """The preface and empty settings."""
        return self.send(PREFACE + frame(SETTINGS))

    def recv(self) -> Frame | None:
        """Raises ``TimeoutError`` if nothing comes."""
        head = self._exactly(9)
        if head is None:
            return None
        length = int.from_bytes(head[:3], "big")
        payload = self._exactly(length)
        return None if payload is None else Frame(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)

    def frames(self) -> list[Frame]:
        """Everything until the peer hangs up."""
        found = []
        while (one := self.recv()) is not None:
            found.append(one)
        return found

    def _exactly(self, count: int) -> bytes | None:
        while len(self._buffer) < count:
            try:
                data = self._socket.recv(65536)
            except ConnectionError:
                return None
            if not data:
                return None
            self._buffer += data
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """One frame's bytes."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
