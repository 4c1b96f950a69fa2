"""Recall handles: RocketMQ's clients read them, and nobody else's text is taken for one."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest

from rocketstore.message.timed import RecallHandle, WrongHandleError, decode_handle


def test_a_handle_is_read_as_it_was_made_and_has_rocketmqs_first_five_words() -> None:
    """T5. RocketMQ 5.x decodes "v1 topic broker timestamp id", and ignores what follows."""
    handle = RecallHandle("T", "broker-a", 1_800_000_000_000, "0A0B", 17)
    assert decode_handle(handle.encode()) == handle
    assert urlsafe_b64decode(handle.encode()).split()[:5] == [b"v1", b"T", b"broker-a", b"1800000000000", b"0A0B"]


@pytest.mark.parametrize(
    "text", ["", "x", "é", "v1 T b 1 i 2", "A" * 5000, *("v2 T b 1 i 2", "v1 T b 1 i", "v1 T b x i 2")]
)
def test_other_texts_are_refused(text: str) -> None:
    encoded = urlsafe_b64encode(text.encode()).decode() if text.startswith(("v1", "v2")) and text[-1] != "2" else text
    with pytest.raises(WrongHandleError):
        decode_handle(encoded)
