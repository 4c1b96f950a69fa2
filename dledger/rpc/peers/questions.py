"""Connections on which this member asks another one, apart from replication: dialled for a purpose, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dledger.errors import DLedgerError, InvalidRequestError, ResponseCode, UnavailableError
from dledger.rpc.peers import codec
from dledger.rpc.peers.connection import PeerConnection
from dledger.rpc.peers.frames import HANDSHAKE_BYTES_MAX, FrameKind, Purpose
from dledger.rpc.peers.identity import Learn, PeerIdentity
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import NodeId

Answer = TypeVar("Answer")


class PeerQuestions:
    """For one thread; ``close`` may come from another."""

    def __init__(self, identity: PeerIdentity, tls_keeper: TlsKeeper | None, learn: Learn) -> None:
        self._learn = learn
        self._identity = identity
        self._tls = tls_keeper
        self._lock = threading.Lock()  # guards the two below
        self._asking: PeerConnection | None = None
        self._closed = False
        self._about = ""

    @contextmanager
    def connected(self, peer: NodeId, purpose: Purpose, deadline: float) -> Iterator[PeerConnection]:
        """A connection whose handshake is done, until the block ends. Raises ``UnavailableError``.

        ``deadline``: its first one. Errors of the block are passed on.
        """
        self._about = f"{peer} cannot be asked about its {purpose.name.lower()}"
        with self._unavailable():
            connection = self._dial(peer, deadline)
        try:
            with self._unavailable():
                self._check_open()  # again: it may have been closed meanwhile
                self._shake_hands(connection, peer, purpose)
            yield connection
        finally:
            with self._lock:
                self._asking = None
            connection.close()

    def ask(
        self,
        connection: PeerConnection,
        question: tuple[FrameKind, bytes],
        wanted: FrameKind,
        bytes_max: int,
        decode: Callable[[bytes | memoryview], Answer],
    ) -> Answer:
        """Send a question, and receive its answer of at most ``bytes_max``, on a connection of ``connected``.

        Raises ``UnavailableError``.
        """
        self.send(connection, question)
        return self.answer(connection, wanted, bytes_max, decode)

    def send(self, connection: PeerConnection, question: tuple[FrameKind, bytes]) -> None:
        """The first half of ``ask``: answers come in the order of the questions. Raises ``UnavailableError``."""
        with self._unavailable():
            connection.send_whole(*question)

    def answer(
        self,
        connection: PeerConnection,
        wanted: FrameKind,
        bytes_max: int,
        decode: Callable[[bytes | memoryview], Answer],
    ) -> Answer:
        """The second half. Raises ``UnavailableError``."""
        with self._unavailable():
            return decode(_receive(connection, wanted, bytes_max))

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, DLedgerError) as error:
            raise UnavailableError(f"{self._about}: {error}") from error

    def close(self) -> None:
        """End the connection in use: what waits for it fails, as later questions do. Idempotent."""
        with self._lock:
            self._closed = True
            if self._asking is not None:
                self._asking.end()

    def _dial(self, peer: NodeId, deadline: float) -> PeerConnection:
        self._check_open()
        member = self._identity.addresses.first(peer)
        if member is None:
            raise UnavailableError("it is not a member any more")
        context = None if self._tls is None else self._tls.connecting()
        connection = PeerConnection.dial(member.host, member.port, member.node_id, context, deadline)
        with self._lock:
            self._asking = connection
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("this node is stopping")

    def _shake_hands(self, connection: PeerConnection, peer: NodeId, purpose: Purpose) -> None:
        handshake = self._identity.handshake(peer, "", purpose)
        connection.send_whole(FrameKind.HANDSHAKE, codec.encode_handshake(handshake))
        answer = _receive(connection, FrameKind.HANDSHAKE_ANSWER, HANDSHAKE_BYTES_MAX)
        verdict = codec.decode_handshake_answer(answer)
        if verdict.code is not ResponseCode.SUCCESS:
            raise UnavailableError(verdict.reason)
        self._identity.take_answer(peer, verdict)
        self._learn(peer, verdict.client_address)


def _receive(connection: PeerConnection, wanted: FrameKind, bytes_max: int) -> bytes | memoryview:
    frame = connection.receive(bytes_max)
    if frame is None:
        raise EOFError("it hung up")
    kind, payload = frame
    if kind is FrameKind.REFUSAL:
        raise UnavailableError(bytes(payload).decode(errors="replace"))
    if kind is not wanted:
        raise InvalidRequestError(f"expected {wanted.name}, got {kind.name}")
    return payload
