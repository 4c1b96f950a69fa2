"""RecallMessage, as far as it is the gateway's: who recalls is in another part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.grpc.codes import RejectedError
from rocketstore.grpc.recalls import Recalls
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from tests.support.on_loop import on_loop
from tests.unit.rocketstore.grpc.harness import GatewayClient, GatewayHarness


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
