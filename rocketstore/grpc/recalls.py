"""RecallMessage: a timed message that is not due yet is not delivered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.grpc.calls import GatewayCall, name_of
from rocketstore.grpc.checks import check_topic_name
from rocketstore.grpc.codes import OK, RejectedError
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs

Recall = Callable[[str, str], Awaitable[str]]
"""Have a message (by topic and recall handle) not delivered; returns its id. Raises ``Refusal``: ``NO_MESSAGE`` for one
that was delivered or recalled, ``INVALID`` for no handle of the broker's.
"""


class Recalls:
    """On the loop."""

    def __init__(self, recall: Recall) -> None:
        self._recall = recall

    async def recall(self, call: GatewayCall, request: pbs.RecallMessageRequest) -> pbs.RecallMessageResponse:
        """RecallMessage. That there is no such message says nothing if a leader that was lost may have recalled it."""
        topic = check_topic_name(name_of(request.topic))
        try:
            message_id = await self._recall(topic, request.recall_handle)
        except Refusal as error:
            if error.kind is not RefusalKind.NO_MESSAGE or not call.may_be_repeated:
                raise
            told = f"the leader before this one may have recalled the message, for this very call: {error}"
            raise RejectedError(pb.SLAVE_PERSISTENCE_TIMEOUT, told) from None
        return pbs.RecallMessageResponse(status=OK, message_id=message_id)
