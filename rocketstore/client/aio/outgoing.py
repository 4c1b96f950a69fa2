"""Messages on their way out: refusals before sending, and the requests that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from dledger.errors import InvalidRequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.errors import MessageRefusedError
from rocketstore.message.batch import encode_items
from rocketstore.message.checks import check_topic
from rocketstore.message.ids import unique_ids
from rocketstore.message.message import (
    PROPERTY_CHECK_TIMES,
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_PRIORITY,
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
from rocketstore.message.properties import PROPERTIES_BYTES_MAX, java_hash, join_properties
from rocketstore.remoting.codes import RequestCode

if TYPE_CHECKING:
    from rocketstore.client.aio.errors import ClientError
    from rocketstore.client.aio.futures import AnyFuture
    from rocketstore.remoting.bodies.queues import MessageQueue

CREATING_TOPIC: Final = "TBW102"
"""RocketMQ's default topic: brokers that have it create other topics when a message for them arrives."""
CREATED_QUEUES: Final = 4
"""RocketMQ's ``defaultTopicQueueNums``: the queues of a topic that is created in this way."""
NO_GROUP: Final = "DEFAULT_PRODUCER"
"""The producer group of those that have none; requests must name one."""
MESSAGE_OVERHEAD_BYTES: Final = 320
"""The bytes of a message here, and in a request, besides its body and its properties."""
_UNIQUE_KEY_BYTES: Final = 1 + len(PROPERTY_UNIQUE_KEY) + 1 + 32
"""The bytes of the property with the message's id."""
_IN_TRANSACTIONS: Final = "use Producer.transaction"
_BY_BROKERS: Final = "brokers set it"
INSTEAD: Final = {
    PROPERTY_TAGS: "pass tags=... to Message",
    PROPERTY_KEYS: "pass keys=... to Message",
    PROPERTY_DELAY: "pass delay_level=... to Message",
    PROPERTY_PRIORITY: "pass priority=... to Message",
    PROPERTY_TIMER_DELIVER_MS: "pass deliver_at=... to Message",
    PROPERTY_TIMER_DELAY_MS: "pass delay=... to Message",
    PROPERTY_TIMER_DELAY_S: "pass delay=... to Message",
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
    PROPERTY_PRIORITY,
    PROPERTY_TRANSACTION,
    PROPERTY_TIMER_DELAY_S,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELIVER_MS,
)
"""Properties of messages that no batch may contain."""


class OutgoingMessage:
    """One message until its outcome is known. Created for every message: fields that few need are the class's."""

    sys_flag = 0
    alone = False
    """Whether it goes in a request of its own."""
    key: str | None = None
    """Its sharding key."""
    wanted: MessageQueue | int | None = None
    """The queue that the caller has chosen."""
    queue: MessageQueue | None = None
    """The queue it goes to; None: any."""
    first: MessageQueue | None = None
    """Of a message for any queue: the one whose turn it was."""
    turn = 0
    """Of a message with a sharding key: its place in the order of all of them."""
    tried: Sequence[str] = ()
    """Names of brokers that have refused it, of those it was numbered for."""
    unique_key = ""
    """Its id, once it is identified; that of a transaction from the start."""
    born_ms = 0
    deadline = 0.0
    """By the loop's clock."""
    number = -1
    """The one that the application has given it, if so."""
    doubtful: ClientError | None = None
    """Why it may be stored already, if so."""
    future: AnyFuture = None
    """Gets its outcome."""
    span: Any = None  # of OpenTelemetry, which need not be installed
    """Ends with its outcome, if there is one."""

    def __init__(self, message: Message, properties: str, size: int) -> None:
        self.message = message
        self.properties = properties
        self.size = size
        """Its bytes here, and in a request."""

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
    if problem := check_topic(topic):
        raise MessageRefusedError(problem)
    if len(message.body) > body_bytes_max:
        raise MessageRefusedError(f"the body has {len(message.body)} bytes, more than {body_bytes_max}")
    if message.queue_id:
        raise MessageRefusedError(
            f"the message sets queue {message.queue_id}: pass the queue to the call instead, send(message, "
            f"queue={message.queue_id})"
        )
    sys_flag, alone, text = message.sys_flag, False, ""
    try:
        if properties:
            check_properties(message)
            alone = any(name in properties for name in _ALONE)
            text = join_properties(properties)
        if transaction_id:
            sys_flag, alone = sys_flag | SYS_FLAG_PREPARED, True
            half = {PROPERTY_TRANSACTION: "true", PROPERTY_PRODUCER_GROUP: producer_group}
            text = join_properties({**properties, PROPERTY_UNIQUE_KEY: transaction_id, **half})
        length = len(text) if text.isascii() else len(text.encode())
    except (InvalidRequestError, UnicodeEncodeError) as error:
        raise MessageRefusedError(f"cannot send the message: {error}") from error
    if length + _UNIQUE_KEY_BYTES > PROPERTIES_BYTES_MAX:
        raise MessageRefusedError(f"the properties take {length} bytes, with the message's id more than is possible")
    found = OutgoingMessage(message, text, len(message.body) + length + MESSAGE_OVERHEAD_BYTES)
    if sys_flag:
        found.sys_flag = sys_flag
    if alone:
        found.alone = True
    if transaction_id:
        found.unique_key = transaction_id
    return found


def identify(messages: Sequence[OutgoingMessage], now_ms: int) -> None:
    """Give each message its unique id and its time of birth."""
    for message, key in zip(messages, unique_ids(len(messages)), strict=True):
        message.born_ms = message.message.born_timestamp or now_ms
        if not message.unique_key:
            message.unique_key = key
            own = message.properties
            message.properties = f"{own}\x02UNIQ_KEY\x01{key}" if own else f"UNIQ_KEY\x01{key}"


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
    return abs(_hash_of(key)) % queues


@lru_cache(maxsize=4096)
def _hash_of(key: str) -> int:
    return java_hash(key)


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
    """Whether two messages of a topic may be in one batch: the batch's own properties must be the same."""
    return not other.alone and (
        one.sys_flag == other.sys_flag and one.message.reconsume_times == other.message.reconsume_times
    )
