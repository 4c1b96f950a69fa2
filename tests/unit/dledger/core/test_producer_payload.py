"""What NOOPs tell of producers: bytes, damage, and the form that people read."""

from __future__ import annotations

import pytest

from dledger.core.noop_payload import (
    ProducerRecord,
    ProducerSnapshot,
    Registration,
    UnreadablePayloadError,
    decode_payload,
    encode_registration,
    encode_snapshot,
)
from dledger.core.noops import describe_payload
from tests.support.producers import newer_payload


def test_payloads_have_these_bytes() -> None:
    """The layout of ``docs/formats.md``."""
    snapshot = encode_snapshot(5, [ProducerRecord("ab", 4, 7, 9, ((0, 3, 5), (5, 11, 2)))])

    assert snapshot.hex(" ") == (
        "89 44 4c 50 52 4f 44 0a 01 01 00 00 00 48 "
        "00 00 00 05 00 00 00 01 "
        "02 02 00 00 00 04 00 00 00 00 00 00 00 07 00 00 00 00 00 00 00 09 61 62 "
        "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 03 00 00 00 05 "
        "00 00 00 00 00 00 00 05 00 00 00 00 00 00 00 0b 00 00 00 02"
    )
    assert encode_registration(Registration("ab", 4, 3)).hex(" ") == (
        "89 44 4c 50 52 4f 44 0a 01 02 00 00 00 0b 00 00 00 04 00 00 00 03 02 61 62"
    )


def test_a_payload_is_found_inside_a_record_and_nothing_in_other_bodies() -> None:
    """A broker's NOOP is a record of its own."""
    payload = encode_registration(Registration("p", 1))

    assert decode_payload(b"record" + payload + b"topic") == Registration("p", 1)
    assert decode_payload(b"") is None
    assert decode_payload(b"begins a term") is None


@pytest.mark.parametrize("at", range(9, 60))
def test_damaged_payloads_are_refused_or_mean_another_sound_one(at: int) -> None:
    """Nothing but the named error comes out of any change of one byte."""
    payload = encode_snapshot(5, [ProducerRecord("ab", 4, 7, 9, ((0, 3, 5),)), ProducerRecord("c", 2, 0, 0, ())])
    for value in (0, 1, 255):
        changed = bytearray(payload)
        changed[at] = value
        for data in (bytes(changed), bytes(changed[:at])):
            try:
                found = decode_payload(data)
            except UnreadablePayloadError:
                continue
            assert isinstance(found, ProducerSnapshot)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", ""),
        (encode_snapshot(1, []), "0 producers"),
        (encode_registration(Registration("p", 1)), "producer p from here on, slot 1"),
        (newer_payload(), "version 2"),
    ],
)
def test_what_a_no_op_tells_can_be_shown(body: bytes, text: str) -> None:
    """Instead of its bytes."""
    assert text in describe_payload(body)
