"""Signatures: those that RocketMQ's programs sent, and what must not pass for one."""

from __future__ import annotations

import pytest

from dledger.remoting.frame import (
    ACCESS_KEY,
    SECURITY_TOKEN,
    SIGNATURE,
    UNIQUE_KEY_QUERY,
    HeaderForm,
    decode,
    encode,
    is_signed,
    signature,
    signed,
)
from tests.unit.rocketstore.remoting.golden_frames import CPP, GOLDEN

SIGNED = {name: one.frame for name, one in GOLDEN.items() if SIGNATURE in one.frame.fields}
SECRET = "12345678"
FIELDS = {"b": "2", "a": "1", "B": "3"}


def _secret(name: str) -> str:
    """The C++ client signs always, with an empty key unless it was given one."""
    return "" if name in CPP else SECRET


def test_all_signed_frames_are_there() -> None:
    """Of mqadmin, and of C++."""
    assert set(SIGNED) == {"F3", "F5", "F9", "F57", "F60", "F62", "F64"} | CPP


@pytest.mark.parametrize("name", SIGNED)
def test_a_captured_signature_is_computed_again(name: str) -> None:
    """With its key, and with no other."""
    frame = SIGNED[name]
    assert signature(_secret(name), frame.fields, frame.body) == frame.fields[SIGNATURE]
    assert is_signed(_secret(name), frame.fields, frame.body)
    assert not is_signed("87654321", frame.fields, frame.body)
    assert not is_signed(_secret(name), frame.fields, frame.body + b"\n")


@pytest.mark.parametrize("name", SIGNED)
def test_a_captured_signature_holds_in_a_binary_header_too(name: str) -> None:
    """Where empty texts are lost on the way."""
    frame = decode(memoryview(encode(SIGNED[name]._replace(form=HeaderForm.BINARY))))
    assert is_signed(_secret(name), frame.fields, frame.body)


def test_the_text_has_the_values_by_name_and_then_the_body() -> None:
    """Capitals first; the signature itself left out."""
    expected = signature(SECRET, {}, b"312body")
    assert signature(SECRET, FIELDS, b"body") == signature(SECRET, {**FIELDS, SIGNATURE: "x"}, b"body") == expected


def test_names_are_sorted_as_java_does() -> None:
    """A surrogate pair comes before the last characters of the basic plane."""
    assert signature(SECRET, {"\uffee": "2", "\U0001f600": "1"}, b"") == signature(SECRET, {}, b"12")


def test_a_signature_of_an_older_client_leaves_the_kind_of_query_out() -> None:
    """Both texts are taken, and no third."""
    asked = {**FIELDS, UNIQUE_KEY_QUERY: "true"}
    with_it, without_it = signature(SECRET, asked, b""), signature(SECRET, FIELDS, b"")
    assert with_it != without_it
    for found, expected in ((with_it, True), (without_it, True), (signature(SECRET, {}, b""), False)):
        assert is_signed(SECRET, {**asked, SIGNATURE: found}, b"") is expected
    assert not is_signed(SECRET, {**FIELDS, SIGNATURE: with_it}, b"")


@pytest.mark.parametrize("found", [None, "", "x", "\u00e9", signature(SECRET, FIELDS, b"")[:-1]])
def test_what_is_no_signature_is_refused(found: str | None) -> None:
    """Whatever it is."""
    fields = FIELDS if found is None else {**FIELDS, SIGNATURE: found}
    assert not is_signed(SECRET, fields, b"")


def test_what_we_sign_is_signed() -> None:
    """With a token, and without; the fields that were given stay as they are."""
    fields = signed(FIELDS, b"body", "key", SECRET)
    assert fields == {**FIELDS, ACCESS_KEY: "key", SIGNATURE: signature(SECRET, {**FIELDS, ACCESS_KEY: "key"}, b"body")}
    assert is_signed(SECRET, fields, b"body")
    with_token = signed(FIELDS, b"body", "key", SECRET, "token")
    assert with_token[SECURITY_TOKEN] == "token"
    assert is_signed(SECRET, with_token, b"body")
    assert not is_signed(SECRET, {**with_token, SECURITY_TOKEN: "other"}, b"body")
    assert set(FIELDS) == {"a", "b", "B"}


def test_what_java_signed_is_signed_alike() -> None:
    """The fields that mqadmin sent, from those that it was asked for."""
    frame = SIGNED["F60"]
    plain = {name: text for name, text in frame.fields.items() if name not in {ACCESS_KEY, SIGNATURE}}
    assert signed(plain, frame.body, "rocketmq2", SECRET) == frame.fields
