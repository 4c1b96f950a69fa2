"""Record heads for tests of what is derived from the log."""

from __future__ import annotations

from rocketstore.types import RecordHead

RECORD_BYTES = 100
STORE_MS = 1_700_000_000_000


def head(
    queue_offset: int = 0,
    offset: int | None = None,
    *,
    topic: str = "T",
    queue_id: int = 0,
    size: int = RECORD_BYTES,
    tags_code: int = 7,
    store_ms: int = STORE_MS,
    sys_flag: int = 0,
    properties: bytes = b"",
) -> RecordHead:
    """A record; by default record n of its queue lies at n * 100."""
    physical = queue_offset * RECORD_BYTES if offset is None else offset
    return RecordHead(topic, queue_id, physical, size, tags_code, store_ms, queue_offset, sys_flag, 0, properties)


def heads(first: int, end: int, *, topic: str = "T", queue_id: int = 0) -> list[RecordHead]:
    """Records ``first`` to ``end`` (exclusive) of one queue, one after the other in the log."""
    return [head(number, topic=topic, queue_id=queue_id) for number in range(first, end)]


def keyed(offset: int, *keys: str, unique: str = "", topic: str = "T", store_ms: int = STORE_MS) -> RecordHead:
    """A record with business keys and a unique key."""
    parts = [f"KEYS\x01{' '.join(keys)}"] * bool(keys) + [f"UNIQ_KEY\x01{unique}"] * bool(unique)
    return head(0, offset, topic=topic, store_ms=store_ms, properties="\x02".join(parts).encode())
