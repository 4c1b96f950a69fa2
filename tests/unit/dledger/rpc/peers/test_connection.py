"""Connections on blocking sockets: frames arrive whole, waiting has an end, and nobody waits to send."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.errors import InvalidRequestError
from dledger.rpc import tls
from dledger.rpc.peers import frames
from dledger.rpc.peers.frames import Frame, FrameKind, PeerConnection
from dledger.rpc.tls import TlsStream
from dledger_cli import certs
from tests.support.certificates import files

FRAMES: list[Frame] = [
    (FrameKind.PUSH, b"abc"),
    (FrameKind.PUSH_ANSWER, b""),
    (FrameKind.PUSH, b"y" * 700_000),
    (FrameKind.REFUSAL, b"x" * 300),
]
SMALL = [FRAMES[0], FRAMES[1], FRAMES[3]]
BYTES = b"".join(frames.pack(kind, bytes(payload)) for kind, payload in SMALL)
Pair = tuple[PeerConnection, PeerConnection]


@pytest.fixture(params=["plaintext", "tls"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two ends of one connection."""
    ours, theirs = socket.socketpair()
    streams: tuple[TlsStream | None, TlsStream | None] = (None, None)
    if request.param == "tls":
        certs.make_authority(tmp_path)
        certs.make_node(tmp_path, "n0")
        material = tls.read(files(tmp_path, "n0"))
        client, server = (
            TlsStream(tls.client_context(material)),
            TlsStream(tls.server_context(material), server_side=True),
        )
        said = b""
        while not (client.agreed and server.agreed):
            said = server.shake_hands(client.shake_hands(said))
        client.feed(said)
        streams = client, server
    ends = PeerConnection(ours, streams[0]), PeerConnection(theirs, streams[1])
    yield ends
    for end in ends:
        end.close()


def received(connection: PeerConnection, bytes_max: int = 1 << 20) -> list[Frame]:
    found: list[Frame] = []
    while (frame := connection.receive(bytes_max)) is not None:
        found.append((frame[0], bytes(frame[1])))
    return found


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_frames_come_out_as_they_went_in(pair: Pair, timeout_s: float | None) -> None:
    """Small ones and one that is larger than what is read at once; with a deadline a socket gives short reads."""
    ours, theirs = pair
    if timeout_s is not None:
        theirs.deadline = time.monotonic() + timeout_s

    def send() -> None:
        for kind, payload in FRAMES:
            ours.send_whole(kind, bytes(payload))
        ours.end()

    sending = threading.Thread(target=send)
    sending.start()
    found = received(theirs)
    sending.join()

    assert found == FRAMES


@pytest.mark.parametrize("length", range(1, len(BYTES)))
def test_a_torn_frame_is_no_frame(length: int) -> None:
    """A connection that ends inside a frame gives only what was whole before."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(BYTES[:length])
        theirs.shutdown(socket.SHUT_WR)
        connection = PeerConnection(ours)
        found = received(connection)
        connection.close()

    assert found == SMALL[: len(found)]
    assert len(frames.pack(SMALL[0][0], bytes(SMALL[0][1]))) > length or found


def test_a_frame_that_is_too_long_is_refused_before_there_is_room_for_it(pair: Pair) -> None:
    """What was received before it was allowed to be that long does not count as an exception."""
    ours, theirs = pair
    ours.send_whole(FrameKind.PUSH, bytes(1001))

    with pytest.raises(InvalidRequestError, match="PUSH frame of 1001 bytes: at most 1000"):
        theirs.receive(1000)


def test_bytes_that_trickle_in_do_not_move_the_deadline() -> None:
    """It is for all of a frame."""
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def trickle() -> None:
        data = iter(frames.pack(FrameKind.PUSH, bytes(10_000)))
        while not over.wait(0.02):
            theirs.sendall(bytes([next(data)]))

    thread = threading.Thread(target=trickle)
    connection = PeerConnection(ours)
    connection.deadline = time.monotonic() + 0.3
    with theirs:
        thread.start()
        with pytest.raises(TimeoutError):
            connection.receive(1 << 20)
        over.set()
        thread.join()
    connection.close()


def test_what_a_peer_does_not_take_ends_the_connection(pair: Pair) -> None:
    """``send`` never waits, and after a frame that was sent in part nothing more can be."""
    ours, _ = pair

    wrote = [ours.send(FrameKind.PUSH_ANSWER, bytes(50_000)) for _ in range(200)]

    assert wrote[0]
    assert not wrote[-1]
    assert ours.receive(1000) is None
