"""What a message says of itself through its properties."""

from __future__ import annotations

from dataclasses import replace

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


def test_arguments_become_properties_that_were_meant() -> None:
    """Beside those of the caller, whose dictionary stays as it was; without arguments nothing is added."""
    own = {"a": "b"}
    message = Message("t", b"", properties=own, tags="new", keys=["k1", "k2"], delay_level=3)

    assert message.properties == {"a": "b", "TAGS": "new", "KEYS": "k1 k2", "DELAY": "3"}
    assert message.meant == {"TAGS", "KEYS", "DELAY"}
    assert own == {"a": "b"}
    assert (message.tags, message.keys, message.delay_level) == ("new", ["k1", "k2"], 3)
    assert Message("t", b"", keys="k1 k2").keys == ["k1", "k2"]
    assert Message("t", b"", tags="", keys=[], delay_level=0).properties == {}


def test_a_copy_keeps_what_was_meant() -> None:
    message = replace(Message("t", b"", tags="new"), body=b"other")

    assert (message.body, message.tags) == (b"other", "new")
    assert message.meant == {"TAGS"}


def test_a_delay_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="invalid delay_level -1"):
        Message("t", b"", delay_level=-1)


def test_one_of_several_keys_has_no_blank() -> None:
    """Blanks separate keys: the message would be found by the parts of that key, and not by the key."""
    assert Message("t", b"", keys="order-17 alice").keys == ["order-17", "alice"]
    assert Message("t", b"", keys=iter(["order-17", "", "alice"])).keys == ["order-17", "alice"]
    with pytest.raises(ValueError, match="invalid key 'order 17': blanks separate keys"):
        Message("t", b"", keys=["alice", "order 17"])
