"""The encoding of large reads: ``proto/dledger/v1/client.proto``.

A chunk is encoded by hand around its megabyte of data, which saves one of two copies on the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dledger.errors import DLedgerError, InvalidRequestError
from dledger.pb import client_pb2 as pb
from dledger.rpc.clients.codec import SUCCESS, raise_failure, status_of
from dledger.rpc.fields import index, parse, varint
from dledger.types import BlockDigest, LogChunk, LogIndex, LogPlace, LogRange, Position
from dledger.values import MIB

BLOCK_BYTES_DEFAULT: Final = 4 * MIB
PLACES_MAX: Final = 4096
"""The limit of questions in one ``Locate``."""
_DATA_TAG: Final = b"\x7a"  # field 15, length-delimited


@dataclass(frozen=True, slots=True)
class FetchLog:
    """A request for raw entries; 0: no limit, or the default."""

    group: str
    first_index: LogIndex
    end_index: LogIndex = LogIndex(0)  # noqa: RUF009  # a NewType is no call
    max_bytes: int = 0
    chunk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Locate:
    """Questions about the places of entries."""

    group: str
    indexes: Sequence[int] = ()
    positions: Sequence[int] = ()
    store_times_ms: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LocatedEntries:
    """The answers, in the order of the request's fields, and the range that the node holds."""

    places: tuple[LogPlace, ...]
    range: LogRange


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """A request for digests; 0: no limit, or the default."""

    group: str
    from_position: Position
    end_position: Position = Position(0)  # noqa: RUF009
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Digested:
    """Consecutive digests, and the range that the node holds."""

    blocks: tuple[BlockDigest, ...]
    begin_position: Position
    committed_position: Position
    committed_index: LogIndex


# --- FetchLog -------------------------------------------------------------------------------------------------------


def encode_fetch(request: FetchLog) -> bytes:
    """Encode a request for chunks."""
    return pb.FetchLogRequest(
        group=request.group,
        first_index=request.first_index,
        end_index=request.end_index,
        max_bytes=request.max_bytes,
        chunk_bytes=request.chunk_bytes,
    ).SerializeToString()


def decode_fetch(data: bytes) -> FetchLog:
    """Raises ``InvalidRequestError``, like every ``decode_*`` of requests."""
    wire = parse(pb.FetchLogRequest, data)
    _check_not_negative(wire, "first_index", "end_index", "max_bytes", "chunk_bytes")
    if 0 < wire.end_index <= wire.first_index:
        raise InvalidRequestError(f"no entry between {wire.first_index} and {wire.end_index} (exclusive)")
    return FetchLog(
        wire.group,
        index(wire.first_index, "first_index"),
        index(wire.end_index, "end_index"),
        wire.max_bytes,
        wire.chunk_bytes,
    )


def encode_chunk(outcome: LogChunk | DLedgerError) -> bytes:
    """Encode one message of a fetch."""
    if isinstance(outcome, DLedgerError):
        return pb.FetchLogResponse(status=status_of(outcome)).SerializeToString()
    head = pb.FetchLogResponse(
        status=SUCCESS,
        first_index=outcome.first_index,
        count=outcome.count,
        position=outcome.position,
        committed_index=outcome.committed_index,
        begin_index=outcome.begin_index,
        segment_base=outcome.segment_base,
    ).SerializeToString()
    return b"".join((head, _DATA_TAG, varint(len(outcome.data)), outcome.data))


def decode_chunk(data: bytes) -> LogChunk:
    """Raises the error in the answer, like the decoders of answers below."""
    wire = parse(pb.FetchLogResponse, data)
    raise_failure(wire.status)
    return LogChunk(
        first_index=LogIndex(wire.first_index),
        count=wire.count,
        position=Position(wire.position),
        segment_base=Position(wire.segment_base),
        data=wire.data,
        committed_index=LogIndex(wire.committed_index),
        begin_index=LogIndex(wire.begin_index),
    )


# --- Locate ---------------------------------------------------------------------------------------------------------


def encode_locate(request: Locate) -> bytes:
    return pb.LocateRequest(
        group=request.group,
        indexes=request.indexes,
        positions=request.positions,
        store_times_ms=request.store_times_ms,
    ).SerializeToString()


def decode_locate(data: bytes) -> Locate:
    """Decode a ``Locate`` request and limit its questions."""
    wire = parse(pb.LocateRequest, data)
    count = len(wire.indexes) + len(wire.positions) + len(wire.store_times_ms)
    if count > PLACES_MAX:
        raise InvalidRequestError(f"{count} places requested at once: at most {PLACES_MAX} are allowed")
    if min((*wire.indexes, *wire.positions), default=0) < 0:
        raise InvalidRequestError("indexes and positions must not be negative")
    return Locate(wire.group, tuple(wire.indexes), tuple(wire.positions), tuple(wire.store_times_ms))


def encode_located(outcome: LocatedEntries | DLedgerError) -> bytes:
    """Encode the answer to ``Locate``."""
    if isinstance(outcome, DLedgerError):
        return pb.LocateResponse(status=status_of(outcome)).SerializeToString()
    begin, end = outcome.range.begin, outcome.range.end
    return pb.LocateResponse(
        status=SUCCESS,
        places=[pb.Place(index=one.index, position=one.position) for one in outcome.places],
        begin_index=begin.index,
        begin_position=begin.position,
        committed_index=end.index - 1,
        committed_position=end.position,
    ).SerializeToString()


def decode_located(data: bytes) -> LocatedEntries:
    """Decode the answer to ``Locate``."""
    wire = parse(pb.LocateResponse, data)
    raise_failure(wire.status)
    return LocatedEntries(
        tuple(_place(one.index, one.position) for one in wire.places),
        LogRange(
            _place(wire.begin_index, wire.begin_position), _place(wire.committed_index + 1, wire.committed_position)
        ),
    )


def _place(at_index: int, position: int) -> LogPlace:
    return LogPlace(LogIndex(at_index), Position(position))


# --- BlockDigests ---------------------------------------------------------------------------------------------------


def encode_digests_request(request: BlockDigests) -> bytes:
    return pb.BlockDigestsRequest(
        group=request.group,
        from_position=request.from_position,
        end_position=request.end_position,
        block_bytes=request.block_bytes,
    ).SerializeToString()


def decode_digests_request(data: bytes) -> BlockDigests:
    """Decode a request for digests and check its numbers."""
    wire = parse(pb.BlockDigestsRequest, data)
    _check_not_negative(wire, "from_position", "end_position", "block_bytes")
    return BlockDigests(wire.group, Position(wire.from_position), Position(wire.end_position), wire.block_bytes)


def encode_digests(outcome: Digested | DLedgerError) -> bytes:
    """Encode one message of digests."""
    if isinstance(outcome, DLedgerError):
        return pb.BlockDigestsResponse(status=status_of(outcome)).SerializeToString()
    return pb.BlockDigestsResponse(
        status=SUCCESS,
        blocks=[
            pb.BlockDigest(
                position=one.position,
                bytes=one.size,
                crc32c=one.crc32c,
                first_index=one.first_index,
                last_index=one.last_index,
                chain_crc=one.chain_crc,
            )
            for one in outcome.blocks
        ],
        begin_position=outcome.begin_position,
        committed_position=outcome.committed_position,
        committed_index=outcome.committed_index,
    ).SerializeToString()


def decode_digests(data: bytes) -> Digested:
    """Decode one message of digests."""
    wire = parse(pb.BlockDigestsResponse, data)
    raise_failure(wire.status)
    blocks = (
        BlockDigest(
            Position(one.position),
            one.bytes,
            one.crc32c,
            LogIndex(one.first_index),
            LogIndex(one.last_index),
            one.chain_crc,
        )
        for one in wire.blocks
    )
    return Digested(
        tuple(blocks),
        Position(wire.begin_position),
        Position(wire.committed_position),
        LogIndex(wire.committed_index),
    )


def _check_not_negative(wire: object, *names: str) -> None:
    for name in names:
        if getattr(wire, name) < 0:
            raise InvalidRequestError(f"{name}={getattr(wire, name)} must not be negative")
