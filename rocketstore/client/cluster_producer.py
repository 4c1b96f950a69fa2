"""``ClusterProducer``: sends messages to all the groups of brokers that have their topic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeVar

from dledger.client.channels import Answer
from dledger.client.discovery import Directory
from dledger.client.security import ClientSecurity
from dledger.errors import DLedgerError, InvalidRequestError, TlsError, UnavailableError
from dledger.sending.batch import call
from dledger.values import MIB
from rocketstore.client.errors import NotFoundError, PartlySentError, is_retried, is_retried_read, receipts_of_all
from rocketstore.client.producer import BODY_BYTES_MAX, MessageSender, Producer
from rocketstore.client.receipts import SendReceipt
from rocketstore.client.routes import Routes
from rocketstore.client.sends import SendFuture
from rocketstore.client.spread import Route, Spread, named_group, queue_for_key
from rocketstore.message.message import Message
from rocketstore.nameserver.groups import BrokerGroup

GROUPS_TRIED_MAX: Final = 3
"""How many groups one message is offered to, as RocketMQ's ``retryTimesWhenSendFailed`` of 2."""
CREATING_TOPIC: Final = "TBW102"
"""The groups of this topic create other topics when a message arrives for them."""
_T = TypeVar("_T")


class ClusterProducer:
    """Needs no address of a broker: it asks ``name_servers`` for the groups of brokers that have a topic. Thread-safe.

    Each group has its own ``Producer``, whose promises and options are described there: order and numbers are those of
    one group. A key always selects the same queue, as long as the queues of the topic stay the same; other messages go
    to all queues of all groups in turn. They pass over groups without a master, or that have just failed, and those
    certainly not stored are offered to up to three groups, each within ``timeout_s``. Routes are refreshed every 30 s,
    and sooner after a failure.
    """

    def __init__(  # one parameter per option
        self,
        name_servers: Sequence[str] | str,
        *,
        timeout_s: float = 5.0,
        enable_idempotence: bool = True,
        allow_duplicates: bool = False,
        body_bytes_max: int = BODY_BYTES_MAX,
        security: ClientSecurity | None = None,
        on_failure: Callable[[str, DLedgerError], object] | None = None,
    ) -> None:
        security = security or ClientSecurity()
        self._routes = Routes(name_servers, timeout_s, security)
        self._spread = Spread()
        self._on_failure = on_failure
        self._make = partial(
            Producer,
            timeout_s=timeout_s,
            enable_idempotence=enable_idempotence,
            allow_duplicates=allow_duplicates,
            body_bytes_max=body_bytes_max,
            security=security,
        )
        self._lock = threading.Lock()  # guards the fields below
        self._producers: dict[str, Producer] = {}
        self._senders: list[ClusterSender] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish pending work, then close every connection. Idempotent."""
        with self._lock:
            self._closed = True
            senders, producers = self._senders, tuple(self._producers.values())
        for sender in senders:
            sender.close()
        for producer in producers:
            producer.close()
        self._routes.close()

    def send(
        self, message: Message, *, key: str | None = None, queue_id: int | None = None, broker_name: str = ""
    ) -> SendReceipt:
        """Send one message; returns when a master has stored it.

        The queue is the one that ``key`` hashes to, or ``queue_id`` of the group ``broker_name``, or the next in turn.
        """

        def attempt(group: BrokerGroup, queue: int | None) -> SendReceipt:
            return self._producer(group).send(message, queue_id=queue)

        return self._deliver(message.topic, key, queue_id, broker_name, attempt)

    def send_many(
        self,
        messages: Iterable[Message],
        *,
        key: str | None = None,
        queue_id: int | None = None,
        broker_name: str = "",
    ) -> list[SendReceipt]:
        """Send messages in as few requests as possible; returns one receipt each.

        Those of one topic go to one group, the next in turn unless a queue is given. Raises the error itself if nothing
        was stored, ``PartlySentError`` with all outcomes if some are or may be.
        """
        by_topic: dict[str, list[tuple[int, Message]]] = {}
        for place, message in enumerate(messages):
            by_topic.setdefault(message.topic, []).append((place, message))
        results: dict[int, SendReceipt | DLedgerError] = {}
        for topic, placed in by_topic.items():
            together = [message for _, message in placed]
            found = self._send_together(topic, together, key, queue_id, broker_name)
            results.update(zip((place for place, _ in placed), found, strict=True))
        return receipts_of_all([results[place] for place in range(len(results))])

    def sender(
        self,
        *,
        linger_ms: float = 2,
        batch_bytes: int = 3 * MIB // 4,
        batch_messages: int = 1024,
        pending_bytes_max: int = 16 * MIB,
        inflight_requests_max: int = 12,
        ordered: bool = False,
    ) -> ClusterSender:
        """A pipelining sender: a ``Producer.sender`` with these options for each group."""
        options = partial(
            Producer.sender,
            linger_ms=linger_ms,
            batch_bytes=batch_bytes,
            batch_messages=batch_messages,
            pending_bytes_max=pending_bytes_max,
            inflight_requests_max=inflight_requests_max,
            ordered=ordered,
        )
        made = ClusterSender(lambda group: options(self._producer(group)), self._deliver)
        with self._lock:
            if self._closed:
                raise UnavailableError("the producer is closed")
            self._senders = [one for one in self._senders if not one.closed]
            self._senders.append(made)
        return made

    def at(self, broker_name: str) -> Producer:
        """The producer of one group, for example to number its messages; closed together with this one.

        Raises ``NotFoundError`` if no brokers of this name have registered.
        """
        for one in self._routes.groups():
            if one.name == broker_name:
                return self._producer(one)
        raise NotFoundError(f"no brokers named {broker_name} have registered")

    # --- machinery --------------------------------------------------------------------------------------------------

    def _send_together(
        self, topic: str, messages: list[Message], key: str | None, queue_id: int | None, broker_name: str
    ) -> Sequence[SendReceipt | DLedgerError]:
        def attempt(group: BrokerGroup, queue: int | None) -> list[SendReceipt]:
            return self._producer(group).send_many(messages, queue_id=queue)

        try:
            return self._deliver(topic, key, queue_id, broker_name, attempt)
        except PartlySentError as error:
            return error.results
        except DLedgerError as error:
            return [error] * len(messages)

    def _deliver(
        self,
        topic: str,
        key: str | None,
        queue_id: int | None,
        broker_name: str,
        attempt: Callable[[BrokerGroup, int | None], Answer[_T]],
    ) -> _T:
        """Choose a group and a queue (None: any) and make the attempt, elsewhere again if that may help."""
        route = self._route(topic, key)
        if key is not None or queue_id is not None or broker_name:
            try:
                return attempt(*_fixed_place(topic, key, queue_id, broker_name, route))
            except DLedgerError as error:
                if is_retried_read(error):
                    self._routes.doubt(topic)
                raise
        tried: list[str] = []
        while True:
            group = self._spread.next(topic, route, tried)
            tried.append(group.name)
            try:
                return attempt(group, None)
            except DLedgerError as error:
                groups = len({one.name for one in route.turns})
                elsewhere = is_retried(error) or isinstance(error, TlsError)  # as a broker of RocketMQ's own causes
                if self._closed or not elsewhere or len(tried) >= min(groups, GROUPS_TRIED_MAX):
                    raise
            self._spread.avoid(group.name)
            self._routes.doubt(topic)

    def _route(self, topic: str, key: str | None) -> Route:
        if self._closed:
            raise UnavailableError("the producer is closed")
        found = self._routes.find(topic)
        if found is None and key is None:
            found = self._routes.find(CREATING_TOPIC)
        if found is None:
            raise NotFoundError(f"topic {topic} does not exist: no name server has a route to it")
        return found

    def _producer(self, group: BrokerGroup) -> Producer:
        producer = self._producers.get(group.name)
        if producer is None or self._closed:
            with self._lock:
                if self._closed:
                    raise UnavailableError("the producer is closed")
                producer = self._producers.get(group.name)
                if producer is None:
                    on_failure = partial(self._note_failure, group.name)
                    producer = self._open(self._routes.directory(group), on_failure)
                    self._producers[group.name] = producer
        return producer

    def _open(self, directory: Directory, on_failure: Callable[[str, DLedgerError], object]) -> Producer:
        """The producer of one group."""
        return self._make(directory, on_failure=on_failure)

    def _note_failure(self, name: str, address: str, error: DLedgerError) -> None:
        if is_retried_read(error):
            self._spread.avoid(name)
        if self._on_failure is not None:
            call(partial(self._on_failure, address, error))


def _fixed_place(
    topic: str, key: str | None, queue_id: int | None, broker_name: str, route: Route
) -> tuple[BrokerGroup, int | None]:
    if key is None:
        return named_group(topic, broker_name, route), queue_id
    if queue_id is not None or broker_name:
        raise InvalidRequestError("a key chooses the queue: give either key, or queue_id and broker_name")
    return queue_for_key(topic, key, route)


class ClusterSender:
    """A context manager created by ``ClusterProducer.sender``. Thread-safe.

    Leaving the context (or ``close``) waits for everything; errors are reported only by the futures, and counted in
    ``failed_messages``. What has been queued for a group stays there.
    """

    def __init__(
        self,
        open_sender: Callable[[BrokerGroup], MessageSender],
        deliver: Callable[..., Answer[SendFuture]],
    ) -> None:
        self._open_sender = open_sender
        self._deliver = deliver
        self._lock = threading.Lock()  # guards the fields below
        self._senders: dict[str, MessageSender] = {}
        self.closed = False
        """Whether ``close`` was called."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def failed_messages(self) -> int:
        """How many messages have failed so far."""
        return sum(one.failed_messages for one in tuple(self._senders.values()))

    def send(
        self, message: Message, *, key: str | None = None, queue_id: int | None = None, broker_name: str = ""
    ) -> SendFuture:
        """Queue one message, for the queue that ``ClusterProducer.send`` would choose; blocks while too many wait.

        Raises the errors of ``MessageSender.send``.
        """

        def attempt(group: BrokerGroup, queue: int | None) -> SendFuture:
            return self._sender(group).send(message, queue_id=queue)

        return self._deliver(message.topic, key, queue_id, broker_name, attempt)

    def flush(self) -> None:
        """Wait until everything sent so far has succeeded or failed."""
        for one in tuple(self._senders.values()):
            one.flush()

    def close(self) -> None:
        """Flush, then end the threads and the streams. Idempotent."""
        with self._lock:
            self.closed = True
            senders = tuple(self._senders.values())
        for one in senders:
            one.close()

    def _sender(self, group: BrokerGroup) -> MessageSender:
        found = self._senders.get(group.name)
        if found is None:
            with self._lock:
                if self.closed:
                    raise UnavailableError("the sender is closed")
                found = self._senders.get(group.name)
                if found is None:
                    found = self._senders[group.name] = self._open_sender(group)
        return found
