"""Access to peers' logs apart from replication: bytes to repair a damaged log, chain CRCs to compare histories.

Each question has a connection of its own, which ends with the answer: a megabyte of log never delays a vote or a push,
and nothing is kept for what is asked every few seconds at most. A member answers one at a time; others are refused, and
ask again later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from dledger.errors import CorruptLogError, IndexBeforeBeginError, IndexOutOfRangeError, InvalidRequestError
from dledger.rpc.peers import codec
from dledger.rpc.peers.connection import PeerConnection
from dledger.rpc.peers.frames import HANDSHAKE_BYTES_MAX, FrameKind, Purpose
from dledger.rpc.peers.identity import Learn, PeerIdentity
from dledger.rpc.peers.questions import Answer, PeerQuestions
from dledger.rpc.ports import PeerLog
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import LogIndex, NodeId

TIMEOUT_S: Final = 10.0
"""For one question, from the connection to the last byte of its answer; on either side."""
READ_LOG_BYTES_MAX: Final = codec.READ_LOG_BYTES_MAX
_ANSWER_BYTES_MAX: Final = READ_LOG_BYTES_MAX + 1024


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
            return self._questions.ask(connection, question, wanted, _ANSWER_BYTES_MAX, decode)
