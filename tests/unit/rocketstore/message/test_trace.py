"""Traces of messages, in the format of RocketMQ's clients."""

from __future__ import annotations

import pytest

from rocketstore.message.message import SYS_FLAG_PREPARED, Message
from rocketstore.message.trace import (
    ConsumedTrace,
    EndedTrace,
    ReceivedTrace,
    SentTrace,
    Trace,
    decode_traces,
    encode_traces,
    keys_of,
    kind_number,
)

ID = "7F0000011F9018B4AAC24DD5B1B70000"
SENT = SentTrace(ID, 1000, 3, True, "orders", "G", "new", "k1 k2", "10.0.0.1:10911", 17, 3, "0A000001")
RECEIVED = ReceivedTrace(ID, 2000, "r1", "readers", 2, "k1 k2")
CONSUMED = ConsumedTrace(ID, 2100, 100, False, "r1", "readers")
ENDED = EndedTrace(ID, 1500, "COMMIT_MESSAGE", "orders", "G", "", "k1", "10.0.0.1:10911", "t1", True)
ALL: tuple[Trace, ...] = (SENT, RECEIVED, CONSUMED, ENDED)
AS_JAVA = {
    SENT: f"Pub\x011000\x01DefaultRegion\x01G\x01orders\x01{ID}\x01new\x01k1 k2\x0110.0.0.1:10911\x0117\x013\x013"
    "\x010A000001\x01true\x02",
    RECEIVED: f"SubBefore\x012000\x01DefaultRegion\x01readers\x01r1\x01{ID}\x012\x01k1 k2\x02",
    CONSUMED: f"SubAfter\x01r1\x01{ID}\x01100\x01false\x01null\x014\x012100\x01readers\x02",
    ENDED: f"EndTransaction\x011500\x01DefaultRegion\x01G\x01orders\x01{ID}\x01null\x01k1\x0110.0.0.1:10911\x012"
    "\x01t1\x01COMMIT_MESSAGE\x01true\x02",
}


@pytest.mark.parametrize("trace", ALL)
def test_a_trace_is_written_as_javas_clients_write_it(trace: Trace) -> None:
    """Field by field, for its tools read them by position; and it comes back as it was."""
    assert encode_traces([trace]) == AS_JAVA[trace].encode()
    assert decode_traces(encode_traces([trace])) == [trace]


@pytest.mark.parametrize("trace", ALL)
def test_no_last_field_is_empty(trace: Trace) -> None:
    """Java's ``split`` leaves out empty fields at the end, and its decoder then reads beyond the others."""
    assert all(record.split("\x01")[-1] for record in encode_traces([trace]).decode().split("\x02")[:-1])
    assert encode_traces([ReceivedTrace(ID, 1, "r", "g")]).decode().endswith("\x01null\x02")


def test_several_traces_are_in_one_body_and_what_is_none_is_left_out() -> None:
    """Of older releases, which write fewer fields, too: nothing in a body of others makes reading fail."""
    body = encode_traces(ALL)
    damaged = b"Pub\x01x\x02SubBefore\x02SubAfter\x01r\x01i\x01-5\x01true\x01k\x02Other\x011\x02\xff\xfe\x02"
    assert decode_traces(body + damaged) == list(ALL)
    assert decode_traces(b"") == []
    old = f"SubAfter\x01r1\x01{ID}\x01100\x01true\x01k\x010\x02".encode()
    assert decode_traces(old) == [ConsumedTrace(ID, 0, 100, True, "r1", "", "k")]


def test_marks_in_names_do_not_make_other_records() -> None:
    """Else an application could forge traces by the keys of its messages."""
    forged = SentTrace(ID, 1, 1, True, "t", "g", "a\x02Pub\x01b", "k\x01k")
    (found,) = decode_traces(encode_traces([forged]))
    assert isinstance(found, SentTrace)
    assert (found.tags, found.keys) == ("a Pub b", "k k")


def test_a_trace_is_found_by_the_id_and_each_key() -> None:
    assert list(keys_of(SENT)) == [ID, "k1", "k2"]
    assert list(keys_of(CONSUMED)) == [ID]


def test_the_kinds_of_messages_have_rocketmqs_numbers() -> None:
    half = Message("t", b"", sys_flag=SYS_FLAG_PREPARED)
    kinds = [Message("t", b""), half, Message("t", b"", delay_level=1), Message("t", b"", message_group="g")]
    assert [kind_number(one) for one in kinds] == [0, 1, 3, 4]
