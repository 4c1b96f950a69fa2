"""What a message says of itself through its properties."""

from __future__ import annotations

import pytest

from rocketstore.message.message import Message


def test_tags_keys_and_ids_come_from_the_properties() -> None:
    """Keys are separated by spaces."""
    message = Message("t", b"", properties={"TAGS": "a", "KEYS": "k1  k2 ", "UNIQ_KEY": "u"})

    assert (message.tags, message.keys, message.unique_key) == ("a", ["k1", "k2"], "u")
    assert (Message("t", b"").tags, Message("t", b"").keys, Message("t", b"").unique_key) == ("", [], "")


@pytest.mark.parametrize(
    ("text", "level"), [("3", 3), ("30", 30), ("0", 0), ("-1", 0), ("x", 0), ("\xb2", 0), ("9" * 5000, 0)]
)
def test_a_delay_level_that_is_no_number_means_no_delay(text: str, level: int) -> None:
    """Producers set this property; nothing they write there may raise."""
    assert Message("t", b"", properties={"DELAY": text}).delay_level == level
