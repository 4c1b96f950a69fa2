"""Messages that no consumer gets now, as JSON: a group's dead letters, and those that wait for their delivery time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cluster.console.browse import FIELD_MAX, PlainBodies, bounds_of, preview, read_back, safe_text
from dledger.access.permissions import DEAD_PREFIX
from rocketstore.client import NotFoundError
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import PROPERTY_REAL_QUEUE_ID, PROPERTY_REAL_TOPIC, PROPERTY_RETRY_TOPIC, Message

if TYPE_CHECKING:
    from rocketstore.client import Admin

PAGE: Final = 20
_NO_DEAD: Final[dict[str, object]] = {"min_offset": 0, "max_offset": 0, "first": 0, "messages": []}


class LetterBrowser:
    """Thread-safe; raises ``DLedgerError``."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def dead(self, group: str, before: int) -> dict[str, object]:
        """A page of a group's dead letters, newest first: offsets below ``before`` (negative: the newest)."""
        topic = f"{DEAD_PREFIX}{group}"
        try:
            low, high = bounds_of(self._admin, topic, 0)
        except NotFoundError:  # it is created with the first one
            return {"group": group, "topic": topic, **_NO_DEAD}
        end = high if before < 0 else min(before, high)
        messages, first = read_back(self._admin, topic, 0, max(end - PAGE, low), end)
        bodies = PlainBodies()
        about: dict[str, object] = {"min_offset": low, "max_offset": high, "first": first}
        return {
            "group": group,
            "topic": topic,
            **about,
            "messages": [_dead(one, bodies.of(one)[0]) for one in messages],
        }

    def delayed(self, level: int, offset: int) -> dict[str, object]:
        """The delay levels; with a ``level``, a page of its messages from ``offset`` on (negative: the next ones)."""
        levels, messages = self._admin.delayed(level, max(offset, -1), max_messages=PAGE)
        bodies = PlainBodies()
        delays_ms = {one.level: one.delay_ms for one in levels}
        return {
            "levels": [
                {
                    "level": one.level,
                    "delay_ms": one.delay_ms,
                    "count": max(one.end_offset - one.next_offset, 0),
                    "next_offset": one.next_offset,
                    "end_offset": one.end_offset,
                    "next_due_ms": one.next_due_ms,
                }
                for one in levels
            ],
            "level": level,
            "messages": [_delayed(one, bodies.of(one)[0], delays_ms[level]) for one in messages],
        }


def _dead(message: Message, body: bytes) -> dict[str, object]:
    return {
        **_about(message, body),
        "origin": safe_text(message.properties.get(PROPERTY_RETRY_TOPIC, ""))[:FIELD_MAX],
        "deliveries": message.reconsume_times,
        "stored_ms": message.store_timestamp,
        "born_ms": message.born_timestamp,
    }


def _delayed(message: Message, body: bytes, delay_ms: int) -> dict[str, object]:
    queue = message.properties.get(PROPERTY_REAL_QUEUE_ID, "")
    return {
        **_about(message, body),
        "to_topic": safe_text(message.properties.get(PROPERTY_REAL_TOPIC, ""))[:FIELD_MAX],
        "to_queue": safe_text(queue)[:FIELD_MAX],
        "stored_ms": message.store_timestamp,
        "due_ms": message.store_timestamp + delay_ms,
    }


def _about(message: Message, body: bytes) -> dict[str, object]:
    return {
        "offset": message.queue_offset,
        "message_id": offset_message_id(message.store_host, message.offset),
        "unique_key": safe_text(message.unique_key)[:FIELD_MAX],
        "tags": safe_text(message.tags)[:FIELD_MAX],
        "keys": safe_text(" ".join(message.keys))[:FIELD_MAX],
        "preview": preview(body),
    }
