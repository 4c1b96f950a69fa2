"""The binary bodies of appends and reads: their bytes, both directions, and what is no such body."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.errors import InvalidRequestError
from dledger.remoting import log_codec
from dledger.remoting.log_codec import StreamAppend, WaitingRead
from dledger.rpc.clients.codec import APPEND_ENTRIES_MAX, Append, Read, ReadAnswer, ReadMode
from dledger.types import NOOP_CHANNEL, AppendedBatch, Entry, LogIndex, Magic, Position, ProducerBatch, StoredRun, Term

APPEND = Append("log", (b"first", b"", b"third"), ordered=True, producer=ProducerBatch("billing", 258, 3))
APPEND_BYTES = bytes.fromhex(
    "0000000700000000000001020000000303076c6f6762696c6c696e6700000005000000000000000566697273747468697264"
)
APPENDED = AppendedBatch(
    Term(3), LogIndex(9), LogIndex(10), (4096, 4150), (StoredRun(LogIndex(5), 2, Term(2), (1024, 1078)),)
)
APPENDED_BYTES = bytes.fromhex(
    "0000000000000003"
    "0000000000000009"
    "00000002"
    "00000001"
    "0000000000001000"
    "0000000000001036"
    "0000000000000005"
    "00000002"
    "0000000000000002"
    "00000002"
    "0000000000000400"
    "0000000000000436"
)
READ = Read("log", LogIndex(17), 4, 65536, ReadMode.LINEARIZABLE)
READ_BYTES = bytes.fromhex("0000000000000011000000040001000001000003e86c6f67")
ENTRY = Entry(LogIndex(17), Term(3), Position(4096), b"body", body_crc=0xFFFFFFFF, chain_crc=2)
ANSWER = ReadAnswer([ENTRY], LogIndex(17), LogIndex(0), LogIndex(18))
ANSWER_BYTES = bytes.fromhex(
    "0000000000000011"
    "0000000000000000"
    "0000000000000012"
    "00000001"
    "00000034"
    "0000000000000011"
    "0000000000000003"
    "0000000000001000"
    "00000000"
    "00000002"
    "ffffffff"
    "00000004"
    "626f6479"
)


def test_the_bytes_of_an_append() -> None:
    """As docs/protocol.md describes them."""
    assert log_codec.encode_append(7, APPEND) == APPEND_BYTES
    assert log_codec.decode_append(APPEND_BYTES) == StreamAppend(7, APPEND)
    assert log_codec.stream_of(APPEND_BYTES) == 7


def test_the_bytes_of_an_answer_to_an_append() -> None:
    """With entries that the log already held."""
    assert log_codec.encode_appended(APPENDED) == APPENDED_BYTES
    assert log_codec.decode_appended(APPENDED_BYTES) == APPENDED


def test_the_bytes_of_a_read_and_its_answer() -> None:
    """The entries are records as the log stores them."""
    assert log_codec.encode_read(READ, 1000) == READ_BYTES
    assert log_codec.decode_read(READ_BYTES) == WaitingRead(READ, 1000)
    assert log_codec.encode_read_answer(ANSWER) == ANSWER_BYTES
    assert log_codec.decode_read_answer(ANSWER_BYTES) == ANSWER


@given(
    st.integers(0, 2**32 - 1),
    st.text(max_size=30),
    st.lists(st.binary(max_size=40), max_size=20),
    st.none() | st.tuples(st.text(min_size=1, max_size=30), st.integers(0, 2**62 - 1)),
)
def test_appends_come_back_as_they_were(
    stream: int, group: str, bodies: list[bytes], producer: tuple[str, int] | None
) -> None:
    """Any names and bodies."""
    batch = ProducerBatch(*producer, len(bodies)) if producer is not None else None
    request = Append(group, tuple(bodies), ordered=bool(stream), producer=batch)
    assert log_codec.decode_append(log_codec.encode_append(stream, request)) == (stream, request)


@given(st.binary(max_size=200))
def test_garbage_is_no_append(data: bytes) -> None:
    """It is refused, or is one with all its bytes."""
    try:
        stream, request = log_codec.decode_append(data)
    except InvalidRequestError:
        return
    if request.producer is not None:
        assert log_codec.encode_append(stream, request) == data


@pytest.mark.parametrize("size", range(len(APPEND_BYTES)))
def test_an_append_cut_short_is_refused(size: int) -> None:
    """At any byte."""
    with pytest.raises(InvalidRequestError):
        log_codec.decode_append(APPEND_BYTES[:size])
    with pytest.raises(InvalidRequestError):
        log_codec.decode_append(APPEND_BYTES + bytes(size + 1))


@pytest.mark.parametrize("size", range(len(APPENDED_BYTES)))
def test_an_answer_cut_short_is_refused(size: int) -> None:
    """At any byte."""
    with pytest.raises(InvalidRequestError):
        log_codec.decode_appended(APPENDED_BYTES[:size])


@pytest.mark.parametrize("size", [*range(24), *range(25, len(ANSWER_BYTES))])
def test_a_reads_answer_cut_short_is_refused(size: int) -> None:
    """At any byte but between entries."""
    with pytest.raises(InvalidRequestError):
        log_codec.decode_read_answer(ANSWER_BYTES[:size])


def test_an_append_has_a_limited_number_of_entries() -> None:
    """They are counted before any is made."""
    log_codec.decode_append(log_codec.encode_append(0, Append("g", [b""] * APPEND_ENTRIES_MAX)))
    with pytest.raises(InvalidRequestError, match="more than 4096 entries"):
        log_codec.decode_append(log_codec.encode_append(0, Append("g", [b""] * (APPEND_ENTRIES_MAX + 1))))


def test_a_name_has_at_most_255_bytes() -> None:
    """Its length is one byte."""
    with pytest.raises(InvalidRequestError, match="255"):
        log_codec.encode_append(0, Append("ü" * 128, [b""]))


def test_a_negative_number_of_an_entry_is_refused() -> None:
    """Only with a producer does it mean anything."""
    numbered = log_codec.encode_append(0, replace(APPEND, producer=ProducerBatch("p", -1, 3)))
    with pytest.raises(InvalidRequestError, match="sequence=-1"):
        log_codec.decode_append(numbered)


@pytest.mark.parametrize("magic", [Magic.NORMAL, Magic.NOOP])
def test_a_noop_is_sent_as_it_is_stored(magic: Magic) -> None:
    """In a broker's log with magic 1 and a mark in the channel field: only so the chain of checksums is right."""
    stored = replace(ENTRY, magic=Magic.NOOP, channel=NOOP_CHANNEL if magic == 1 else 0)
    data = log_codec.encode_read_answer(replace(ANSWER, entries=[stored]))
    assert int.from_bytes(data[24:28]) == magic
    assert log_codec.decode_read_answer(data).entries == [stored]


def test_only_committed_entries_are_waited_for() -> None:
    """And for a limited time."""
    with pytest.raises(InvalidRequestError, match="LOCAL"):
        log_codec.decode_read(log_codec.encode_read(replace(READ, mode=ReadMode.LOCAL), 1))
    assert log_codec.decode_read(log_codec.encode_read(READ, 2**32 - 1)).wait_ms == log_codec.WAIT_MS_MAX


def test_an_unknown_mode_is_refused() -> None:
    """As over gRPC."""
    with pytest.raises(InvalidRequestError, match="read mode 9"):
        log_codec.decode_read(READ_BYTES[:16] + b"\x09" + READ_BYTES[17:])
