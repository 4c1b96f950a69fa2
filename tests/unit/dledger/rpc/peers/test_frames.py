"""Frames between members: whole however the bytes arrive, and never longer than allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.errors import InvalidRequestError
from dledger.rpc import tls
from dledger.rpc.peers import frames
from dledger.rpc.peers.frames import Frame, FrameBuffer, FrameKind
from dledger.rpc.tls import SEAL_BYTES, TlsStream
from dledger_cli import certs
from tests.support.certificates import files

FRAMES: list[Frame] = [(FrameKind.PUSH, b"abc"), (FrameKind.PUSH_ANSWER, b""), (FrameKind.REFUSAL, b"x" * 300)]
BYTES = b"".join(frames.pack(kind, bytes(payload)) for kind, payload in FRAMES)


@pytest.mark.parametrize("step", [1, 2, 5, 7, len(BYTES)])
def test_frames_come_out_however_the_bytes_are_cut(step: int) -> None:
    """TCP keeps no boundaries."""
    buffer = FrameBuffer(1000)

    found = [frame for at in range(0, len(BYTES), step) for frame in buffer.feed(BYTES[at : at + step])]

    assert found == FRAMES


@pytest.mark.parametrize(
    ("garbage", "complaint"),
    [
        (b"\x70\x00\x00\x00\x01x", "a frame of kind 112 is unknown: only members"),
        (frames.pack(FrameKind.PUSH, bytes(1001)), "PUSH frame of 1001 bytes: at most 1000"),
        (b"GET / HTTP/1.1\r\n", "a frame of kind 71 is unknown"),
    ],
)
def test_what_is_no_frame_is_refused_before_it_is_kept(garbage: bytes, complaint: str) -> None:
    """Nobody allocates what a stranger claims, whether the frame is whole or has only begun."""
    with pytest.raises(InvalidRequestError, match=complaint):
        list(FrameBuffer(1000).feed(garbage))
    begun = FrameBuffer(1000)
    begun.add(garbage)
    with pytest.raises(InvalidRequestError, match=complaint):
        begun.begin()


def test_no_frame_begins_as_tls_does() -> None:
    """The first byte tells the two apart."""
    assert frames.TLS_RECORD not in {kind.value for kind in FrameKind}


@pytest.mark.parametrize("size", [0, 5, SEAL_BYTES, SEAL_BYTES + 1, 3 * SEAL_BYTES])
def test_a_frame_is_the_same_through_tls(tmp_path: Path, size: int) -> None:
    """In one piece or in many."""
    certs.make_authority(tmp_path)
    certs.make_node(tmp_path, "n0")
    material = tls.read(files(tmp_path, "n0"))
    ours, theirs = TlsStream(tls.client_context(material)), TlsStream(tls.server_context(material), server_side=True)
    said = b""
    while not (ours.agreed and theirs.agreed):
        said = theirs.shake_hands(ours.shake_hands(said))
    ours.feed(said)
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)

    for piece in frames.sealed(ours, FrameKind.PUSH, b"head", body):
        theirs.feed(piece)

    buffer = FrameBuffer(1 << 20)
    assert list(buffer.feed(theirs.read())) == [(FrameKind.PUSH, b"head" + body)]
    assert b"".join(frames.sealed(None, FrameKind.PUSH, b"head", body)) == frames.pack(FrameKind.PUSH, b"head", body)


def test_a_refusal_in_the_clear_is_read_where_tls_was_expected() -> None:
    """The sentence of a member without TLS; anything else is none."""
    assert frames.refusal_in(frames.pack(FrameKind.REFUSAL, b"no TLS here")) == "no TLS here"
    assert frames.refusal_in(frames.pack(FrameKind.PUSH, b"no TLS here")) == ""
    assert frames.refusal_in(b"HTTP/1.1 400 Bad Request") == ""
    assert frames.refusal_in(b"\x03") == ""
