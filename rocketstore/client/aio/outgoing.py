"""Messages on their way out: what is refused before it is sent, and the requests that carry them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from dledger.errors import InvalidRequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.errors import MessageRefusedError
from rocketstore.message.batch import encode_items
from rocketstore.message.ids import unique_id
from rocketstore.message.message import (
    PROPERTY_CHECK_TIMES,
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_S,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT,
    SYS_FLAG_PREPARED,
    Message,
)
from rocketstore.message.properties import PROPERTIES_BYTES_MAX, join_properties
from rocketstore.message.tags import java_hash
from rocketstore.remoting.codes import RequestCode

if TYPE_CHECKING:
    from rocketstore.client.aio.errors import ClientError
    from rocketstore.client.aio.results import SendResult
    from rocketstore.remoting.bodies.queues import MessageQueue

TOPIC_CHARS_MAX: Final = 127
CREATING_TOPIC: Final = "TBW102"
"""RocketMQ's default topic: brokers that have it create other topics when a message for them arrives."""
CREATED_QUEUES: Final = 4
"""RocketMQ's ``defaultTopicQueueNums``: the queues of a topic that is created in this way."""
NO_GROUP: Final = "DEFAULT_PRODUCER"
"""The producer group of those that have none; requests must name one."""
MESSAGE_OVERHEAD_BYTES: Final = 256
"""What a message takes here, and in a request, besides its body and its properties."""
_IN_TRANSACTIONS: Final = "use Producer.transaction"
_BY_BROKERS: Final = "brokers set it"
INSTEAD: Final = {
    PROPERTY_TAGS: "pass tags=... to Message",
    PROPERTY_KEYS: "pass keys=... to Message",
    PROPERTY_DELAY: "pass delay_level=... to Message",
    PROPERTY_UNIQUE_KEY: "the producer sets it (the result's message_id); pass keys=... for a key of your own",
    PROPERTY_WAIT: "the broker's conf file says what a send waits for; look at the result's status",
    PROPERTY_TRANSACTION: _IN_TRANSACTIONS,
    PROPERTY_PRODUCER_GROUP: _IN_TRANSACTIONS,
    PROPERTY_CHECK_TIMES: _BY_BROKERS,
    PROPERTY_REAL_TOPIC: _BY_BROKERS,
    PROPERTY_REAL_QUEUE_ID: _BY_BROKERS,
    PROPERTY_RETRY_TOPIC: _BY_BROKERS,
}
"""Properties that mean something to the store: what an application does instead of setting them itself."""
_ALONE: Final = (
    PROPERTY_DELAY,
    PROPERTY_TRANSACTION,
    PROPERTY_TIMER_DELAY_S,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELIVER_MS,
)
"""Properties of messages that no batch may contain."""


class OutcomeFuture(Protocol):
    """Where a message's outcome goes: a future of asyncio's, or of threads."""

    def done(self) -> bool:
        """Whether it has an outcome, or was cancelled."""

    def set_result(self, result: SendResult, /) -> None:
        """The message is stored."""

    def set_exception(self, error: BaseException, /) -> None:
        """It is not, or perhaps not."""


class OutgoingMessage:
    """One message until its outcome is known. Created for every message: a class with slots."""

    __slots__ = (
        "alone",
        "born_ms",
        "deadline",
        "doubtful",
        "first",
        "future",
        "key",
        "message",
        "properties",
        "queue",
        "size",
        "sys_flag",
        "tried",
        "unique_key",
        "wanted",
    )

    def __init__(self, message: Message, properties: str, unique_key: str, sys_flag: int, *, alone: bool) -> None:
        self.message = message
        self.properties = properties
        self.unique_key = unique_key
        self.sys_flag = sys_flag
        self.alone = alone
        """Whether it goes in a request of its own."""
        self.size = len(message.body) + len(properties) + MESSAGE_OVERHEAD_BYTES
        self.born_ms = message.born_timestamp or time.time_ns() // 1_000_000
        self.key: str | None = None
        """Its sharding key."""
        self.wanted: MessageQueue | int | None = None
        """The queue that the caller has chosen."""
        self.queue: MessageQueue | None = None
        """The queue it must go to, by one or the other; None: any."""
        self.first: MessageQueue | None = None
        """Of a message for any queue: the one whose turn it was."""
        self.tried: list[str] = []
        """Names of brokers that have refused it, of those it was numbered for."""
        self.deadline = 0.0
        """By the loop's clock."""
        self.doubtful: ClientError | None = None
        """Why it may be stored already, if so."""
        self.future: OutcomeFuture | None = None

    @property
    def is_free(self) -> bool:
        """Whether it may go to any queue."""
        return self.key is None and self.wanted is None


def outgoing(
    message: Message, body_bytes_max: int, *, producer_group: str = "", transaction_id: str = ""
) -> OutgoingMessage:
    """Check and encode a message; with ``transaction_id`` (its unique key) as the first half of a transaction.

    Raises ``MessageRefusedError`` for a message that no broker would take, and ``TypeError`` for something else.
    """
    if not isinstance(message, Message):
        raise TypeError(f"a producer sends Message(topic, body), not {type(message).__name__}")
    topic, properties = message.topic, message.properties
    if not 0 < len(topic) <= TOPIC_CHARS_MAX:
        raise MessageRefusedError(f"a topic must have 1 to {TOPIC_CHARS_MAX} characters, not {len(topic)}: {topic!r}")
    if len(message.body) > body_bytes_max:
        raise MessageRefusedError(f"the body has {len(message.body)} bytes, more than {body_bytes_max}")
    if message.queue_id:
        raise MessageRefusedError(
            f"the message sets queue {message.queue_id}: pass the queue to the call instead, send(message, "
            f"queue={message.queue_id})"
        )
    sys_flag, alone = message.sys_flag, False
    if properties:
        check_properties(message)
        alone = any(name in properties for name in _ALONE)
    unique_key = transaction_id or unique_id()
    try:
        if transaction_id:
            sys_flag, alone = sys_flag | SYS_FLAG_PREPARED, True
            half = {PROPERTY_TRANSACTION: "true", PROPERTY_PRODUCER_GROUP: producer_group}
            text = join_properties({**properties, PROPERTY_UNIQUE_KEY: unique_key, **half})
        elif properties:
            text = join_properties({**properties, PROPERTY_UNIQUE_KEY: unique_key})
        else:
            text = f"{PROPERTY_UNIQUE_KEY}\x01{unique_key}"
        length = len(text) if text.isascii() else len(text.encode())
    except (InvalidRequestError, UnicodeEncodeError) as error:
        raise MessageRefusedError(f"cannot send the message: {error}") from error
    if length > PROPERTIES_BYTES_MAX:
        raise MessageRefusedError(f"the properties take {length} bytes, more than {PROPERTIES_BYTES_MAX}")
    return OutgoingMessage(message, text, unique_key, sys_flag, alone=alone)


def check_properties(message: Message) -> None:
    """Raises ``MessageRefusedError`` for a property that means something to the store and that no argument has set."""
    for name in message.properties:
        instead = INSTEAD.get(name)
        if instead is not None and name not in message.meant:
            raise MessageRefusedError(f"the property {name} means something to the store: {instead}")


def queue_number_of_key(key: str, queues: int) -> int:
    """The place of a sharding key among the queues: always the same, and as RocketMQ's ``SelectMessageQueueByHash``."""
    if not isinstance(key, str):
        raise TypeError(f"key must be a str, not {type(key).__name__}: {key!r}")
    return abs(java_hash(key)) % queues


def request_of(messages: Sequence[OutgoingMessage], queue: MessageQueue, group: str) -> Frame:
    """The request that sends them to a queue, several as a batch.

    Raises ``MessageRefusedError`` if something does not fit into it.
    """
    first = messages[0]
    fields = {
        "a": group or NO_GROUP,
        "b": first.message.topic,
        "c": CREATING_TOPIC,
        "d": str(CREATED_QUEUES),
        "e": str(queue.queue_id),
        "f": str(first.sys_flag),
        "g": str(first.born_ms),
        "h": str(first.message.flag),
        "j": str(first.message.reconsume_times),
    }
    if len(messages) == 1 or first.alone:
        fields["i"] = first.properties
        return Frame(RequestCode.SEND_MESSAGE_V2, 0, fields, first.message.body)
    fields["m"] = "true"
    try:
        body = encode_items((one.message.flag, one.message.body, one.properties.encode()) for one in messages)
    except InvalidRequestError as error:
        raise MessageRefusedError(f"cannot send the messages: {error}") from error
    return Frame(RequestCode.SEND_BATCH_MESSAGE, 0, fields, body)


def fit_together(one: OutgoingMessage, other: OutgoingMessage) -> bool:
    """Whether two messages of a topic may be in one batch: what is not their own must be the same."""
    return not other.alone and (
        one.sys_flag == other.sys_flag and one.message.reconsume_times == other.message.reconsume_times
    )
