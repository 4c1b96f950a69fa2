"""Properties that only brokers set are taken out of clients' messages, and no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketstore.message.message import Message
from rocketstore.message.properties import _OF_RETRIES, BROKER_ONLY, decode_properties, is_broker_only, take_out

NAMES = sorted(BROKER_ONLY | _OF_RETRIES)
OTHERS = [
    "TAGS",
    "KEYS",
    "UNIQ_KEY",
    "TIMER_DELAY_SEC",
    "TRAN_MSG",
    "MY_ORIGIN",
    "POP_ORIGINAL",
    "TRACE_CONTEXT",
    "x",
    "é",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", ["", "A\x01b\x02"])
def test_each_name_is_found_wherever_it_is(name: str, before: str) -> None:
    """Only texts that may have one are taken apart."""
    message = Message("T", b"")
    message.property_string = f"{before}{name}\x01v".encode()
    take_out(message)
    assert message.property_string == before[:-1].encode()


@pytest.mark.parametrize("as_text", [True, False])
@given(st.lists(st.sampled_from(NAMES + OTHERS), max_size=6), st.sampled_from(["T", "%RETRY%g", "%DLQ%g"]))
def test_the_others_stay(as_text: bool, names: list[str], topic: str) -> None:
    """Whichever form they have; a message to be retried may say where it was, as RocketMQ's clients do."""
    given = {name: f"of {name}" for name in names}
    message = Message(topic, b"", properties={} if as_text else given)
    if as_text:
        message.property_string = "\x02".join(f"{name}\x01{value}" for name, value in given.items()).encode()
    take_out(message)
    found = decode_properties(message.property_string) if as_text else message.properties
    assert found == {name: value for name, value in given.items() if not is_broker_only(name, topic)}
    assert not found.keys() & BROKER_ONLY
    assert topic != "T" or not found.keys() & _OF_RETRIES


def test_a_repeated_or_broken_segment_hides_nothing() -> None:
    """Readers take the last of two, and skip segments without a value."""
    message = Message("T", b"")
    message.property_string = (
        b"\x02\x02POP_ORIGIN\x01a\x02\xffPOP_ORIGIN\x01b\x02POP_ORIGIN\x01c\x02A\x01POP_ORIGIN\x02POP_ORIGIN"
    )
    take_out(message)
    assert "POP_ORIGIN" not in decode_properties(message.property_string)
    assert decode_properties(message.property_string)["A"] == "POP_ORIGIN"
