"""Whatever a request holds, its answer has a status of the protocol: no error of gRPC's, and no word of a defect."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest
from google.protobuf.descriptor import FieldDescriptor as Kind
from google.protobuf.message import Message

from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from tests.unit.rocketstore.grpc.harness import GatewayClient, GatewayHarness, message

UNARY: Final[dict[str, tuple[type[Message], type[Message]]]] = {
    "QueryRoute": (pbs.QueryRouteRequest, pbs.QueryRouteResponse),
    "Heartbeat": (pbs.HeartbeatRequest, pbs.HeartbeatResponse),
    "NotifyClientTermination": (pbs.NotifyClientTerminationRequest, pbs.NotifyClientTerminationResponse),
    "SendMessage": (pbs.SendMessageRequest, pbs.SendMessageResponse),
    "EndTransaction": (pbs.EndTransactionRequest, pbs.EndTransactionResponse),
    "RecallMessage": (pbs.RecallMessageRequest, pbs.RecallMessageResponse),
    "QueryAssignment": (pbs.QueryAssignmentRequest, pbs.QueryAssignmentResponse),
    "AckMessage": (pbs.AckMessageRequest, pbs.AckMessageResponse),
    "ChangeInvisibleDuration": (pbs.ChangeInvisibleDurationRequest, pbs.ChangeInvisibleDurationResponse),
    "ForwardMessageToDeadLetterQueue": (
        pbs.ForwardMessageToDeadLetterQueueRequest,
        pbs.ForwardMessageToDeadLetterQueueResponse,
    ),
}
TRIES: Final = 30
TEXTS: Final = ("", "T", "G", "a b", "x" * 300, "0-0", "\x02\x01", "ü" * 70, "%RETRY%G", "7")
NUMBERS: Final = (0, 1, 2, 3, 4, 5, 6, 99, -1, 2**31 - 1, -(2**31))
LARGE: Final = (*NUMBERS, 2**63 - 1, -(2**63), 1_700_000_000)


def fill(message: Message, dice: random.Random, depth: int = 0) -> None:
    """Some of the fields, with values that mean something, and others."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.3 or depth > 5 or field.name == "resource_namespace":
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(dice.randrange(3)):
                getattr(message, field.name)[dice.choice(TEXTS)] = dice.choice(TEXTS)
        elif field.is_repeated:
            for _ in range(dice.randrange(3)):
                if field.message_type is not None:
                    fill(getattr(message, field.name).add(), dice, depth + 1)
                else:
                    getattr(message, field.name).append(_value(field, dice))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), dice, depth + 1)
        else:
            setattr(message, field.name, _value(field, dice))


def _value(field: Any, dice: random.Random) -> object:  # noqa: ANN401  # protobuf has two kinds of descriptors
    kind = field.cpp_type
    if kind == Kind.CPPTYPE_STRING:
        text = dice.choice(TEXTS)
        return text.encode() if field.type == Kind.TYPE_BYTES else text
    if kind == Kind.CPPTYPE_BOOL:
        return dice.random() < 0.5
    if kind in (Kind.CPPTYPE_FLOAT, Kind.CPPTYPE_DOUBLE):
        return dice.choice((0.0, 1.5, -1.0, float("inf"), float("nan")))
    return dice.choice(LARGE if kind == Kind.CPPTYPE_INT64 else NUMBERS)


@pytest.mark.parametrize("method", UNARY)
def test_every_answer_has_a_status(broker: GatewayHarness, client: GatewayClient, method: str) -> None:
    """With fields of any kind, and with bytes that are no message at all."""

    async def recall(_topic: str, _handle: str) -> str:
        raise Refusal(RefusalKind.NO_MESSAGE, "nothing waits")

    broker.gateway._recalls._recall = recall
    request, answer = UNARY[method]
    dice = random.Random(method)
    for _ in range(TRIES):
        given = request()
        fill(given, dice)
        found = client.call(method, given, answer, timeout_s=5)
        code = found.status.code  # type: ignore[attr-defined]  # every answer has one
        assert code >= pb.OK, given
        assert code != pb.INTERNAL_SERVER_ERROR, (found, given)
    assert client.call(method, b"\xff\xff", answer).status.code == pb.BAD_REQUEST  # type: ignore[attr-defined]


def test_receives_and_settings_too(client: GatewayClient) -> None:
    """The two methods with streams."""
    dice = random.Random("streams")
    for _ in range(TRIES):
        given = pbs.ReceiveMessageRequest()
        fill(given, dice)
        given.ClearField("long_polling_timeout")
        given.long_polling_timeout.nanos = 1
        assert client.calls("ReceiveMessage", given, pbs.ReceiveMessageResponse, 5)[0].status.code >= pb.OK
        settings = pb.Settings()
        fill(settings, dice)
        settings.user_agent.language = pb.PYTHON
        assert client.telemetry(settings).next().status.code >= pb.OK


def test_a_defect_is_told_in_words_and_logged(
    broker: GatewayHarness, client: GatewayClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is wrong inside is for the log: a client gets a code that it understands."""

    def fail(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(broker.gateway.sends, "_choose_queue", fail)
    status = client.send(message()).status
    assert status.code == pb.INTERNAL_SERVER_ERROR
    assert "secret" not in status.message
    assert any("SendMessage" in one.message and one.exc_info for one in caplog.records)
