"""What a set of queue numbers looks like in the log."""

from __future__ import annotations

import random

import pytest
from crc32c import crc32c

from dledger.errors import InvalidRequestError
from rocketstore.config import KIB
from rocketstore.queue_numbers import NEXT_OFFSET_MAX, NumberingPart, decode_numbering, encode_numbering

SOME = {("rare", 0): 5, ("rare", 7): NEXT_OFFSET_MAX, ("%RETRY%g", 0): 1, ("x" * 127, 2**31 - 1): 77}


def sealed(body: bytes) -> bytes:
    return body + crc32c(body).to_bytes(4, "big")


def test_a_set_of_one_part_looks_like_this() -> None:
    """Every log holds such records from now on."""
    (body,) = encode_numbering({("T", 1): 300, ("T", 0): 7}, covers=1000, set_id=9, bytes_max=KIB)

    head = b"RSQN" + bytes.fromhex("0001 0000 0001 0000") + (1000).to_bytes(8, "big") + (9).to_bytes(8, "big")
    queues = bytes.fromhex("00000000 0000000000000007 00000001 000000000000012c")
    assert body == sealed(head + b"\x01T" + bytes.fromhex("00000002") + queues)


def test_what_is_encoded_is_decoded_again() -> None:
    (body,) = encode_numbering(SOME | {("never used", 0): 0}, covers=1000, set_id=2**62 - 1, bytes_max=KIB)

    assert decode_numbering(body) == NumberingPart(1000, 2**62 - 1, 0, 1, SOME)


def test_no_queues_are_a_set_too() -> None:
    """A log whose queues were all empty may be cleaned, too."""
    (body,) = encode_numbering({}, covers=10, set_id=1, bytes_max=KIB)

    assert decode_numbering(body).next_offsets == {}


def test_ten_thousand_queues_are_some_small_parts() -> None:
    """1,250 topics of 8 queues take 150 KB; one topic of very many queues is split, too."""
    many = {(f"Topic-{number // 8:020d}", number % 8): number + 1 for number in range(10_000)}
    wide = {("T", number): 1 for number in range(60_000)}

    bodies = encode_numbering(many, covers=1, set_id=1, bytes_max=128 * KIB)
    pieces = encode_numbering(wide, covers=1, set_id=1, bytes_max=4 * KIB)

    assert sum(map(len, bodies)) < 170_000
    assert max(map(len, bodies)) <= 128 * KIB
    assert max(map(len, pieces)) <= 4 * KIB
    for encoded, expected in ((bodies, many), (pieces, wide)):
        parts = [decode_numbering(body) for body in encoded]
        assert [(one.part, one.parts) for one in parts] == [(number, len(parts)) for number in range(len(parts))]
        assert {key: end for one in parts for key, end in one.next_offsets.items()} == expected


def test_no_changed_bit_is_believed() -> None:
    (body,) = encode_numbering(SOME, covers=1000, set_id=5, bytes_max=KIB)
    for number in range(8 * len(body)):
        bad = bytearray(body)
        bad[number // 8] ^= 1 << number % 8
        with pytest.raises(InvalidRequestError):
            decode_numbering(bytes(bad))


def test_whatever_is_sealed_is_read_or_refused() -> None:
    """Who can write to the topic of an older program's broker can make up the checksum, too."""
    seeded = random.Random(12)
    (body,) = encode_numbering(SOME, covers=1000, set_id=5, bytes_max=KIB)
    for _ in range(2000):
        bad = bytearray(body[:-4])
        for _ in range(seeded.randint(1, 4)):
            bad[seeded.randrange(4, len(bad))] = seeded.randrange(256)
        try:
            found = decode_numbering(sealed(bytes(bad[: seeded.randint(0, len(bad))])))
        except InvalidRequestError:
            continue
        assert all(0 < end <= NEXT_OFFSET_MAX for end in found.next_offsets.values())
        assert found.part < found.parts
