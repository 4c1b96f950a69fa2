"""A connection that speaks just enough HTTP/2 to be a nuisance."""

from __future__ import annotations

import socket
import struct
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
HEADERS, DATA = 1, 0
INITIAL_WINDOW: Final = 4
END_STREAM, END_HEADERS = 1, 4
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

    def __init__(self, host: str, port: int, *, timeout_s: float = 60) -> None:
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

    def begin(self, window_bytes: int | None = None) -> bool:
        """The preface and settings: how much of each answer is taken before the peer must wait."""
        settings = b"" if window_bytes is None else struct.pack(">HI", INITIAL_WINDOW, window_bytes)
        return self.send(PREFACE + frame(SETTINGS, settings) + frame(SETTINGS, flags=ACK))

    def is_closed(self) -> bool:
        """Whether it was hung up on; drops what has come."""
        self._socket.setblocking(False)
        try:
            while self._socket.recv(65536):
                pass
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        finally:
            self._socket.setblocking(True)
        return True

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


def call_frames(stream: int, path: str, request: bytes, *headers: tuple[str, bytes]) -> bytes:
    """A gRPC call with one request, on a stream of an odd number; with more headers, whatever their values are."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    every = [*((name, value.encode()) for name, value in fields.items()), *headers]
    head = b"".join(b"\x00" + _literal(name.encode()) + _literal(value) for name, value in every)
    message = b"\x00" + len(request).to_bytes(4, "big") + request
    return frame(HEADERS, head, flags=END_HEADERS, stream=stream) + frame(
        DATA, message, flags=END_STREAM, stream=stream
    )


def _literal(data: bytes) -> bytes:
    """One of HPACK's, shorter than its length needs a second byte for."""
    return bytes((len(data),)) + data
