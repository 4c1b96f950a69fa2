"""RocketMQ 5's pop over remoting: the headers of its requests, and the texts by which clients name a message.

A client makes of each message it got a *check point*, a text of eight numbers and names, and sends it back with the
acknowledgement: ``start pop-time invisible-time revive-queue retry broker queue offset``. ``retry`` is 1 for a message
of the group's retry topic. Clients that find one among the properties of a message (``POP_CK``) keep that, so what
stands behind the eighth place comes back to the broker as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from dledger.records import record
from dledger.remoting.codes import RequestError
from rocketstore.remoting.headers import Int32, Int64

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
