"""The serving side of a snapshot's transfer: who is answered, how fast, and what its errors say."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from dledger.errors import InvalidRequestError, SnapshotBusyError, UnavailableError
from dledger.rpc.peers import codec, exchanges
from dledger.rpc.peers.codec import SnapshotRequest
from dledger.rpc.peers.exchanges import PIECE_BYTES, TRANSFERS_MAX, PeerQuestions, PeerSnapshotService, SnapshotTransfer
from dledger.rpc.peers.frames import FrameKind, PeerConnection
from dledger.types import NO_INDEX, LogIndex

MIB = 1 << 20


@dataclass
class Snapshots:
    """A snapshot whose file consists of one byte, ``size`` times."""

    size: int = 3 * MIB
    newest: int = 9
    doubted: list[int] = field(default_factory=list)
    open: int = 0

    @contextmanager
    def offered(self, at_least: LogIndex, _index: LogIndex) -> Iterator[Snapshots]:
        if self.newest < at_least:
            raise SnapshotBusyError(f"the newest snapshot here is of entry {self.newest}: retry later")
        self.open += 1
        try:
            yield self
        finally:
            self.open -= 1

    @property
    def description(self) -> bytes:
        return b"meta"

    def piece(self, _file: str, offset: int, bytes_max: int) -> bytes:
        return b"x" * min(bytes_max, self.size - offset)

    def doubt(self, index: LogIndex) -> None:
        self.doubted.append(index)


@contextmanager
def connected(service: PeerSnapshotService) -> Iterator[PeerConnection]:
    """A connection that it serves."""
    here, there = socket.socketpair()
    serving = PeerConnection(there)

    def serve() -> None:
        try:
            service.serve(serving)
        except (InvalidRequestError, OSError):
            serving.end()

    thread = threading.Thread(target=serve)
    thread.start()
    asking = PeerConnection(here)
    asking.deadline = time.monotonic() + 20
    try:
        yield asking
    finally:
        asking.close()
        thread.join()
        serving.close()


def ask(connection: PeerConnection, kind: FrameKind, question: bytes) -> tuple[FrameKind, bytes] | None:
    connection.send_whole(kind, question)
    frame = connection.receive(2 * MIB)
    return None if frame is None else (frame[0], bytes(frame[1]))


def begin(connection: PeerConnection, at_least: int = 5, doubted: int = NO_INDEX) -> tuple[FrameKind, bytes] | None:
    request = SnapshotRequest(LogIndex(at_least), doubted=LogIndex(doubted))
    return ask(connection, FrameKind.SNAPSHOT, codec.encode_snapshot_request(request))


def test_pieces_are_sent_on_request_from_any_offset() -> None:
    """So a broken transfer goes on; a piece is at most 1 MiB, and the snapshot stays until the peer hangs up."""
    snapshots = Snapshots(size=2 * MIB + 10)
    with connected(PeerSnapshotService(snapshots, 0)) as peer:
        answer = begin(peer, doubted=4)
        assert answer == (FrameKind.SNAPSHOT_ANSWER, codec.encode_snapshot_description(b"meta"))
        assert (snapshots.doubted, snapshots.open) == ([4], 1)
        for offset, length in ((MIB, PIECE_BYTES), (2 * MIB, 10), (2 * MIB + 10, 0)):
            said = ask(peer, FrameKind.SNAPSHOT_PIECE, codec.encode_piece_request("state", offset))
            assert said is not None
            assert len(codec.decode_piece(said[1])) == length
    assert snapshots.open == 0


def test_a_snapshot_that_is_not_there_is_refused_with_the_reason() -> None:
    """The peer asks again later, or another member."""
    with connected(PeerSnapshotService(Snapshots(), 0)) as peer:
        assert begin(peer, at_least=10) == (
            FrameKind.REFUSAL,
            b"the newest snapshot here is of entry 9: retry later",
        )


def test_few_transfers_run_at_a_time() -> None:
    """Each costs a thread and the disk; a place is free again when a peer hangs up."""
    service = PeerSnapshotService(Snapshots(), 0)
    with connected(service) as one:
        begin(one)
        with connected(service) as two:
            begin(two)
            with connected(service) as three:
                refused = begin(three)
                assert refused is not None
                assert refused[0] is FrameKind.REFUSAL
                assert f"{TRANSFERS_MAX} members" in refused[1].decode()
        with connected(service) as four:
            answer = begin(four)
            assert answer is not None
            assert answer[0] is FrameKind.SNAPSHOT_ANSWER


def test_all_transfers_together_keep_to_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two peers wait for each other."""
    now = [100.0]
    waits: list[float] = []
    monkeypatch.setattr(exchanges, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=waits.append))
    service = PeerSnapshotService(Snapshots(), 2 * MIB)
    for _ in range(3):
        service._pace(MIB)
    now[0] += 10
    service._pace(MIB)
    assert waits == [0, 0.5, 1.0, 0]


def test_another_question_ends_the_connection() -> None:
    """It is for snapshots only."""
    with connected(PeerSnapshotService(Snapshots(), 0)) as peer:
        assert ask(peer, FrameKind.READ_LOG, codec.encode_read_log(0, 10)) is None


class Questions:
    """Answers with pieces of a file of letters; in the place of ``PeerQuestions``."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.said: list[object] = []

    def send(self, _connection: PeerConnection, question: tuple[FrameKind, bytes]) -> None:
        self.said.append(codec.decode_piece_request(question[1])[1])

    def answer(self, *_: object) -> bytes:
        return self.answers.pop(0)


def test_the_next_piece_is_asked_for_before_one_is_used() -> None:
    """Disks and network work at the same time; nothing is asked for behind the end."""
    questions = Questions([b"abc", b"de", b"f"])
    transfer = SnapshotTransfer(cast("PeerQuestions", questions), cast("PeerConnection", SimpleNamespace()), b"")
    for data in transfer.pieces("state", 10, 16):
        questions.said.append(data)
    assert questions.said == [10, 13, b"abc", 15, b"de", b"f"]
    assert list(transfer.pieces("state", 16, 16)) == []


def test_a_file_that_ends_too_early_is_told() -> None:
    """The member says what it has; another one is asked."""
    questions = Questions([b"abc", b""])
    transfer = SnapshotTransfer(cast("PeerQuestions", questions), cast("PeerConnection", SimpleNamespace()), b"")
    with pytest.raises(UnavailableError, match="ends at 3"):
        list(transfer.pieces("state", 0, 16))
