"""RocketMQ 5's pop over remoting: headers and bodies of its requests, and the texts by which clients name a message.

A client makes of each message it got a *check point*, a text of eight numbers and names, and sends it back with the
acknowledgement: ``start pop-time invisible-time revive-queue retry broker queue offset``. ``retry`` is 1 for a message
of the group's retry topic. Clients that find one among the properties of a message (``POP_CK``) keep that, so what
stands behind the eighth place comes back to the broker as well.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Final, NamedTuple

from dledger.records import record
from dledger.remoting.codes import RequestError
from rocketstore.remoting.body import AtMost, Body
from rocketstore.remoting.headers import Int32, Int64, Named
from rocketstore.remoting.topics import MessageQueue
from rocketstore.types import MessageModel, RequestMode

ORDERED: Final = 999
"""The revive queue of messages of ordered groups: clients look at it."""
FROM_FIRST: Final = 0
"""``initMode``: a group that is new begins at the first message of each queue; otherwise at the end."""
_PLACES: Final = 8
_PLACES_WITH_LOG: Final = 9
_INT32: Final = 1 << 31
_INT64: Final = 1 << 63


@record(frozen=True, slots=True)
class PopHeader:
    """POP_MESSAGE."""

    consumer_group: str
    topic: str
    queue_id: Int32
    """Negative: any."""
    max_msg_nums: Int32
    invisible_time: Int64
    poll_time: Int64
    born_time: Int64 = 0
    init_mode: Int32 = 1
    exp_type: str = ""
    exp: str = ""
    order: bool = False
    attempt_id: str = ""


@record(frozen=True, slots=True)
class PopAnswer:
    """Answer to POP_MESSAGE, whatever its code."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32
    rest_num: Int64
    start_offset_info: str = ""
    msg_offset_info: str = ""
    order_count_info: str = ""


@record(frozen=True, slots=True)
class AckHeader:
    """ACK_MESSAGE."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: Int64


@record(frozen=True, slots=True)
class ChangeInvisibleHeader:
    """CHANGE_MESSAGE_INVISIBLETIME."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: Int64
    invisible_time: Int64
    suspend: bool = False


@record(frozen=True, slots=True)
class ChangeInvisibleAnswer:
    """Answer to CHANGE_MESSAGE_INVISIBLETIME: of it and its request, clients make the new check point."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32
    handle: str = ""
    """Ours: the broker's word for the message from now on."""


@record(frozen=True, slots=True)
class PeekHeader:
    """PEEK_MESSAGE."""

    consumer_group: str
    topic: str
    queue_id: Int32
    max_msg_nums: Int32


@record(frozen=True, slots=True)
class PollingInfoHeader:
    """POLLING_INFO."""

    consumer_group: str
    topic: str
    queue_id: Int32


@record(frozen=True, slots=True)
class PollingInfoAnswer:
    """Answer to POLLING_INFO."""

    polling_num: Int32


@record(frozen=True, slots=True)
class NotificationHeader:
    """NOTIFICATION."""

    consumer_group: str
    topic: str
    queue_id: Int32
    poll_time: Int64
    born_time: Int64 = 0


@record(frozen=True, slots=True)
class NotificationAnswer:
    """Answer to NOTIFICATION."""

    has_msg: bool
    polling_full: bool = False


class CheckPoint(NamedTuple):
    """The receipt that a client sends back for one message. Times in ms: since 1970, and how long."""

    start: int
    pop_time: int
    invisible_time: int
    revive: int
    is_retry: bool
    broker: str
    queue_id: int
    offset: int
    log_offset: int = -1
    """Where the message is in the log; RocketMQ's proxy demands a number there, if there is anything; -1: nothing."""
    rest: str = ""
    """The broker's own word without blanks, if the client got it with the message."""

    def __str__(self) -> str:
        numbers = f"{self.start} {self.pop_time} {self.invisible_time} {self.revive} {int(self.is_retry)}"
        place = f"{self.broker} {self.queue_id} {self.offset}"
        if self.log_offset < 0 and not self.rest:
            return f"{numbers} {place}"
        return f"{numbers} {place} {self.log_offset} {self.rest}".rstrip(" ")

    @classmethod
    def parse(cls, text: str) -> CheckPoint:
        """Raises ``RequestError`` for anything else than a check point."""
        parts = text.split(" ")
        if len(parts) < _PLACES or len(text) > 4096:
            raise RequestError(f"invalid <extraInfo>, not a check point of a message: {text[:64]!r}")
        try:
            start, pop_time, invisible, revive, retry, *place = map(int, (*parts[:5], *parts[6:_PLACES_WITH_LOG]))
        except ValueError:
            raise RequestError(f"<extraInfo> has a place that is not a number: {text[:64]!r}") from None
        queue_id, offset, log_offset = place if len(place) > 2 else (*place, -1)
        longs = start, pop_time, invisible, offset, log_offset
        if max(map(abs, longs)) >= _INT64 or max(abs(revive), abs(queue_id)) >= _INT32:
            raise RequestError(f"<extraInfo> has a number that is too large: {text[:64]!r}")
        rest = parts[_PLACES_WITH_LOG] if len(parts) > _PLACES_WITH_LOG else ""  # RocketMQ's proxy adds a word
        return cls(start, pop_time, invisible, revive, retry > 0, parts[5], queue_id, offset, log_offset, rest)


def start_offsets(offsets: Mapping[tuple[bool, int], Iterable[int]]) -> str:
    """``startOffsetInfo``: the first of the offsets of each queue, by whether it is of the retry topic, and its id."""
    return ";".join(f"{int(is_retry)} {queue_id} {min(some)}" for (is_retry, queue_id), some in offsets.items())


def message_offsets(offsets: Mapping[tuple[bool, int], Iterable[int]]) -> str:
    """``msgOffsetInfo``: all of them."""
    return ";".join(
        f"{int(is_retry)} {queue_id} {','.join(map(str, some))}" for (is_retry, queue_id), some in offsets.items()
    )


def order_counts(counts: Mapping[tuple[bool, int], int]) -> str:
    """``orderCountInfo``: how often the messages of each queue were delivered before."""
    return ";".join(f"{int(is_retry)} {queue_id} {count}" for (is_retry, queue_id), count in counts.items())


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
