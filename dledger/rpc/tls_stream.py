"""TLS as a transformation of bytes, without a socket: its user does the I/O.

``ssl.SSLSocket`` would not do, because one thread reads a push connection and another one writes to it: OpenSSL's
objects do not support that, and a lock around a blocking read would keep the writer waiting for ever. Here a lock is
held only while bytes are transformed.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Mapping
from typing import Final

READ_BYTES: Final = 256 * 1024
"""How much is read from a socket at a time: several TLS records (of 16 KiB)."""
SEAL_BYTES: Final = 128 * 1024
"""How much is sealed at a time: it stays in the processor's cache, and the other side can start reading."""
_RECORD_BYTES: Final = 16 * 1024


class TlsStream:
    """One connection's TLS: ``shake_hands`` until ``agreed``, then ``feed`` and ``read``, or ``seal``.

    An ``ssl.SSLError`` ends it.
    """

    def __init__(self, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        self.agreed = False
        """Whether the handshake is done, and with it the other side's certificate (if any) verified."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._lock = threading.Lock()  # guards the three above

    @property
    def certificate(self) -> Mapping[str, object]:
        """The other side's certificate, in ``ssl``'s form; empty if there is none."""
        return self._object.getpeercert() or {}

    @property
    def version(self) -> str:
        """The protocol version, for people."""
        return self._object.version() or "TLS"

    def shake_hands(self, received: bytes) -> bytes:
        """Continue the handshake with received bytes; returns the bytes to send."""
        with self._lock:
            self._incoming.write(received)
            try:
                self._object.do_handshake()
                self.agreed = True
            except ssl.SSLWantReadError:
                pass
            return self._outgoing.read()

    def feed(self, received: bytes | memoryview) -> None:
        """Take received bytes."""
        with self._lock:
            self._incoming.write(received)

    def read(self) -> bytes:
        """The decrypted bytes received so far. Raises ``EOFError`` once the other side has closed TLS."""
        with self._lock:
            parts: list[bytes] = []
            try:
                while part := self._object.read(_RECORD_BYTES):
                    parts.append(part)
            except ssl.SSLWantReadError:
                return b"".join(parts)
            except ssl.SSLZeroReturnError:
                pass
            if parts:
                return b"".join(parts)
            raise EOFError("the other side closed TLS")

    def read_into(self, room: memoryview) -> int:
        """``read`` into a buffer; returns the number of bytes."""
        with self._lock:
            got, read = 0, self._object.read
            try:
                while got < len(room):
                    count: int = read(len(room) - got, room[got:])  # type: ignore[assignment]  # typeshed: bytes
                    if not count:
                        break
                    got += count
            except ssl.SSLWantReadError:
                return got
            except ssl.SSLZeroReturnError:
                pass
            if got or not room:
                return got
            raise EOFError("the other side closed TLS")

    def seal(self, data: bytes | memoryview) -> bytes:
        """Encrypt ``data``; send the results in the order of the calls, or the other side reads nothing."""
        with self._lock:
            self._object.write(data)
            return self._outgoing.read()

    @property
    def has_due(self) -> bool:
        """Whether ``due`` has bytes to send."""
        return self._outgoing.pending > 0

    def due(self) -> bytes:
        """Bytes that TLS itself has to send: new keys, or after an ``SSLError`` the alert. In order with ``seal``'s
        results.
        """
        with self._lock:
            return self._outgoing.read()
