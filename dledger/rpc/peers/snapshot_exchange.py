"""Snapshots of state machines for members whose log cannot be continued any more (S8).

A transfer has a connection and threads of its own: gigabytes delay neither votes nor pushes. The receiver asks for each
piece, and for the next one before it writes one, so that disks and network work at the same time; pieces in flight are
one piece, and a broken transfer goes on where it ended. Nothing is believed: the receiver verifies all of it before it
counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dledger.errors import DLedgerError, InvalidRequestError, UnavailableError
from dledger.rpc.peers import codec
from dledger.rpc.peers.codec import SnapshotRequest
from dledger.rpc.peers.connection import PeerConnection
from dledger.rpc.peers.frames import HANDSHAKE_BYTES_MAX, FrameKind, Purpose
from dledger.rpc.peers.identity import Learn, PeerIdentity
from dledger.rpc.peers.questions import PeerQuestions
from dledger.rpc.ports import OfferedSnapshot, PeerSnapshots
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import LogIndex, NodeId

IDLE_TIMEOUT_S: Final = 10.0
"""For each question and each answer, on either side; a whole transfer may take as long as it does."""
TRANSFERS_MAX: Final = 2
"""That a member sends at a time; more members than that are not far behind at once, and they ask again."""
PIECE_BYTES: Final = codec.SNAPSHOT_PIECE_BYTES_MAX
DESCRIPTION_BYTES_MAX: Final = 1 << 20
_ANSWER_BYTES_MAX: Final = max(PIECE_BYTES, DESCRIPTION_BYTES_MAX) + 1024


class PeerSnapshotService:
    """Answers peers, with at most ``rate`` bytes per second for all of them together (0: no limit). Thread-safe."""

    def __init__(self, snapshots: PeerSnapshots, rate: int) -> None:
        self._snapshots = snapshots
        self._rate = rate
        self._turns = threading.Semaphore(TRANSFERS_MAX)
        self._lock = threading.Lock()  # guards _free_s
        self._free_s = 0.0  # when the next piece may be sent, as a time of time.monotonic

    def serve(self, connection: PeerConnection) -> None:
        """Receive the question for a snapshot, and those for its pieces, until the peer hangs up."""
        payload = _receive(connection, FrameKind.SNAPSHOT)
        if payload is None:
            return
        request = codec.decode_snapshot_request(payload)
        if not self._turns.acquire(blocking=False):
            _refuse(connection, f"{TRANSFERS_MAX} members are fetching a snapshot here already: retry later")
            return
        try:
            self._snapshots.doubt(request.doubted)
            with self._snapshots.offered(request.at_least, request.index) as offered:
                self._send(connection, offered)
        except InvalidRequestError:
            raise
        except DLedgerError as error:
            _refuse(connection, str(error))
        finally:
            self._turns.release()

    def _send(self, connection: PeerConnection, offered: OfferedSnapshot) -> None:
        _answer(connection, FrameKind.SNAPSHOT_ANSWER, codec.encode_snapshot_description(offered.description))
        while (payload := _receive(connection, FrameKind.SNAPSHOT_PIECE)) is not None:
            piece = offered.piece(*codec.decode_piece_request(payload), PIECE_BYTES)
            self._pace(len(piece))
            _answer(connection, FrameKind.SNAPSHOT_PIECE_ANSWER, codec.encode_piece(piece))

    def _pace(self, size: int) -> None:
        """Wait until so many bytes may be sent."""
        if not self._rate:
            return
        with self._lock:
            now_s = time.monotonic()
            begin_s = max(now_s, self._free_s)
            self._free_s = begin_s + size / self._rate
        time.sleep(begin_s - now_s)


def _receive(connection: PeerConnection, wanted: FrameKind) -> bytes | memoryview | None:
    connection.deadline = time.monotonic() + IDLE_TIMEOUT_S
    frame = connection.receive(HANDSHAKE_BYTES_MAX)
    if frame is not None and frame[0] is not wanted:
        raise InvalidRequestError(f"expected {wanted.name}, got {frame[0].name}")
    return None if frame is None else frame[1]


def _answer(connection: PeerConnection, kind: FrameKind, payload: bytes) -> None:
    connection.deadline = time.monotonic() + IDLE_TIMEOUT_S
    connection.send_whole(kind, payload)


def _refuse(connection: PeerConnection, reason: str) -> None:
    _answer(connection, FrameKind.REFUSAL, reason.encode()[:HANDSHAKE_BYTES_MAX])


class SnapshotTransfer:
    """A snapshot that a peer sends. Its methods raise ``UnavailableError``."""

    def __init__(self, questions: PeerQuestions, connection: PeerConnection, description: bytes) -> None:
        self._questions = questions
        self._connection = connection
        self.description: Final = description
        """The content of its ``meta.json``, from the peer."""

    def pieces(self, file: str, offset: int, length: int) -> Iterator[bytes]:
        """The bytes of a file from ``offset`` to ``length``, in parts of at most ``PIECE_BYTES``; at most one pass."""
        if offset < length:
            self._ask(file, offset)
        while offset < length:
            data = self._questions.answer(
                self._connection, FrameKind.SNAPSHOT_PIECE_ANSWER, _ANSWER_BYTES_MAX, codec.decode_piece
            )
            if not data:
                raise UnavailableError(f"it says that {file!r} ends at {offset}")
            offset += len(data)
            if offset < length:
                self._ask(file, offset)
            yield data

    def _ask(self, file: str, offset: int) -> None:
        self._connection.deadline = time.monotonic() + IDLE_TIMEOUT_S
        self._questions.send(self._connection, (FrameKind.SNAPSHOT_PIECE, codec.encode_piece_request(file, offset)))


class PeerSnapshotClient:
    """Fetches snapshots. For one thread; ``close`` may come from another."""

    def __init__(self, identity: PeerIdentity, tls_keeper: TlsKeeper | None, learn: Learn) -> None:
        self._identity = identity
        self._questions = PeerQuestions(identity, tls_keeper, learn)
        self._crcs = PeerQuestions(identity, tls_keeper, learn)  # asked during a transfer

    @property
    def peers(self) -> tuple[NodeId, ...]:
        """The other members, voters first."""
        addresses = self._identity.addresses
        voters = addresses.voting_peers
        return (*voters, *(one for one in addresses.peers if one not in voters))

    @contextmanager
    def transfer(self, peer: NodeId, request: SnapshotRequest) -> Iterator[SnapshotTransfer]:
        """Ask a peer for a snapshot, which stays there until the block ends. Raises ``UnavailableError``."""
        decode = codec.decode_snapshot_description
        with self._questions.connected(peer, Purpose.SNAPSHOT, time.monotonic() + IDLE_TIMEOUT_S) as connection:
            question = FrameKind.SNAPSHOT, codec.encode_snapshot_request(request)
            said = self._questions.ask(connection, question, FrameKind.SNAPSHOT_ANSWER, _ANSWER_BYTES_MAX, decode)
            yield SnapshotTransfer(self._questions, connection, said)

    def chain_crc(self, peer: NodeId, index: LogIndex) -> int | None:
        """The chain CRC of an entry that ``peer`` holds as committed, if it does. Raises ``UnavailableError``."""
        wanted, decode = FrameKind.CHAIN_CRCS_ANSWER, codec.decode_chain_crcs
        with self._crcs.connected(peer, Purpose.LOG, time.monotonic() + IDLE_TIMEOUT_S) as connection:
            question = FrameKind.CHAIN_CRCS, codec.encode_chain_crcs_request((index,))
            return self._crcs.ask(connection, question, wanted, _ANSWER_BYTES_MAX, decode).get(index)

    def close(self) -> None:
        """End the connection in use: a transfer fails, as later ones do. Idempotent."""
        self._questions.close()
        self._crcs.close()
