"""Frames: limits, and what is no frame."""

from __future__ import annotations

import struct

import pytest

from rocketstore.remoting.errors import FrameError
from rocketstore.remoting.frame import Frame, decode, encode


def framed(header: bytes, body: bytes = b"", *, kind: int = 0) -> memoryview:
    """A frame with any header."""
    return memoryview(struct.pack(">iI", 4 + len(header) + len(body), kind << 24 | len(header)) + header + body)


@pytest.mark.parametrize(
    "header",
    [
        b'{"code":1,"remark":"\xed\xa0\x80"}',
        '{"code":1,"extFields":{"a":"\\ud800"}}'.encode("utf-16"),
        b'\xff\xfe{"code":1}',
    ],
)
def test_a_json_header_that_is_not_utf_8_is_refused(header: bytes) -> None:
    """``json`` itself takes other encodings, and raw halves of surrogate pairs, which nobody could write again."""
    with pytest.raises(FrameError):
        decode(framed(header))


def test_halves_of_surrogate_pairs_become_question_marks() -> None:
    """In names and in values; whole pairs stay."""
    frame = decode(framed(rb'{"code":1,"remark":"a\ud800","extFields":{"\uDFFFk":"\ud83d\ude00\\ud800\udead"}}'))
    assert (frame.remark, frame.fields) == ("a?", {"?k": "\U0001f600\\ud800?"})
    assert (
        decode(memoryview(encode(frame)))
        == frame
        == Frame(1, 0, frame.fields, remark="a?", version=0, language=frame.language)
    )
