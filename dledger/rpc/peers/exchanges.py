"""Questions to other members apart from replication, on connections dialled for a purpose, one at a time.

**Logs**: bytes to repair a damaged log, chain CRCs to compare histories. Each question has a connection of its own,
which ends with the answer: a megabyte of log never delays a vote or a push, and nothing is kept for what is asked every
few seconds at most. A member answers one at a time; others are refused, and ask again later.

**Snapshots** of state machines, for members whose log cannot be continued any more (S8). A transfer has a connection
and threads of its own: gigabytes delay neither votes nor pushes. The receiver asks for each piece, and for the next one
before it writes one, so that disks and network work at the same time; pieces in flight are one piece, and a broken
transfer goes on where it ended. Nothing is believed: the receiver verifies all of it before it counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from dledger.errors import (
    CorruptLogError,
    DLedgerError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvalidRequestError,
    ResponseCode,
    UnavailableError,
)
from dledger.rpc.peers import codec
from dledger.rpc.peers.codec import SnapshotRequest
from dledger.rpc.peers.frames import HANDSHAKE_BYTES_MAX, FrameKind, PeerConnection, Purpose
from dledger.rpc.peers.identity import Learn, PeerIdentity
from dledger.rpc.ports import OfferedSnapshot, PeerLog, PeerSnapshots
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import LogIndex, NodeId

_IDLE_TIMEOUT_S: Final = 10.0
"""For each question and each answer, on either side; a whole transfer may take as long as it does."""
TRANSFERS_MAX: Final = 2
"""That a member sends at a time; more members than that are not far behind at once, and they ask again."""
PIECE_BYTES: Final = codec.SNAPSHOT_PIECE_BYTES_MAX
_DESCRIPTION_BYTES_MAX: Final = 1 << 20
_PIECE_ANSWER_BYTES_MAX: Final = max(PIECE_BYTES, _DESCRIPTION_BYTES_MAX) + 1024


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
        payload = _receive_unless_closed(connection, FrameKind.SNAPSHOT)
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
        while (payload := _receive_unless_closed(connection, FrameKind.SNAPSHOT_PIECE)) is not None:
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


def _receive_unless_closed(connection: PeerConnection, wanted: FrameKind) -> bytes | memoryview | None:
    connection.deadline = time.monotonic() + _IDLE_TIMEOUT_S
    frame = connection.receive(HANDSHAKE_BYTES_MAX)
    if frame is not None and frame[0] is not wanted:
        raise InvalidRequestError(f"expected {wanted.name}, got {frame[0].name}")
    return None if frame is None else frame[1]


def _answer(connection: PeerConnection, kind: FrameKind, payload: bytes) -> None:
    connection.deadline = time.monotonic() + _IDLE_TIMEOUT_S
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
                self._connection, FrameKind.SNAPSHOT_PIECE_ANSWER, _PIECE_ANSWER_BYTES_MAX, codec.decode_piece
            )
            if not data:
                raise UnavailableError(f"it says that {file!r} ends at {offset}")
            offset += len(data)
            if offset < length:
                self._ask(file, offset)
            yield data

    def _ask(self, file: str, offset: int) -> None:
        self._connection.deadline = time.monotonic() + _IDLE_TIMEOUT_S
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
        with self._questions.connected(peer, Purpose.SNAPSHOT, time.monotonic() + _IDLE_TIMEOUT_S) as connection:
            question = FrameKind.SNAPSHOT, codec.encode_snapshot_request(request)
            said = self._questions.ask(connection, question, FrameKind.SNAPSHOT_ANSWER, _PIECE_ANSWER_BYTES_MAX, decode)
            yield SnapshotTransfer(self._questions, connection, said)

    def chain_crc(self, peer: NodeId, index: LogIndex) -> int | None:
        """The chain CRC of an entry that ``peer`` holds as committed, if it does. Raises ``UnavailableError``."""
        wanted, decode = FrameKind.CHAIN_CRCS_ANSWER, codec.decode_chain_crcs
        with self._crcs.connected(peer, Purpose.LOG, time.monotonic() + _IDLE_TIMEOUT_S) as connection:
            question = FrameKind.CHAIN_CRCS, codec.encode_chain_crcs_request((index,))
            return self._crcs.ask(connection, question, wanted, _PIECE_ANSWER_BYTES_MAX, decode).get(index)

    def close(self) -> None:
        """End the connection in use: a transfer fails, as later ones do. Idempotent."""
        self._questions.close()
        self._crcs.close()


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


TIMEOUT_S: Final = 10.0
"""For one question, from the connection to the last byte of its answer; on either side."""
READ_LOG_BYTES_MAX: Final = codec.READ_LOG_BYTES_MAX
_LOG_ANSWER_BYTES_MAX: Final = READ_LOG_BYTES_MAX + 1024


class PeerLogService:
    """Answers peers. Thread-safe."""

    def __init__(self, log: PeerLog) -> None:
        self._log = log
        self._turn = threading.Semaphore()

    def serve(self, connection: PeerConnection) -> None:
        """Receive one question and answer it."""
        connection.deadline = time.monotonic() + TIMEOUT_S
        frame = connection.receive(HANDSHAKE_BYTES_MAX)
        if frame is None:
            return
        if not self._turn.acquire(blocking=False):
            busy = b"another member is already reading the log here: retry later"
            connection.send_whole(FrameKind.REFUSAL, busy)
            return
        try:
            kind, answer = self._answer(*frame)
        finally:
            self._turn.release()
        connection.send_whole(kind, answer)

    def _answer(self, kind: FrameKind, payload: bytes | memoryview) -> tuple[FrameKind, bytes]:
        match kind:
            case FrameKind.READ_LOG:
                data = self._log.copy_committed(*codec.decode_read_log(payload))
                return FrameKind.READ_LOG_ANSWER, codec.encode_log_bytes(data)
            case FrameKind.CHAIN_CRCS:
                crcs = committed_crcs(self._log, codec.decode_chain_crcs_request(payload))
                return FrameKind.CHAIN_CRCS_ANSWER, codec.encode_chain_crcs(crcs)
            case _:
                raise InvalidRequestError(f"expected a question about the log, got {kind.name}")


def committed_crcs(log: PeerLog, indexes: Sequence[LogIndex]) -> dict[LogIndex, int]:
    """The chain CRCs of those indexes that are committed, kept and intact here."""
    found: dict[LogIndex, int] = {}
    for index in indexes:
        if log.begin.index <= index <= log.committed_index:
            try:
                found[index] = log.chain_crc_at(index)
            except (CorruptLogError, IndexBeforeBeginError, IndexOutOfRangeError):  # damage is reported by reads
                continue
    return found


class PeerLogClient:
    """Asks the other members. For one thread; ``close`` may come from another."""

    def __init__(
        self,
        identity: PeerIdentity,
        tls_keeper: TlsKeeper | None,
        learn: Learn = lambda _peer, _address: None,
    ) -> None:
        self._identity = identity
        self._questions = PeerQuestions(identity, tls_keeper, learn)

    @property
    def peers(self) -> tuple[NodeId, ...]:
        """The other members, as of now: nobody asks one that was removed."""
        return self._identity.addresses.peers

    @property
    def voting_peers(self) -> tuple[NodeId, ...]:
        """Those of them that are voters."""
        return self._identity.addresses.voting_peers

    @property
    def quorum(self) -> int:
        """How many voters are a majority."""
        return self._identity.addresses.quorum

    def read_log(self, peer: NodeId, position: int, length: int) -> bytes | None:
        """Committed bytes of one segment, at most ``READ_LOG_BYTES_MAX``; None if ``peer`` does not hold all of them.

        Raises ``UnavailableError``.
        """
        question = FrameKind.READ_LOG, codec.encode_read_log(position, length)
        return self._ask(peer, question, FrameKind.READ_LOG_ANSWER, codec.decode_log_bytes)

    def chain_crcs(self, peer: NodeId, indexes: Sequence[LogIndex]) -> dict[LogIndex, int]:
        """The chain CRCs of those indexes that ``peer`` holds as committed. Raises ``UnavailableError``."""
        question = FrameKind.CHAIN_CRCS, codec.encode_chain_crcs_request(indexes)
        return self._ask(peer, question, FrameKind.CHAIN_CRCS_ANSWER, codec.decode_chain_crcs)

    def close(self) -> None:
        """End the connection in use: its call fails, as later ones do. Idempotent."""
        self._questions.close()

    def _ask(
        self,
        peer: NodeId,
        question: tuple[FrameKind, bytes],
        wanted: FrameKind,
        decode: Callable[[bytes | memoryview], Answer],
    ) -> Answer:
        with self._questions.connected(peer, Purpose.LOG, time.monotonic() + TIMEOUT_S) as connection:
            return self._questions.ask(connection, question, wanted, _LOG_ANSWER_BYTES_MAX, decode)
