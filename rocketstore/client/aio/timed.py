"""Timed messages: their recall handles, recalling them, and what waits at a broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rocketstore.client.aio.admin_answers import body_of
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.connections import Deadline
from rocketstore.client.aio.outgoing import OutgoingMessage
from rocketstore.message.message import PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELIVER_MS
from rocketstore.message.timed import RecallHandle, WrongHandleError, decode_handle
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import TimedMessagesBody
from rocketstore.remoting.headers import ListTimedHeader, RecallHeader

PAGE: Final = 128


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """A message that waits for its time. ``due_ms`` and ``born_ms`` are Unix times (ms), ``size`` is in bytes."""

    topic: str
    queue: int
    due_ms: int
    message_id: str
    keys: str
    tags: str
    size: int
    born_ms: int
    recall_handle: str


@dataclass(frozen=True, slots=True)
class TimedMessages:
    """A part of the messages that wait at a broker, by due time.

    ``next_ms``, ``next_offset``: where the next part begins; -1: this is the last one. ``open``: how many wait in all;
    ``late``: how many should have been delivered more than a second ago; ``next_due_ms``: when the first of all is due,
    or -1.
    """

    broker: str
    messages: list[TimedMessage]
    next_ms: int
    next_offset: int
    open: int
    late: int
    next_due_ms: int


def handle_of(message: OutgoingMessage, broker: str, queue_offset: int) -> str:
    """The recall handle of a message that was stored there; empty if it does not wait for a time."""
    found = message.message.properties
    text = found.get(PROPERTY_TIMER_DELIVER_MS, "")
    due_ms = int(text) if text.isdigit() else 0
    if text := found.get(PROPERTY_TIMER_DELAY_MS, ""):
        due_ms = message.born_ms + int(text)
    if due_ms <= message.born_ms or queue_offset < 0:
        return ""
    return RecallHandle(message.message.topic, broker, due_ms, message.unique_key, queue_offset).encode()


async def recall(cluster: Cluster, handle: str, group: str, deadline: Deadline) -> str:
    """Have a timed message not delivered; returns its id. Raises ``ValueError`` and ``ClientError``."""
    try:
        found = decode_handle(handle)
    except WrongHandleError as error:
        raise ValueError(f"{error}: pass the recall_handle of a send's result") from error
    header = RecallHeader(found.topic, handle, group)
    await cluster.ask_master(found.broker, RequestCode.RECALL_MESSAGE, header, deadline=deadline, harmless=False)
    return found.message_id


async def list_timed(
    cluster: Cluster, broker: str, topic: str, key: str, begin: tuple[int, int], count: int, deadline: Deadline
) -> TimedMessages:
    """Messages that wait at a broker's master, from a time and place on. Raises ``ClientError``."""
    name = (await cluster.broker(broker, deadline)).name
    header = ListTimedHeader(topic, key, *begin, min(count, PAGE))
    answer = await cluster.ask_master(name, OwnCode.LIST_TIMED, header, deadline=deadline)
    body = body_of(TimedMessagesBody, answer, name)
    messages = [
        TimedMessage(
            one.topic, one.queue_id, one.due_ms, one.message_id, one.keys, one.tags, one.size, one.born_ms, one.handle
        )
        for one in body.messages
    ]
    next_ = (body.next_ms, body.next_offset)
    return TimedMessages(name, messages, *next_, body.open, body.late, body.next_due_ms)
