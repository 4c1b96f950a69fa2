"""Answers to clients of other protocols at a remoting port, in their own words: it is the wrong port for them.

Pure. gRPC's clients try again at once, and say nothing, if a connection merely ends; so their first call is answered
(HTTP/2, RFC 9113; its headers, RFC 7541).
"""

from __future__ import annotations

import re
from typing import Final

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


def is_http2(head: bytes) -> bool:
    """Whether these first bytes are HTTP/2's, as gRPC's are."""
    return head.startswith(PREFACE[:HEAD_BYTES])


def answer_to(head: bytes, reason: str) -> bytes:
    """The answer of HTTP/1.1 that shows ``reason``; empty for first bytes that are not of that protocol."""
    if not _HTTP1.match(head):
        return b""
    body = f"{reason}\n".encode()
    first = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return f"{first}Connection: close\r\n\r\n".encode() + body


class GrpcRefusal:
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
