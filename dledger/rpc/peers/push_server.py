"""The follower's end of push connections, one thread each: receives a push, flushes it and answers it.

Only that thread reads the connection, so that an isolated push costs one wake-up; answers may also come from the
flusher. Each peer has at most one connection: a newer one ends the older, which may hang on a path not yet known to be
dead.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from dledger.config import ServerConfig
from dledger.core.messages import Envelope
from dledger.errors import (
    DLedgerError,
    IdentityError,
    InvalidRequestError,
    ResponseCode,
    TlsError,
    UnknownMemberError,
)
from dledger.rpc import options, tls
from dledger.rpc.peers import codec, push_frames
from dledger.rpc.peers.control_link import Learn
from dledger.rpc.peers.identity import PeerIdentity
from dledger.rpc.peers.push_frames import Frame, FrameBuffer, FrameType
from dledger.rpc.ports import Receiver
from dledger.rpc.tls_stream import READ_BYTES, TlsStream
from dledger.types import NodeId

_LOG = logging.getLogger(__name__)

_Received = tuple[FrameType, bytes | memoryview]

HANDSHAKE_TIMEOUT_S: Final = 5.0
"""How long a connection may take for its handshake: the peer is unknown until then."""


class PushServer:
    """Serves the connections passed to ``take`` until ``close``."""

    def __init__(
        self, config: ServerConfig, identity: PeerIdentity, receiver: Receiver, *, client_address: str, learn: Learn
    ) -> None:
        self.dropped = 0
        """Answers that found no connection, or a full one. For monitoring: updates may race."""
        self._identity = identity
        self._receiver = receiver
        self._client_address = client_address
        self._learn = learn
        self._push_bytes_max = options.push_bytes_limit(config)
        # Per peer: one in use, one about to replace it; and some about to be refused. None of them is silent: without
        # TLS their first frame has arrived, with TLS they have shown a member's certificate.
        self._connections_max = 8 + 4 * len(config.peers)
        self._lock = threading.Lock()  # guards what follows
        self._registered = 0
        self._connections: set[_Connection] = set()
        self._by_peer: dict[NodeId, _Connection] = {}
        self._closing = False

    def take(self, link: socket.socket, found: TlsStream | Frame) -> None:
        """Serve ``link``, a blocking socket whose preamble has been read, and close it in the end.

        ``found``: its first frame, or its TLS, whose handshake is done. Raises ``TlsError`` if the certificate belongs
        to no member, before the connection takes one of the few places.
        """
        connection = _TlsConnection(link, found) if isinstance(found, TlsStream) else _Connection(link, found)
        try:
            connection.check_member(self._identity.members)
        except TlsError as error:
            connection.send(FrameType.REFUSAL, str(error).encode()[: push_frames.HANDSHAKE_BYTES_MAX])
            connection.close()
            raise
        with self._lock:
            if self._closing or len(self._connections) >= self._connections_max:
                link.close()
                return
            name = f"dledger-push-in-{self._identity.node_id}"
            connection.thread = threading.Thread(target=self._serve, args=(connection,), name=name)
            try:
                connection.thread.start()
            except RuntimeError as error:  # no more threads: the peer will try again
                _LOG.warning("%s cannot start a thread for a push connection: %s", self._identity.node_id, error)
                link.close()
                return
            self._connections.add(connection)

    def respond(self, envelope: Envelope) -> None:
        """Send an answer on its target's connection, or drop it if there is none. Never blocks."""
        connection = self._by_peer.get(envelope.target)
        if connection is None or not connection.send(FrameType.PUSH_ANSWER, codec.encode(envelope)):
            self.dropped += 1

    def close(self) -> None:
        """Close all connections and join their threads. Idempotent."""
        with self._lock:
            self._closing = True
            connections = tuple(self._connections)
        for connection in connections:
            connection.end()
        for connection in connections:
            connection.thread.join()

    def _serve(self, connection: _Connection) -> None:
        try:
            sender = self._shake_hands(connection)
            if sender is not None:
                self._read(sender, connection, self._register(sender, connection))
        except (InvalidRequestError, IdentityError, UnknownMemberError, TlsError) as error:
            _LOG.warning("%s refused a push connection: %s", self._identity.node_id, error)
            connection.send(FrameType.REFUSAL, str(error).encode()[: push_frames.HANDSHAKE_BYTES_MAX])
        except (DLedgerError, OSError, EOFError) as error:  # the node stops, or the connection broke: the peer retries
            _LOG.debug("%s closed a push connection: %s", self._identity.node_id, error)
        finally:
            with self._lock:
                self._connections.discard(connection)
                for peer in [peer for peer, one in self._by_peer.items() if one is connection]:
                    del self._by_peer[peer]
            connection.close()

    def _shake_hands(self, connection: _Connection) -> NodeId | None:
        frame = connection.receive_first(push_frames.HANDSHAKE_BYTES_MAX, HANDSHAKE_TIMEOUT_S)
        if frame is None:
            return None
        kind, payload = frame
        if kind is not FrameType.HANDSHAKE:
            raise InvalidRequestError(f"expected a handshake first on a push connection, got {kind.name}")
        handshake = codec.decode_handshake(payload)
        self._identity.check(handshake.header)
        connection.check_name(handshake.header.sender)
        self._learn(handshake.header.sender, handshake.client_address)
        answer = self._identity.judge(handshake, self._client_address)
        connection.send(FrameType.HANDSHAKE_ANSWER, codec.encode_handshake_answer(answer))
        if answer.code is not ResponseCode.SUCCESS:
            return None
        return handshake.header.sender

    def _register(self, sender: NodeId, connection: _Connection) -> int:
        """Assign the connection to its peer; returns its number, above all earlier ones."""
        with self._lock:
            older = self._by_peer.get(sender)
            self._by_peer[sender] = connection
            self._registered += 1
            number = self._registered
        if older is not None:
            older.end()
        return number

    def _read(self, sender: NodeId, connection: _Connection, number: int) -> None:
        while (frame := connection.receive(self._push_bytes_max)) is not None:
            kind, payload = frame
            if kind is not FrameType.PUSH:
                raise InvalidRequestError(f"expected a push, got {kind.name}")
            envelope = codec.decode_push_request(payload, number)
            self._identity.check(envelope)
            if envelope.sender != sender:
                raise IdentityError(f"the connection of {sender!r} carried a message from {envelope.sender!r}")
            self._receiver.receive(envelope)


class _Connection:
    """An accepted socket."""

    thread: threading.Thread

    def __init__(self, link: socket.socket, first: Frame | None = None) -> None:
        self.link = link
        self._first = first
        self._sending = threading.Lock()

    def receive(self, bytes_max: int) -> _Received | None:
        """The next frame, None at the end."""
        return push_frames.receive(self.link, bytes_max)

    def receive_first(self, _bytes_max: int, _timeout_s: float) -> _Received | None:
        """The first frame, complete within that time. Raises ``TimeoutError``."""
        return self._first

    def _hurry(self, timeout_s: float) -> Callable[[], None]:
        """Gives each wait on the socket the remaining time, however slowly bytes arrive."""
        end_at = time.monotonic() + timeout_s

        def hurry() -> None:
            left_s = end_at - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no handshake in time")
            self.link.settimeout(left_s)

        return hurry

    def check_member(self, member_ids: Iterable[str]) -> None:
        """Raise ``TlsError`` if the other side is certainly no member."""

    def check_name(self, node_id: NodeId) -> None:
        """Raise ``TlsError`` if the other side is certainly not ``node_id``."""

    def send(self, kind: FrameType, payload: bytes) -> bool:
        """Send a frame; if the peer does not accept it at once, returns False and ends the connection.

        A peer that leaves some megabytes of answers unread is dead or broken; waiting for it would stop the flusher.
        """
        frame = push_frames.pack(kind, payload)
        with self._sending:
            try:
                data = self._wrap(frame)
                if self.link.send(data, socket.MSG_DONTWAIT) == len(data):
                    return True
            except OSError:
                pass
        self.end()
        return False

    def _wrap(self, frame: bytes) -> bytes:
        """Encode a frame for the wire; in order, so under ``_sending``."""
        return frame

    def end(self) -> None:
        """Make the reading thread stop."""
        try:
            self.link.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed, or no longer connected
            return

    def close(self) -> None:
        """Close the socket; no other thread is sending."""
        with self._sending:
            self.link.close()


class _TlsConnection(_Connection):
    """An accepted socket with TLS."""

    def __init__(self, link: socket.socket, stream: TlsStream) -> None:
        super().__init__(link)
        self._stream = stream
        self._names = tls.names_of(stream.certificate)
        self._frames = FrameBuffer(push_frames.HANDSHAKE_BYTES_MAX)
        self._room = memoryview(bytearray(READ_BYTES))

    def receive(self, bytes_max: int) -> _Received | None:
        """See ``_Connection.receive``."""
        return self._next(bytes_max, None)

    def receive_first(self, bytes_max: int, timeout_s: float) -> _Received | None:
        """See ``_Connection.receive_first``."""
        hurry = self._hurry(timeout_s)
        self._frames.add(self._stream.read())  # received with the end of the TLS handshake
        frame = self._next(bytes_max, hurry)
        self.link.settimeout(None)
        return frame

    def check_member(self, member_ids: Iterable[str]) -> None:
        """Raise ``TlsError`` unless the other side's certificate is a member's."""
        tls.check_member(self._names, member_ids, "that a push connection showed")

    def check_name(self, node_id: NodeId) -> None:
        """Raise ``TlsError`` unless the other side's certificate is that node's."""
        tls.check_name(self._names, node_id, f"that {self.link.getpeername()[0]} showed")

    def _next(self, bytes_max: int, hurry: Callable[[], None] | None) -> _Received | None:
        frames = self._frames
        frames.bytes_max = bytes_max
        while (frame := frames.take()) is None:
            if (begun := frames.begin()) is not None:
                kind, room, have = begun
                return (kind, room) if self._fill(room[have:], hurry) else None
            if not self._receive(hurry):
                return None
            frames.add(self._stream.read())
        return frame

    def _fill(self, room: memoryview, hurry: Callable[[], None] | None) -> bool:
        """Receive the rest of a frame, decrypting straight into its buffer."""
        while len(room := room[self._stream.read_into(room) :]):
            if not self._receive(hurry):
                return False
        return True

    def _receive(self, hurry: Callable[[], None] | None) -> bool:
        """Receive some bytes; False at the end."""
        if hurry is not None:
            hurry()
        count = self.link.recv_into(self._room)
        self._stream.feed(self._room[:count])
        if self._stream.has_due:
            with self._sending:
                self.link.send(self._stream.due(), socket.MSG_DONTWAIT)
        return count > 0

    def _wrap(self, frame: bytes) -> bytes:
        return self._stream.seal(frame)
