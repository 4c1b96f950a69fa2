"""The encoding of a leader's clock in a NOOP (``dledger.core.noop_payload``), for state machines.

Entries have no times, and a state machine must not read a clock. So a leader whose log has a state machine writes its
clock into the log before the first batch of its term, and again before a batch when ``TIME_STEP_MS`` have passed.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from dledger.core.noop_payload import PayloadKind, UnreadablePayloadError, find_payload, kind_in, with_head

TIME_STEP_MS: Final = 100
_TIME: Final = Struct(">q")


def encode_time(time_ms: int) -> bytes:
    """The payload of a time (Unix time)."""
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
