"""A broker shows that it has a log, and nobody else can."""

from __future__ import annotations

from random import Random

import pytest

from rocketstore.ha.protocol import BLOCK_BYTES, LEAST_BYTES, answer_challenge, challenge, is_empty


class Bytes:
    """A log of two files."""

    def __init__(self, data: bytes, begin: int = 0, file_bytes: int = 10_000) -> None:
        self.data = data
        self.min_offset = begin
        self.max_offset = begin + len(data)
        self._file_bytes = file_bytes

    def stretch(self, offset: int, bytes_max: int) -> bytes:
        at = offset - self.min_offset
        end = min(at + bytes_max, at + self._file_bytes - offset % self._file_bytes)
        return self.data[at:end] if at >= 0 else b""


LOG = Random(1).randbytes(19_000)


@pytest.mark.parametrize("end", [19_000, 12_345, 5_000, 300, 10**9])
def test_who_has_the_log_up_to_there_proves_it(end: int) -> None:
    """Whatever either has behind it; nobody else does, and no answer serves twice."""
    own = Bytes(LOG)
    for seed in range(8):
        wanted = challenge(own, end, Random(seed))
        again = challenge(own, end, Random(seed))
        assert wanted is not None
        assert again is not None
        assert answer_challenge(Bytes(LOG[:end] + b"others"), wanted.text) == wanted.digest != again.digest
        assert answer_challenge(Bytes(LOG[: min(end, len(LOG)) - 1]), wanted.text) in ("", wanted.digest)
        assert answer_challenge(Bytes(Random(2).randbytes(19_000)), wanted.text) != wanted.digest


def test_all_of_the_log_may_be_asked_for() -> None:
    """Who has a part of it is found out soon."""
    own = Bytes(LOG)
    asked = {challenge(own, len(LOG), Random(seed)).text.split(",")[0] for seed in range(64)}  # type: ignore[union-attr]
    assert asked == {str(begin) for begin in range(0, len(LOG), BLOCK_BYTES)}


@pytest.mark.parametrize("data", [b"", b"x" * (LEAST_BYTES - 1), bytes(50_000), bytes(4000) + b"x" * 90])
def test_what_anybody_could_guess_proves_nothing(data: bytes) -> None:
    """Little, or zeros."""
    assert challenge(Bytes(data), len(data)) is None
    assert challenge(Bytes(LOG), 0) is None
    assert challenge(Bytes(LOG), -1) is None
    assert is_empty(Bytes(data)) == (len(data) < LEAST_BYTES)


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "x",
        "0,4096",
        "1,4096,{n}",
        "0,1,{n}",
        "0,4097,{n}",
        "0,4096,short",
        "-4096,4096,{n}",
        "0,4096,{n},",
        "9" * 999,
    ],
)
def test_nobody_may_ask_for_anything_else(asked: str) -> None:
    """Digests of few bytes, or of places that move byte by byte, would tell the bytes."""
    assert answer_challenge(Bytes(LOG), asked.replace("{n}", "a" * 32)) == ""


def test_expired_files_are_not_asked_for() -> None:
    """Of the side that asks; the other one that lacks them proves nothing by that block."""
    own = Bytes(LOG, begin=8192)
    wanted = challenge(own, own.max_offset, Random(1))
    assert wanted is not None
    assert answer_challenge(own, wanted.text) == wanted.digest
    assert answer_challenge(Bytes(LOG[12_288:], begin=20_480), "8192,4096," + "a" * 32) == ""
