"""Looks up single messages, entries, queues and groups for the page, as JSON.

Bodies are untrusted bytes. They are returned as text without characters that hide, reorder or break lines, or as a hex
dump, and truncated if large.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from dledger.access.rules import DEAD_PREFIX
from dledger_cli.console.listing import OFFSET_MAX, BadInputError
from dledger_cli.console.sampler import wall_ms
from dledger_cli.terminal import host_text
from rocketstore.client import ForbiddenError, MessageQueue, NotFoundError
from rocketstore.client.aio.admin_messages import QUERIED_MAX
from rocketstore.client.aio.received import plain_body
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import PROPERTY_REAL_QUEUE_ID, PROPERTY_REAL_TOPIC, PROPERTY_RETRY_TOPIC

if TYPE_CHECKING:
    from dledger.types import Entry
    from dledger_cli.targets import GroupTarget
    from rocketstore.client import Admin, Message, QueueProgress

PAGE_MAX: Final = 100
ANSWER_BYTES_MAX: Final = 1 << 20
"""Limit for the entries fetched for a list."""
PREVIEW_CHARACTERS: Final = 160
TEXT_BYTES_MAX: Final = 64 * 1024
HEX_BYTES_MAX: Final = 4 * 1024
TRACE_STEPS_MAX: Final = 256
LETTERS_PAGE: Final = 20
"""Dead letters, or delayed messages, of one page."""
QUEUES_MAX: Final = 256
COLUMNS_MAX: Final = 32
"""Groups shown beside the queues of a topic."""
NOT_COMMITTED: Final = -1
"""In the place of a group's offset in a queue that it does not read."""
CURSOR_CHARACTERS_MAX: Final = 12_000
"""Of what a page of messages says for the next one: two numbers per queue. It must fit into a request's head."""
_CURSOR: Final = re.compile(r"[0-9]{1,5}-[0-9]{1,19}")
FIELD_MAX: Final = 4096
PLAIN_BYTES_MAX: Final = 32 << 20
_INFLATION_MAX: Final = 1032
"""The most bytes that one byte compressed with zlib becomes."""
_HEX_ROW: Final = 16
_SHOWN: Final = frozenset("\n\t")
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Control, format (which reorder text), surrogates, private, unassigned, line and paragraph separators."""


def safe_text(text: str) -> str:
    """The text with every character that is not displayed as itself replaced by an escape."""
    return "".join(
        one if one in _SHOWN or unicodedata.category(one) not in _HIDDEN else ascii(one)[1:-1] for one in text
    )


def body_view(body: bytes) -> dict[str, object]:
    """A body, truncated to what a page can take: ``text`` if it is UTF-8 (otherwise None), and ``hex``."""
    cut = body[:TEXT_BYTES_MAX]
    return {
        "bytes": len(body),
        "text": _text_of(cut, cut_off=len(body) > len(cut)),
        "text_bytes": len(cut),
        "hex": hex_dump(body[:HEX_BYTES_MAX]),
        "hex_bytes": min(len(body), HEX_BYTES_MAX),
    }


def preview(body: bytes) -> dict[str, object]:
    """One line of a body, for lists."""
    text = _text_of(body[: 4 * PREVIEW_CHARACTERS], cut_off=len(body) > 4 * PREVIEW_CHARACTERS)
    if text is None:
        return {"bytes": len(body), "is_text": False, "text": body[:32].hex(" ")}
    line = " ".join(text.split())
    return {"bytes": len(body), "is_text": True, "text": line[:PREVIEW_CHARACTERS]}


def hex_dump(data: bytes) -> str:
    """Offset, sixteen bytes and their ASCII characters per line."""
    lines = []
    for at in range(0, len(data), _HEX_ROW):
        row = data[at : at + _HEX_ROW]
        text = "".join(chr(one) if 0x20 <= one < 0x7F else "." for one in row)
        lines.append(f"{at:08x}  {row.hex(' '):<47}  {text}")
    return "\n".join(lines)


def _text_of(data: bytes, *, cut_off: bool) -> str | None:
    for drop in range(4 if cut_off else 1):  # a character may have been cut
        try:
            text = data[: len(data) - drop].decode()
        except UnicodeDecodeError:
            continue
        controls = sum(unicodedata.category(one) == "Cc" and one not in "\n\r\t" for one in text)
        return None if controls > len(text) // 10 else safe_text(text)
    return None


_NO_DEAD: Final[dict[str, object]] = {"min_offset": 0, "max_offset": 0, "first": 0, "messages": []}


@dataclass(frozen=True, slots=True)
class WantedMessages:
    """Of a topic, or of one of its queues, the newest first; ``after``: what the page before said of the next one.

    Those stored at ``since_ms`` or later, and before ``before_ms``; 0: no limit.
    """

    topic: str
    queue_id: int | None = None
    since_ms: int = 0
    before_ms: int = 0
    oldest_first: bool = False
    after: str = ""


class PlainBodies:
    """Decompresses the bodies of one answer, ``PLAIN_BYTES_MAX`` bytes in all: one compressed megabyte may become a
    thousand, in time and memory of the console.
    """

    def __init__(self) -> None:
        self._left = PLAIN_BYTES_MAX

    def of(self, message: Message) -> tuple[bytes, str]:
        """A message's body; or the stored one, and why it is not decompressed."""
        if self._left <= 0:
            return message.body, "bodies before this one are too large to decompress it as well"
        body, note = plain_body(message, self._left)
        if body is not message.body:
            self._left -= len(body)
        elif note:
            self._left -= _INFLATION_MAX * len(body)  # so much may have been tried
        return body, note


class MessageBrowser:
    """Looks things up at the brokers. Thread-safe; raises ``DLedgerError``."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def by_time(self, wanted: WantedMessages, count: int) -> dict[str, object]:
        """A page of a topic's messages, by time."""
        broker = broker_of(self._admin, wanted.topic)
        queue = None if wanted.queue_id is None else MessageQueue(wanted.topic, broker, wanted.queue_id)
        before = _ends_of(wanted.after)
        found, ends = self._admin.newest(
            wanted.topic,
            {MessageQueue(wanted.topic, broker, number): end for number, end in before.items()},
            max_messages=count,
            queue=queue,
            stored=(wanted.since_ms, wanted.before_ms),
            oldest_first=wanted.oldest_first,
        )
        more = ".".join(f"{one.queue_id}-{end}" for one, end in ends.items())
        return {
            "messages": _listed(found),
            "next": more if len(more) <= CURSOR_CHARACTERS_MAX else "",
            "has_next": bool(ends),
            "as_of_ms": wall_ms(),
        }

    def by_offset(self, topic: str, queue_id: int, offset: int, count: int) -> dict[str, object]:
        """Messages of a queue from ``offset`` backwards, the newest first; a negative one is the queue's end."""
        low, high = bounds_of(self._admin, topic, queue_id)
        end = high if offset < 0 else min(offset + 1, high)
        messages, _ = read_back(self._admin, topic, queue_id, max(end - count, low), end)
        return {"min_offset": low, "max_offset": high, "messages": _listed(messages)}

    def trace(self, message_id: str) -> dict[str, object]:
        """The way of the message with this id of its producer."""
        try:
            steps = self._admin.trace(message_id)
        except NotFoundError:  # nobody has ever written a trace
            steps = []
        shown = [
            asdict(one) | {name: safe_text(getattr(one, name))[:FIELD_MAX] for name in ("group", "host", "detail")}
            for one in steps[:TRACE_STEPS_MAX]
        ]
        return {"message_id": safe_text(message_id)[:FIELD_MAX], "steps": shown}

    def one(self, topic: str, queue_id: int, offset: int) -> dict[str, object] | None:
        """All details of one message."""
        queue = MessageQueue(topic, broker_of(self._admin, topic), queue_id)
        messages, _ = self._admin.messages(queue, offset, max_messages=1)
        if not messages or messages[0].queue_offset != offset:
            return None
        return _whole(messages[0], *PlainBodies().of(messages[0]))

    def by_key(self, topic: str, key: str, *, unique: bool) -> dict[str, object]:
        """The newest messages with a business key, or with the unique id assigned by the producer, the newest first."""
        found = self._admin.messages_by_key(topic, key, max_messages=QUERIED_MAX, unique=unique)
        return {"messages": _listed(reversed(found)), "may_have_more": len(found) == QUERIED_MAX}

    def by_id(self, message_id: str) -> dict[str, object]:
        """The message with an offset message id."""
        return {"messages": _listed([self._admin.message_by_id(message_id)])}

    def topic(self, name: str) -> dict[str, object]:
        """The queues of a topic, and the progress of the groups that read it in each."""
        (info,) = self._admin.topic(name)
        ranges = self._admin.queue_ranges(name)
        users = self._admin.groups_of_topic(name)
        shown = ranges[:QUEUES_MAX]
        groups = {}
        for group in users[:COLUMNS_MAX]:
            with suppress(NotFoundError, ForbiddenError):  # it is gone, or not this account's
                committed = self._admin.offsets(group, name)
                groups[group] = [committed.get(one.queue, NOT_COMMITTED) for one in shown]
        return {
            "name": name,
            "write_queues": info.write_queues,
            "read_queues": info.read_queues,
            "permission": info.permission,
            "all_queues": len(ranges),
            "all_groups": len(users),
            "queues": [
                {
                    "queue": one.queue.queue_id,
                    "min_offset": one.min_offset,
                    "max_offset": one.max_offset,
                    "newest_ms": one.last_update_ms or -1,
                }
                for one in shown
            ],
            "groups": groups,
        }

    def group(self, name: str) -> dict[str, object]:
        """A group's progress per queue, and the number of its dead letters. Raises ``NotFoundError``."""
        progress = self._admin.progress(name)
        rows = rows_of(self._admin, progress, {one.queue.topic for one in progress})
        return {
            "name": name,
            "dead_letters": self._dead_letters(name),
            "all_rows": len(rows),
            "rows": rows[:QUEUES_MAX],
        }

    def _dead_letters(self, group: str) -> int:
        try:
            low, high = bounds_of(self._admin, f"{DEAD_PREFIX}{group}", 0)
        except NotFoundError:  # the topic is created with the first one
            return 0
        return high - low


def broker_of(admin: Admin, topic: str) -> str:
    """The name of the brokers that have a topic: of the only ones. Raises ``NotFoundError``."""
    return admin.topic(topic)[0].broker


def bounds_of(admin: Admin, topic: str, queue_id: int) -> tuple[int, int]:
    """A queue's first offset and its end. Raises ``NotFoundError`` also for a queue that the topic does not have."""
    for one in admin.queue_ranges(topic):
        if one.queue.queue_id == queue_id:
            return one.min_offset, one.max_offset
    raise NotFoundError(f"topic {topic} has no queue {queue_id}")


def rows_of(admin: Admin, progress: Iterable[QueueProgress], topics: Iterable[str]) -> list[dict[str, object]]:
    """A group's place and lag in each queue of these topics, as far as they are there.

    Messages that were removed are nobody's lag.
    """
    committed = {one.queue: one.committed for one in progress}
    ranges = admin.topic_ranges(sorted(topics))
    return [
        {
            "topic": topic,
            "queue": one.queue.queue_id,
            "committed": committed.get(one.queue, NOT_COMMITTED),
            "min_offset": one.min_offset,
            "max_offset": one.max_offset,
            "lag": max(one.max_offset - max(committed.get(one.queue, 0), one.min_offset), 0),
        }
        for topic in sorted(ranges)
        for one in ranges[topic]
    ]


def read_back(admin: Admin, topic: str, queue_id: int, first: int, end: int) -> tuple[list[Message], int]:
    """The messages of a queue from offset ``first`` up to ``end``, the newest first, and where the oldest begin.

    That is ``first``, unless they are too large for one answer. Raises ``DLedgerError``.
    """
    if first >= end:
        return [], first
    queue = MessageQueue(topic, broker_of(admin, topic), queue_id)
    found, ends = admin.newest(topic, {queue: end}, max_messages=end - first, queue=queue)
    return [one for one in found if one.queue_offset >= first], max(first, ends.get(queue, first))


def _ends_of(after: str) -> dict[int, int]:
    """By queue. Raises ``BadInputError`` for what no page said."""
    parts = after.split(".") if after else []
    if len(after) > CURSOR_CHARACTERS_MAX or not all(map(_CURSOR.fullmatch, parts)):
        raise BadInputError("after must be what the page before it said")
    return {int(queue): min(int(end), OFFSET_MAX) for queue, _, end in (one.partition("-") for one in parts)}


def _listed(messages: Iterable[Message]) -> list[dict[str, object]]:
    bodies = PlainBodies()
    return [_message_json(one, *bodies.of(one)) for one in messages]


def _message_json(message: Message, body: bytes, note: str) -> dict[str, object]:
    offset_id = offset_message_id(message.store_host, message.offset)
    return {
        "topic": message.topic,
        "queue": message.queue_id,
        "offset": message.queue_offset,
        "message_id": safe_text(message.unique_key)[:FIELD_MAX] or offset_id,
        "offset_message_id": offset_id,
        "tags": safe_text(message.tags)[:FIELD_MAX],
        "keys": safe_text(" ".join(message.keys))[:FIELD_MAX],
        "stored_ms": message.store_timestamp,
        "note": note,
        "preview": preview(body),
    }


def _whole(message: Message, body: bytes, note: str) -> dict[str, object]:
    properties = sorted(message.properties.items())
    return {
        **_message_json(message, body, note),
        "born_ms": message.born_timestamp,
        "born_host": host_text(message.born_host),
        "store_host": host_text(message.store_host),
        "position": message.offset,
        "size": message.size,
        "flag": message.flag,
        "sys_flag": message.sys_flag,
        "reconsume_times": message.reconsume_times,
        "properties": [[safe_text(name)[:FIELD_MAX], safe_text(value)[:FIELD_MAX]] for name, value in properties],
        "body": body_view(body),
    }


class LetterBrowser:
    """Messages that no consumer gets now: a group's dead letters, and those that wait for their delivery time.

    Thread-safe; raises ``DLedgerError``.
    """

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
        messages, first = read_back(self._admin, topic, 0, max(end - LETTERS_PAGE, low), end)
        bodies = PlainBodies()
        about: dict[str, object] = {"min_offset": low, "max_offset": high, "first": first}
        return {
            "group": group,
            "topic": topic,
            **about,
            "messages": [_dead(one, *bodies.of(one)) for one in messages],
        }

    def delayed(self, level: int, offset: int) -> dict[str, object]:
        """The delay levels; with a ``level``, a page of its messages from ``offset`` on (negative: the next ones)."""
        levels, messages = self._admin.delayed(level, max(offset, -1), max_messages=LETTERS_PAGE)
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
            "messages": [_delayed(one, *bodies.of(one), delays_ms[level]) for one in messages],
        }

    def timed(self, topic: str, key: str, from_ms: int, from_offset: int) -> dict[str, object]:
        """Messages that wait for a time of their own, from a place on, and where the next page begins.

        With a ``topic`` or ``key`` (or message id), those of some thousands that have it: maybe none, and more follow.
        """
        found = self._admin.timed(topic, key, from_ms, from_offset, max_messages=LETTERS_PAGE)
        return {
            "open": found.open,
            "late": found.late,
            "next_due_ms": found.next_due_ms,
            "next_ms": found.next_ms,
            "next_offset": found.next_offset,
            "messages": [
                {
                    "topic": safe_text(one.topic)[:FIELD_MAX],
                    "queue": one.queue,
                    "due_ms": one.due_ms,
                    "message_id": safe_text(one.message_id)[:FIELD_MAX],
                    "keys": safe_text(one.keys)[:FIELD_MAX],
                    "tags": safe_text(one.tags)[:FIELD_MAX],
                    "size": one.size,
                    "recall_handle": one.recall_handle,
                }
                for one in found.messages
            ],
        }


def _dead(message: Message, body: bytes, note: str) -> dict[str, object]:
    return {
        **_message_json(message, body, note),
        "origin": safe_text(message.properties.get(PROPERTY_RETRY_TOPIC, ""))[:FIELD_MAX],
        "deliveries": message.reconsume_times,
        "born_ms": message.born_timestamp,
    }


def _delayed(message: Message, body: bytes, note: str, delay_ms: int) -> dict[str, object]:
    queue = message.properties.get(PROPERTY_REAL_QUEUE_ID, "")
    return {
        **_message_json(message, body, note),
        "to_topic": safe_text(message.properties.get(PROPERTY_REAL_TOPIC, ""))[:FIELD_MAX],
        "to_queue": safe_text(queue)[:FIELD_MAX],
        "due_ms": message.store_timestamp + delay_ms,
    }


class EntryBrowser:
    """Reads entries of a log without brokers."""

    def __init__(self, target: GroupTarget) -> None:
        self._target = target

    def by_index(self, group: str, index: int, count: int) -> dict[str, object]:
        """Committed entries from ``index`` backwards, the newest first; a negative one is the end. Fewer if large."""
        with closing(replace(self._target, group=group).client()) as client:
            status = client.metadata()
            begin, last = max(status.begin_index, 0), status.committed_index
            newest = last if index < 0 else min(index, last)
            start = max(newest - count + 1, begin)
            # Read from the same member: another one may not know yet that these entries are committed.
            read = partial(client.read, count=count, max_bytes=ANSWER_BYTES_MAX, address=status.client_address or None)
            entries = read(start) if start <= newest else []
            while entries and entries[-1].index < newest:  # halving limits how much is read in vain
                start = max(entries[-1].index, (start + newest) // 2) + 1
                entries = read(start)
            shown = [_entry_json(one) for one in reversed(entries) if one.index <= newest]
        return {"begin": begin, "last": last, "entries": shown}

    def one(self, group: str, index: int) -> dict[str, object] | None:
        """All details of one entry."""
        with closing(replace(self._target, group=group).client()) as client:
            entries = client.read(index, count=1)
        if not entries or entries[0].index != index:
            return None
        return {**_entry_json(entries[0]), "body": body_view(entries[0].body)}


def _entry_json(entry: Entry) -> dict[str, object]:
    return {
        "index": entry.index,
        "term": entry.term,
        "position": entry.position,
        "kind": entry.magic.name,
        "preview": preview(entry.body),
    }
