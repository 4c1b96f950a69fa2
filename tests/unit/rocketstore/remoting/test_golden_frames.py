"""Frames of RocketMQ's own programs: they decode, and encode again to what they were."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

import pytest

from dledger.remoting.codes import Language
from dledger.remoting.fastjson import loads
from dledger.remoting.frame import Frame, cut, decode, encode
from rocketstore.remoting.body import Body
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import (
    ConsumerIdList,
    ConsumerOffsetTable,
    ConsumeStats,
    DelayOffsetTable,
    HeartbeatData,
    LockedQueuesBody,
    LockQueuesBody,
    SubscriptionData,
    SubscriptionGroupTable,
    TopicStatsTable,
)
from rocketstore.remoting.headers import (
    BrokerHeader,
    CheckTransactionHeader,
    EndTransactionHeader,
    GroupHeader,
    GroupQueueHeader,
    OffsetAnswer,
    PullAnswer,
    PullHeader,
    PutTopicHeader,
    QueryMessageAnswer,
    QueryMessageHeader,
    RegisterBrokerHeader,
    ResetClientOffsetHeader,
    RouteHeader,
    SendAnswer,
    SendBackHeader,
    SendHeader,
    TopicHeader,
    UnregisterClientHeader,
    UpdateOffsetHeader,
    read_header,
    write_header,
)
from rocketstore.remoting.topics import (
    ClusterInfo,
    KVTable,
    MessageQueue,
    RegisterBrokerBody,
    TopicConfigTable,
    TopicRouteData,
    body_crc32,
)
from rocketstore.types import ConsumeFromWhere, ConsumeType, MessageModel
from tests.unit.rocketstore.remoting.golden_frames import BINARY, CPP, GO, GOLDEN

REQUEST_HEADERS: dict[int, tuple[type[Any], bool]] = {
    RequestCode.SEND_MESSAGE: (SendHeader, False),
    RequestCode.SEND_MESSAGE_V2: (SendHeader, True),
    RequestCode.SEND_BATCH_MESSAGE: (SendHeader, True),
    RequestCode.PULL_MESSAGE: (PullHeader, False),
    RequestCode.QUERY_MESSAGE: (QueryMessageHeader, False),
    RequestCode.QUERY_CONSUMER_OFFSET: (GroupQueueHeader, False),
    RequestCode.UPDATE_CONSUMER_OFFSET: (UpdateOffsetHeader, False),
    RequestCode.UPDATE_AND_CREATE_TOPIC: (PutTopicHeader, False),
    RequestCode.UNREGISTER_CLIENT: (UnregisterClientHeader, False),
    RequestCode.CONSUMER_SEND_MSG_BACK: (SendBackHeader, False),
    RequestCode.END_TRANSACTION: (EndTransactionHeader, False),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: (GroupHeader, False),
    RequestCode.CHECK_TRANSACTION_STATE: (CheckTransactionHeader, False),
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: (GroupHeader, False),
    RequestCode.REGISTER_BROKER: (RegisterBrokerHeader, False),
    RequestCode.UNREGISTER_BROKER: (BrokerHeader, False),
    RequestCode.GET_ROUTEINFO_BY_TOPIC: (RouteHeader, False),
    RequestCode.GET_TOPIC_STATS_INFO: (TopicHeader, False),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: (ResetClientOffsetHeader, False),
}
WITHOUT_HEADER = {
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.GET_BROKER_RUNTIME_INFO,
    RequestCode.HEART_BEAT,
    RequestCode.LOCK_BATCH_MQ,
    RequestCode.UNLOCK_BATCH_MQ,
    RequestCode.GET_ALL_TOPIC_CONFIG,
    RequestCode.GET_ALL_CONSUMER_OFFSET,
    RequestCode.GET_ALL_DELAY_OFFSET,
}
ANSWER_HEADERS: dict[str, type[Any]] = {
    **dict.fromkeys(("F12", "F14", "F39", "F53", "F77", "F85"), SendAnswer),
    **dict.fromkeys(("F28", "F30", "F56"), PullAnswer),
    "F24": OffsetAnswer,
    "F63": QueryMessageAnswer,
}
IGNORED_FIELDS = {"Signature", "AccessKey", "OnsChannel", "bname", "n", "_UNIQUE_KEY_QUERY", "TRACE_ON", "MSG_REGION"}
BODIES: dict[str, type[Body]] = {
    **dict.fromkeys(("F1", "F61"), RegisterBrokerBody),
    "F4": ClusterInfo,
    **dict.fromkeys(("F6", "F51"), TopicRouteData),
    "F10": KVTable,
    **dict.fromkeys(("F18", "F54", "F78", "F86"), HeartbeatData),
    "F22": ConsumerIdList,
    **dict.fromkeys(("F35", "F37"), LockQueuesBody),
    "F36": LockedQueuesBody,
    "F44": TopicConfigTable,
    "F46": ConsumerOffsetTable,
    "F48": DelayOffsetTable,
    "F49": SubscriptionGroupTable,
    "F58": TopicStatsTable,
    "F59": ConsumeStats,
}
WRITTEN_ALIKE = {"F6", "F18", "F22", "F35", "F36", "F37", "F51", "F54", "F61"}
"""Bodies that Java wrote with its members sorted, and without maps of several members, whose order is Java's own."""


def test_all_frames_are_there() -> None:
    """67 to 73 are another protocol's."""
    assert list(GOLDEN) == [f"F{number}" for number in (*range(1, 67), *range(74, 89))]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_captured_frame_decodes_to_the_same_again(name: str) -> None:
    """In our order of members, where its own is another."""
    frame = GOLDEN[name].frame
    assert frame.language is (Language.CPP if name in CPP else Language.GO if name in GO else Language.JAVA)
    assert decode(memoryview(encode(frame))) == frame


@pytest.mark.parametrize("name", sorted(set(GOLDEN) - CPP - GO))
def test_what_java_wrote_is_written_alike(name: str) -> None:
    """Byte by byte; only whether an answer without fields has ``extFields`` differs from frame to frame."""
    one = GOLDEN[name]
    frame = one.frame
    expected = one.data
    if name not in BINARY and frame.is_response and not frame.fields and b'"extFields"' not in expected:
        header = json.loads(expected[8 : 8 + int.from_bytes(expected[5:8])])
        text = json.dumps({"code": header.pop("code"), "extFields": {}, **header}, separators=(",", ":")).encode()
        expected = struct.pack(">iI", 4 + len(text) + len(frame.body), len(text)) + text + frame.body
    assert encode(frame) == expected


@pytest.mark.parametrize("name", GOLDEN)
def test_a_frame_cut_at_any_byte_waits_for_the_rest(name: str) -> None:
    """Nothing is returned, and nothing raised, before its last byte."""
    data = GOLDEN[name].data
    for end in range(len(data)):
        assert cut(data[:end]) == ([], 0)


def test_frames_come_out_whole_however_they_come_in() -> None:
    """In pieces of 1 to 97 bytes, all in one buffer."""
    stream = b"".join(one.data for one in GOLDEN.values())
    frames: list[Frame] = []
    buffer = bytearray()
    at = 0
    for size in itertools.cycle((1, 2, 3, 4, 5, 7, 97, 64, 8)):
        buffer += stream[at : at + size]
        at += size
        found, end = cut(buffer)
        frames += found
        del buffer[:end]
        if at >= len(stream):
            break
    assert not buffer
    assert frames == [one.frame for one in GOLDEN.values()]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_header_class_reads_and_writes_its_frame(name: str) -> None:
    """All fields that are not ignored come back; C++ writes a truth as 0, and Go an empty text."""
    frame = GOLDEN[name].frame
    if frame.is_response:
        if name not in ANSWER_HEADERS:
            assert not frame.fields
            return
        kind, short = ANSWER_HEADERS[name], False
    elif frame.code in WITHOUT_HEADER:
        assert set(frame.fields) <= IGNORED_FIELDS
        return
    else:
        kind, short = REQUEST_HEADERS[frame.code]
    header = read_header(kind, frame.fields, short=short)
    written = write_header(header, short=short)
    assert read_header(kind, written, short=short) == header
    assert set(written) <= set(frame.fields)
    for field, text in frame.fields.items():
        if field not in IGNORED_FIELDS and field in written:
            assert written[field] == text
    assert set(frame.fields) - set(written) - IGNORED_FIELDS <= _with_defaults(name)


def _with_defaults(name: str) -> set[str]:
    """Fields whose value is the default, which are not written."""
    found = {"j", "k", "m", "unitMode", "topicSysFlag", "compressed", "fromTransactionCheck"}
    return found | {"batch", "reconsumeTimes", "i", "subscription", "consumerGroup"} if name in CPP | GO else found


@pytest.mark.parametrize("name", BODIES)
def test_a_body_decodes_and_encodes_to_equal_values(name: str) -> None:
    """Whatever dialect it was written in."""
    sent = GOLDEN[name].frame.body
    body = BODIES[name].decode(sent)
    written = body.encode()
    assert BODIES[name].decode(written) == body
    assert (written == sent) is (name in WRITTEN_ALIKE)
    if name not in CPP:
        assert loads(written) == loads(sent)


def test_bodies_that_are_json_are_all_read() -> None:
    """None is forgotten above."""
    assert {name for name, one in GOLDEN.items() if one.frame.body.startswith(b'{"')} | {"F58", "F59"} == set(BODIES)


def test_the_cpp_clients_heartbeat() -> None:
    """Ordinals, numbers as texts, and much left out."""
    subscriptions = tuple(
        SubscriptionData(topic, sub_version=1795331472448) for topic in ("%RETRY%CppConsumer", "ProbeTopicCpp")
    )
    heartbeat = HeartbeatData.decode(GOLDEN["F78"].frame.body)
    (consumer,) = heartbeat.consumer_data_set
    assert (heartbeat.client_id, heartbeat.producer_data_set) == ("10611-127.0.0.1@DEFAULT", ())
    assert consumer.consume_type is ConsumeType.CONSUME_PASSIVELY
    assert consumer.message_model is MessageModel.CLUSTERING
    assert consumer.consume_from_where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    assert consumer.subscription_data_set == subscriptions


def test_objects_and_digits_as_keys() -> None:
    """Of maps by queue, and by number."""
    stats = TopicStatsTable.decode(GOLDEN["F58"].frame.body)
    assert stats.offset_table[MessageQueue("ProbeTopic", "broker-a", 3)].max_offset == 2
    offsets = ConsumerOffsetTable.decode(GOLDEN["F46"].frame.body)
    assert offsets.offset_table["ProbeTopic@ProbeOrder"] == {0: 1, 1: 2, 2: 3, 3: 1}
    brokers = ClusterInfo.decode(GOLDEN["F4"].frame.body).broker_addr_table
    assert brokers["broker-a"].broker_addrs == {0: "127.0.0.1:20911"}


@pytest.mark.parametrize("name", ["F1", "F61"])
def test_registrations_have_the_crc_that_their_header_says(name: str) -> None:
    """And are read as it says."""
    frame = GOLDEN[name].frame
    header = read_header(RegisterBrokerHeader, frame.fields)
    assert header.body_crc32 == body_crc32(frame.body)
    body = RegisterBrokerBody.of_request(
        frame.body, compressed=header.compressed, version=frame.version, crc32=header.body_crc32
    )
    assert body == RegisterBrokerBody.decode(frame.body)
