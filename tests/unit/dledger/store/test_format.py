"""Golden bytes of every format, and where records go."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from dledger.store import format as records
from dledger.store.format import Follow, Piece, ScanWindow, StopKind
from dledger.types import EntryId, EntryRun, LogIndex, Position, Term


def test_crc_is_castagnoli() -> None:
    """The check value of CRC-32C (RFC 3720, B.4)."""
    assert crc32c(b"123456789") == 0xE3069283


def test_an_entry_record_byte_for_byte() -> None:
    """The header of spec §1.2, big-endian, then the body; CRCs as design decision 8 defines them."""
    encoded = records.encode_piece(1, 0x0102, 0x0304, Piece(0x0506, [b"hello"]), 0)

    body_crc = bytes.fromhex("9a71bb4c")
    head = bytes.fromhex("00000001 00000035 0000000000000304 0000000000000102 0000000000000506 00000000")
    chain_crc = crc32c(head + body_crc + bytes.fromhex("00000005")).to_bytes(4, "big")
    assert crc32c(b"hello").to_bytes(4, "big") == body_crc
    assert chain_crc == bytes.fromhex("6afd8938")
    assert encoded.records == head + chain_crc + body_crc + bytes.fromhex("00000005") + b"hello"
    assert encoded.chain_crc == int.from_bytes(chain_crc, "big")
    assert encoded.positions == [0x0506]


def test_an_index_unit_byte_for_byte() -> None:
    """The unit of spec §1.3, with the true magic."""
    encoded = records.encode_piece(2, 0x0102, 0x0304, Piece(0x0506, [b""]), 0)

    assert encoded.units == bytes.fromhex("00000002 0000000000000506 00000030 0000000000000304 0000000000000102")


def test_a_blank_byte_for_byte() -> None:
    """Magic -1 and a length that counts the 8 bytes themselves."""
    assert records.blank_head(300) == bytes.fromhex("ffffffff 0000012c")


def test_the_chain_binds_everything_before() -> None:
    """The same entry after another predecessor has another chain CRC."""
    one, chain_one = records.encode_record(1, 5, 0, b"x", 1)
    two, chain_two = records.encode_record(1, 5, 0, b"x", 2)

    assert chain_one != chain_two
    assert one[:36] + one[40:] == two[:36] + two[40:]


def test_the_batch_encoder_agrees_with_the_record_encoder() -> None:
    """Both encoders make the same bytes."""
    bodies = [b"a" * n for n in (0, 1, 300)]
    encoded = records.encode_piece(1, 3, 10, Piece(1000, bodies), 99)

    chain, position, parts = 99, 1000, []
    for index, body in enumerate(bodies, 10):
        record, chain = records.encode_record(3, index, position, body, chain)
        parts.append(record)
        position += len(record)
    assert encoded.records == b"".join(parts)
    assert encoded.chain_crc == chain


def test_a_large_batch_is_encoded_like_a_small_one() -> None:
    """In columns or entry by entry: the same bytes, whatever the bodies are and however large the numbers are."""
    bodies: list[bytes | bytearray] = [bytes([n % 256]) * (n * 7 % 300) for n in range(1000)]
    bodies[3] = bytearray(b"three")
    position, first, term, chain = 1 << 41, 1 << 40, 1 << 33, 0xFEDC_BA98

    whole = records.encode_piece(1, term, first, Piece(position, bodies, -5), chain)

    parts, at, end = [], position, chain
    for start in range(0, len(bodies), 100):
        parts.append(records.encode_piece(1, term, first + start, Piece(at, bodies[start : start + 100], -5), end))
        at, end = at + len(parts[-1].records), parts[-1].chain_crc
    assert whole.records == b"".join(part.records for part in parts)
    assert whole.units == b"".join(part.units for part in parts)
    assert whole.positions == [one for part in parts for one in part.positions]
    assert whole.chain_crc == end


def test_segment_names_are_twenty_digits() -> None:
    """Anything else is not a segment."""
    assert records.segment_name(1 << 30) == "00000000001073741824"
    assert records.parse_segment_name("00000000001073741824") == 1 << 30
    for name in ("1073741824", "0000000000107374182x", "00000000001073741824.tmp", "\u0660" * 20):
        assert records.parse_segment_name(name) is None


@pytest.mark.parametrize("size", range(100 - 64, 101))
def test_place_keeps_eight_bytes_free(size: int) -> None:
    """The tail-blank rule: size + 8 > remaining rolls."""
    assert records.place(300, size, 400) == (300 if size + 8 <= 100 else 400)
    assert records.place(400, size, 400) == 400


def test_split_batch_places_like_one_by_one() -> None:
    """A batch lands exactly where its entries would land if appended alone."""
    bodies = [b"x" * ((7 * n) % 90) for n in range(200)]
    end, wanted = 33, []
    for body in bodies:
        at = records.place(end, len(body) + 48, 400)
        wanted.append(at)
        end = at + len(body) + 48

    pieces = records.split_batch(bodies, 33, 400)

    got = [at for piece in pieces for at in records.encode_piece(1, 1, 0, piece, 0).positions]
    assert got == wanted
    assert [body for piece in pieces for body in piece.bodies] == bodies


def _scan(data: bytes, follow: Follow = Follow(-1, 0, 0), *, unchecked: bool = False) -> records.Scan:  # noqa: B008
    return records.scan_records(ScanWindow(memoryview(data), 0, 0, len(data), unchecked), follow)


def test_scan_names_why_it_stopped() -> None:
    """Zeros, a blank and each kind of bad record are told apart."""
    good, chain = records.encode_record(1, 0, 0, b"abc", 0)
    next_one, _ = records.encode_record(1, 1, len(good), b"abc", chain)

    assert _scan(good).stop is StopKind.LIMIT
    assert _scan(good + bytes(100)).stop is StopKind.ZERO
    assert _scan(good + bytes(20)).stop is StopKind.ZERO
    assert _scan(good + records.blank_head(60) + bytes(52)).stop is StopKind.BLANK
    assert _scan(good + records.blank_head(8)).stop is StopKind.BLANK
    for tail, reason in [
        (b"\x01", "1 bytes are left"),
        (bytes(3) + b"\x09" + next_one[4:], "magic 9"),
        (next_one[:44] + b"\0\0\0\x04" + next_one[48:], "bodyLength 4"),
        (next_one[:-1], "does not fit"),
        (next_one[:-1] + b"x", "bodyCrc of entry 1"),
        (next_one[:36] + b"zzzz" + next_one[40:], "chainCrc of entry 1"),
        (records.encode_record(1, 2, len(good), b"abc", chain)[0], "index 2 found where 1 was expected"),
        (records.encode_record(0, 1, len(good), b"abc", chain)[0], "term 0 after term 1"),
        (records.encode_record(1, 1, 7, b"abc", chain)[0], "pos 7 found at position 51"),
    ]:
        scan = _scan(good + tail)
        assert (scan.count, scan.end_offset, scan.stop) == (1, len(good), StopKind.BAD)
        assert reason in scan.reason


def test_records_without_crcs_are_read_only_when_asked_for() -> None:
    """The Java line leaves both CRC fields 0; such records chain from 0."""
    java = [bytearray(records.encode_record(1, n, n * 51, b"abc", 0)[0]) for n in range(2)]
    for record in java:
        record[36:44] = bytes(8)
    ours, _ = records.encode_record(1, 2, 102, b"abc", 0)
    data = b"".join([*java, ours])

    assert _scan(data).count == 0
    assert _scan(data, unchecked=True).count == 3
    run = EntryRun(EntryId(Term(-1), LogIndex(-1)), 0, LogIndex(0), LogIndex(2), Position(0), data)
    assert records.check_run(run, unchecked=True).last.index == 2
    data = data[:-1] + b"!"
    assert _scan(data, unchecked=True).count == 2
