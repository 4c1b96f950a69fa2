"""The encoding of producer records in a NOOP (``dledger.core.noop_payload``).

A snapshot holds every producer as of all entries before its own; a registration gives a new one its slot.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError  # noqa: N812  # it is an exception
from typing import Final

from dledger.core.noop_payload import HEAD_BYTES, PayloadKind, UnreadablePayloadError, find_payload, with_head
from dledger.errors import InvalidRequestError

SLOT_MAX: Final = 1 << 30
"""Slots are positive; the mark of a NOOP in the same header field is larger."""
NAME_BYTES_MAX: Final = 128

_TABLE: Final = Struct(">II")
_PRODUCER: Final = Struct(">BBIQQ")
_RUN: Final = Struct(">QQI")
_REGISTRATION: Final = Struct(">IIB")
_NAME: Final = re.compile(r"[A-Za-z0-9._/:-]{1,128}")

EMPTY_SNAPSHOT_BYTES: Final = HEAD_BYTES + _TABLE.size
PRODUCER_BYTES: Final = _PRODUCER.size
"""The size of a producer in a snapshot, without its name and runs."""
RUN_BYTES: Final = _RUN.size


RunRecord = tuple[int, int, int]
"""Entries of one producer at contiguous indexes: the sequence and the index of the first, and their number.

A plain tuple: a new leader makes some 100,000 of them while the group waits for it.
"""


@dataclass(frozen=True, slots=True)
class ProducerRecord:
    """A producer in a snapshot; ``idle_ms`` since its last append, ``runs`` its last ones, oldest first."""

    name: str
    slot: int
    next_sequence: int
    idle_ms: int
    runs: tuple[RunRecord, ...]


@dataclass(frozen=True, slots=True)
class ProducerSnapshot:
    """All producers. ``next_slot`` is the slot of the next registration."""

    next_slot: int
    producers: tuple[ProducerRecord, ...]


@dataclass(frozen=True, slots=True)
class Registration:
    """From here on entries with ``slot`` are this producer's, from sequence 0; ``dropped`` (0: none) is forgotten."""

    name: str
    slot: int
    dropped: int = 0


Payload = ProducerSnapshot | Registration


def check_name(name: str) -> None:
    """Raise ``InvalidRequestError`` for an invalid producer name."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequestError(
            f"{name[:140]!r} is not a valid producer name: use 1 to {NAME_BYTES_MAX} of the characters A-Z a-z "
            "0-9 . _ / : -"
        )


def encode_snapshot(next_slot: int, producers: Sequence[ProducerRecord]) -> bytes:
    """The payload of a snapshot."""
    parts = [_TABLE.pack(next_slot, len(producers))]
    for one in producers:
        name = one.name.encode("ascii")
        parts.append(_PRODUCER.pack(len(name), len(one.runs), one.slot, one.next_sequence, one.idle_ms))
        parts.append(name)
        parts += [_RUN.pack(*run) for run in one.runs]
    return with_head(PayloadKind.SNAPSHOT, b"".join(parts))


def encode_registration(registration: Registration) -> bytes:
    """The payload of a registration."""
    name = registration.name.encode("ascii")
    return with_head(
        PayloadKind.REGISTRATION, _REGISTRATION.pack(registration.slot, registration.dropped, len(name)) + name
    )


def decode_payload(body: bytes) -> Payload | None:
    """The producers' payload in a NOOP's body; None if there is none. Raises ``UnreadablePayloadError``."""
    found = find_payload(body)
    if found is None:
        return None
    kind, rest = found
    try:
        match kind:
            case PayloadKind.SNAPSHOT:
                return _decode_snapshot(rest)
            case PayloadKind.REGISTRATION:
                return _decode_registration(rest)
            case _:
                return None
    except (StructError, UnicodeDecodeError, InvalidRequestError) as error:
        raise UnreadablePayloadError(f"damaged producer table in the log: {error}") from error


def describe_producers(payload: Payload) -> str:
    """A payload, for people."""
    if isinstance(payload, ProducerSnapshot):
        return f"{len(payload.producers)} producers"
    return f"producer {payload.name} from here on, slot {payload.slot}"


def _decode_snapshot(rest: bytes) -> ProducerSnapshot:
    next_slot, count = _TABLE.unpack_from(rest)
    at = _TABLE.size
    producers: list[ProducerRecord] = []
    for _ in range(count):
        name_bytes, run_count, slot, next_sequence, idle_ms = _PRODUCER.unpack_from(rest, at)
        at += _PRODUCER.size
        name = rest[at : at + name_bytes].decode("ascii")
        at += name_bytes
        runs_end = at + run_count * _RUN.size
        runs: tuple[RunRecord, ...] = tuple(_RUN.iter_unpack(rest[at:runs_end]))
        at = runs_end
        _check(name, slot)
        producers.append(ProducerRecord(name, slot, next_sequence, idle_ms, runs))
    distinct = len({one.slot for one in producers}) == len({one.name for one in producers}) == count
    if at != len(rest) or not distinct or not 0 < next_slot <= SLOT_MAX:
        raise InvalidRequestError(f"{count} producers, {at} of {len(rest)} bytes, next slot {next_slot}")
    return ProducerSnapshot(next_slot, tuple(producers))


def _decode_registration(rest: bytes) -> Registration:
    slot, dropped, name_bytes = _REGISTRATION.unpack_from(rest)
    name = rest[_REGISTRATION.size :].decode("ascii")
    _check(name, slot)
    if len(name) != name_bytes:
        raise InvalidRequestError(f"a name of {len(name)} instead of {name_bytes} bytes")
    return Registration(name, slot, dropped)


def _check(name: str, slot: int) -> None:
    check_name(name)
    if not 0 < slot <= SLOT_MAX:
        raise InvalidRequestError(f"slot {slot} of {name}")
