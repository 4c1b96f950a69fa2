"""Bodies leave the console as text that hides nothing, or as a hex dump, and never whole when they are large.

And queues of which messages were removed are shown as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cluster.console import browse
from cluster.console.browse import MessageBrowser, read_back
from rocketstore.client import Admin, Message, QueueProgress, QueueRange, ReceivedMessage, TopicInfo
from rocketstore.client.received import split_records
from rocketstore.message.record import encode_record


class Brokers(Admin):
    """Two queues of which messages were removed: the first five, and those with odd offsets; a group is in one."""

    def __init__(self) -> None:
        pass

    def topic(self, name: str) -> TopicInfo:
        return TopicInfo(name, 2, 2)

    def queue_ranges(self, topic: str) -> list[QueueRange]:
        return [self.queue_range(topic, queue) for queue in range(2)]

    def queue_range(self, topic: str, queue_id: int) -> QueueRange:
        return QueueRange(queue_id, 5, 12, 1)

    def groups(self) -> list[str]:
        return ["elsewhere", "g"]

    def group_offsets(self, groups: Sequence[str]) -> dict[str, dict[tuple[str, int], int]]:
        return {group: {("T" if group == "g" else "other", 1): 8} for group in groups}

    def progress(self, group: str, topic: str = "") -> list[QueueProgress]:
        return []

    def messages(
        self, topic: str, queue_id: int, offset: int, *, max_messages: int = 32, tags: str = "*"
    ) -> tuple[list[ReceivedMessage], int]:
        there = [one for one in range(6, 12, 2) if one >= offset][:max_messages]
        records = [encode_record(Message(topic, b"x", queue_id), queue_offset=one) for one in there]
        return split_records(b"".join(records)), there[-1] + 1 if there else offset


def test_messages_of_a_queue_are_read_up_to_an_end() -> None:
    """Also if those in between were removed, and brokers give later ones instead: these are on another page."""
    assert [one.queue_offset for one in read_back(Brokers(), "T", 0, 5, 9)] == [8, 6]
    assert [one.queue_offset for one in read_back(Brokers(), "T", 0, 5, 12)] == [10, 8, 6]


def test_removed_dead_letters_are_not_counted() -> None:
    """Their number is what the page can show."""
    assert MessageBrowser(Brokers()).group("g")["dead_letters"] == 7


def test_a_queue_in_which_a_group_committed_nothing_has_no_place_of_it() -> None:
    """That is no offset 0; and a group without any in the topic is not listed."""
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
