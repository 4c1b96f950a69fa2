"""Handles say themselves what they are for, and nothing else is one (P5)."""

from __future__ import annotations

import random

import pytest

from rocketstore.pop.operations import HANDLE_CHARS_MAX, Handle, InvalidHandleError, decode_handle, encode_handle

HANDLES = (
    Handle("group", "T", False, 0, 0, 1, 1, 1),
    Handle("g" * 127, "t" * 127, True, 65_535, 2**62, 65_535, 2**62, 2**62),
)


@pytest.mark.parametrize("handle", HANDLES)
def test_a_handle_comes_back_as_it_was_written(handle: Handle) -> None:
    text = encode_handle(handle)
    assert decode_handle(text) == handle
    assert len(text) <= HANDLE_CHARS_MAX
    assert text.isascii()
    assert not set(text) & set(" +/=")


def test_an_attempt_that_is_too_high_is_cut() -> None:
    assert decode_handle(encode_handle(HANDLES[0]._replace(attempt=70_000))).attempt == 65_535


@pytest.mark.parametrize("handle", HANDLES)
def test_every_changed_character_is_noticed(handle: Handle) -> None:
    text = encode_handle(handle)
    whole = len(text) // 4 * 4  # the last one may have bits that mean nothing
    for at in range(whole):
        spoilt = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
        with pytest.raises(InvalidHandleError):
            decode_handle(spoilt)


@pytest.mark.parametrize("text", ["", "A", "AAAA", "?", "ä", "A" * 513, "A" * 512, " " * 40])
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(InvalidHandleError):
        decode_handle(text)


def test_random_texts_are_refused() -> None:
    choose = random.Random(3)
    for _ in range(2000):
        text = "".join(choose.choices("ABCDEFabcdef0123-_", k=choose.randint(0, 120)))
        with pytest.raises(InvalidHandleError):
            decode_handle(text)
