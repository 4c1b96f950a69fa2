"""SendMessage: what is stored of each type, what is refused, and what is recognized as sent again.

RecallMessage, as far as it is the gateway's: who recalls is in another part.
"""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker_config import BrokerConfig
from rocketstore.config import KIB
from rocketstore.grpc.calls import RejectedError
from rocketstore.grpc.sends import Recalls
from rocketstore.message.message import Message
from rocketstore.message.properties import BROKER_ONLY
from rocketstore.message.record import decode_record
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.state.changes import TopicConfig
from tests.support.on_loop import on_loop
from tests.support.waiting import wait_until
from tests.unit.rocketstore.grpc.harness import GatewayClient, GatewayHarness, message

WRONG_DIGEST = pb.Digest(type=pb.MD5, checksum="00")
CRC = zlib.crc32(b"body")


def stored(broker: GatewayHarness) -> list[Message]:
    return [decode_record(one.record) for one in broker.store.log.records]


def test_a_message_is_stored_as_rocketmq_4_reads_it(broker: GatewayHarness, client: GatewayClient) -> None:
    """Tag, keys, id and the application's properties are where remoting clients look; the client's id is echoed."""
    given = message(b"hello", message_id="01ABC", tag="new", keys=["k1", "k2"], trace_context="t")
    given.user_properties["colour"] = "red"
    answer = client.send(given)
    assert answer.status.code == pb.OK
    (entry,) = answer.entries
    assert (entry.status.code, entry.message_id, entry.offset) == (pb.OK, "01ABC", 0)
    (found,) = stored(broker)
    assert (found.topic, found.body, found.tags, found.keys) == ("T", b"hello", "new", ["k1", "k2"])
    assert (found.unique_key, found.properties["colour"], found.properties["TRACE_CONTEXT"]) == ("01ABC", "red", "t")
    assert (found.born_timestamp, found.born_host.ip) == (1_700_000_000_000, b"\x7f\0\0\1")


def test_queues_take_turns_and_a_message_group_has_one(broker: GatewayHarness, client: GatewayClient) -> None:
    """The server chooses: official clients send no queue, or always the same one; a group's messages stay in order."""
    for number in range(4):
        client.send(message(message_id=f"n{number}"))
    assert sorted(one.queue_id for one in stored(broker)) == [0, 1, 2, 3]
    for number in range(3):
        client.send(message(message_id=f"f{number}", kind=pb.FIFO, message_group="g"))
    fifo = stored(broker)[4:]
    assert {one.queue_id for one in fifo} == {zlib.crc32(b"g") % 4}
    assert {one.properties["__SHARDINGKEY"] for one in fifo} == {"g"}


def test_priority_is_the_queue(broker: GatewayHarness, client: GatewayClient) -> None:
    """The highest number is read first; what is above the last queue goes there."""
    for priority in (0, 2, 99):
        client.send(message(message_id=f"p{priority}", kind=pb.PRIORITY, priority=priority))
    assert [one.queue_id for one in stored(broker)] == [0, 2, 3]


def test_a_compressed_body_is_stored_plain(broker: GatewayHarness, client: GatewayClient) -> None:
    """Clients of other protocols, and tools, know another compression."""
    answer = client.send(message(gzip.compress(b"text" * 100), body_encoding=pb.GZIP))
    assert answer.status.code == pb.OK
    assert stored(broker)[0].body == b"text" * 100
    assert stored(broker)[0].sys_flag & 1 == 0


def test_a_bomb_is_refused_before_it_is_unpacked(client: GatewayClient) -> None:
    """No more is unpacked than a body may have."""
    bomb = zlib.compressobj(wbits=31)
    data = bomb.compress(bytes(64 * 1024 * KIB)) + bomb.flush()
    assert client.send(message(data, body_encoding=pb.GZIP)).status.code == pb.MESSAGE_BODY_TOO_LARGE


def test_what_only_brokers_set_is_refused(broker: GatewayHarness, client: GatewayClient) -> None:
    """Whoever could name a message as the origin of a copy would have it taken for consumed."""
    for name in (*BROKER_ONLY, "RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "TIMER_OUT_MS"):
        forged = message()
        forged.user_properties[name] = "forged"
        assert client.send(forged).status.code == pb.ILLEGAL_MESSAGE_PROPERTY_KEY, name
    assert not broker.store.log.records


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda one: one.system_properties.ClearField("message_id"), pb.ILLEGAL_MESSAGE_ID),
        (lambda one: setattr(one.system_properties, "tag", "a|b"), pb.ILLEGAL_MESSAGE_TAG),
        (lambda one: one.system_properties.keys.append(" "), pb.ILLEGAL_MESSAGE_KEY),
        (lambda one: one.user_properties.update({"TAGS": "x"}), pb.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (lambda one: one.user_properties.update({"a": "x\x02PGROUP\x01y"}), pb.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (lambda one: one.user_properties.update({"a": "x" * 17_000}), pb.MESSAGE_PROPERTIES_TOO_LARGE),
        (lambda one: one.user_properties.update({str(at): "x" for at in range(129)}), pb.MESSAGE_PROPERTIES_TOO_LARGE),
        (lambda one: setattr(one, "body", b""), pb.MESSAGE_BODY_EMPTY),
        (lambda one: setattr(one, "body", bytes(4096 * KIB + 1)), pb.MESSAGE_BODY_TOO_LARGE),
        (lambda one: setattr(one.topic, "name", "a b"), pb.ILLEGAL_TOPIC),
        (lambda one: setattr(one.topic, "name", "RMQ_SYS_TRANS_HALF_TOPIC"), pb.ILLEGAL_TOPIC),
        (lambda one: setattr(one.topic, "resource_namespace", "n"), pb.NOT_IMPLEMENTED),
        (lambda one: setattr(one.system_properties, "message_group", "g"), pb.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (lambda one: setattr(one.system_properties, "message_type", pb.LITE), pb.NOT_IMPLEMENTED),
        (lambda one: setattr(one.system_properties.body_digest, "checksum", "00"), pb.OK),  # of no known type
        (lambda one: one.system_properties.body_digest.CopyFrom(WRONG_DIGEST), pb.MESSAGE_CORRUPTED),
        (lambda one: setattr(one.system_properties, "body_encoding", pb.GZIP), pb.MESSAGE_CORRUPTED),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_message_has_a_code_of_its_own(
    broker: GatewayHarness, client: GatewayClient, change: Callable[[pb.Message], object], code: pb.Code
) -> None:
    """In the answer's status, with a sentence; nothing is stored."""
    given = message()
    change(given)
    status = client.send(given).status
    assert status.code == code
    assert status.message
    assert len(stored(broker)) == (code == pb.OK)


@pytest.mark.parametrize(
    "checksum", [f"{zlib.crc32(b'body'):X}", f"{zlib.crc32(b'body'):08x}", str(zlib.crc32(b"body"))]
)
def test_each_clients_way_to_write_a_checksum_is_understood(client: GatewayClient, checksum: str) -> None:
    """CRC32 is written with zeros, without, and decimally."""
    given = message(b"body")
    given.system_properties.body_digest.MergeFrom(pb.Digest(type=pb.CRC32, checksum=checksum))
    assert client.send(given).status.code == pb.OK


def test_empty_bodies_are_taken_if_that_is_set() -> None:
    """They are refused otherwise, as by RocketMQ's proxy."""
    with GatewayHarness(replace(BrokerConfig(), grpc_empty_bodies=True)) as broker, broker.dial() as client:
        assert client.send(message(b"")).status.code == pb.OK


def test_a_topic_is_created_by_sending_to_it(broker: GatewayHarness, client: GatewayClient) -> None:
    """As by remoting clients."""
    assert client.send(message(topic="new")).status.code == pb.OK
    assert broker.state.topic("new") is not None


def test_without_that_an_unknown_topic_is_not_found() -> None:
    """The code that clients know."""
    config = replace(BrokerConfig(), auto_create_topic_enable=False)
    with GatewayHarness(config) as broker, broker.dial() as client:
        assert client.send(message(topic="new")).status.code == pb.TOPIC_NOT_FOUND


def test_one_request_is_for_one_topic(broker: GatewayHarness, client: GatewayClient) -> None:
    """Several messages have a result each."""
    answer = client.send(message(message_id="1"), message(message_id="2"))
    assert [one.message_id for one in answer.entries] == ["1", "2"]
    assert client.send(message(message_id="3"), message(topic="U", message_id="4")).status.code == pb.BAD_REQUEST
    assert client.send().status.code == pb.BAD_REQUEST
    assert len(stored(broker)) == 2


def test_a_message_that_is_sent_again_gets_the_first_answer(broker: GatewayHarness, client: GatewayClient) -> None:
    """Clients repeat a send that took too long, up to three times, under the same id."""
    first = client.send(message(message_id="again"))
    assert client.send(message(message_id="again")) == first
    assert len(stored(broker)) == 1
    assert client.send(message(message_id="other")).status.code == pb.OK
    assert client.send(message(topic="U", message_id="again")).status.code == pb.OK
    assert len(stored(broker)) == 3


def test_a_send_under_way_is_not_stored_twice_when_its_client_gives_up(
    broker: GatewayHarness, client: GatewayClient
) -> None:
    """The client's deadline cancels the call, not what was begun: the repetition gets its result."""
    broker.store.hold_results = True
    results: list[pb.Code] = []

    def send(timeout_s: float) -> None:
        with suppress(grpc.RpcError):
            results.append(client.send(message(message_id="slow"), timeout_s=timeout_s).status.code)

    first = Thread(target=send, args=(0.5,))
    first.start()
    first.join()
    second = Thread(target=send, args=(10,))
    second.start()
    wait_until(lambda: broker.gateway.sends.window.recognized == 1, "the second waits for the first")
    for one in broker.store.held:
        one()
    second.join()
    assert results[-1] == pb.OK
    assert len(stored(broker)) == 1


def test_queues_only_for_reading_are_refused() -> None:
    """By a setting of the topic."""
    with GatewayHarness(None, TopicConfig("T", 1, 1, 4)) as broker, broker.dial() as client:
        assert client.send(message()).status.code == pb.FORBIDDEN


def test_timed_messages_are_bounded_as_they_come() -> None:
    """Those that wait are counted once a second: a burst must not pass meanwhile. Of one second, too."""
    due_s = int(time.time()) + 3600
    access = replace(BrokerConfig().access, account_share_percent=100)
    config = replace(BrokerConfig(), timed_messages_max=3, timed_messages_per_s_max=2, access=access)
    with GatewayHarness(config) as broker, broker.dial() as client:

        def send(at_s: int) -> pb.Code:
            given = message(message_id=f"d{len(broker.store.log.records)}", kind=pb.DELAY)
            given.system_properties.delivery_timestamp.seconds = at_s
            return client.send(given).status.code

        assert [send(due_s) for _ in range(3)] == [pb.OK, pb.OK, pb.TOO_MANY_REQUESTS]
        assert [send(due_s + 1) for _ in range(2)] == [pb.OK, pb.TOO_MANY_REQUESTS]


def recall(client: GatewayClient, topic: str, handle: str) -> pbs.RecallMessageResponse:
    request = pbs.RecallMessageRequest(topic=pb.Resource(name=topic), recall_handle=handle)
    return client.call("RecallMessage", request, pbs.RecallMessageResponse)


def test_a_recall_names_the_message_that_it_recalled(broker: GatewayHarness, client: GatewayClient) -> None:
    """By topic and handle; a message that was delivered is not found, a handle of nobody is a bad request."""
    asked: list[tuple[str, str]] = []

    async def answer(topic: str, handle: str) -> str:
        asked.append((topic, handle))
        if handle == "late":
            raise Refusal(RefusalKind.NO_MESSAGE, "it was delivered")
        if handle == "wrong":
            raise Refusal(RefusalKind.INVALID, "no handle")
        return "01"

    broker.gateway._recalls._recall = answer
    found = recall(client, "T", "h")
    assert (found.status.code, found.message_id) == (pb.OK, "01")
    assert recall(client, "T", "late").status.code == pb.MESSAGE_NOT_FOUND
    assert recall(client, "T", "wrong").status.code == pb.BAD_REQUEST
    assert recall(client, "", "h").status.code == pb.ILLEGAL_TOPIC
    assert asked == [("T", "h"), ("T", "late"), ("T", "wrong")]


@on_loop
async def test_a_recall_that_a_lost_leader_may_have_done_is_not_said_to_have_come_too_late() -> None:
    """Its producer would believe that the message was delivered."""

    async def gone(_topic: str, _handle: str) -> str:
        raise Refusal(RefusalKind.NO_MESSAGE, "there is no such message")

    request = pbs.RecallMessageRequest(topic=pb.Resource(name="T"), recall_handle="h")
    with pytest.raises(RejectedError, match="may have recalled") as refused:
        await Recalls(gone).recall(cast(Any, SimpleNamespace(may_be_repeated=True)), request)
    assert refused.value.code == pb.SLAVE_PERSISTENCE_TIMEOUT
    with pytest.raises(Refusal, match="no such message"):
        await Recalls(gone).recall(cast(Any, SimpleNamespace(may_be_repeated=False)), request)
