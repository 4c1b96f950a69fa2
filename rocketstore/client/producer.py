"""``Producer``: sends messages to the current master."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, Self

from dledger.client.channels import Answer
from dledger.client.discovery import Addresses
from dledger.client.security import ClientSecurity
from dledger.client.shared import Deadline
from dledger.errors import DLedgerError, UnavailableError
from dledger.sending.batch import call
from dledger.sending.futures import wait_for_batch
from dledger.sending.stream import Stream
from dledger.sending.threads import Links, OnAnswer, OnEnd, Sender
from dledger.values import MIB
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import MessageRefusedError, NotFoundError, receipts_of_all
from rocketstore.client.methods import PRODUCER
from rocketstore.client.outgoing import check_message, encode, queue_of_key
from rocketstore.client.receipts import SendReceipt
from rocketstore.client.sends import (
    WIRE,
    EncodedMessage,
    Result,
    SendFuture,
    SendManyFuture,
    SendOptions,
    Sent,
    noting_refusals,
    window_of,
)
from rocketstore.client.topic_cache import TopicCache
from rocketstore.client.topics import PERMISSION_WRITE
from rocketstore.message.message import Message
from rocketstore.message.producer_names import check_producer_name
from rocketstore.pb import broker_pb2 as pb

ANY_QUEUE: Final = -1
BODY_BYTES_MAX: Final = 4 * MIB
_TURNS: Final = 1 << 16


class Producer:
    """Sends to a group of brokers, or to one. Thread-safe; every call has a deadline (``timeout_s``).

    ``addresses``: listen addresses of one or more brokers; the others are discovered, and the master is found again
    after each change. Messages not known to be stored are resent until the deadline, and still stored only once: they
    are numbered (``enable_idempotence``), so the broker recognizes those it has. ``outcome="unknown"`` remains only for
    messages without a response by the deadline, and for a plain broker that was restarted in between.

    With ``producer_name``, the application numbers its messages itself: it calls ``next_sequence``, and passes
    consecutive numbers (``sequence``). So it can continue after a crash without repeating or losing anything, if it can
    produce the same messages again. Only one sender at a time may use a name.

    Without ``enable_idempotence``, messages that may be stored are resent only with ``allow_duplicates``; otherwise
    they fail with ``outcome="unknown"``, and the caller decides. ``on_failure`` is called at once with the address and
    the error of every failed attempt, including those that are retried. It must not block.
    """

    def __init__(  # noqa: PLR0913  # one parameter per option
        self,
        addresses: Addresses,
        *,
        timeout_s: float = 5.0,
        enable_idempotence: bool = True,
        producer_name: str = "",
        allow_duplicates: bool = False,
        body_bytes_max: int = BODY_BYTES_MAX,
        security: ClientSecurity | None = None,
        on_failure: Callable[[str, DLedgerError], object] | None = None,
    ) -> None:
        self._connection = BrokerConnection(addresses, timeout_s=timeout_s, security=security)
        self._topics = TopicCache(self._connection)
        # Not always queue 0: many short-lived producers would fill it, and leave the others empty.
        self._turn = itertools.count(random.randrange(_TURNS))
        self._body_bytes_max = body_bytes_max
        self._on_failure = on_failure
        if producer_name:
            check_producer_name(producer_name)
        self._options = SendOptions(
            timeout_s=timeout_s,
            allow_duplicates=allow_duplicates,
            idempotent=enable_idempotence,
            producer_name=producer_name,
        )
        self._lock = threading.RLock()  # guards the fields below
        self._direct: Sender[Sent, Result] | None = None
        self._senders: list[MessageSender] = []
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
            senders = self._senders  # all of them, also for concurrent or repeated calls
            direct = self._direct
        for sender in senders:
            sender.close()
        if direct is not None:
            direct.close()
        self._connection.close()

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(
        self, message: Message, *, key: str | None = None, queue_id: int | None = None, sequence: int | None = None
    ) -> SendReceipt:
        """Send one message; returns when the master has stored it.

        The queue is ``queue_id``, or the one that ``key`` (a sharding key) hashes to, or the next in turn. ``sequence``
        is the message's number, if the producer is named.
        """
        data, sent = self._encode(message, key, queue_id)
        batch, place = self._direct_sender().add(data, item=sent, sequence=sequence)
        wait_for_batch(batch)
        return SendFuture(batch, place).result()

    def send_many(
        self,
        messages: Iterable[Message],
        *,
        key: str | None = None,
        queue_id: int | None = None,
        sequence: int | None = None,
    ) -> list[SendReceipt]:
        """Send messages in as few requests as possible; returns one receipt each.

        ``sequence`` is the number of the first one, if the producer is named. Raises the error itself if nothing was
        stored, ``PartlySentError`` with all outcomes if some are or may be.
        """
        encoded = [self._encode(message, key, queue_id) for message in messages]
        return receipts_of_all(list((_add_many(self._direct_sender(), encoded, sequence)).outcomes()))

    def sender(
        self,
        *,
        linger_ms: float = 2,
        batch_bytes: int = 3 * MIB // 4,
        batch_messages: int = 1024,
        pending_bytes_max: int = 16 * MIB,
        inflight_requests_max: int = 12,
        ordered: bool = False,
        producer_name: str | None = None,
    ) -> MessageSender:
        """A pipelining sender: many cheap ``send`` calls, few requests. See ``SendOptions`` for its guarantees.

        ``producer_name`` defaults to the producer's own; a sender may have another one.
        """
        options = replace(
            self._options,
            linger_s=linger_ms / 1000,
            batch_bytes=batch_bytes,
            batch_messages=batch_messages,
            pending_bytes_max=pending_bytes_max,
            inflight_requests_max=inflight_requests_max,
            ordered=ordered,
            producer_name=self._options.producer_name if producer_name is None else producer_name,
        )
        with self._lock:
            made = MessageSender(self._make_sender(options), self._encode)
            self._senders = [one for one in self._senders if not one.closed]
            self._senders.append(made)
        return made

    def next_sequence(self, producer_name: str | None = None) -> int:
        """The next message number of this producer, after everything stored so far; 0 initially.

        Unfinished sends of another process with the same name either count or will never be stored, unless that process
        is still sending. Call it before the first message, and after a failed one.
        """
        name = self._options.producer_name if producer_name is None else producer_name
        check_producer_name(name)
        connection = self._connection
        return (connection.ask_master(PRODUCER, pb.ProducerRequest(producer=name), connection.deadline())).next_sequence

    # --- machinery --------------------------------------------------------------------------------------------------

    def _direct_sender(self) -> Sender[Sent, Result]:
        sender = self._direct
        if sender is None or self._closed:
            with self._lock:
                sender = None if self._closed else self._direct
                if sender is None:
                    sender = self._direct = self._make_sender(replace(self._options, linger_s=0.0))
        return sender

    def _make_sender(self, options: SendOptions) -> Sender[Sent, Result]:
        """Requires the lock, so that none is left open after ``close``."""
        if self._closed:
            raise UnavailableError("the producer is closed")
        links = Links(self._connect, self._connection.seeker.look, self._note_failure)
        return Sender(links, window_of(options), "rocketstore-sender")

    def _connect(
        self, timeout_s: float, on_answer: OnAnswer[Sent, Result], on_end: OnEnd[Sent, Result]
    ) -> Stream[Sent, Result]:
        """Open a stream to the master. Raises ``NotMasterError`` or ``UnavailableError`` if nothing was sent."""
        connection, deadline = self._connection, Deadline(timeout_s)

        # A queue may be gone, or the permission be another one: then the next message needs to know.
        take = noting_refusals(on_answer, self._topics.forget)

        def attempt() -> Stream[Sent, Result]:
            address = connection.seeker.leader(deadline)
            try:
                connection.check_master(address, deadline)
                open_call = partial(connection.channels.open_stream, "SendStream", address)
                stream = Stream(open_call, address, WIRE, take, on_end)
                stream.open(deadline.remaining_s)
            except DLedgerError as error:
                self._note_failure(address, error)
                raise
            return stream

        return connection.retry(deadline, attempt)

    def _note_failure(self, address: str, error: DLedgerError) -> None:
        self._connection.directory.note_failure(address, error)
        if self._on_failure is not None:
            call(partial(self._on_failure, address, error))

    def _encode(self, message: Message, key: str | None, queue_id: int | None) -> EncodedMessage:
        check_message(message, queue_id, self._body_bytes_max)
        return encode(message, self._choose(message.topic, key) if queue_id is None else queue_id)

    def _choose(self, topic: str, key: str | None) -> int:
        known = self._topics.find(topic)
        if known is None:
            if key is None:
                return ANY_QUEUE  # the broker may create the topic, and then knows its number of queues
            raise NotFoundError(f"topic {topic} does not exist, so a key cannot select one of its queues")
        if not (known.permission & PERMISSION_WRITE and known.write_queues > 0):
            raise MessageRefusedError(f"topic {topic} does not allow writes (permission {known.permission})")
        if key is None:
            return next(self._turn) % known.write_queues
        return queue_of_key(key, known.write_queues)


def _add_many(sender: Sender[Sent, Result], encoded: Sequence[EncodedMessage], sequence: int | None) -> SendManyFuture:
    payloads = [data for data, _ in encoded]
    spans = sender.add_many(payloads, items=[sent for _, sent in encoded], sequence=sequence)
    return SendManyFuture(spans)


class MessageSender:
    """A context manager created by ``Producer.sender``. Thread-safe.

    Leaving the context (or ``close``) waits for everything; errors are reported only by the futures, and counted in
    ``failed_messages``.
    """

    def __init__(
        self,
        sender: Sender[Sent, Result],
        encode: Callable[[Message, str | None, int | None], Answer[EncodedMessage]],
    ) -> None:
        self._sender = sender
        self._encode = encode
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
        return self._sender.failed_items

    def send(
        self, message: Message, *, key: str | None = None, queue_id: int | None = None, sequence: int | None = None
    ) -> SendFuture:
        """Queue one message; blocks while the queue is full. Queue and ``sequence`` work as in ``Producer.send``.

        Raises ``MessageRefusedError`` for a message that no broker accepts, ``PendingFullError`` if the queue stays
        full too long, ``OutOfOrderSequenceError`` if the number does not follow the previous message's. After a message
        of a named producer has failed, the following ones fail, too: call ``next_sequence`` and continue from there.
        """
        data, sent = self._encode(message, key, queue_id)
        return SendFuture(*self._sender.add(data, item=sent, sequence=sequence))

    def send_many(
        self,
        messages: Iterable[Message],
        *,
        key: str | None = None,
        queue_id: int | None = None,
        sequence: int | None = None,
    ) -> SendManyFuture:
        """Queue many messages, in order; one future for all of them. Raises the same errors as ``send``.

        After ``PendingFullError``, the first of them may have been queued.
        """
        encoded = [self._encode(message, key, queue_id) for message in messages]
        return _add_many(self._sender, encoded, sequence)

    def flush(self) -> None:
        """Wait until everything sent so far has succeeded or failed."""
        self._sender.flush()

    def close(self) -> None:
        """Flush, then end the thread and the stream. Idempotent."""
        self.closed = True
        self._sender.close()
