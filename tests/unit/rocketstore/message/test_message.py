"""What a message says of itself through its properties."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rocketstore.client.aio.outgoing import queue_number_of_key
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


ANY_QUEUE: Any = queue_number_of_key
ANY_MESSAGE: Any = Message  # as a program may call it that is not checked


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: ANY_MESSAGE("t", "text"), "body must be bytes, not str"),
        (lambda: ANY_MESSAGE("t", None), "body must be bytes, not NoneType"),
        (lambda: ANY_MESSAGE(b"t", b""), "topic must be a str, not bytes"),
        (lambda: ANY_MESSAGE("t", b"", keys=[1]), "keys must be a str or several, not int: 1"),
        (lambda: ANY_MESSAGE("t", b"", keys=7), "keys must be a str or several, not int: 7"),
        (lambda: ANY_MESSAGE("t", b"", tags=["a"]), "tags must be a str, not list"),
        (lambda: ANY_QUEUE(7, 4), "key must be a str, not int: 7"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_at_once(make: Callable[[], object], what: str) -> None:
    """Not by the first send, and by its name."""
    with pytest.raises(TypeError, match=re.escape(what)):
        make()


@pytest.mark.parametrize("tags", ["a||b", "a || b", "*", " a", "a\t"])
def test_tags_that_no_subscription_can_name_are_refused(tags: str) -> None:
    with pytest.raises(ValueError, match="invalid tags"):
        Message("t", b"", tags=tags)


@pytest.mark.parametrize("level", [19, 99, "3"])
def test_a_delay_level_that_does_not_exist_is_refused(level: object) -> None:
    """Brokers would take it for their highest one."""
    with pytest.raises(ValueError, match="use 1 to 18"):
        ANY_MESSAGE("t", b"", delay_level=level)
    assert Message("t", b"", delay_level=18).delay_level == 18


def test_other_bytes_are_a_body() -> None:
    """Whatever joins like bytes."""
    assert [len(ANY_MESSAGE("t", one).body) for one in (b"x", bytearray(b"x"), memoryview(b"x"))] == [1, 1, 1]
