"""Blocking clients: the asyncio ones of ``rocketstore.client.aio`` on a thread, with the same names and arguments.

All clients of a process share that thread (``loop_thread``). They are thread-safe. Callbacks of futures run on it: they
must not block, nor wait for a client.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self, TypeVar

from dledger.rpc.loops import mind_forks
from rocketstore.client.aio import admin as aio_admin
from rocketstore.client.aio import producer as aio_numbered
from rocketstore.client.aio import producer as aio_producer
from rocketstore.client.aio import transactions as aio_transactions
from rocketstore.client.aio.admin_messages import FOREVER_MS, Page
from rocketstore.client.aio.admin_requests import TimedMessages
from rocketstore.client.aio.errors import (
    ClientClosedError,
    ClientError,
    PreparedMessage,
    SendResult,
    TransactionResult,
    TransactionState,
)
from rocketstore.client.aio.outgoing import (
    BatchedFuture,
    OutgoingMessage,
    begin,
    in_another_process,
    leave_behind,
    settle,
)
from rocketstore.client.aio.producer import TIMEOUT_S, ProducerOptions
from rocketstore.client.aio.transactions import Check, checked_state
from rocketstore.client.loop_thread import BlockingClient, ClientThread
from rocketstore.message.trace import TRACE_TOPIC

if TYPE_CHECKING:
    from dledger.client.shared import ClientSecurity
    from rocketstore.client.aio.admin_requests import (
        BrokerStatus,
        ConsumeMode,
        DelayLevelStatus,
        GroupInfo,
        GroupMembers,
        QueuePart,
        QueueProgress,
        QueueRange,
        Start,
        TopicInfo,
        Traced,
    )
    from rocketstore.client.aio.consumer_options import Sql
    from rocketstore.client.aio.routes import RoutedBroker
    from rocketstore.message.message import Message
    from rocketstore.remoting.groups import ClientConnection, ProducerInfo
    from rocketstore.remoting.topics import MessageQueue

HANDED_OVER_MAX: Final = 1024
"""Messages that are on their way to the clients' thread."""
_T = TypeVar("_T")
LARGE_BYTES: Final = 16 * 1024
"""A larger message waits until the thread has counted those before it."""


class Producer(BlockingClient):
    """Sends messages to a group of brokers, or to all brokers that name servers know: see ``aio.Producer``."""

    def __init__(  # noqa: PLR0913  # one parameter per option
        self,
        addresses: Sequence[str] | str | None = None,
        *,
        name_servers: Sequence[str] | str | None = None,
        group: str = "",
        check: Check | None = None,
        enable_idempotence: bool | Literal["auto"] = "auto",
        trace: bool = False,
        timeout_s: float = TIMEOUT_S,
        security: ClientSecurity | None = None,
        options: ProducerOptions | None = None,
    ) -> None:
        self._producer = aio_producer.Producer(
            addresses,
            name_servers=name_servers,
            group=group,
            check=check,
            enable_idempotence=enable_idempotence,
            trace=trace,
            timeout_s=timeout_s,
            security=security,
            options=options,
        )
        self.group: Final = group
        self.client_id: Final = self._producer.client_id
        super().__init__(self._producer)
        self._handed_over = HandOver(self._thread, self._producer.add_all)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Join the producer group, if there is a ``check``: see ``aio.Producer.start``."""
        self._run(self._producer.start())

    def send(self, message: Message, *, key: str | None = None, queue: MessageQueue | int | None = None) -> SendResult:
        """Send one message; returns when the broker has stored it: see ``aio.Producer.send``."""
        return self._run(self._producer.send(self._producer.carried(message), key=key, queue=queue))

    def submit(
        self, message: Message, *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> Future[SendResult]:
        """Send one message soon, together with others: see ``aio.Producer.submit``. Blocks while too much is pending.

        ``wait`` and ``as_completed`` of ``concurrent.futures`` take the future; cancelling it has no effect once the
        message is on its way.
        """
        self._check()
        prepared = self._producer.prepared(message, key, queue)
        if self._handed_over.is_much(prepared) or not self._producer.has_room:
            self._run(self._producer.wait_for_room())
        return self._handed_over.add(prepared)

    def send_many(
        self, messages: Iterable[Message], *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> list[SendResult]:
        """Send messages in as few requests as possible; one result each: see ``aio.Producer.send_many``."""
        carried = map(self._producer.carried, messages)
        return self._run(self._producer.send_many(list(carried), key=key, queue=queue))

    def send_oneway(self, message: Message, *, key: str | None = None, queue: MessageQueue | int | None = None) -> None:
        """Send one message without an answer, once: see ``aio.Producer.send_oneway``."""
        self._run(self._producer.send_oneway(message, key=key, queue=queue))

    def flush(self) -> None:
        """Return once every message submitted so far has an outcome."""
        self._run(self._flush())

    @property
    def pending_messages(self) -> int:
        """Messages that were submitted and have no outcome yet."""
        return len(self._handed_over) + self._producer.pending_messages

    def recall(self, handle: str) -> str:
        """Have a message that waits for its time not delivered: see ``aio.Producer.recall``."""
        return self._run(self._producer.recall(handle))

    def transaction(
        self, message: Message, *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> Transaction:
        """``with producer.transaction(message) as transaction:``, see ``aio.transactions.Transaction``."""
        return Transaction(self, self._producer.transaction(message, key=key, queue=queue))

    def send_in_transaction(
        self,
        message: Message,
        execute: Callable[[PreparedMessage], TransactionState],
        *,
        key: str | None = None,
        queue: MessageQueue | int | None = None,
    ) -> TransactionResult:
        """Store a message, call ``execute`` here, and end as that says: see ``aio.Producer.send_in_transaction``."""
        with self.transaction(message, key=key, queue=queue) as transaction:
            if transaction.is_safe:
                transaction.state = checked_state(execute(transaction.prepared))
        return transaction.result

    def numbered(self, name: str, *, broker: str = "") -> NumberedProducer:
        """For a program that numbers its messages, so that it can go on after a crash: see ``aio.Producer.numbered``.

        Use it before the producer is closed.
        """
        return NumberedProducer(self, self._producer.numbered(name, broker=broker))

    async def _flush(self) -> None:
        self._handed_over.take()
        await self._producer.flush()


class HandOver:
    """Messages on their way from callers' threads to the clients' thread, which takes many at a time."""

    def __init__(self, thread: ClientThread, add_all: Callable[[Sequence[OutgoingMessage]], None]) -> None:
        self._thread = thread
        self._add_all = add_all
        self._messages: deque[OutgoingMessage] = deque()
        self._condition = threading.Condition()
        """Of the futures of messages that are taken together."""
        self._is_told = False
        """Whether the thread was told that there are some, and has not looked yet."""
        mind_forks(self)

    def leave_behind(self) -> None:
        """See ``LeftBehind``."""
        leave_behind(self._messages, in_another_process())

    def __len__(self) -> int:
        return len(self._messages)

    def is_much(self, message: OutgoingMessage) -> bool:
        """Whether a caller should wait for the thread before it adds this one."""
        return message.size > LARGE_BYTES or len(self._messages) >= HANDED_OVER_MAX

    def add(self, message: OutgoingMessage) -> BatchedFuture:
        """Hand a message over. Raises ``ClientClosedError``."""
        message.future = future = BatchedFuture(self._condition)
        self._messages.append(message)
        if not self._is_told:
            self._is_told = True
            try:
                self._thread.post(self.take)
            except ClientClosedError as error:
                self._fail_all(error)
                raise
        return future

    def take(self) -> None:
        """Send what was handed over. On the clients' thread."""
        self._is_told = False  # first: of what comes from now on the thread is told again
        self._condition = threading.Condition()
        taken = list(self._messages.copy())  # in one step: other threads add to it
        try:
            self._add_all(taken)
        finally:  # not before: anyone who forks meanwhile finds each of them here or there
            for _ in taken:
                self._messages.popleft()

    def _fail_all(self, error: ClientClosedError) -> None:
        """The thread has ended: messages of other callers, who saw that it had been told, get their outcomes here."""
        self._is_told = False  # first: what comes from now on fails by itself
        with suppress(IndexError):
            while True:
                settle([one.future for one in begin([self._messages.popleft()])], [error])


class NumberedProducer:
    """A producer whose messages have numbers that the application gives: see ``aio.NumberedProducer``."""

    def __init__(self, producer: Producer, numbered: aio_numbered.NumberedProducer) -> None:
        self._producer = producer
        self._numbered = numbered
        self._handed_over = HandOver(producer._thread, numbered.add_all)
        self.name: Final = numbered.name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def next_number(self) -> int:
        """The number after those that are stored by now, once all that was submitted has an outcome."""
        return self._producer._run(self._after_taking(self._numbered.next_number))

    def submit(
        self, message: Message, number: int, *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> Future[SendResult]:
        """Send a message soon: see ``aio.NumberedProducer.submit``. Blocks while too much is pending."""
        self._producer._check()
        prepared = self._numbered.prepared(message, number, key, queue)
        if self._handed_over.is_much(prepared) or not self._producer._producer.has_room:
            self._producer._run(self._producer._producer.wait_for_room())
        return self._handed_over.add(prepared)

    def flush(self) -> None:
        """Return once every message submitted so far has an outcome."""
        self._producer._run(self._after_taking(self._numbered.flush))

    def close(self) -> None:
        """Send what was submitted; another one may use the name then. Idempotent."""
        self._producer._run(self._after_taking(self._numbered.close))

    async def _after_taking(self, call: Callable[[], Awaitable[_T]]) -> _T:
        self._handed_over.take()
        return await call()


class Transaction:
    """A transaction in progress: see ``aio.transactions.Transaction``, whose members these are."""

    def __init__(self, producer: Producer, transaction: aio_transactions.Transaction) -> None:
        self._producer = producer
        self._transaction = transaction

    def __enter__(self) -> Self:
        self._producer._run(self._transaction.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._producer._run(self._transaction.__aexit__(kind, error, trace))

    @property
    def id(self) -> str:
        """The message's unique key."""
        return self._transaction.id

    @property
    def half(self) -> SendResult:
        """Where the message waits."""
        return self._transaction.half

    @property
    def prepared(self) -> PreparedMessage:
        """The message, and the transaction's id."""
        return self._transaction.prepared

    @property
    def result(self) -> TransactionResult:
        """Its outcome; after the block."""
        return self._transaction.result

    @property
    def is_safe(self) -> bool:
        """Whether the broker has the message as safely as it is set to."""
        return self._transaction.is_safe

    @property
    def state(self) -> TransactionState | None:
        """The action at the end of the block; None: commit it, unless the block raises."""
        return self._transaction.state

    @state.setter
    def state(self, state: TransactionState) -> None:
        self._transaction.state = state

    def commit(self) -> None:
        """Commit at the end of the block, also if it raises after this."""
        self._transaction.commit()

    def rollback(self) -> None:
        """Roll back at the end of the block: nobody will see the message."""
        self._transaction.rollback()

    def leave_open(self) -> None:
        """Decide nothing at the end of the block: ``check`` will be asked."""
        self._transaction.leave_open()


class Admin(BlockingClient):
    """Administers a group of brokers, or all brokers that name servers know: see ``aio.Admin``."""

    def __init__(
        self,
        addresses: Sequence[str] | str | None = None,
        *,
        name_servers: Sequence[str] | str | None = None,
        timeout_s: float = TIMEOUT_S,
        security: ClientSecurity | None = None,
    ) -> None:
        self._admin = aio_admin.Admin(addresses, name_servers=name_servers, timeout_s=timeout_s, security=security)
        super().__init__(self._admin)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def brokers(self) -> tuple[RoutedBroker, ...]:
        """All brokers, by name: their cluster, and their addresses by broker id (0 is the master)."""
        return self._run(self._admin.brokers())

    def status(self, address: str) -> BrokerStatus:
        """The runtime information of one broker (GET_BROKER_RUNTIME_INFO)."""
        return self._run(self._admin.status(address))

    def statuses(self) -> dict[str, BrokerStatus | ClientError]:
        """Every broker's status by address, or why it does not tell. Raises ``ClientError`` if there are no brokers."""
        return self._run(self._admin.statuses())

    def topics_at(self, address: str) -> list[str]:
        """The topics that one broker knows, whatever its role."""
        return self._run(self._admin.topics_at(address))

    def read_at(self, address: str, topic: str, queue_id: int, offset: int, *, max_messages: int = 1000) -> QueuePart:
        """The part of a queue at one broker from ``offset`` on, whatever its role: see ``aio.Admin.read_at``."""
        return self._run(self._admin.read_at(address, topic, queue_id, offset, max_messages=max_messages))

    def broker_config(self, address: str) -> dict[str, str]:
        """One broker's settings by RocketMQ's names."""
        return self._run(self._admin.broker_config(address))

    def set_broker_config(self, address: str, settings: Mapping[str, str]) -> None:
        """Change settings of a running broker; brokers of this project forget them at their next start."""
        return self._run(self._admin.set_broker_config(address, settings))

    def set_write_permission(self, broker: str, *, allowed: bool) -> None:
        """Take the topics of a broker out of producers' routes at every name server, or put them back."""
        return self._run(self._admin.set_write_permission(broker, allowed=allowed))

    def topics(self, *, system: bool = False) -> list[TopicInfo]:
        """Every topic at every broker, by name; ``system``: those that every broker has, too."""
        return self._run(self._admin.topics(system=system))

    def topic(self, name: str) -> list[TopicInfo]:
        """One topic, at every broker that has it, as routes tell. Raises ``NotFoundError``."""
        return self._run(self._admin.topic(name))

    def put_topic(self, topic: TopicInfo) -> None:
        """Create a topic, or change its numbers of queues and its permission; at all brokers unless it names one."""
        return self._run(self._admin.put_topic(topic))

    def delete_topic(self, name: str, broker: str = "") -> None:
        """Delete a topic and its messages, at all brokers and name servers, or at one. Raises ``NotFoundError``."""
        return self._run(self._admin.delete_topic(name, broker))

    def queue_ranges(self, topic: str) -> list[QueueRange]:
        """The offsets of all the topic's queues, also of those that may only be read. Raises ``NotFoundError``."""
        return self._run(self._admin.queue_ranges(topic))

    def topic_ranges(self, topics: Iterable[str]) -> dict[str, list[QueueRange]]:
        """``queue_ranges`` of many topics, without those that do not exist or that this account may not read."""
        return self._run(self._admin.topic_ranges(topics))

    def offset_at(self, queue: MessageQueue, start: Start) -> int:
        """A queue's first offset, its end, or the offset of the first message stored at a time or later."""
        return self._run(self._admin.offset_at(queue, start))

    def groups(self) -> list[GroupInfo]:
        """The settings of every consumer group at every broker, by name."""
        return self._run(self._admin.groups())

    def put_group(self, group: GroupInfo) -> None:
        """Create a consumer group, or change the settings that are given; at all brokers unless it names one."""
        return self._run(self._admin.put_group(group))

    def consume_modes(self) -> list[ConsumeMode]:
        """Those that were set, of every broker, by topic and group; brokers of RocketMQ 4 have none."""
        return self._run(self._admin.consume_modes())

    def set_consume_mode(self, mode: ConsumeMode) -> None:
        """Have a group's consumers pull a topic or pop it, as ``mqadmin setConsumeMode``."""
        return self._run(self._admin.set_consume_mode(mode))

    def delete_group(self, name: str, broker: str = "", *, with_offsets: bool = True) -> None:
        """Delete a consumer group at all brokers, or at one; its consumers should be stopped."""
        return self._run(self._admin.delete_group(name, broker, with_offsets=with_offsets))

    def groups_of_topic(self, topic: str) -> list[str]:
        """The consumer groups that have read a topic. Raises ``NotFoundError``."""
        return self._run(self._admin.groups_of_topic(topic))

    def members(self, group: str) -> GroupMembers:
        """The consumers of a group that are online, and their subscriptions. Raises ``NotFoundError`` if nobody is."""
        return self._run(self._admin.members(group))

    def producers(self, group: str) -> tuple[ClientConnection, ...]:
        """The producers of a group that are online. Raises ``NotFoundError`` if nobody is."""
        return self._run(self._admin.producers(group))

    def all_producers(self) -> dict[str, tuple[ProducerInfo, ...]]:
        """The producers that are online, by group."""
        return self._run(self._admin.all_producers())

    def progress(self, group: str, topic: str = "") -> list[QueueProgress]:
        """A group's progress in every queue of its topics (or of one). Raises ``NotFoundError`` if it has none."""
        return self._run(self._admin.progress(group, topic))

    def ages(self, group: str, topic: str) -> dict[MessageQueue, int]:
        """By queue, how long (ms) the next message that a group consumes has been stored: see ``aio.Admin.ages``."""
        return self._run(self._admin.ages(group, topic))

    def progress_of(self, groups: Iterable[str]) -> dict[str, list[QueueProgress]]:
        """``progress`` of many groups, without those that have none or that this account may not use."""
        return self._run(self._admin.progress_of(groups))

    def offsets(self, group: str, topic: str = "") -> dict[MessageQueue, int]:
        """A group's committed offsets. Raises ``NotFoundError`` if it has none."""
        return self._run(self._admin.offsets(group, topic))

    def lag(self, group: str, topic: str = "") -> int:
        """How many messages a group has yet to consume. Raises ``NotFoundError`` if it has no offsets."""
        return self._run(self._admin.lag(group, topic))

    def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Commit offsets for a group, forwards or backwards; its consumers should be stopped."""
        return self._run(self._admin.set_offsets(group, offsets))

    def commit_position(
        self, group: str, position: int, topics: Sequence[str], broker: str = ""
    ) -> dict[MessageQueue, int]:
        """Record that a group which reads a broker's log itself has consumed everything of these topics before a
        position in it; returns the offsets that this means.
        """
        return self._run(self._admin.commit_position(group, position, topics, broker))

    def reset_offsets(self, group: str, topic: str, start: Start) -> dict[MessageQueue, int]:
        """Move a group's offsets in a topic, forwards or backwards; returns where each queue is then."""
        return self._run(self._admin.reset_offsets(group, topic, start))

    def message_by_id(self, offset_id: str, broker: str = "") -> Message:
        """The message with this id (``SendResult.offset_id``). Raises ``NotFoundError``."""
        return self._run(self._admin.message_by_id(offset_id, broker))

    def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 32,
        begin_ms: int = 0,
        end_ms: int = FOREVER_MS,
        unique: bool = False,
        broker: str = "",
    ) -> list[Message]:
        """Messages with this key stored between two times, oldest first. Raises ``NotFoundError`` for no such topic."""
        found = self._admin.messages_by_key(
            topic, key, max_messages=max_messages, begin_ms=begin_ms, end_ms=end_ms, unique=unique, broker=broker
        )
        return self._run(found)

    def trace(self, message_id: str, *, topic: str = TRACE_TOPIC, begin_ms: int = 0) -> list[Traced]:
        """The way of the message with this id, by time, as its clients have written it: see ``aio.Admin.trace``."""
        return self._run(self._admin.trace(message_id, topic=topic, begin_ms=begin_ms))

    def messages(
        self, queue: MessageQueue, offset: int, *, max_messages: int = 32, expression: str | Sql = "*"
    ) -> tuple[list[Message], int]:
        """Messages of a queue from ``offset`` on, for no group, and the offset for the next call."""
        return self._run(self._admin.messages(queue, offset, max_messages=max_messages, expression=expression))

    def newest(
        self,
        topic: str,
        ends: Mapping[MessageQueue, int] | None = None,
        *,
        max_messages: int = 32,
        queue: MessageQueue | None = None,
        stored: tuple[int, int] = (0, 0),
        oldest_first: bool = False,
    ) -> Page:
        """A page of a topic's messages from the newest one backwards, or from the oldest one on: see ``aio.Admin``."""
        page = self._admin.newest(
            topic, ends, max_messages=max_messages, queue=queue, stored=stored, oldest_first=oldest_first
        )
        return self._run(page)

    def delayed(
        self, level: int = 0, offset: int = -1, *, max_messages: int = 32, broker: str = ""
    ) -> tuple[list[DelayLevelStatus], list[Message]]:
        """Every delay level of a broker, and messages that wait at one, from ``offset`` on (-1: the next ones)."""
        return self._run(self._admin.delayed(level, offset, max_messages=max_messages, broker=broker))

    def timed(
        self,
        topic: str = "",
        key: str = "",
        from_ms: int = 0,
        from_offset: int = 0,
        *,
        max_messages: int = 32,
        broker: str = "",
    ) -> TimedMessages:
        """Messages that wait for a time of their own, by due time: see ``aio.Admin.timed``."""
        wanted = self._admin.timed(topic, key, from_ms, from_offset, max_messages=max_messages, broker=broker)
        return self._run(wanted)

    def recall(self, handle: str) -> str:
        """Have a message that waits for its time not delivered: see ``aio.Producer.recall``."""
        return self._run(self._admin.recall(handle))

    def send_back(
        self, group: str, topic: str, position: int, *, delay_level: int, retries_max: int, broker: str = ""
    ) -> None:
        """Have a message delivered to a group again after a delay: see ``aio.Admin``."""
        sent = self._admin.send_back(
            group, topic, position, delay_level=delay_level, retries_max=retries_max, broker=broker
        )
        return self._run(sent)

    def resume_transaction(self, offset_id: str, broker: str = "") -> None:
        """Begin a transaction again that was given up: its producers are asked again what became of it."""
        return self._run(self._admin.resume_transaction(offset_id, broker))
