"""The bodies of appends and reads over remoting, in both directions. Pure; all integers are big-endian.

Append: ``stream u32, sequence i64, count u32, group length u8, producer length u8, group, producer``, then ``count``
lengths (u32) and the bodies of the entries. ``stream`` 0: in no order; otherwise the request is refused if an earlier
one with the same number, on the same connection, failed. Without a producer, ``sequence`` means nothing.

Answer: ``term i64, first index i64, count u32, runs u32``, the positions of the new entries (``count`` of i64), and
``runs`` runs of entries that the log already held: ``first index i64, count u32, term i64, positions u32`` and those
positions (i64; all or none).

Read: ``first index i64, count u32, bytes u32, mode u8, wait u32 (ms)``, group. Answer: ``committed index i64, begin
index i64, end index i64`` and whole records, headers included, as the log stores them (docs/formats.md).
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from struct import Struct, pack, unpack_from
from struct import error as StructError  # noqa: N812  # it is an exception
from typing import Final, NamedTuple

from dledger.errors import (
    AccessDeniedError,
    DLedgerError,
    InvalidRequestError,
    PendingFullError,
    RequestTimeoutError,
    ShutdownError,
    UnavailableError,
    told,
)
from dledger.records import ENTRY, ENTRY_HEADER_BYTES
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame, HeaderForm, encode
from dledger.rpc.clients.codec import APPEND_ENTRIES_MAX, Append, Read, ReadAnswer, ReadMode, decode_error, encode_error
from dledger.rpc.fields import NUMBER_LIMIT, index, name
from dledger.types import NOOP_CHANNEL, AppendedBatch, Entry, LogIndex, Magic, Position, ProducerBatch, StoredRun, Term

UNORDERED: Final = 0
WAIT_MS_MAX: Final = 15_000
"""The longest wait of a read for the next entry."""
_APPEND: Final = Struct(">IqIBB")
_STREAM: Final = Struct(">I")
_APPENDED: Final = Struct(">qqII")
_RUN: Final = Struct(">qIqI")
_READ: Final = Struct(">qIIBI")
_ANSWER: Final = Struct(">qqq")
_HEADER: Final = ENTRY.struct()
_NAME_BYTES_MAX: Final = 255
REQUEST_BYTES_MAX_FIELD: Final = "requestBytesMax"
"""In the header of the answer to DLedger's METADATA: how many bytes the body of an append may have."""
_PLACE: Final = 2_000_000_001
"""Stands for the opaque in the template; no answer of a template has it for its own."""


class StreamAppend(NamedTuple):
    """An append, and the number of the sender's stream that it belongs to."""

    stream: int
    append: Append


class WaitingRead(NamedTuple):
    """A read, and for how long it may wait if ``first_index`` is the next index to be written."""

    read: Read
    wait_ms: int = 0


# --- append -----------------------------------------------------------------------------------------------------------


def encode_append(stream: int, request: Append) -> bytes:
    """An append. Raises ``InvalidRequestError`` for names that are too long."""
    group, bodies = _name_bytes(request.group), request.bodies
    producer, sequence = b"", 0
    if request.producer is not None:
        producer, sequence = _name_bytes(request.producer.producer), request.producer.sequence
    count = len(bodies)
    head = _APPEND.pack(stream, sequence, count, len(group), len(producer))
    return b"".join((head, group, producer, pack(f">{count}I", *map(len, bodies)), *bodies))


def decode_append(data: bytes) -> StreamAppend:
    """An append. Raises ``InvalidRequestError``, like every ``decode_*`` of requests."""
    try:
        stream, sequence, count, group_bytes, producer_bytes = _APPEND.unpack_from(data)
        if count > APPEND_ENTRIES_MAX:
            raise InvalidRequestError(f"more than {APPEND_ENTRIES_MAX} entries in one request")
        at = _APPEND.size
        group, at = _text(data, at, group_bytes)
        producer, at = _text(data, at, producer_bytes)
        lengths = unpack_from(f">{count}I", data, at)
    except StructError as error:
        raise InvalidRequestError(f"an append of {len(data)} bytes ends too early") from error
    ends = [at + 4 * count]
    for length in lengths:
        ends.append(ends[-1] + length)
    if ends[-1] != len(data):
        raise InvalidRequestError(f"an append of {len(data)} bytes, whose entries end at byte {ends[-1]}")
    if producer and not 0 <= sequence < NUMBER_LIMIT:
        raise InvalidRequestError(f"sequence={sequence} is not the number of an entry")
    bodies = tuple([data[begin:end] for begin, end in pairwise(ends)])
    batch = ProducerBatch(producer, sequence, count) if producer else None
    return StreamAppend(stream, Append(group, bodies, ordered=stream != UNORDERED, producer=batch))


def group_of_append(data: bytes) -> str:
    """The group that an append names; the rest of it is not decoded. Raises ``InvalidRequestError``."""
    if len(data) < _APPEND.size:
        raise InvalidRequestError(f"an append of {len(data)} bytes ends too early")
    *_, group_bytes, _ = _APPEND.unpack_from(data)
    return _text(data, _APPEND.size, group_bytes)[0]


def stream_of(data: bytes) -> int:
    """The stream of an append that is not decoded."""
    stream: int = _STREAM.unpack_from(data)[0] if len(data) >= _STREAM.size else UNORDERED
    return stream


def encode_appended(batch: AppendedBatch) -> bytes:
    """The answer to an append that is stored."""
    positions, runs = batch.positions, batch.duplicates
    count = len(positions)
    parts = [_APPENDED.pack(batch.term, batch.first_index, count, len(runs)), pack(f">{count}q", *positions)]
    for run in runs:
        known = len(run.positions)
        parts += (_RUN.pack(run.first_index, run.count, run.term, known), pack(f">{known}q", *run.positions))
    return b"".join(parts)


def decode_appended(data: bytes) -> AppendedBatch:
    """The answer. Raises ``InvalidRequestError`` if it is malformed."""
    try:
        term, first, count, runs = _APPENDED.unpack_from(data)
        at = _APPENDED.size
        positions = unpack_from(f">{count}q", data, at) if count <= len(data) else ()
        at += 8 * count
        duplicates = []
        for _ in range(runs):
            run_first, run_count, run_term, known = _RUN.unpack_from(data, at)
            at += _RUN.size
            run_positions = unpack_from(f">{known}q", data, at) if known <= len(data) else ()
            at += 8 * known
            duplicates.append(StoredRun(LogIndex(run_first), run_count, Term(run_term), run_positions))
    except StructError as error:
        raise InvalidRequestError(f"an answer of {len(data)} bytes to an append ends too early") from error
    if at != len(data):
        raise InvalidRequestError(f"an answer of {len(data)} bytes to an append ends at byte {at}")
    last = LogIndex(first + count - 1)
    return AppendedBatch(Term(term), LogIndex(first), last, positions, tuple(duplicates))


# --- read -------------------------------------------------------------------------------------------------------------


def encode_read(request: Read, wait_ms: int = 0) -> bytes:
    """A read; ``wait_ms``: for the entry at ``first_index``, if it is the next one."""
    head = _READ.pack(request.first_index, request.count, request.max_bytes, request.mode, wait_ms)
    return head + _name_bytes(request.group)


def decode_read(data: bytes) -> WaitingRead:
    """A read, its numbers in range (the index may still be beyond the log)."""
    try:
        first, count, max_bytes, mode, wait_ms = _READ.unpack_from(data)
    except StructError as error:
        raise InvalidRequestError(f"a read of {len(data)} bytes ends too early") from error
    group, _ = _text(data, _READ.size, len(data) - _READ.size)
    try:
        read_mode = ReadMode(mode)
    except ValueError as error:
        raise InvalidRequestError(f"read mode {mode} is unknown") from error
    if wait_ms and read_mode is ReadMode.LOCAL:
        raise InvalidRequestError("only committed entries can be waited for: LOCAL reads what is there")
    read = Read(name(group, "group"), index(first, "first_index"), count, max_bytes, read_mode)
    return WaitingRead(read, min(wait_ms, WAIT_MS_MAX))


def encode_read_answer(answer: ReadAnswer) -> bytes:
    parts = [_ANSWER.pack(answer.committed_index, answer.begin_index, answer.end_index)]
    for entry in answer.entries:
        body, channel = entry.body, entry.channel
        magic = Magic.NORMAL if channel == NOOP_CHANNEL and entry.magic is Magic.NOOP else entry.magic
        parts += (
            _HEADER.pack(
                magic,
                ENTRY_HEADER_BYTES + len(body),
                entry.index,
                entry.term,
                entry.position,
                channel,
                entry.chain_crc,
                entry.body_crc,
                len(body),
            ),
            body,
        )
    return b"".join(parts)


def decode_read_answer(data: bytes) -> ReadAnswer:
    """The answer. Raises ``InvalidRequestError`` if it is malformed."""
    entries: list[Entry] = []
    at, end = _ANSWER.size, len(data)
    try:
        committed, begin, last = _ANSWER.unpack_from(data)
        while at < end:
            magic, size, number, term, position, channel, chain_crc, body_crc, length = _HEADER.unpack_from(data, at)
            body_at, at = at + ENTRY_HEADER_BYTES, at + size
            if length < 0 or size != ENTRY_HEADER_BYTES + length or at > end:
                raise InvalidRequestError(
                    f"entry {number} in an answer to a read has {size} bytes, and {length} of body"
                )
            meaning = Magic.NOOP if magic == Magic.NORMAL and channel == NOOP_CHANNEL else Magic(magic)
            place = LogIndex(number), Term(term), Position(position)
            entries.append(Entry(*place, data[body_at:at], meaning, channel, body_crc, chain_crc))
    except (StructError, ValueError) as error:
        raise InvalidRequestError(f"an answer of {end} bytes to a read has a malformed entry") from error
    return ReadAnswer(entries, LogIndex(committed), LogIndex(begin), LogIndex(last))


# --- parts ------------------------------------------------------------------------------------------------------------


def _name_bytes(text: str) -> bytes:
    data = text.encode()
    if len(data) > _NAME_BYTES_MAX:
        raise InvalidRequestError(f"a name of {len(data)} bytes: at most {_NAME_BYTES_MAX} are allowed")
    return data


def _text(data: bytes, at: int, size: int) -> tuple[str, int]:
    end = at + size
    if end > len(data):
        raise InvalidRequestError(f"a request of {len(data)} bytes ends within a name")
    try:
        return data[at:end].decode(), end
    except UnicodeDecodeError as error:
        raise InvalidRequestError("a name that is not UTF-8") from error


class JavaCode(IntEnum):
    """DLedger's codes, with its names. Their bodies are fastjson's, and the code of an answer is in its body."""

    METADATA = 50000
    APPEND = 50001
    GET = 50002
    LEADERSHIP_TRANSFER = 51005


class LogCode(IntEnum):
    """Our codes; ``codec`` has the bodies of the first two, ``proto/dledger/v1/client.proto`` those of the others.

    An answer has code 0 and a body, or DLedger's response code of an error, and a ``Status`` as its body.
    """

    APPEND = 20000
    READ = 20001
    METADATA = 20002
    PRODUCER = 20003
    TRANSFER = 20004
    WATCH_ROLE = 20005
    """Answered with the present role; changes come as requests of the server, until the connection ends."""
    ROLE_CHANGED = 20006
    """Sent by the server, without an answer."""
    FETCH = 20007
    """Answered with one chunk; who wants more asks for the next one."""
    LOCATE = 20008
    DIGESTS = 20009
    """Answered with the first blocks; who wants more asks from where they end."""
    CHANGE_MEMBERS = 20010
    COMMAND = 20011
    """Of a state machine on the log, as the two below."""
    QUERY = 20012
    SNAPSHOT = 20013


def error_answer(request: Frame, error: DLedgerError) -> Frame:
    """The answer that tells a client of an error."""
    return request.answer(error.code, told(error), body=encode_error(error))


def error_of(answer: Frame, address: str) -> DLedgerError:
    """The error that an answer from ``address`` tells of; also one of a server that knows none of ours."""
    if answer.body:
        error = decode_error(answer.body)
        return AccessDeniedError(f"{address}: {error}") if isinstance(error, AccessDeniedError) else error
    why = f"{address} refused the request: {answer.remark or f'code {answer.code}'}"
    match answer.code:
        case AnswerCode.SYSTEM_BUSY:
            return PendingFullError(why)
        case AnswerCode.REQUEST_CODE_NOT_SUPPORTED:
            return UnavailableError(why)
        case AnswerCode.SERVICE_NOT_AVAILABLE:
            return ShutdownError(why)
        case _:
            return RequestTimeoutError(why)


def success_bytes(request: Frame, body: bytes) -> bytes:
    """The whole frame of an answer, without the general machinery: there is one for every append."""
    if request.form is not HeaderForm.JSON:
        return encode(request.answer(body=body))
    header = _SUCCESS_HEADER % request.opaque
    return (len(header) + 4 + len(body)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header + body


_SUCCESS_HEADER: Final = encode(Frame(0, _PLACE).answer())[8:].replace(str(_PLACE).encode(), b"%d")
