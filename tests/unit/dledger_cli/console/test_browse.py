"""Bodies leave the console as text that hides nothing, or as a hex dump, and never whole when they are large.

And queues of which messages were removed are shown as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from dledger_cli.console import browse
from dledger_cli.console.browse import PLAIN_BYTES_MAX, MessageBrowser, WantedMessages, read_back
from rocketstore.client import Admin, Message, MessageQueue, NotFoundError, QueueProgress, QueueRange, TopicInfo
from rocketstore.client.aio.admin_messages import Page
from rocketstore.client.aio.received import plain_body
from rocketstore.message.message import SYS_FLAG_COMPRESSED


class Brokers(Admin):
    """Two queues of which messages were removed: the first five, and those with odd offsets; a group is in one."""

    def __init__(self, fit: int = 100) -> None:
        """``fit``: so many messages fit into one answer."""
        self.fit = fit

    def topic(self, name: str) -> list[TopicInfo]:
        return [TopicInfo(name, 2, 2, broker="b")]

    def queue_ranges(self, topic: str) -> list[QueueRange]:
        return [QueueRange(queue_of(topic, number), 5, 12, 1) for number in range(2)]

    def topic_ranges(self, topics: Iterable[str]) -> dict[str, list[QueueRange]]:
        return {name: Brokers.queue_ranges(self, name) for name in topics}

    def groups_of_topic(self, topic: str) -> list[str]:
        return ["g", "gone"]

    def progress(self, group: str, topic: str = "") -> list[QueueProgress]:
        if group == "gone":
            raise NotFoundError("group gone has no offsets")
        return [QueueProgress(queue_of("T", 1), 8, 12, 1)]

    def offsets(self, group: str, topic: str = "") -> dict[MessageQueue, int]:
        return {one.queue: one.committed for one in self.progress(group, topic)}

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
        there = [one for one in range(10, 5, -2) if one < (ends or {})[queue]]
        shown = there[: min(max_messages, self.fit)]
        found = [Message(topic, b"x", queue.queue_id, queue_offset=one) for one in shown]
        return Page(found, {queue: shown[-1]} if len(shown) < len(there) else {})


class Many(Brokers):
    """A group that consumes many topics of four queues, and as many groups that consume one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.names = [f"name-{number:03}" for number in range(500)]

    def topic(self, name: str) -> list[TopicInfo]:
        self.requests += 1
        return [TopicInfo(name, 1000, 1000, broker="b")]

    def queue_ranges(self, topic: str) -> list[QueueRange]:
        self.requests += 1
        return super().queue_ranges(topic)

    def topic_ranges(self, topics: Iterable[str]) -> dict[str, list[QueueRange]]:
        self.requests += 1
        return {name: [QueueRange(queue_of(name, number), 0, 1, 1) for number in range(4)] for name in topics}

    def groups_of_topic(self, topic: str) -> list[str]:
        self.requests += 1
        return self.names

    def progress(self, group: str, topic: str = "") -> list[QueueProgress]:
        self.requests += 1
        topics = [topic] if topic else self.names
        return [QueueProgress(queue_of(name, number), 1, 1, 1) for name in topics for number in range(4)]


def queue_of(topic: str, number: int) -> MessageQueue:
    return MessageQueue(topic, "b", number)


def test_what_a_group_costs_does_not_grow_with_its_topics() -> None:
    """A page asks every few seconds while its row is open; and it is shown no more rows than it can take."""
    brokers = Many()
    found: Any = MessageBrowser(brokers).group("g")

    assert brokers.requests <= 3
    assert (len(found["rows"]), found["all_rows"]) == (browse.QUEUES_MAX, 2000)


def test_what_a_topic_costs_does_not_grow_with_its_queues_and_groups() -> None:
    """Groups that are left out of the table are counted."""
    brokers = Many()
    found: Any = MessageBrowser(brokers).topic("T")

    assert brokers.requests <= browse.COLUMNS_MAX + 4
    assert (len(found["groups"]), found["all_groups"]) == (browse.COLUMNS_MAX, 500)


def test_large_messages_are_read_back_as_far_as_one_answer_goes() -> None:
    """However large they are, so that looking at them takes little memory; the next page begins where they end."""
    brokers = Brokers(fit=2)

    (first, reached), (rest, end) = read_back(brokers, "T", 1, 5, 12), read_back(brokers, "T", 1, 5, 8)

    assert ([one.queue_offset for one in first], reached) == ([10, 8], 8)
    assert ([one.queue_offset for one in rest], end) == ([6], 5)


@pytest.mark.parametrize(("queues", "has_place"), [(500, True), (1000, False)])
def test_a_page_names_the_next_one_only_if_a_request_can(queues: int, has_place: bool) -> None:
    """Of a topic with very many queues it says that there are more, and no place that would be refused."""

    class Wide(Brokers):
        def newest(self, *_: object, **__: object) -> Page:
            return Page([], {queue_of("T", number): 10**9 for number in range(queues)})

    browser = MessageBrowser(Wide())

    page: Any = browser.by_time(WantedMessages("T"), 20)

    assert (bool(page["next"]), page["has_next"]) == (has_place, True)
    assert browser.by_time(WantedMessages("T", after=page["next"]), 20) is not None


def test_only_messages_of_a_span_are_read_back() -> None:
    """Also if those in between were removed, and brokers give older ones instead: these are on another page."""
    assert [one.queue_offset for one in read_back(Brokers(), "T", 0, 7, 9)[0]] == [8]
    assert [one.queue_offset for one in read_back(Brokers(), "T", 1, 5, 12)[0]] == [10, 8, 6]


def test_removed_dead_letters_are_not_counted() -> None:
    """Their number is what the page can show."""
    assert MessageBrowser(Brokers()).group("g")["dead_letters"] == 7


def test_a_queue_in_which_a_group_committed_nothing_has_no_place_of_it() -> None:
    """That is no offset 0; and a group that is gone meanwhile is not listed."""
    found: Any = MessageBrowser(Brokers()).topic("T")

    assert found["groups"] == {"g": [-1, 8]}
    assert [(one["min_offset"], one["max_offset"]) for one in found["queues"]] == [(5, 12)] * 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, tab\tand\nline", "plain, tab\tand\nline"),
        ("naïve ☕ 中文", "naïve ☕ 中文"),
        ("a\x1b[31mred", "a\\x1b[31mred"),
        ("abc\u202egnp.exe", "abc\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("line\u2028separator", "line\\u2028separator"),
        ("nul\x00", "nul\\x00"),
    ],
)
def test_characters_that_hide_or_reorder_are_escaped(text: str, shown: str) -> None:
    """Whatever a producer sent, what is seen is what is there."""
    assert browse.safe_text(text) == shown


def test_markup_stays_text() -> None:
    """The page sets textContent only; the server changes nothing of it."""
    attack = b"<img src=x onerror=alert(1)><script>alert(2)</script>"

    assert browse.body_view(attack)["text"] == attack.decode()


def test_bytes_that_are_no_text_are_shown_in_hex() -> None:
    """Offset, bytes, and the readable ones of them."""
    view = browse.body_view(bytes(range(256)))

    assert view["text"] is None
    assert str(view["hex"]).splitlines()[4] == f"00000040  {bytes(range(64, 80)).hex(' ')}  @ABCDEFGHIJKLMNO"
    assert browse.preview(b"\xff\xfe\x00")["text"] == "ff fe 00"


def test_a_large_body_is_cut_between_characters() -> None:
    """64 KiB of text, 4 KiB of hex, and how much there is."""
    body = "é".encode() * 100_000

    view = browse.body_view(b"x" + body)

    assert view["bytes"] == 200_001
    assert str(view["text"]).startswith("xéé")
    assert len(str(view["text"])) <= browse.TEXT_BYTES_MAX
    assert len(str(view["hex"]).splitlines()) == browse.HEX_BYTES_MAX // 16


def test_a_preview_is_one_short_line() -> None:
    """Lines and blanks become one blank."""
    shown = browse.preview(("{\n  " + "a" * 500).encode())

    assert str(shown["text"]).startswith("{ aaa")
    assert len(str(shown["text"])) == browse.PREVIEW_CHARACTERS


def test_an_empty_body_is_empty_text() -> None:
    """Neither hex nor an error."""
    assert browse.body_view(b"") == {"bytes": 0, "text": "", "text_bytes": 0, "hex": "", "hex_bytes": 0}


class Compressed(Admin):
    """Brokers with compressed messages, as RocketMQ's producers send them; ``found``: the newest first."""

    def __init__(self, *bodies: bytes, sys_flag: int = SYS_FLAG_COMPRESSED) -> None:
        self.found = [Message("T", zlib.compress(one), sys_flag=sys_flag) for one in bodies]

    def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 32,
        begin_ms: int = 0,
        end_ms: int = 0,
        unique: bool = False,
        broker: str = "",
    ) -> list[Message]:
        return self.found[::-1]

    def message_by_id(self, offset_id: str, broker: str = "") -> Message:
        return self.found[0]


@pytest.mark.parametrize("find", [lambda one: one.by_key("T", "k", unique=False), lambda one: one.by_id("id")])
def test_a_message_looks_the_same_however_it_is_found(find: Callable[[MessageBrowser], Any]) -> None:
    """Decompressed, as among the newest ones."""
    found = find(MessageBrowser(Compressed(b"a long order" * 100)))

    assert found["messages"][0]["preview"]["is_text"]
    assert found["messages"][0]["preview"]["text"].startswith("a long order")


def test_messages_that_grow_when_decompressed_have_a_bound_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer could make the console decompress gigabytes for each look at a page: the rest is shown as stored."""
    bomb = b"\0" * (PLAIN_BYTES_MAX // 2 - 1)
    inflated: list[int] = []

    def noted(message: Message, bytes_max: int) -> tuple[bytes, str]:
        body, note = plain_body(message, bytes_max)
        inflated.append(len(body))
        return body, note

    monkeypatch.setattr(browse, "plain_body", noted)

    found: Any = MessageBrowser(Compressed(*[bomb] * 3, b"small")).by_key("T", "k", unique=False)

    notes = [one["note"] for one in found["messages"]]
    assert notes[:2] == ["", ""]
    assert "larger than 2 bytes" in notes[2]
    assert "too large to decompress it as well" in notes[3]
    assert sum(inflated[:2]) < PLAIN_BYTES_MAX


def test_a_compression_that_is_not_known_hides_no_other_body() -> None:
    """It costs nothing, so it leaves the bound to the others."""
    brokers = Compressed(b"first", b"second")
    brokers.found[0].sys_flag |= 0x100  # LZ4

    found: Any = MessageBrowser(brokers).by_key("T", "k", unique=False)

    assert "LZ4" in found["messages"][0]["note"]
    assert found["messages"][1]["preview"]["text"] == "second"
