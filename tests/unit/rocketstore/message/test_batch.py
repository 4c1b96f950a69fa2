"""Batches as they travel."""

from __future__ import annotations

from dataclasses import replace
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.errors import InvalidRequestError
from rocketstore.message.batch import (
    BATCH_MESSAGES_MAX,
    BatchItem,
    CorruptBatchError,
    decode_batch,
    encode_batch,
    expand_batch,
)
from rocketstore.message.message import Message
from rocketstore.message.properties import decode_properties
from tests.unit.rocketstore.message.samples import MESSAGES, golden_message

GOLDEN = bytes.fromhex("0000001B0000000000000000000000010000000268690003780179")


def test_an_item_has_rocketmqs_bytes() -> None:
    """Golden bytes made by RocketMQ 4.9.8."""
    assert encode_batch([Message("t", b"hi", flag=1, properties={"x": "y"})]) == GOLDEN
    assert decode_batch(GOLDEN) == [BatchItem(1, b"hi", {"x": "y"})]


@given(st.lists(MESSAGES, max_size=5))
def test_every_batch_is_read_back(messages: list[Message]) -> None:
    """Flag, body and properties of each message, in order."""
    items = decode_batch(encode_batch(messages))

    assert items == [BatchItem(message.flag, message.body, message.properties) for message in messages]


def test_messages_get_from_the_batch_what_items_do_not_say() -> None:
    """The batch's properties are appended to each message's, later ones win, and nothing is prepared."""
    batch = replace(golden_message(), body=GOLDEN * 2, properties={"x": "z", "WAIT": "false"})

    expected = replace(batch, body=b"hi", flag=1, properties={"x": "z", "WAIT": "false"}, prepared_offset=0)
    messages = expand_batch(batch)
    assert messages == [expected, expected]
    assert messages[0].properties is not messages[1].properties


@pytest.mark.parametrize(
    "encoded",
    [
        *(GOLDEN[:cut] for cut in range(1, len(GOLDEN))),
        GOLDEN + b"\0",
        bytes(27),
        pack(">i", 21) + GOLDEN[4:],
        pack(">i", 26) + GOLDEN[4:],
        pack(">i", 28) + GOLDEN[4:],
        pack(">i", -1) + GOLDEN[4:],
        GOLDEN[:16] + pack(">i", -1) + GOLDEN[20:],
        GOLDEN[:16] + pack(">i", 6) + GOLDEN[20:],
        GOLDEN[:16] + pack(">i", 2**31 - 1) + GOLDEN[20:],
        GOLDEN[:22] + pack(">h", -1) + GOLDEN[24:],
        pack(">ihhiiih", 22, 16, 0, 0, 0, -16, 0),
        GOLDEN[:22] + pack(">h", 2) + GOLDEN[24:],
    ],
)
def test_bytes_that_are_no_whole_items_are_refused(encoded: bytes) -> None:
    """Cut anywhere, or with lengths that do not add up."""
    with pytest.raises(CorruptBatchError):
        decode_batch(encoded)


@given(st.binary(max_size=80), st.integers(0, len(GOLDEN) - 1), st.integers(0, 255))
def test_any_bytes_are_read_or_refused(data: bytes, at: int, value: int) -> None:
    """With no other error."""
    for encoded in (data, GOLDEN + data, GOLDEN[:at] + bytes((value,)) + GOLDEN[at + 1 :]):
        try:
            decode_batch(encoded)
        except CorruptBatchError:
            continue


@pytest.mark.parametrize(
    "message",
    [
        Message("t", b"", flag=2**31),
        Message("t", b"", properties={"a": "b" * 32_766}),
        Message("t", b"", properties={"": "b"}),
    ],
)
def test_what_no_item_can_hold_is_refused(message: Message) -> None:
    """With an error that callers expect."""
    with pytest.raises(InvalidRequestError):
        encode_batch([message])


TEXTS = st.text(st.sampled_from("aDELAY\x01\x02é"), max_size=12)


@given(st.lists(st.one_of(TEXTS.map(str.encode), st.binary(max_size=6)), max_size=4), st.sampled_from(["x", "DELAY"]))
def test_a_property_string_of_the_batch_means_the_same(own: list[bytes], name: str) -> None:
    """Whatever the items' strings look like, with and without a final 0x02."""
    items = [pack(">iiiii", 22 + len(one), 0, 0, 0, 0) + pack(">h", len(one)) + one for one in own]
    batch = Message("t", b"".join(items), properties={name: "1", "CLUSTER": "c"})
    joined = replace(batch, properties={}, property_string=f"{name}\x011\x02CLUSTER\x01c".encode())

    if any("DELAY" in decode_properties(one) for one in own):
        for each in (batch, joined):
            with pytest.raises(CorruptBatchError, match="cannot have the property DELAY"):
                expand_batch(each)
        return
    for split, appended in zip(expand_batch(batch), expand_batch(joined), strict=True):
        assert bool(appended.properties) != bool(appended.property_string)
        assert (appended.properties or decode_properties(appended.property_string)) == split.properties
        assert "DELAY" not in decode_properties(appended.property_string)


def item(properties: bytes = b"") -> bytes:
    """One without a body."""
    return pack(">iiiiih", 22 + len(properties), 0, 0, 0, 0, len(properties)) + properties


@pytest.mark.parametrize("name", ["TRAN_MSG", "DELAY", "REAL_TOPIC", "REAL_QID"])
def test_what_only_a_message_by_itself_can_mean_is_refused(name: str) -> None:
    """A stored message would claim to be delayed, or half of a transaction, or to belong to another topic."""
    for text in (f"{name}\x01true", f"a\x01b\x02{name}\x01x\x02", f"a\x01{name}\x02{name}\x011"):
        with pytest.raises(CorruptBatchError, match=name):
            expand_batch(Message("t", item() + item(text.encode())))
    for text in (f"a\x01{name}", f"X{name}\x01true", name):  # part of something else
        assert len(expand_batch(Message("t", item(text.encode())))) == 1


def test_a_batch_has_so_many_messages_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused before any is made, whatever comes after it."""
    made = list[bytes]()

    def decode(data: bytes) -> dict[str, str]:
        made.append(data)
        return {}

    monkeypatch.setattr("rocketstore.message.batch.decode_properties", decode)
    assert len(expand_batch(Message("t", item() * BATCH_MESSAGES_MAX))) == BATCH_MESSAGES_MAX
    made.clear()
    for rest in (item(b"a\x01b"), item() * 700_000, b"garbage"):
        with pytest.raises(CorruptBatchError, match=f"more than {BATCH_MESSAGES_MAX} messages"):
            decode_batch(item(b"a\x01b") * BATCH_MESSAGES_MAX + rest)
    assert made == []


@pytest.mark.parametrize("is_text", [True, False])
def test_each_message_of_a_batch_keeps_its_own_unique_key(is_text: bool) -> None:
    """Java's producer gives the batch one, too: by that, none could be found."""
    own = [b"UNIQ_KEY\x01one\x02TAGS\x01a", b"TAGS\x01b"]
    items = [pack(">iiiii", 22 + len(one), 0, 0, 0, 0) + pack(">h", len(one)) + one for one in own]
    properties = {"UNIQ_KEY": "batch", "TAGS": "c"}
    text = b"UNIQ_KEY\x01batch\x02TAGS\x01c"
    batch = Message(
        "t", b"".join(items), properties={} if is_text else properties, property_string=text if is_text else b""
    )

    found = [one.properties or decode_properties(one.property_string) for one in expand_batch(batch)]
    assert [(one["UNIQ_KEY"], one["TAGS"]) for one in found] == [("one", "c"), ("batch", "c")]


def test_a_property_string_is_usually_appended() -> None:
    """Splitting and joining the properties of each message costs more than everything else about it."""
    batch = Message("t", GOLDEN, property_string=b"CLUSTER\x01c")

    (message,) = expand_batch(batch)
    assert (message.property_string, message.properties) == (b"x\x01y\x02CLUSTER\x01c", {})
