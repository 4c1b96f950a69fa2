"""Dead letters and delayed messages as the page is told of them, from brokers that hold what no test waits for."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, cast

import pytest

from dledger_cli.console import browse
from dledger_cli.console.browse import LETTERS_PAGE, LetterBrowser, MessageBrowser
from rocketstore.client import Admin, Message, MessageQueue, NotFoundError, QueueRange, TopicInfo
from rocketstore.client.aio.admin_messages import Page
from rocketstore.client.aio.admin_requests import DelayLevelStatus, Traced
from rocketstore.message.message import SYS_FLAG_COMPRESSED

LEVEL = DelayLevelStatus(3, 10_000, 7, 9, 20_000)


class Brokers(Admin):
    """A group's dead letters from ``low`` to before ``end``, and ``late`` delayed messages."""

    def __init__(self, low: int = 0, end: int = 0, **properties: str) -> None:
        self.low, self.end, self.properties = low, end, properties
        self.body, self.sys_flag, self.late = b"x", 0, 1

    def topic(self, name: str) -> list[TopicInfo]:
        return [TopicInfo(name, 1, 1, broker="b")]

    def queue_ranges(self, topic: str) -> list[QueueRange]:
        assert topic == "%DLQ%g"
        return [QueueRange(MessageQueue(topic, "b", 0), self.low, self.end, 1)]

    def newest(
        self,
        topic: str,
        ends: Mapping[MessageQueue, int] | None = None,
        *,
        max_messages: int = 32,
        queue: MessageQueue | None = None,
        stored: tuple[int, int] = (0, 0),
        oldest_first: bool = False,
    ) -> Page:
        assert queue is not None
        end = (ends or {})[queue]
        first = max(end - max_messages, self.low)
        found = [
            Message(topic, self.body, properties=dict(self.properties), sys_flag=self.sys_flag, queue_offset=one)
            for one in range(end - 1, first - 1, -1)
        ]
        return Page(found, {queue: first} if first > self.low else {})

    def delayed(
        self, level: int = 0, offset: int = -1, *, max_messages: int = 32, broker: str = ""
    ) -> tuple[list[DelayLevelStatus], list[Message]]:
        late = Message("SCHEDULE_TOPIC_XXXX", self.body, properties=self.properties, sys_flag=self.sys_flag)
        late.born_timestamp, late.store_timestamp = 1, 5_000
        return [LEVEL], [late] * self.late if level == LEVEL.level else []


def test_dead_letters_that_were_removed_are_not_asked_for() -> None:
    """A page ends where the queue now begins, and says so: the page then has nothing older to offer."""
    brokers = Brokers(low=30, end=30 + LETTERS_PAGE + 5)

    newest: Any = LetterBrowser(brokers).dead("g", -1)
    older: Any = LetterBrowser(brokers).dead("g", newest["first"])

    assert (newest["min_offset"], newest["first"], older["first"]) == (30, 35, 30)
    assert [one["offset"] for one in older["messages"]] == [34, 33, 32, 31, 30]


def test_a_delayed_message_is_due_after_it_was_stored() -> None:
    """Not after its producer's clock says that it was made."""
    found: Any = LetterBrowser(Brokers()).delayed(LEVEL.level, -1)

    assert [one["due_ms"] for one in found["messages"]] == [5_000 + LEVEL.delay_ms]


def test_what_clients_have_written_hides_nothing() -> None:
    """Topics, keys and tags are whatever a producer has set."""
    hidden = "a\u202eb"
    properties = dict.fromkeys(("RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "TAGS", "KEYS", "UNIQ_KEY"), hidden)
    brokers = Brokers(0, 1, **properties)

    dead: Any = LetterBrowser(brokers).dead("g", -1)
    delayed: Any = LetterBrowser(brokers).delayed(LEVEL.level, -1)

    shown = "a\\u202eb"
    (letter,), (late,) = dead["messages"], delayed["messages"]
    assert {letter[name] for name in ("origin", "tags", "keys", "message_id")} == {shown}
    assert {late[name] for name in ("to_topic", "to_queue", "tags", "keys", "message_id")} == {shown}


def test_compressed_bodies_are_shown_decompressed() -> None:
    """As RocketMQ's producers send them."""
    brokers = Brokers(0, 1)
    brokers.body, brokers.sys_flag = zlib.compress(b"a long order"), SYS_FLAG_COMPRESSED

    dead: Any = LetterBrowser(brokers).dead("g", -1)
    delayed: Any = LetterBrowser(brokers).delayed(LEVEL.level, -1)

    shown = [one["preview"]["text"] for one in (*dead["messages"], *delayed["messages"])]
    assert shown == ["a long order"] * 2


def test_compressed_bodies_of_a_page_have_one_bound_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of twenty would otherwise become twenty times as much."""
    monkeypatch.setattr(browse, "PLAIN_BYTES_MAX", 1500)
    brokers = Brokers(0, 2)
    brokers.body, brokers.sys_flag, brokers.late = zlib.compress(b"x" * 1000), SYS_FLAG_COMPRESSED, 2

    dead: Any = LetterBrowser(brokers).dead("g", -1)
    delayed: Any = LetterBrowser(brokers).delayed(LEVEL.level, -1)

    for page in (dead, delayed):
        assert [one["preview"]["bytes"] for one in page["messages"]] == [1000, len(brokers.body)]


def test_a_trace_is_shown_without_anything_that_a_page_would_take_for_more() -> None:
    """Texts of clients are made printable and short; where nobody writes traces, there are no steps."""

    class Writing(Brokers):
        def trace(self, message_id: str, *, topic: str = "", begin_ms: int = 0) -> list[Traced]:
            return [Traced("sent", 5, 1, True, "g\x07" + "x" * 5000, "127.0.0.1", "here")]

    class Without(Brokers):
        def trace(self, message_id: str, *, topic: str = "", begin_ms: int = 0) -> list[Traced]:
            raise NotFoundError("no such topic")

    (step,) = cast("list[dict[str, Any]]", MessageBrowser(Writing()).trace("id")["steps"])
    assert (step["step"], step["cost_ms"], step["detail"]) == ("sent", 1, "here")
    assert step["group"].isprintable()
    assert len(step["group"]) < 5000
    assert MessageBrowser(Without()).trace("id") == {"message_id": "id", "steps": []}
