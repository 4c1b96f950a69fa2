"""TLS between bytes that arrive and bytes that are to be sent, without a socket: whoever has one carries them.

Not ``ssl.SSLSocket``, because a push connection is read by one thread and written to by another: OpenSSL's objects are
not made for that, and a lock around a blocking read would keep the writer waiting for ever. Here a lock is held only
while bytes are turned into other bytes.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Mapping
from typing import Final

READ_BYTES: Final = 256 * 1024
"""How much of a socket is read at once: some TLS records (16 KiB each) at a time."""
SEAL_BYTES: Final = 128 * 1024
"""How much is sealed at once: it stays in the processor's cache, and the other side can begin to read."""
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
        """What the other side showed, as ``ssl`` gives it; empty if nothing."""
        return self._object.getpeercert() or {}

    @property
    def version(self) -> str:
        """Of the protocol, for people."""
        return self._object.version() or "TLS"

    def shake_hands(self, received: bytes) -> bytes:
        """Go on with what has arrived; gives what is to be sent."""
        with self._lock:
            self._incoming.write(received)
            try:
                self._object.do_handshake()
                self.agreed = True
            except ssl.SSLWantReadError:
                pass
            return self._outgoing.read()

    def feed(self, received: bytes | memoryview) -> None:
        """Take what has arrived."""
        with self._lock:
            self._incoming.write(received)

    def read(self) -> bytes:
        """What the other side said, as far as it is there. Raises ``EOFError`` once it has said goodbye."""
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
        """As ``read``, but at most as much as there is room; gives how much."""
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
        """What is to be sent for the other side to read ``data``; in the order of the calls, or it reads nothing."""
        with self._lock:
            self._object.write(data)
            return self._outgoing.read()

    @property
    def has_due(self) -> bool:
        """Whether ``due`` would give anything."""
        return self._outgoing.pending > 0

    def due(self) -> bytes:
        """What TLS itself wants to send: new keys, or after an ``SSLError`` the alert that says why. As ``seal``'s."""
        with self._lock:
            return self._outgoing.read()
