"""Frames of push connections: whole however the bytes arrive, and never longer than allowed."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from dledger.errors import InvalidRequestError
from dledger.rpc.peers import push_frames
from dledger.rpc.peers.push_frames import Frame, FrameBuffer, FrameType

FRAMES: list[Frame] = [(FrameType.PUSH, b"abc"), (FrameType.PUSH_ANSWER, b""), (FrameType.REFUSAL, b"x" * 300)]
BYTES = b"".join(push_frames.pack(kind, payload) for kind, payload in FRAMES)


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("step", [1, 2, 5, 7, len(BYTES)])
def test_frames_come_out_however_the_bytes_are_cut(step: int) -> None:
    """TCP keeps no boundaries."""
    buffer = FrameBuffer(1000)

    found = [frame for at in range(0, len(BYTES), step) for frame in buffer.feed(BYTES[at : at + step])]

    assert found == FRAMES


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_a_socket_gives_frame_after_frame_then_none(
    link: tuple[socket.socket, socket.socket], timeout_s: float | None
) -> None:
    """With a timeout a socket gives short reads, which must not tear a frame."""
    ours, theirs = link
    ours.settimeout(timeout_s)
    theirs.sendall(BYTES)
    theirs.shutdown(socket.SHUT_WR)

    found = [push_frames.receive(ours, 1000) for _ in range(len(FRAMES) + 1)]

    assert found == [*FRAMES, None]


@pytest.mark.parametrize("length", range(1, len(BYTES)))
def test_a_torn_frame_is_no_frame(link: tuple[socket.socket, socket.socket], length: int) -> None:
    """A stream that ends inside a frame gives only what was whole before."""
    ours, theirs = link
    theirs.sendall(BYTES[:length])
    theirs.shutdown(socket.SHUT_WR)
    found = []

    while (frame := push_frames.receive(ours, 1000)) is not None:
        found.append(frame)

    assert found == FRAMES[: len(found)]
    assert len(push_frames.pack(*FRAMES[0])) > length or found


@pytest.mark.parametrize(
    ("garbage", "complaint"),
    [
        (b"\x09\x00\x00\x00\x01x", "frame type 9 is unknown"),
        (push_frames.pack(FrameType.PUSH, bytes(1001)), "PUSH frame of 1001 bytes: at most 1000"),
        (b"GET / HTTP/1.1\r\n", "frame type 71 is unknown"),
    ],
)
def test_what_is_no_frame_is_refused_before_it_is_kept(
    link: tuple[socket.socket, socket.socket], garbage: bytes, complaint: str
) -> None:
    """Neither side allocates what a stranger claims."""
    ours, theirs = link
    theirs.sendall(garbage)

    with pytest.raises(InvalidRequestError, match=complaint):
        push_frames.receive(ours, 1000)
    with pytest.raises(InvalidRequestError, match=complaint):
        list(FrameBuffer(1000).feed(garbage))
