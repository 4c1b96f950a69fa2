"""Requests of administrators that a client answers, through its broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dledger.remoting.codes import AnswerCode, Language
from dledger.remoting.frame import Frame, encode
from rocketstore.broker_remoting import clients
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumerStatusBody, ResetOffsetBody, ResetOffsetBodyForC
from rocketstore.remoting.topics import MessageQueue
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness, captured
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN


@pytest.fixture
def consumer(broker: RemotingHarness) -> Iterator[RemotingSocket]:
    with broker.dial() as dialled:
        dialled.subscribe("g", "T", client_id="one")
        yield dialled


def test_running_info_is_the_clients_own(client: RemotingSocket, consumer: RemotingSocket) -> None:
    """Whatever is in it; but a signature is for the broker, and goes no further."""
    fields = {"consumerGroup": "g", "clientId": "one", "jstackEnable": "true"}
    asked = client.begin(RequestCode.GET_CONSUMER_RUNNING_INFO, fields | {"Signature": "s", "AccessKey": "k"})
    request = consumer.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    assert request.fields == fields
    consumer.reply(request, body=b"\x00not even JSON")
    assert client.answer_to(asked).body == b"\x00not even JSON"
    asked = client.begin(RequestCode.GET_CONSUMER_RUNNING_INFO, fields)
    consumer.reply(consumer.request(RequestCode.GET_CONSUMER_RUNNING_INFO), 1, "not now")
    answer = client.answer_to(asked)
    assert (answer.code, answer.remark) == (1, "not now")


@pytest.mark.parametrize("code", [RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.CONSUME_MESSAGE_DIRECTLY])
def test_a_client_that_is_not_here_cannot_be_asked(
    client: RemotingSocket, consumer: RemotingSocket, code: RequestCode
) -> None:
    for group, client_id in (("g", "two"), ("h", "one")):
        answer = client.ask(code, {"consumerGroup": group, "clientId": client_id, "msgId": "0" * 32})
        assert (answer.code, "not online" in answer.remark) == (AnswerCode.SYSTEM_ERROR, True)


def test_a_client_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, client: RemotingSocket, consumer: RemotingSocket
) -> None:
    monkeypatch.setattr(clients, "CALL_S_MAX", 0.01)
    answer = client.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "g", "clientId": "one"})
    assert answer.code == AnswerCode.CONSUME_MSG_TIMEOUT


def test_a_client_that_hangs_up_is_not_waited_for(client: RemotingSocket, consumer: RemotingSocket) -> None:
    asked = client.begin(RequestCode.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "g", "clientId": "one"})
    consumer.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    consumer.socket.close()
    answer = client.answer_to(asked)
    assert (answer.code, "ended" in answer.remark) == (AnswerCode.SYSTEM_ERROR, True)


def test_calls_under_way_are_bounded(
    monkeypatch: pytest.MonkeyPatch, client: RemotingSocket, consumer: RemotingSocket
) -> None:
    monkeypatch.setattr(clients, "CALLS_MAX", 1)
    fields = {"consumerGroup": "g", "clientId": "one"}
    asked = client.begin(RequestCode.GET_CONSUMER_RUNNING_INFO, fields)
    request = consumer.request(RequestCode.GET_CONSUMER_RUNNING_INFO)
    assert client.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, fields).code == AnswerCode.SYSTEM_BUSY
    consumer.reply(request)
    assert client.answer_to(asked).code == 0


def test_a_client_consumes_one_message(client: RemotingSocket, consumer: RemotingSocket) -> None:
    message_id = client.send(body=b"again").fields["msgId"]
    fields = {"consumerGroup": "g", "clientId": "one", "msgId": message_id}
    asked = client.begin(RequestCode.CONSUME_MESSAGE_DIRECTLY, fields)
    request = consumer.request(RequestCode.CONSUME_MESSAGE_DIRECTLY)
    assert request.fields == fields | {"brokerName": "broker-a"}
    assert decode_record(request.body).body == b"again"
    consumer.reply(request, body=b'{"consumeResult":"CR_SUCCESS"}')
    assert client.answer_to(asked).body == b'{"consumeResult":"CR_SUCCESS"}'
    for wrong in ("", "not an id", "0" * 31 + "1"):
        assert client.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, fields | {"msgId": wrong}).code == 1


def test_where_clients_are(client: RemotingSocket, consumer: RemotingSocket, broker: RemotingHarness) -> None:
    """Those that answer, of all or of the one that is named."""
    fields = {"topic": "T", "group": "g"}
    code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
    with broker.dial() as second:
        second.subscribe("g", "T", client_id="two")
        asked = client.begin(code, fields)
        request = consumer.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT)
        assert request.fields == fields
        place = {MessageQueue("T", "b", 0): 7}
        consumer.reply(request, body=ConsumerStatusBody(place).encode())
        second.reply(second.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT), body=b"\xff")
        answer = client.answer_to(asked)
        assert ConsumerStatusBody.decode(answer.body).consumer_table == {"one": place}
        assert "two" in answer.remark
        asked = client.begin(code, fields | {"clientAddr": "two"})
        second.reply(second.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT), 1)
        assert client.answer_to(asked).code == AnswerCode.SYSTEM_ERROR
    for wrong in ({"clientAddr": "three"}, {"group": "h"}):
        assert client.ask(code, fields | wrong).code == AnswerCode.SYSTEM_ERROR


def test_a_reset_is_refused_while_nobody_is_online(client: RemotingSocket, broker: RemotingHarness) -> None:
    """Then mqadmin commits the offsets by itself (F64, F65)."""
    broker.state.committed |= {("ProbePush", "T", queue_id): 0 for queue_id in range(4)}
    answer = captured(client, "F64", topic="T")
    theirs = GOLDEN["F65"].frame
    assert (answer.code, answer.remark) == (theirs.code, theirs.remark.replace("ProbeTopic", "T"))


def test_clients_are_told_where_to_go_on(
    client: RemotingSocket, consumer: RemotingSocket, broker: RemotingHarness
) -> None:
    """To a time, forward only if it is forced; the broker's own offsets stay."""
    for _ in range(10):
        client.send()
    broker.state.committed |= {("g", "T", queue_id): 0 for queue_id in range(4)}
    broker.state.committed["g", "T", 0] = 5
    code, name = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, broker.config.name

    def ask(timestamp: int, is_force: str) -> int:
        answer = client.ask(code, {"topic": "T", "group": "g", "timestamp": timestamp, "isForce": is_force})
        request = consumer.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert request.body == answer.body
        assert request.is_oneway
        return ResetOffsetBody.decode(answer.body).offset_table[MessageQueue("T", name, 0)]

    assert [ask(3, "false"), ask(8, "false"), ask(8, "true"), ask(-1, "true")] == [3, 5, 8, 10]
    broker.state.begins["T", 0] = 2  # the topic was made anew
    assert [ask(0, "true"), ask(1, "false")] == [2, 2]
    assert broker.state.offset("g", "T", 0) == 5
    for wrong in ({"group": "h"}, {"topic": "Unknown"}):
        fields = {"topic": "T", "group": "g", "timestamp": 0, "isForce": "true"} | wrong
        assert client.ask(code, fields).code in (AnswerCode.SYSTEM_ERROR, AnswerCode.TOPIC_NOT_EXIST)


def test_cpp_clients_are_told_in_their_own_form(
    client: RemotingSocket, consumer: RemotingSocket, broker: RemotingHarness
) -> None:
    broker.state.committed |= {("g", "T", queue_id): 0 for queue_id in range(4)}
    fields = {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true"}
    code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    client.socket.sendall(encode(Frame(code, 77, fields, language=Language.CPP)))
    assert client.answer_to(77).code == 0
    body = ResetOffsetBodyForC.decode(consumer.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET).body)
    assert [(one.queue_id, one.offset) for one in body.offset_table] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_a_group_of_too_many_clients_is_not_asked_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, client: RemotingSocket, consumer: RemotingSocket, broker: RemotingHarness
) -> None:
    monkeypatch.setattr(clients, "CLIENTS_MAX", 0)
    broker.state.committed |= {("g", "T", queue_id): 0 for queue_id in range(4)}
    fields = {"topic": "T", "group": "g", "timestamp": "-1", "isForce": "true"}
    for code in (RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET):
        answer = client.ask(code, fields)
        assert (answer.code, "1 clients" in answer.remark) == (AnswerCode.SYSTEM_ERROR, True)
