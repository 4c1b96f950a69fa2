"""A connection between two members on a blocking socket, through TLS or not: one thread receives, any number send.

The accepting side uses it once a peer has shaken hands, and the exchange of logs on both sides. Links, which send to a
peer all the time, do so on an event loop instead (``dledger.rpc.peers.link``).
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from typing import Final, Self

from dledger.errors import TlsError
from dledger.rpc import tls
from dledger.rpc.peers import frames
from dledger.rpc.peers.frames import Frame, FrameBuffer, FrameKind
from dledger.rpc.tls_stream import READ_BYTES, TlsStream
from dledger.types import NodeId

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
            frames.tune(link)
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
            refused = frames.refusal_in(said)
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
                for piece in frames.sealed(self._tls, kind, payload):
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
            for piece in frames.sealed(self._tls, kind, payload):
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
