"""Messages that travel together, the futures that share their fate, and what a sender promises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Final, NamedTuple

from dledger.client.shared import Deadline
from dledger.config import MIB
from dledger.errors import (
    AccessDeniedError,
    ConfigError,
    DLedgerError,
    InvalidRequestError,
    OutOfOrderSequenceError,
    UnavailableError,
)
from dledger.records import record
from rocketstore.client.errors import BadAnswerError, SendOutcomeUnknownError, send_failure
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import PutMessageStatus

MESSAGE_OVERHEAD_BYTES: Final = 64
"""What a waiting message costs besides its encoding: without it, any number of empty ones could wait."""


@record(frozen=True, slots=True)
class SendOptions:
    """What a sender promises and how much it holds.

    A message that was certainly not stored is sent again until ``timeout_s`` after its batch was begun. So is, with
    ``idempotent``, one whose outcome is unknown: messages are numbered, and the broker stores each number once (see
    ``rocketstore.client.numbers``); only when the time is over without an answer it fails with ``outcome="unknown"``.
    ``producer_name`` says under which name; then the application gives the numbers as well.

    Without ``idempotent`` a message of unknown outcome fails with ``outcome="unknown"`` at once, or with
    ``allow_duplicates`` is sent again, so that it may be stored twice (at least once, as RocketMQ's own producers do).

    ``ordered`` keeps the order of the ``send`` calls within each queue, also over retries; without ``idempotent`` at
    the price of one request in flight. ``send`` blocks while ``pending_bytes_max`` bytes wait, at most ``timeout_s``.
    """

    linger_s: float = 0.002
    batch_bytes: int = 3 * MIB // 4
    batch_messages: int = 1024
    pending_bytes_max: int = 16 * MIB
    inflight_requests_max: int = 12
    timeout_s: float = 5.0
    allow_duplicates: bool = False
    ordered: bool = False
    idempotent: bool = True
    producer_name: str = ""

    def __post_init__(self) -> None:
        limits = ("batch_bytes", "batch_messages", "pending_bytes_max", "inflight_requests_max", "timeout_s")
        problems = [f"{name} must be positive" for name in limits if getattr(self, name) <= 0]
        if self.linger_s < 0:
            problems.append("linger must not be negative")
        if self.producer_name and not self.idempotent:
            problems.append("a producer_name numbers messages: it needs enable_idempotence")
        if problems:
            raise ConfigError(problems)


class Sent(NamedTuple):
    """What a message's receipt needs of it."""

    topic: str
    queue_id: int
    unique_key: str


class Encoded(NamedTuple):
    """A message ready to travel: its bytes as a field of a ``SendRequest``."""

    data: bytes
    sent: Sent


@record(frozen=True, slots=True)
class SendReceipt:
    """Where a message is stored. ``message_id`` says where in the log, ``unique_key`` is the producer's own id.

    ``status`` other than ``PUT_OK``: stored, but a flush or a copy was not confirmed in time. An empty ``message_id``
    and numbers of -1: an earlier request had stored the message, and the broker does not remember where.
    """

    topic: str
    queue_id: int
    queue_offset: int
    message_id: str
    unique_key: str
    offset: int
    store_timestamp: int
    status: PutMessageStatus = PutMessageStatus.PUT_OK


class StoredAt(NamedTuple):
    """One message of a ``StoredBatch``; thousands are made per second, receipts only for who asks."""

    id_prefix: str
    offset: int
    queue_id: int
    queue_offset: int
    store_timestamp_ms: int


Outcome = StoredAt | pb.SendResult | DLedgerError


class SendBatch:
    """Its lock is the sender's; ``done`` and ``outcomes`` may be read without it once ``done`` is true."""

    __slots__ = (
        "bytes",
        "callbacks",
        "data",
        "deadline",
        "done",
        "doubtful",
        "error",
        "finished",
        "left",
        "linger_until",
        "messages",
        "number",
        "outcomes",
        "producer",
        "sent_at",
        "sequence",
    )

    def __init__(self, number: int, linger_until: float, deadline: Deadline) -> None:
        self.number = number
        self.linger_until = linger_until
        self.deadline = deadline
        self.data: list[bytes] = []
        self.messages: list[Sent] = []
        self.bytes = 0
        self.left: list[int] = []  # places of the messages that are still to be sent
        self.outcomes: list[Outcome | None] = []
        self.error: DLedgerError | None = None  # why it is sent again
        self.sent_at = 0.0  # last, on the monotonic clock
        self.producer = ""  # who numbers the messages; empty: nobody
        self.sequence = -1  # the number of the first message in ``left``; -1: not numbered yet
        self.doubtful = False  # an attempt may have been stored
        self.done = False
        self.finished = threading.Event()
        self.callbacks: list[tuple[Callable[[SendFuture], object], SendFuture]] = []

    def begin(self) -> None:
        """It is complete: no message is added any more."""
        self.left = list(range(len(self.messages)))
        self.outcomes = [None] * len(self.messages)

    def forget(self) -> None:
        """No attempt so far was stored, nor will be: it may get new numbers."""
        self.producer, self.sequence, self.doubtful = "", -1, False
        for place in self.left:
            self.outcomes[place] = None

    def take(
        self,
        answer: object,
        address: str,
        is_sent_again: Callable[[DLedgerError], bool],
        *,
        ordered: bool,
        given: bool = False,
    ) -> DLedgerError | None:
        """Note what became of the messages in flight; returns the gravest failure. ``left`` is what to send again.

        ``given``: the application has numbered them.
        """
        sent, self.left = self.left, []
        if isinstance(answer, pb.StoredBatch):
            if len(answer.offsets) == len(sent):
                self.sequence += len(sent) if self.producer else 0
                if len(sent) == len(self.outcomes):
                    self.outcomes = list(_stored(answer))
                else:
                    for place, stored in zip(sent, _stored(answer), strict=True):
                        self.outcomes[place] = stored
                return None
            answer = BadAnswerError(f"{address} answered {len(answer.offsets)} places to {len(sent)} messages")
        results: list[pb.SendResult | DLedgerError]
        results = [answer] * len(sent) if isinstance(answer, DLedgerError) else list(answer)  # type: ignore[call-overload]  # a repeated field
        if len(results) != len(sent):
            wrong = BadAnswerError(f"{address} answered {len(results)} results to {len(sent)} messages")
            results = [wrong] * len(sent)
        if self.producer:
            return self._take_numbered(sent, results, address, is_sent_again, given=given)
        trouble: DLedgerError | None = None
        stored_queues: set[tuple[str, int]] = set()
        again: list[int] = []
        for place, result in zip(reversed(sent), reversed(results), strict=True):
            failure = result if isinstance(result, DLedgerError) else send_failure(result, address)
            if failure is None:
                self.outcomes[place] = result
                if ordered:
                    stored_queues.add((self.messages[place].topic, result.queue_id))  # type: ignore[union-attr]
                continue
            trouble = failure if trouble is None or _is_graver(failure, trouble) else trouble
            earlier = self.outcomes[place]
            if not _is_unknown(earlier):  # a later refusal does not make an earlier attempt undone
                self.outcomes[place] = failure
            queue = (self.messages[place].topic, self.messages[place].queue_id)
            if is_sent_again(failure) and queue not in stored_queues:
                again.append(place)
        self.left = again[::-1]
        return trouble

    def _take_numbered(
        self,
        sent: list[int],
        results: Sequence[pb.SendResult | DLedgerError],
        address: str,
        is_sent_again: Callable[[DLedgerError], bool],
        *,
        given: bool,
    ) -> DLedgerError | None:
        """As ``take``: those stored are the first ones, and what is left goes on with the numbers behind them."""
        failures = [one if isinstance(one, DLedgerError) else send_failure(one, address) for one in results]
        stored = next((at for at, failure in enumerate(failures) if failure is not None), len(failures))
        for place, result in zip(sent[:stored], results, strict=False):
            self.outcomes[place] = result
        self.sequence += stored
        wrong = BadAnswerError(f"{address} has stored message {sent[-1]} of a numbered request and left out others")
        rest = list(zip(sent[stored:], (failure or wrong for failure in failures[stored:]), strict=True))
        for place, failure in rest:
            if not _is_unknown(self.outcomes[place]):  # a later refusal does not make an earlier attempt undone
                self.outcomes[place] = failure
        self.doubtful = self.doubtful or any(failure.outcome == "unknown" for _, failure in rest)
        left = [place for place, failure in rest if is_sent_again(failure)]
        if len(left) < len(rest) and (given or self.doubtful):
            # It cannot be sent without those that are refused: their numbers may be taken, or are the application's.
            left = self._front(left, rest) if given and not self.doubtful else []
        self.left = left
        return max((failure for _, failure in rest), key=_gravity, default=None)

    def _front(self, left: list[int], rest: Sequence[tuple[int, DLedgerError]]) -> list[int]:
        """What can still be sent: the messages before the first one that is refused; those behind it fail with it."""
        refused = next((place, failure) for place, failure in rest if place not in left)
        for place in left:
            if place > refused[0]:
                self.outcomes[place] = OutOfOrderSequenceError(f"a message before it is refused: {refused[1]}")
        return [place for place in left if place < refused[0]]

    def fail(self, error: DLedgerError) -> None:
        """Nothing more is tried: what is left fails with ``error``, or with why it had to be sent again."""
        for place in self.left:
            earlier = self.outcomes[place]
            self.outcomes[place] = earlier if _is_unknown(earlier) else error
        self.left = []

    def expire(self) -> None:
        """The deadline has passed: what may be stored is unknown, the rest certainly is not."""
        why = self.error or UnavailableError("earlier messages were still under way")
        message = f"not sent within {self.deadline.timeout_s:g} s: {why}"
        for place in self.left:
            unknown = _is_unknown(self.outcomes[place])
            self.outcomes[place] = SendOutcomeUnknownError(message) if unknown else UnavailableError(message)
        self.left = []

    def end(self) -> int:
        """It is finished; returns how many of its messages failed."""
        self.data.clear()  # futures may live long; what they wrote need not
        self.done = True
        return sum(isinstance(outcome, DLedgerError) for outcome in self.outcomes)

    def announce(self) -> None:
        """Wake whoever waits; outside the lock."""
        self.finished.set()
        while self.callbacks:
            try:
                callback, future = self.callbacks.pop(0)
            except IndexError:  # taken back by add_done_callback
                return
            callback(future)


def _is_unknown(outcome: Outcome | None) -> bool:
    return isinstance(outcome, DLedgerError) and outcome.outcome == "unknown"


def _gravity(error: DLedgerError) -> int:
    """What concerns the connection weighs more than what concerns a message, and that more than its consequences."""
    if error.outcome == "unknown":
        return 3
    if isinstance(error, OutOfOrderSequenceError):
        return 0
    return 1 if isinstance(error, InvalidRequestError | AccessDeniedError) else 2


def _is_graver(one: DLedgerError, other: DLedgerError) -> bool:
    return one.outcome == "unknown" and other.outcome != "unknown"


class SendFuture:
    """The result of one message; shares its batch's state, so it costs next to nothing."""

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: SendBatch, place: int) -> None:
        self._batch = batch
        self._place = place

    def done(self) -> bool:
        """Whether ``result`` returns at once."""
        return self._batch.done

    def result(self, timeout: float | None = None) -> SendReceipt:
        """Where the message is; raises its error, or ``TimeoutError`` if there is neither within ``timeout`` seconds.

        Without ``timeout`` it ends all the same: every batch has a deadline.
        """
        batch = self._batch
        if not batch.done:
            batch.finished.wait(timeout)
            if not batch.done:
                raise TimeoutError(f"the message is not sent after {timeout} s")
        outcome = batch.outcomes[self._place]
        if isinstance(outcome, StoredAt | pb.SendResult):
            return _receipt(outcome, batch.messages[self._place])
        raise outcome or BadAnswerError("the message has no outcome")

    def exception(self, timeout: float | None = None) -> DLedgerError | None:
        """The message's error, or None; waits as ``result`` does."""
        try:
            self.result(timeout)
        except DLedgerError as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[SendFuture], object]) -> None:
        """Call ``callback(self)`` when done, on the client's thread (or here and now); it must not block."""
        batch = self._batch
        if not self.done():
            # list.append is atomic, and the finishing thread reads the list only after it has set ``done``: either it
            # still finds this callback, or we see ``done`` below and take it back (whoever removes it calls it).
            item = (callback, self)
            batch.callbacks.append(item)
            if not self.done():
                return
            try:
                batch.callbacks.remove(item)
            except ValueError:
                return
        callback(self)


def _stored(batch: pb.StoredBatch) -> Iterator[StoredAt]:
    """Its lists are equally long."""
    places = zip(
        repeat(batch.id_prefix, len(batch.offsets)),
        batch.offsets,
        batch.queue_ids,
        batch.queue_offsets,
        batch.store_timestamps_ms,
        strict=True,
    )
    return map(partial(tuple.__new__, StoredAt), places)  # as StoredAt(*place) does, at a third of the price


def _receipt(result: StoredAt | pb.SendResult, message: Sent) -> SendReceipt:
    if isinstance(result, StoredAt):
        message_id, status = f"{result.id_prefix}{result.offset:016X}", PutMessageStatus.PUT_OK
    else:
        message_id, status = result.message_id, PutMessageStatus(result.status)
    return SendReceipt(
        topic=message.topic,
        queue_id=result.queue_id,
        queue_offset=result.queue_offset,
        message_id=message_id,
        unique_key=message.unique_key,
        offset=result.offset,
        store_timestamp=result.store_timestamp_ms,
        status=status,
    )
