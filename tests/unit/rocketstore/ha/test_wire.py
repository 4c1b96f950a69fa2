"""What master and slave say to each other, cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketstore.ha.protocol import (
    FRAME,
    FRAME_BYTES_MAX,
    GREETING,
    STANDING,
    VERDICT,
    WORDS_BYTES_MAX,
    FrameReader,
    HaProtocolError,
    MasterWords,
    SlaveVerdict,
    SlaveWords,
)

MASTER = MasterWords("c", "b", 3, 1024, 0, 500)


def test_frames_are_those_of_rocketmq() -> None:
    """Offset (8 bytes) and length (4), big-endian; a frame without bytes is a sign of life."""
    assert FRAME.pack(0x0102030405060708, 32768).hex() == "010203040506070800008000"
    assert FrameReader().feed(FRAME.pack(500, 0)) == [(500, b"")]


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 300), max_size=8))
def test_it_does_not_matter_how_the_bytes_arrive(bodies: list[bytes], cuts: list[int]) -> None:
    """Frames are the same, wherever the stream is cut: their bytes at their offsets, introductions whole."""
    stream, wanted, at = MASTER.encode(GREETING), b"", 100
    for body in bodies:
        stream += FRAME.pack(at, len(body)) + body
        wanted += body
        at += len(body)
    stream += SlaveVerdict(7, "no").encode(VERDICT)
    reader, pieces, begin = FrameReader(), [], 0
    for cut in [*sorted(min(one, len(stream)) for one in cuts), len(stream)]:
        pieces += reader.feed(stream[begin:cut])
        begin = cut

    assert MasterWords.decode(pieces[0][1]) == MASTER
    assert SlaveVerdict.decode(pieces[-1][1]) == SlaveVerdict(7, "no")
    log = pieces[1:-1]
    assert b"".join(data for _, data in log) == wanted
    following = 100
    for offset, data in log:
        assert offset == following
        following += len(data)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, -1), (0, FRAME_BYTES_MAX + 1), (GREETING, WORDS_BYTES_MAX + 1), (STANDING - 1, 5), (-(2**62), 0)],
)
def test_frames_of_wrong_lengths_are_refused(offset: int, size: int) -> None:
    """Nobody makes the other side keep what it must not send."""
    with pytest.raises(HaProtocolError, match="are expected"):
        FrameReader().feed(FRAME.pack(offset, size))


def test_an_introduction_is_read_again() -> None:
    """All fields; those of later versions are ignored."""
    words = SlaveWords("c", "b", 1, 2, 1024, 300, 64, 0xDEADBEEF)
    assert SlaveWords.decode(words.encode(GREETING)[FRAME.size :]) == words
    assert SlaveVerdict.decode(b'{"begin": 1, "refusal": "", "later": []}') == SlaveVerdict(1, "")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"\xff", b'{"begin": "1", "refusal": ""}', b'{"begin": true, "refusal": ""}', b"1" * 9000],
)
def test_what_is_no_introduction_is_refused(body: bytes) -> None:
    """Wrong JSON, missing fields, fields of other types."""
    with pytest.raises(HaProtocolError):
        SlaveVerdict.decode(body)
