"""The bodies of our requests for a group's offsets: their bytes, and what is no such body."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dledger.remoting.codes import RequestError
from rocketstore.remoting.extensions import (
    QUEUES_MAX,
    CommitGroupOffsets,
    FetchedOffsets,
    FetchOffsets,
    decode_committed,
    encode_committed,
)

FETCH = FetchOffsets("g1", [("T", 0), ("%RETRY%g1", 3)])
GOLDEN_FETCH = bytes.fromhex("02 6731 00000002 01 54 00000000 09 2552455452592567 31 00000003")
FETCHED = FetchedOffsets(258, [7, -1])
GOLDEN_FETCHED = bytes.fromhex("0000000000000102 0000000000000007 ffffffffffffffff")
COMMIT = CommitGroupOffsets("g1", [("T", 2, 4096)], 258, rewind=True)
GOLDEN_COMMIT = bytes.fromhex("0000000000000102 01 02 6731 00000001 01 54 00000002 0000000000001000")


def test_bodies_have_these_bytes() -> None:
    """As in docs/protocol.md: clients of other languages can be written from it."""
    assert (FETCH.encode(), FetchOffsets.decode(GOLDEN_FETCH)) == (GOLDEN_FETCH, FETCH)
    assert (FETCHED.encode(), FetchedOffsets.decode(GOLDEN_FETCHED, 2)) == (GOLDEN_FETCHED, FETCHED)
    assert (COMMIT.encode(), CommitGroupOffsets.decode(GOLDEN_COMMIT)) == (GOLDEN_COMMIT, COMMIT)
    assert (encode_committed(258), decode_committed(GOLDEN_FETCHED[:8])) == (GOLDEN_FETCHED[:8], 258)


@pytest.mark.parametrize("decode", [FetchOffsets.decode, CommitGroupOffsets.decode])
@given(data=some.binary(max_size=80))
def test_anything_else_is_refused(decode: type, data: bytes) -> None:
    """With an error for the one who sent it."""
    with suppress(RequestError):
        decode(data)


def test_bodies_that_are_cut_or_too_long_are_refused() -> None:
    """At every byte; the answers, too."""
    for golden, decode in (
        (GOLDEN_FETCH, FetchOffsets.decode),
        (GOLDEN_COMMIT, CommitGroupOffsets.decode),
        (GOLDEN_FETCHED, lambda data: FetchedOffsets.decode(data, 2)),
        (encode_committed(1), decode_committed),
    ):
        for wrong in (*(golden[:end] for end in range(len(golden))), golden + b"\0"):
            with pytest.raises(RequestError):
                decode(wrong)


def test_no_more_queues_are_taken_than_a_topic_has() -> None:
    with pytest.raises(RequestError, match=f"at most {QUEUES_MAX}"):
        FetchOffsets.decode(FetchOffsets("g", [("T", 0)] * (QUEUES_MAX + 1)).encode())
