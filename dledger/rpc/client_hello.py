"""Reads the protocols offered in a TLS ClientHello (RFC 8446 §4.1.2)."""

from __future__ import annotations

from typing import Final

HANDSHAKE_RECORD: Final = 0x16
"""A TLS connection's first byte."""
_RECORD_HEADER_BYTES: Final = 5
_RECORD_BYTES_MAX: Final = 16 * 1024
_RECORDS_MAX: Final = 8
"""The limit of TLS records per ClientHello: clients use one or two, and every further one costs a read."""
_HELLO_BYTES_MAX: Final = 16 * 1024
_CLIENT_HELLO: Final = 1
_HELLO_HEADER_BYTES: Final = 4
_BEFORE_SESSION_ID: Final = 2 + 32
_ALPN: Final = 16


def protocols_offered(head: bytes) -> tuple[bytes, ...] | int:
    """Return the ALPN protocol names (RFC 7301) in a ClientHello, given a connection's first bytes; empty without ALPN.

    A number is the least number of bytes that it needs. Raises ``ValueError`` for anything else, or a long ClientHello.
    """
    hello = b""
    at = 0
    for _ in range(_RECORDS_MAX):
        end = at + _RECORD_HEADER_BYTES
        if len(head) < end:
            return end
        length = int.from_bytes(head[at + 3 : end], "big")
        if head[at] != HANDSHAKE_RECORD or not 0 < length <= _RECORD_BYTES_MAX:
            raise ValueError("not a TLS handshake")
        at = end + length
        hello += head[end:at]
        wanted = _hello_bytes(hello)
        if wanted is not None and len(hello) >= wanted:
            return _alpn(hello[_HELLO_HEADER_BYTES:wanted])
        if len(head) < at:
            return at
    raise ValueError("a ClientHello in many pieces")


def _hello_bytes(hello: bytes) -> int | None:
    """Return the length of the whole message, None if its header is incomplete."""
    if hello and hello[0] != _CLIENT_HELLO:
        raise ValueError("not a ClientHello")
    if len(hello) < _HELLO_HEADER_BYTES:
        return None
    length = _HELLO_HEADER_BYTES + int.from_bytes(hello[1:_HELLO_HEADER_BYTES], "big")
    if length > _HELLO_BYTES_MAX:
        raise ValueError("a ClientHello of more than 16 KiB")
    return length


def _alpn(body: bytes) -> tuple[bytes, ...]:
    rest = _Reader(body)
    rest.take(_BEFORE_SESSION_ID)
    rest.vector(1)  # session id
    rest.vector(2)  # cipher suites
    rest.vector(1)  # compression methods
    if rest.is_empty:
        return ()
    extensions = _Reader(rest.vector(2))
    while not extensions.is_empty:
        kind, content = int.from_bytes(extensions.take(2), "big"), extensions.vector(2)
        if kind == _ALPN:
            names = _Reader(_Reader(content).vector(2))
            found = []
            while not names.is_empty:
                found.append(names.vector(1))
            return tuple(found)
    return ()


class _Reader:
    """Reads from the front. Raises ``ValueError`` if there are too few bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ValueError("a ClientHello that ends too early")
        taken, self._at = self._data[self._at : end], end
        return taken

    def vector(self, length_bytes: int) -> bytes:
        """Read bytes that are preceded by their length."""
        return self.take(int.from_bytes(self.take(length_bytes), "big"))
