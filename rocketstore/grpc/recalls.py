"""RecallMessage: a timed message that is not due yet is not delivered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rocketstore.grpc.calls import GatewayCall, name_of
from rocketstore.grpc.checks import check_topic_name
from rocketstore.grpc.codes import OK
from rocketstore.pb import service_pb2 as pbs

Recall = Callable[[str, str], Awaitable[str]]
"""Have a message (by topic and recall handle) not delivered; returns its id. Raises ``Refusal``: ``NO_MESSAGE`` for one
that was delivered or recalled, ``INVALID`` for no handle of the broker's.
"""


class Recalls:
    """On the loop."""

    def __init__(self, recall: Recall) -> None:
        self._recall = recall

    async def recall(self, _: GatewayCall, request: pbs.RecallMessageRequest) -> pbs.RecallMessageResponse:
        """RecallMessage."""
        topic = check_topic_name(name_of(request.topic))
        return pbs.RecallMessageResponse(status=OK, message_id=await self._recall(topic, request.recall_handle))
