"""The clients of a drill: a producer of numbered messages and a consumer of one group, both recorded.

The producer gives each message a key. It resends messages that were certainly not stored until its deadline, and
never those that may be stored: both are rules of ``rocketstore.client`` for producers that do not number their
messages, as RocketMQ's do not. The drill itself retries nothing: it gives each number to the producer once.

At the end, everything is read back from every node, through the client APIs.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Final

from cluster.drill.history import (
    DrillDelivery,
    DrillSend,
    EventKind,
    HistoryRecorder,
    NodeCopy,
    SendOutcome,
    ServedMessage,
)
from cluster.drill.target import SECURITY, DrillError, wait_until
from dledger.client import ReadMode
from dledger.client.blocking import DLedgerClient
from dledger.errors import DLedgerError
from dledger.types import LogIndex, NodeId
from rocketstore.client import Admin, Consumer, Message, Producer, ProducerOptions, SendResult

TOPIC: Final = "drill-messages"
GROUP: Final = "drill-readers"
QUEUES: Final = 4
KEYS: Final = 16
BODY_BYTES: Final = 256
TICK_S: Final = 0.005
"""How often the producer sends due messages: at 1000 messages per second, five at a time."""
BEHIND_S_MAX: Final = 0.25
"""A producer that was delayed catches up on no more than this."""
SEND_TIMEOUT_S: Final = 4.0
POLL_S: Final = 0.25
ERROR_CHARACTERS_MAX: Final = 200
JOIN_TIMEOUT_S: Final = 120.0


class Load:
    """Runs from ``start`` to ``finish`` or ``abandon``."""

    def __init__(self, addresses: Sequence[str], recorder: HistoryRecorder, *, rate: float, name: str) -> None:
        self._addresses = list(addresses)
        self._recorder = recorder
        self._rate = rate
        self._name = name
        self._stopping = threading.Event()
        self._abandoned = threading.Event()
        self._paused = threading.Event()
        self._resting = threading.Event()
        """Set by the producer once it has seen the pause."""
        self._given = 0
        """Messages given to the producer; read while it rests."""
        self._failures: list[BaseException] = []
        self._producer = self._thread("drill-producer", self._produce)
        self._consumer = self._thread("drill-consumer", self._consume)

    def start(self) -> None:
        """Start sending and consuming."""
        self._producer.start()
        self._consumer.start()

    def pause(self) -> int:
        """Send nothing more, and wait until every outcome is known; returns how many messages were sent so far."""
        self._resting.clear()
        self._paused.set()
        wait_until(self._rests, JOIN_TIMEOUT_S, "the producer still waits for answers")
        return self._given

    def resume(self) -> None:
        self._paused.clear()

    def _rests(self) -> bool:
        if self._failures:
            raise DrillError(f"a client of the drill failed: {self._failures[0]!r}")
        return self._resting.is_set() and self._recorder.finished() == self._given

    def finish(self, drain_s: float) -> None:
        """Stop sending, and wait for all outcomes and for the consumer to receive all acknowledged messages.

        A consumer that has not received them after ``drain_s`` is stopped; the verdict reports what it missed.
        """
        self._stopping.set()
        self._join(self._producer, JOIN_TIMEOUT_S)
        never, waited_s = threading.Event(), 0.0
        while waited_s < drain_s and self._recorder.undelivered() and self._consumer.is_alive():
            never.wait(POLL_S)
            waited_s += POLL_S
        self.abandon()
        if self._failures:
            raise DrillError(f"a client of the drill failed: {self._failures[0]!r}") from self._failures[0]

    def abandon(self) -> None:
        """Stop at once. Idempotent."""
        self._stopping.set()
        self._abandoned.set()
        for thread in (self._producer, self._consumer):
            if thread.is_alive():
                self._join(thread, JOIN_TIMEOUT_S)

    def _join(self, thread: threading.Thread, timeout_s: float) -> None:
        thread.join(timeout_s)
        if thread.is_alive():
            raise DrillError(f"{thread.name} hangs: did not end within {timeout_s:g} s")

    def _thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - told when the load ends
                self._failures.append(error)

        return threading.Thread(target=guarded, name=name, daemon=True)

    # --- the producer ------------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        recorder = self._recorder

        def note(_broker: str, error: DLedgerError) -> None:
            recorder.attempt_failed(f"{type(error).__name__}: {_short(error)}")

        options = ProducerOptions(on_failure=note)
        with Producer(
            self._addresses, timeout_s=SEND_TIMEOUT_S, enable_idempotence=False, security=SECURITY, options=options
        ) as producer:
            due_s = recorder.now_s
            while not self._stopping.wait(TICK_S):
                now_s = recorder.now_s
                if self._paused.is_set():
                    self._resting.set()
                    due_s = now_s
                    continue
                due_s = max(due_s, now_s - BEHIND_S_MAX)
                while due_s <= now_s:
                    due_s += 1 / self._rate
                    self._given += 1
                    self._send_one(producer, self._given - 1)

    def _send_one(self, producer: Producer, number: int) -> None:
        body = f"{self._name}/{number} ".encode().ljust(BODY_BYTES, b".")
        message = Message(TOPIC, body, keys=f"number-{number}")
        sent_s = self._recorder.now_s
        try:
            future = producer.submit(message, key=f"key-{number % KEYS}")
        except DLedgerError as error:
            self._recorder.sent(_failed(number, body, sent_s, self._recorder.now_s, error))
        else:
            future.add_done_callback(partial(self._on_done, number, body, sent_s))

    def _on_done(self, number: int, body: bytes, sent_s: float, future: Future[SendResult]) -> None:
        ended_s = self._recorder.now_s
        try:
            result = future.result()
        except DLedgerError as error:
            self._recorder.sent(_failed(number, body, sent_s, ended_s, error))
        else:
            place = (result.queue, result.offset)
            self._recorder.sent(DrillSend(number, body, sent_s, ended_s, SendOutcome.ACKNOWLEDGED, *place))

    # --- the consumer ------------------------------------------------------------------------------------------------

    def _consume(self) -> None:
        """Run one consumer after the other: when a poll fails, the next one continues from the committed offsets."""
        life = 0
        while not self._abandoned.is_set():
            consumer = Consumer(
                self._addresses,
                group=GROUP,
                topics=TOPIC,
                assign="all",
                start="first",
                commit_s=0.5,
                timeout_s=SEND_TIMEOUT_S,
                pull_wait_s=1.0,
                security=SECURITY,
            )
            try:
                with consumer:
                    self._consume_in_one_life(life, consumer)
            except DLedgerError as error:
                self._recorder.event(EventKind.STEP, f"the consumer starts a new session: {_short(error)}")
            life += 1

    def _consume_in_one_life(self, life: int, consumer: Consumer) -> None:
        while not self._abandoned.is_set():
            messages = consumer.poll(1000, POLL_S)
            now_s = self._recorder.now_s
            self._recorder.delivered(
                [DrillDelivery(life, now_s, one.queue.queue_id, one.queue_offset, one.body) for one in messages]
            )


def _failed(number: int, body: bytes, sent_s: float, ended_s: float, error: DLedgerError) -> DrillSend:
    outcome = SendOutcome.UNKNOWN if error.outcome == "unknown" else SendOutcome.REFUSED
    return DrillSend(number, body, sent_s, ended_s, outcome, error=_short(error))


def _short(error: DLedgerError) -> str:
    text = " ".join(str(error).split())
    return text[:ERROR_CHARACTERS_MAX] or type(error).__name__


TIMEOUT_S: Final = 10.0
PAGE: Final = 1000


def read_node(
    node: NodeId, address: str, group: str, topic: str, queues: int, end_position: int, *, name: str = ""
) -> NodeCopy:
    """One node's own copy, whatever its role. Raises ``DrillError`` if it cannot be read.

    ``name``: what the copy is called, if not as the node.
    Only the log before ``end_position`` is read: brokers also write to it on their own, even between two reads.
    """
    try:
        with Admin([address], timeout_s=TIMEOUT_S, security=SECURITY) as admin:
            pulled = {one: pull_all(admin, address, topic, one) for one in range(queues)}
        return NodeCopy(NodeId(name or node), pulled, _log(address, group, end_position))
    except DLedgerError as error:
        raise DrillError(f"cannot read back what {node} holds: {error}") from error


def pull_all(admin: Admin, address: str, topic: str, queue_id: int) -> tuple[ServedMessage, ...]:
    """One broker's own copy of a queue, after waiting until it knows what is committed. Raises ``DLedgerError``."""
    stored: list[ServedMessage] = []
    offset = 0
    while True:
        part = admin.read_at(address, topic, queue_id, offset, max_messages=PAGE)
        if not part.messages:
            if offset != part.max_offset:
                raise DrillError(
                    f"{address}: queue {queue_id} ends at {part.max_offset}, but nothing is returned from {offset}"
                )
            return tuple(stored)
        stored += [ServedMessage(one.queue_offset, one.body, zlib.crc32(one.record)) for one in part.messages]
        offset = part.next_offset


def _log(address: str, group: str, end_position: int) -> str:
    """The replicated log's bounds, and a digest of every entry with its position and term."""
    digest = hashlib.sha256()
    with closing(DLedgerClient([address], group=group, timeout_s=TIMEOUT_S, security=SECURITY)) as client:
        status = client.metadata(address=address)
        index, term = status.begin_index, -1
        while True:
            read = client.read(index, count=PAGE, mode=ReadMode.COMMITTED, address=address)
            entries = [entry for entry in read if entry.position < end_position]
            if not entries:
                break
            for entry in entries:
                digest.update(b"%d %d %d %d\n" % (entry.index, entry.term, entry.position, len(entry.body)))
                digest.update(entry.body)
            index, term = LogIndex(entries[-1].index + 1), entries[-1].term
    return f"entries {status.begin_index} to {index - 1}, the last of term {term}, SHA-256 {digest.hexdigest()[:16]}"
