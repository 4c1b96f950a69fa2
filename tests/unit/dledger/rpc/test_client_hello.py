"""What a TLS client says first, as OpenSSL says it and as nobody should."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.rpc.client_hello import protocols_offered


def hello(*protocols: str, name: str = "broker") -> bytes:
    """The first bytes of a real client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def in_records(whole: bytes, size: int) -> bytes:
    """The same hello in records of this size."""
    body = whole[5:]
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)


def with_body(body: bytes) -> bytes:
    """A record with a hello of this content."""
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


START = b"\x03\x03" + bytes(32) + b"\0" + b"\0\2\x13\x01" + b"\1\0"
"""A hello's content before its extensions."""
MADE = with_body(START + b"\0\x09\0\x10\0\5\0\3\2h2")
"""One that is the same in every run."""


@pytest.mark.parametrize("protocols", [(), ("h2",), ("grpc-exp", "h2"), ("http/1.1",)])
def test_what_a_client_offers_is_found(protocols: tuple[str, ...]) -> None:
    """In one record, in several, and with something behind it."""
    whole = hello(*protocols)
    expected = tuple(one.encode() for one in protocols)
    assert protocols_offered(whole) == expected
    assert protocols_offered(whole + b"more") == expected
    assert protocols_offered(in_records(whole, 100)) == expected


def test_as_long_as_it_is_not_whole_it_says_how_much_it_takes() -> None:
    """Always more than there is, and never more than there will be: so it is asked but a few times."""
    for whole in (hello("h2"), in_records(hello("h2"), 120)):
        for cut in range(len(whole)):
            wanted = protocols_offered(whole[:cut])
            if isinstance(wanted, int):
                assert cut < wanted <= len(whole)
        known, asked = 0, 0
        while isinstance(found := protocols_offered(whole[:known]), int):
            known, asked = found, asked + 1
        assert found == (b"h2",)
        assert asked <= 2 * whole.count(b"\x16\x03\x01") + 1


def test_a_hello_of_an_old_client_has_no_extensions() -> None:
    """TLS 1.2 allows that; such a client offers nothing."""
    assert protocols_offered(with_body(START)) == ()


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"\x17\x03\x03\0\1x", "not a TLS handshake"),
        (b"\x16\x03\x01\0\0", "not a TLS handshake"),
        (b"\x16\x03\x01\xff\xff", "not a TLS handshake"),
        (b"\x16\x03\x01\0\4\x02\0\0\0", "not a ClientHello"),
        (b"\x16\x03\x01\0\4\x01\xff\xff\xff", "more than 16 KiB"),
        (with_body(b""), "ends too early"),
        (with_body(START + b"\0\7\0\x10\0\5\0\3\2h2"), "ends too early"),
        (with_body(START + b"\0\x09\0\x10\0\5\0\3\7h2"), "ends too early"),
        (in_records(MADE, 5), "in many pieces"),
    ],
    ids=["data", "empty record", "long record", "server", "long", "empty", "extensions", "name", "pieces"],
)
def test_what_is_no_hello_is_told(head: bytes, why: str) -> None:
    """Whatever length it claims, nobody waits for it."""
    with pytest.raises(ValueError, match=why):
        protocols_offered(head)


@given(st.binary(max_size=200), st.integers(0, 70), st.binary(max_size=8))
def test_whatever_comes_is_answered(noise: bytes, at: int, patch: bytes) -> None:
    """With names, a number, or a ``ValueError``: never anything else."""
    whole = MADE
    for head in (b"\x16\x03\x01" + noise, whole[:at] + patch + whole[at + len(patch) :], with_body(START + noise)):
        try:
            found = protocols_offered(head)
        except ValueError:
            continue
        assert isinstance(found, tuple) or found > len(head)
