"""The payload that a NOOP can carry: its body, or (in a broker's log) a part of its body.

All integers are big-endian. A payload begins with

    0        8         9      10       14
    +--------+---------+------+--------+------
    | mark   | version | kind | length | rest
    +--------+---------+------+--------+------

where ``length`` counts the bytes of the rest. The mark is searched for anywhere in a NOOP's body: only leaders write
NOOPs, so nothing else in them could look like it. ``docs/formats.md`` draws the rest of each kind.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

from dledger.errors import DLedgerError

MARK: Final = b"\x89DLPROD\n"
VERSION: Final = 1
_HEAD: Final = Struct(">8sBBI")
HEAD_BYTES: Final = _HEAD.size
TIME_STEP_MS: Final = 100
_TIME: Final = Struct(">q")


class PayloadKind(IntEnum):
    """The kinds of payloads."""

    SNAPSHOT = 1
    """All producers (``dledger.core.producer_payload``)."""
    REGISTRATION = 2
    """One new producer."""
    CONFIGURATION = 3
    """The group's members from here on (``dledger.core.membership_payload``)."""
    TIME = 4
    """The leader's clock (``dledger.core.noop_payload``)."""


class UnreadablePayloadError(DLedgerError):
    """Raised for a payload of a newer version of this program, or an inconsistent one."""


def with_head(kind: PayloadKind, rest: bytes) -> bytes:
    return _HEAD.pack(MARK, VERSION, kind, len(rest)) + rest


def kind_in(body: bytes) -> int | None:
    """The kind of the payload in a NOOP's body, known or not; None if there is none."""
    start = body.find(MARK)
    if start < 0 or len(body) < start + HEAD_BYTES:
        return None
    kind: int = _HEAD.unpack_from(body, start)[2]
    return kind


def find_payload(body: bytes) -> tuple[PayloadKind, bytes] | None:
    """The kind and the rest of the payload in a NOOP's body; None if there is none.

    Raises ``UnreadablePayloadError``.
    """
    start = body.find(MARK)
    if start < 0:
        return None
    if len(body) < start + HEAD_BYTES:
        raise UnreadablePayloadError(f"damaged payload of a no-op: {len(body) - start} bytes")
    _, version, kind, length = _HEAD.unpack_from(body, start)
    if version != VERSION:
        raise UnreadablePayloadError(
            f"the log holds a no-op's payload of version {version}, but this program reads version {VERSION}: run the "
            "version that wrote it, or a later one"
        )
    rest = body[start + HEAD_BYTES : start + HEAD_BYTES + length]
    try:
        known = PayloadKind(kind)
    except ValueError:
        known = None
    if known is None or len(rest) != length:
        raise UnreadablePayloadError(f"damaged payload of a no-op: kind {kind}, {len(rest)} bytes")
    return known, rest


def encode_time(time_ms: int) -> bytes:
    """The encoding of a leader's clock in a NOOP (``dledger.core.noop_payload``), for state machines.

    Entries have no times, and a state machine must not read a clock. So a leader whose log has a state machine writes
    its clock into the log before the first batch of its term, and again before a batch when ``TIME_STEP_MS`` have
    passed.

    The payload of a time (Unix time).
    """
    return with_head(PayloadKind.TIME, _TIME.pack(time_ms))


def decode_time(body: bytes) -> int | None:
    """The time in a NOOP's body; None if it holds none. Raises ``UnreadablePayloadError``."""
    found = find_payload(body) if kind_in(body) == PayloadKind.TIME else None
    if found is None:
        return None
    if len(found[1]) != _TIME.size:
        raise UnreadablePayloadError(f"damaged time in the log: {len(found[1])} bytes")
    time_ms: int = _TIME.unpack(found[1])[0]
    return time_ms
