"""Messages on their way out: refusals before sending, the requests that carry them, and those without an outcome yet
(room for more, waiting for them, and their futures).

A ``concurrent.futures.Future`` costs a lock and two lists when it is made, and a notification when it has its outcome.
Here those that are handed over together share the lock, and the lists are made for anyone who asks for them. The
documented behaviour of futures holds, and ``concurrent.futures.wait`` and ``as_completed`` take them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from dledger.errors import InvalidRequestError
from dledger.records import record
from dledger.remoting.frame import Frame
from dledger.rpc.loops import mind_forks
from rocketstore.client.aio.errors import (
    OTHER_PROCESS,
    ClientClosedError,
    ClientError,
    MessageRefusedError,
    SendQueueFullError,
    SendResult,
)
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
    from rocketstore.remoting.topics import MessageQueue

_DONE = frozenset({CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED})


class BatchedFuture(Future[SendResult]):
    """``condition`` guards the outcome, and is notified of those of all futures that share it."""

    _state = PENDING
    _result: SendResult | None = None
    _exception: BaseException | None = None
    _waiters: list[Any]
    _done_callbacks: list[Callable[[Future[Any]], object]]
    _invoke_callbacks: Callable[[], None]
    _is_watched = False
    """Whether somebody has asked for one of the lists."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition

    def __getattr__(self, name: str) -> list[Any]:
        if name not in ("_waiters", "_done_callbacks"):
            raise AttributeError(name)
        self._waiters, self._done_callbacks = [], []
        self._is_watched = True
        return self._waiters if name == "_waiters" else self._done_callbacks

    def done(self) -> bool:
        return self._state in _DONE

    def result(self, timeout: float | None = None) -> SendResult:
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # which the error's traceback refers to
        assert self._result is not None, "it has an outcome, and no error"
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state != FINISHED:
            self._wait(None if timeout is None else time.monotonic() + timeout)
        return self._exception

    def _wait(self, until: float | None) -> None:
        with self._condition:
            while self._state != FINISHED:
                if self._state in (CANCELLED, CANCELLED_AND_NOTIFIED):
                    raise CancelledError
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self._condition.wait(left)


AnyFuture: TypeAlias = asyncio.Future[SendResult] | BatchedFuture | None


class WithFuture(Protocol):
    """A message, for a caller."""

    future: AnyFuture


_Message = TypeVar("_Message", bound=WithFuture)


def begin(messages: Sequence[_Message]) -> list[_Message]:
    """Those whose futures, all of this kind, were not cancelled: from now on they cannot be."""
    begun: list[_Message] = []
    condition: threading.Condition | None = None
    try:
        for message in messages:
            future = message.future
            assert isinstance(future, BatchedFuture), "another thread waits for it"
            if future._condition is not condition:
                _release(condition)
                condition = future._condition
                condition.acquire()
            if future._state == PENDING:
                future._state = RUNNING
                begun.append(message)
            else:
                future.set_running_or_notify_cancel()
    finally:
        _release(condition)
    return begun


def settle(futures: Sequence[AnyFuture], outcomes: Sequence[SendResult | BaseException]) -> None:
    """Give futures their outcomes, each lock being taken once for all that follow each other and share it.

    Those that were cancelled, and None, have nobody who waits.
    """
    watched: list[BatchedFuture] = []
    condition: threading.Condition | None = None
    try:
        for future, outcome in zip(futures, outcomes, strict=True):
            if not isinstance(future, BatchedFuture):
                _settle(future, outcome)
                continue
            if future._condition is not condition:
                _release(condition)
                condition = future._condition
                condition.acquire()
            if future._state != RUNNING:
                continue
            if isinstance(outcome, SendResult):
                future._result = outcome
            else:
                future._exception = outcome
            future._state = FINISHED
            if future._is_watched:
                watched.append(future)
                for waiter in future._waiters:
                    if future._exception is None:
                        waiter.add_result(future)
                    else:
                        waiter.add_exception(future)
    finally:
        _release(condition)
    for future in watched:
        future._invoke_callbacks()


def leave_behind(messages: Iterable[WithFuture], error: BaseException) -> None:
    """In a forked child, on its only thread: nobody else would ever give these their outcomes. Takes no lock, since a
    thread of the parent may hold any of them.
    """
    condition = threading.Condition()
    for message in messages:
        future = message.future
        if isinstance(future, BatchedFuture) and not future.done():
            future._condition, future._exception, future._state = condition, error, FINISHED


def _release(condition: threading.Condition | None) -> None:
    if condition is not None:
        condition.notify_all()
        condition.release()


def _settle(future: asyncio.Future[SendResult] | None, outcome: SendResult | BaseException) -> None:
    if future is None or future.done():
        return
    if isinstance(outcome, SendResult):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


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


@record(frozen=True, slots=True)
class PipelineLimits:
    """The limits of a producer's messages that are pending, and of its requests."""

    pending_bytes_max: int = 32 * 1024 * 1024
    pending_messages_max: int = 65_536
    batch_bytes_max: int = 768 * 1024
    batch_messages_max: int = 1024
    requests_max: int = 64
    """In progress, of all queues together."""


def in_another_process() -> ClientClosedError:
    """The error of messages without an outcome in a forked child: the parent may store them yet."""
    return ClientClosedError(OTHER_PROCESS, outcome="unknown")


class SendObserver(Protocol):
    """Hears of outcomes, on the loop: it must neither block nor raise."""

    def settled(self, messages: Sequence[OutgoingMessage], outcomes: Sequence[SendResult | ClientError]) -> None:
        """These have their outcomes."""


class PendingMessages:
    """Use it on one loop; ``is_full`` may be read anywhere."""

    def __init__(
        self, limits: PipelineLimits, on_settled: Callable[[Sequence[OutgoingMessage]], object] = lambda _: None
    ) -> None:
        """``on_settled`` is told of all messages that are not pending any more."""
        self.limits: Final = limits
        self._on_settled = on_settled
        self._messages: set[OutgoingMessage] = set()
        self._waiting: list[asyncio.Future[None]] = []  # for room
        self._flushes: list[tuple[set[OutgoingMessage], asyncio.Future[None]]] = []
        self._is_closing = False
        self.observers: tuple[SendObserver, ...] = ()
        self.bytes = 0
        self.is_full = False
        """Whether callers should wait before they add more."""
        mind_forks(self)

    def leave_behind(self) -> None:
        """See ``LeftBehind``."""
        leave_behind(self._messages, in_another_process())

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, messages: Sequence[OutgoingMessage]) -> None:
        """These have no outcome from now on."""
        self._messages.update(messages)
        self.bytes += sum([one.size for one in messages])
        self._look()

    def keyed(self, topic: str) -> set[OutgoingMessage]:
        """Those of a topic that a sharding key has brought into a queue."""
        return {one for one in self._messages if one.key is not None and one.queue and one.queue.topic == topic}

    async def wait_for_room(self, timeout_s: float) -> None:
        """Return once a message may be added. Raises ``SendQueueFullError``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_full and not self._is_closing:
                    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append(waiting)
                    await waiting
        except TimeoutError:
            raise SendQueueFullError(
                f"{len(self)} messages with {self.bytes} bytes are not sent yet, and there was no room for another one "
                f"within {timeout_s:g} s"
            ) from None

    async def flush(self) -> None:
        """Return once every message added so far has an outcome."""
        left = set(self._messages)
        if left:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            flush = (left, done)
            self._flushes.append(flush)
            try:
                await done
            finally:
                self._flushes.remove(flush)

    def let_in(self) -> None:
        """Nobody waits for room from now on: adding says that the producer is closed."""
        self._is_closing = True
        self._wake()

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def settle(self, messages: Sequence[OutgoingMessage], outcomes: Sequence[SendResult | ClientError]) -> None:
        """Give each message its outcome, unless its caller gave up."""
        self.drop(messages)
        for one in self.observers:
            one.settled(messages, outcomes)
        settle([one.future for one in messages], outcomes)

    def fail(self, messages: Sequence[OutgoingMessage], error: ClientError) -> None:
        """They are not stored, or perhaps not: those of which that was in doubt before have their earlier error."""
        self.settle(messages, [one.doubtful or error for one in messages])

    def fail_all(self, error: ClientError) -> None:
        """Fail all that are left."""
        self.fail(tuple(self._messages), error)

    def drop(self, messages: Sequence[OutgoingMessage]) -> None:
        """They are not pending any more."""
        before = len(self._messages)
        self._messages.difference_update(messages)
        if before - len(self._messages) == len(messages):
            self.bytes -= sum([one.size for one in messages])
        else:  # some were dropped before
            self.bytes = sum(one.size for one in self._messages)
        for left, done in self._flushes:
            left.difference_update(messages)
            if not left and not done.done():
                done.set_result(None)
        self._on_settled(messages)
        self._look()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        limits = self.limits
        self.is_full = len(self._messages) >= limits.pending_messages_max or self.bytes >= limits.pending_bytes_max
        if self._waiting and not self.is_full:
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)
