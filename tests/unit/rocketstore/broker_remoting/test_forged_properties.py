"""No client can say in a broker's place what the broker has done with a message, whichever way the message comes in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rocketstore.broker.popping.copies import origin_text
from rocketstore.broker.sending import SendBatch
from rocketstore.message.batch import encode_batch
from rocketstore.message.message import Message
from rocketstore.message.properties import BROKER_ONLY
from rocketstore.message.record import decode_record
from rocketstore.pop.operations import Origin
from rocketstore.pop.tables import PopPlace
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import NumberedMessage, NumberedSend
from tests.support.remoting import RemotingSocket, send_fields
from tests.unit.rocketstore.broker.popping.harness import GROUP, TOPIC, PopBroker, bodies
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

FORGED = dict.fromkeys(BROKER_ONLY, "forged") | {"RETRY_TOPIC": "Payments", "ORIGIN_MESSAGE_ID": "00"}
IN_BATCHES = {name: value for name, value in FORGED.items() if not name.startswith("REAL_")}  # refused, those
ORDINARY = {"TAGS": "new", "KEYS": "k", "colour": "red"}
_LONG = (
    *("producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp", "flag"),
    *("properties", "reconsumeTimes", "unitMode", "batch"),
)


def text_of(properties: Mapping[str, str]) -> str:
    return "\x02".join(f"{name}\x01{value}" for name, value in properties.items())


def send(client: RemotingSocket, way: str, topic: str = "T", forged: Mapping[str, str] = FORGED) -> None:
    """One message with these properties, in a request of this kind."""
    text = text_of({**ORDINARY, **forged})
    fields = send_fields(topic, properties=text)
    if way == "SEND_MESSAGE":
        fields = dict(zip(_LONG, fields.values(), strict=True))
        answer = client.ask(RequestCode.SEND_MESSAGE, fields, b"hello")
    elif way == "SEND_MESSAGE_V2":
        answer = client.ask(RequestCode.SEND_MESSAGE_V2, fields, b"hello")
    elif way == "SEND_BATCH_MESSAGE":
        inside = {name: value for name, value in forged.items() if name in IN_BATCHES}
        batch = encode_batch([Message(topic, b"hello", properties={**ORDINARY, **inside})])
        outside = send_fields(topic, properties=text_of(inside))
        answer = client.ask(RequestCode.SEND_BATCH_MESSAGE, outside, batch)
    else:
        numbered = NumberedMessage(topic, 0, 0, 0, 1000, text.encode(), b"hello")
        answer = client.ask(OwnCode.SEND_NUMBERED, {}, NumberedSend("p", 0, [numbered]).encode())
    assert answer.code == 0, answer.remark


WAYS = ["SEND_MESSAGE", "SEND_MESSAGE_V2", "SEND_BATCH_MESSAGE", "SEND_NUMBERED"]


@pytest.mark.parametrize("way", WAYS)
def test_what_only_brokers_set_is_taken_out(broker: RemotingHarness, client: RemotingSocket, way: str) -> None:
    """The application's own properties stay."""
    send(client, way)
    found = decode_record(broker.store.log.records[-1].record).properties
    assert {name: found[name] for name in ORDINARY} == ORDINARY
    assert not found.keys() & FORGED.keys()


@pytest.mark.parametrize("way", ["SEND_MESSAGE", "SEND_MESSAGE_V2", "SEND_BATCH_MESSAGE"])
def test_a_message_to_be_retried_says_where_it_was_and_no_more(
    broker: RemotingHarness, client: RemotingSocket, way: str
) -> None:
    """As RocketMQ's clients send those that they could not send back, with all properties they had."""
    send(client, way, "%RETRY%g")
    found = decode_record(broker.store.log.records[-1].record).properties
    assert (found["RETRY_TOPIC"], found["ORIGIN_MESSAGE_ID"]) == ("Payments", "00")
    assert not found.keys() & BROKER_ONLY


@pytest.mark.parametrize("delay_level", [0, -1])
def test_what_is_sent_back_says_nothing_of_its_last_delivery(
    broker: RemotingHarness, client: RemotingSocket, delay_level: int
) -> None:
    """Also if the log has it already, from a broker that let it through: to be retried, and dead."""
    sent = client.send()
    forged = Message("T", b"hello", properties=dict(FORGED))
    (result,) = broker.bridge.run(broker.broker.sending.send(None, SendBatch([forged], 5)))
    assert result.stored is not None
    assert "POP_ORIGIN" in decode_record(broker.store.log.records[-1].record).properties
    back = {
        "offset": result.stored.offset,
        "group": "g",
        "delayLevel": delay_level,
        "originMsgId": sent.fields["msgId"],
    }
    assert client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0
    found = decode_record(broker.store.log.records[-1].record).properties
    assert not [name for name in found if name.startswith(("POP_", "DLQ_"))]


def test_a_forged_origin_settles_nothing(tmp_path: Path) -> None:
    """A new leader takes the messages that copies name as their origins for settled."""
    with PopBroker(tmp_path) as broker:
        broker.send([b"a"])
        broker.receive_all(1, invisible_ms=1000)
        place = PopPlace(GROUP, TOPIC, 0)
        origin = origin_text(Origin(place, 0, broker.window().generation))
        with RemotingSocket(broker.server.port) as client:
            for way in WAYS[:2]:
                send(client, way, f"%RETRY%{GROUP}_{TOPIC}", {"POP_ORIGIN": origin})
    with PopBroker(tmp_path) as broker:
        assert b"a" in bodies(broker.receive_all(1))
