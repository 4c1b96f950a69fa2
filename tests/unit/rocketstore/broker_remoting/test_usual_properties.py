"""Ordinary properties are not taken apart, and end up as if they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketstore.broker_remoting.sends import usual_properties

SEGMENTS = ("WAIT\x01true", "WAIT\x01false", "WAIT\x01", "UNIQ_KEY\x017F00", "TAGS\x01a", "MYWAIT\x01true", "", "x")
UNUSUAL = ("CLUSTER\x01c", "DELAY\x013", "TRAN_MSG\x01true", "WAIT\x01trueish")


@given(st.lists(st.sampled_from(SEGMENTS + UNUSUAL), max_size=6))
def test_usual_properties_are_those_without_wait(segments: list[str]) -> None:
    text = "\x02".join(segments)

    found = usual_properties(text)

    if found is not None:
        assert found == "\x02".join(one for one in text.split("\x02") if one and not one.startswith("WAIT\x01"))
        assert not set(segments) & {*UNUSUAL, "WAIT\x01false"}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", ""),
        ("WAIT\x01true", ""),
        ("A\x01b\x02WAIT\x01true", "A\x01b"),
        ("WAIT\x01true\x02A\x01b", "A\x01b"),
        ("A\x01b\x02WAIT\x01true\x02C\x01d", "A\x01b\x02C\x01d"),
    ],
)
def test_what_producers_send_is_usual(text: str, left: str) -> None:
    assert usual_properties(text) == left


@pytest.mark.parametrize("text", [*UNUSUAL, "WAIT\x01false", "A\x01b\x02", "\x02A\x01b", "A\x01b\x02\x02C\x01d"])
def test_what_needs_more_is_not_usual(text: str) -> None:
    assert usual_properties(text) is None
