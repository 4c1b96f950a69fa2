"""The records that ``Admin`` takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.client.aio.routes import PERMISSION_READ, PERMISSION_WRITE
from rocketstore.remoting.groups import ClientConnection
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.remoting.topics import MessageQueue
from rocketstore.state.attributes import RetryPolicy
from rocketstore.types import ConsumeFromWhere, MessageModel, RequestMode


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A broker's runtime information; ``table`` is the whole of it, by RocketMQ's names."""

    address: str
    runtime: RuntimeInfo
    table: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic at one broker: its numbers of queues, and RocketMQ's permission bits (4 read, 2 write).

    ``broker`` is the broker's name; to put a topic at all of them, leave it empty. ``message_type``: the type of
    messages that it takes, by RocketMQ 5's names (NORMAL, FIFO, DELAY, TRANSACTION, PRIORITY; UNSPECIFIED or MIXED:
    any); empty: any, and when a topic is put, as it is. ``retention``: how long its messages can be read (``36h``);
    empty: as long as the log has them, and when a topic is put, as it is; ``"log"`` removes one.
    """

    name: str
    read_queues: int = 4
    write_queues: int = 4
    permission: int = PERMISSION_READ | PERMISSION_WRITE
    broker: str = ""
    message_type: str = ""
    retention: str = ""


@dataclass(frozen=True, slots=True)
class Traced:
    """One step of a message's way: ``sent``, ``consumed`` (``failed`` where ``ok`` is false), or ``ended`` of its
    transaction.

    ``time_ms``: when it began; ``cost_ms``: how long it took, -1 while it is not over, or nobody has said so. ``host``
    is the client's address, ``group`` its group. ``detail``: the broker's address, or what became of a transaction.
    """

    step: str
    time_ms: int
    cost_ms: int
    ok: bool
    group: str
    host: str
    detail: str = ""
    retries: int = 0


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The settings of a consumer group at one broker; to put it at all of them, leave ``broker`` empty.

    ``retries_max``: how often a message is delivered again before it goes to the dead letters. Settings that are None
    stay as they are; a new group has the defaults.
    """

    name: str
    retries_max: int | None = None
    is_enabled: bool | None = None
    may_broadcast: bool | None = None
    broker: str = ""
    is_ordered: bool | None = None
    """Whether RocketMQ 5's clients get the messages of a queue in order, however many share it."""
    retry_delays: RetryPolicy | Literal["levels"] | None = None
    """How long a message that could not be consumed waits, for RocketMQ 5's clients; ``levels``: the broker's delay
    levels from the third on.
    """


@dataclass(frozen=True, slots=True)
class ConsumeMode:
    """How a group's consumers get a topic's messages if they leave the division of queues to the brokers, as clients of
    RocketMQ 5 do with ``clientRebalance=false``; to set it at all brokers, leave ``broker`` empty.

    ``share_queues``: who pops shares its queues with so many others; 0: everyone pops from all queues.
    """

    topic: str
    group: str
    mode: RequestMode
    share_queues: int = 0
    broker: str = ""


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The consumers of a group that are online; ``topics`` are their subscriptions, by topic."""

    clients: tuple[ClientConnection, ...]
    topics: Mapping[str, str]
    model: MessageModel
    begins: ConsumeFromWhere


@dataclass(frozen=True, slots=True)
class QueueRange:
    """One queue's first offset and its end, and the store time of its newest message (ms since 1970; 0: not known)."""

    queue: MessageQueue
    min_offset: int
    max_offset: int
    last_update_ms: int


@dataclass(frozen=True, slots=True)
class QueuePart:
    """Messages of one broker's copy of a queue, the offset for the next call, and the copy's first offset and end."""

    messages: tuple[ConsumedMessage, ...]
    next_offset: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """A group's progress in one queue. ``last_ms``: when the last message that it consumed was stored."""

    queue: MessageQueue
    committed: int
    max_offset: int
    last_ms: int

    @property
    def lag(self) -> int:
        """The number of messages still to be consumed."""
        return max(self.max_offset - max(self.committed, 0), 0)


@dataclass(frozen=True, slots=True)
class DelayLevelStatus:
    """Messages that wait at one delay level of a broker: those from ``next_offset`` to before ``end_offset``.

    ``next_due_ms`` (since 1970) is when the next one is due; -1 if none waits.
    """

    level: int
    delay_ms: int
    next_offset: int
    end_offset: int
    next_due_ms: int
