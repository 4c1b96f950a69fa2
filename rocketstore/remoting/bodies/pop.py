"""Bodies of RocketMQ 5's pop: assignments, and acknowledgements of many messages."""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Final

from dledger.records import record
from dledger.remoting.codes import RequestError
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.body import AtMost, Body
from rocketstore.remoting.headers import Int32, Int64, Named
from rocketstore.types import MessageModel, RequestMode

ACK_BYTES_MAX: Final = 1024 * 1024
ACKS_MAX: Final = 4096
"""Entries of one request; clients send one per queue and receive."""
ACKED_MAX: Final = 4096
"""Messages of one entry, by distance from the first."""


@record(frozen=True, slots=True)
class QueryAssignmentBody(Body):
    """QUERY_ASSIGNMENT."""

    bytes_max: ClassVar[int] = ACK_BYTES_MAX
    topic: str
    consumer_group: str
    client_id: str = ""
    strategy_name: str = ""
    message_model: MessageModel = MessageModel.CLUSTERING


@record(frozen=True, slots=True)
class QueueAssignment(Body):
    """A queue for a client; with ``POP`` and a negative id, all of this broker's."""

    message_queue: MessageQueue
    mode: RequestMode = RequestMode.PULL


@record(frozen=True, slots=True)
class AssignmentsBody(Body):
    """Answer to QUERY_ASSIGNMENT."""

    message_queue_assignments: tuple[QueueAssignment, ...] = ()


@record(frozen=True, slots=True)
class SetRequestModeBody(Body):
    """SET_MESSAGE_REQUEST_MODE, and one of the answer to GET_ALL_MESSAGE_REQUEST_MODE."""

    bytes_max: ClassVar[int] = ACK_BYTES_MAX
    topic: str
    consumer_group: str
    mode: RequestMode = RequestMode.PULL
    pop_share_queue_num: Int32 = 0


@record(frozen=True, slots=True)
class RequestModesBody(Body):
    """Answer to GET_ALL_MESSAGE_REQUEST_MODE: by topic, and by group."""

    message_request_mode_map: Mapping[str, Mapping[str, SetRequestModeBody]] = field(default_factory=dict)


@record(frozen=True, slots=True)
class AckEntry(Body):
    """Messages of one queue that were popped together: ``start_offset`` and the distances from it."""

    consumer_group: Annotated[str, Named("c")]
    topic: Annotated[str, Named("t")]
    retry: Annotated[str, Named("r")]
    """1: of the group's retry topic, and ``topic`` is the one it is for."""
    start_offset: Annotated[Int64, Named("so")]
    queue_id: Annotated[Int32, Named("q")]
    revive_queue_id: Annotated[Int32, Named("rq")]
    pop_time: Annotated[Int64, Named("pt")]
    invisible_time: Annotated[Int64, Named("it")]
    bit_set: Annotated[str, Named("b")]
    """Base64 of bits, the lowest of each byte first."""

    def offsets(self) -> Iterator[int]:
        """Raises ``RequestError``."""
        try:
            bits = int.from_bytes(binascii.a2b_base64(self.bit_set, strict_mode=True), "little")
        except (ValueError, binascii.Error):
            raise RequestError("the field <b> of an acknowledgement is not base64") from None
        if bits >> ACKED_MAX:
            raise RequestError(f"an acknowledgement names messages more than {ACKED_MAX} apart")
        while bits:
            lowest = bits & -bits
            yield self.start_offset + lowest.bit_length() - 1
            bits ^= lowest


@record(frozen=True, slots=True)
class HandleEntry(Body):
    """Ours: messages by what the broker called them, of one topic and group."""

    consumer_group: Annotated[str, Named("c")]
    topic: Annotated[str, Named("t")]
    handles: Annotated[tuple[str, ...], Named("h"), AtMost(ACKS_MAX)]


@record(frozen=True, slots=True)
class BatchAckBody(Body):
    """BATCH_ACK_MESSAGE. ``by_handle`` is ours; its answer's body has a result per handle, as ``BatchAckAnswer``."""

    bytes_max: ClassVar[int] = ACK_BYTES_MAX
    acks: Annotated[tuple[AckEntry, ...], AtMost(ACKS_MAX)] = ()
    by_handle: Annotated[tuple[HandleEntry, ...], AtMost(ACKS_MAX)] = ()


@record(frozen=True, slots=True)
class BatchAckAnswer(Body):
    """Ours: whether each handle of the request was valid, in order."""

    valid: tuple[bool, ...] = ()
