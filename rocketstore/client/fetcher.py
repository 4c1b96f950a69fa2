"""Pulls one queue: a thread that keeps a ``PullStream`` busy and responses in stock, from whichever broker is live."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

import grpc

from dledger.backoff import Backoff
from dledger.client.shared import RETRY_WAIT_S_MAX, RETRY_WAIT_S_MIN
from dledger.errors import DLedgerError, RequestTimeoutError, UnavailableError
from dledger.values import MIB
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.aio.received import ReceivedMessage, split_records
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import (
    NotAllowedNowError,
    NotFoundError,
    OffsetOutOfRangeError,
    StoreFailedError,
    failure_of,
    is_retried_read,
)
from rocketstore.client.methods import OFFSET_BY_TIME, PULL, parse_answer
from rocketstore.message.record import BLANK, is_same_message
from rocketstore.pb import broker_pb2 as pb
from rocketstore.types import GetMessageStatus

if TYPE_CHECKING:
    _Call = grpc.CallIterator[bytes]

_log = logging.getLogger(__name__)
SLAVE_SESSION_S: Final = 1.0
"""How long to read from a slave before looking for a master again."""
BEYOND_END_S = 3.0
"""How long masters must keep reporting that a queue ends before the wanted offset until that is believed: one that was
paused or disconnected may not know yet that it was replaced, nor what was stored since.
"""
IDLE_PAUSE_S: Final = 0.05
"""The pause after an empty response that arrived at once, although the broker could have waited for messages."""
LOOK_BACK_S: Final = 1.0
"""How long a master has to show the last message again after the connection broke."""
REFUSED_PAUSE_S: Final = 1.0
"""The pause before a queue that was refused is asked for again."""

_NOTHING_YET: Final = frozenset(
    (
        GetMessageStatus.OFFSET_OVERFLOW_ONE,
        GetMessageStatus.NO_MESSAGE_IN_QUEUE,
        GetMessageStatus.NO_MATCHED_LOGIC_QUEUE,
    )
)
_GO_ON: Final = frozenset(
    (
        GetMessageStatus.FOUND,
        GetMessageStatus.NO_MATCHED_MESSAGE,
        GetMessageStatus.MESSAGE_WAS_REMOVING,
        GetMessageStatus.OFFSET_FOUND_NULL,
    )
)


@dataclass(frozen=True, slots=True)
class PullOptions:
    """The parameters of every pull, and how much is kept in stock per queue."""

    group: str
    topic: str
    tag_expression: str = "*"
    max_messages: int = 1024
    max_bytes: int = MIB
    wait_ms: int = 5000
    stock_bytes_max: int = 4 * MIB
    go_on_when_out_of_range: bool = True
    patient: bool = False
    """Whether a refusal is waited out. Otherwise ``take`` raises it, until ``seek``."""


class Chunk(NamedTuple):
    """A response waiting to be polled: whole records, and where the queue continues after them."""

    records: bytes
    next_offset: int
    rewinds: bool = False
    """Whether that is before what came earlier, because the broker's queue ended before our offset."""


class _BeyondEnd(Exception):  # noqa: N818  # it is no error: it leaves the lock
    """The master insists that the queue ends before the wanted offset."""

    def __init__(self, end: int, incarnation: int) -> None:
        self.end = end
        self.incarnation = incarnation


class QueueFetcher:
    """Owned by a consumer, whose lock guards the state; ``arrived`` is called (without the lock) after every change."""

    def __init__(
        self,
        connection: BrokerConnection,
        queue_id: int,
        offset: int,
        pulls: PullOptions,
        arrived: Callable[[], None],
        incarnation: int = 0,
    ) -> None:
        """``incarnation``: of the broker that knew the offset; 0: of whichever answers first."""
        self.queue_id = queue_id
        self.skipped = 0
        """How many offsets were skipped because their messages no longer exist."""
        self.max_offset = -1
        """The queue's end in the last response; -1 if unknown."""
        self.refused = False
        """Whether it was refused at the last attempt, and is asked for again."""
        self._connection = connection
        self._pulls = pulls
        self._arrived = arrived
        self._lock = threading.Lock()  # guards the fields below and those above
        self._room = threading.Condition(self._lock)
        self._offset = offset
        self._epoch = 0
        self._stock: deque[Chunk] = deque()
        self._stock_bytes = 0
        self._error: DLedgerError | None = None
        # What the broker of this incarnation is known to have as it was read, in front of the offset:
        self._incarnation = incarnation
        self._last = b""  # the last message that came; empty if there was none
        self._learn_at = offset - 1  # the message to ask for in its place, -1: none
        self._again_until = 0  # what comes before this offset was not there, or not wanted, when it was read first
        self._needs_position = False  # there is no such message: only the group's position can tell
        self._stop = threading.Event()
        self._call: _Call | None = None
        self._address = ""
        self._due: float | None = None  # deadline of the response
        self._overdue = False  # why the session was ended: no response in time,
        self._moved = False  # or another broker is the master
        self._beyond_since: float | None = None  # since when the queue is reported to end before the wanted offset
        self._thread = threading.Thread(
            target=self._run, name=f"rocketstore-pull-{pulls.topic}-{queue_id}", daemon=True
        )
        self._thread.start()

    # --- for the consumer -------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether ``take`` would return or raise something."""
        return bool(self._stock) or self._error is not None

    def take(self) -> Chunk | None:
        """The next response, or None. Raises errors that retrying cannot solve; ``seek`` continues after them."""
        with self._lock:
            if self._stock:
                chunk = self._stock.popleft()
                self._stock_bytes -= len(chunk.records)
                self._room.notify()
                return chunk
            if self._error is not None:
                raise self._error
        return None

    def seek(self, offset: int, incarnation: int | None = None) -> None:
        """Drop the stock and continue at ``offset``.

        ``incarnation``: of the broker that knew the offset; 0: whichever answers; None: that of what came last.
        """
        with self._lock:
            self._epoch += 1
            self._begin_at(offset, self._incarnation if incarnation is None else incarnation)
            self._stock.clear()
            self._stock_bytes = 0
            self._error = None
            self._room.notify()
            call = self._call
        if call is not None:
            call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped

    def _begin_at(self, offset: int, incarnation: int) -> None:
        self._offset = offset
        self._incarnation = incarnation
        self._last, self._learn_at = b"", offset - 1
        self._again_until, self._needs_position = 0, False
        self._beyond_since = None

    def is_at(self, incarnation: int) -> bool:
        """Whether the broker of this incarnation has what was taken so far, as it was read. Raises ``DLedgerError``.

        Otherwise nothing may be committed there: other messages may be in the place of those that were read.
        """
        with self._lock:
            known, last, epoch, offset = self._incarnation, self._last, self._epoch, self._offset
            if known == incarnation or not incarnation:
                return not (self._needs_position or self._again_until or any(one.rewinds for one in self._stock))
            if not known:
                self._incarnation = incarnation
                return True
            if not last or _only(last).queue_offset + 1 != offset:
                return False
        answer = self._message_at(_only(last).queue_offset)
        with self._lock:
            same = (self._incarnation, self._last, self._epoch, self._offset) == (known, last, epoch, offset)
            if not same or not is_same_message(bytes(answer.records), last) or answer.incarnation != incarnation:
                return False
            self._incarnation = incarnation
            return not any(one.rewinds for one in self._stock)

    def has_looked_at(self, incarnation: int) -> bool:
        """Whether it is settled what the broker of this incarnation has: ``is_at`` will not change by itself."""
        with self._lock:
            return incarnation in (0, self._incarnation)

    def confirm(self, incarnation: int) -> None:
        """The broker of this incarnation has the group's position: everything before it is as it was."""
        with self._lock:
            if incarnation in (0, self._incarnation):
                self._needs_position = False

    @property
    def has_nothing_to_compare(self) -> bool:
        """Whether only the group's position can tell if the broker has what was taken so far."""
        with self._lock:
            return self._needs_position

    def _message_at(self, offset: int, timeout_s: float | None = None) -> pb.PullResponse:
        """With the whole message, if there is one."""
        request = pb.PullRequest(
            group=self._pulls.group,
            topic=self._pulls.topic,
            queue_id=self.queue_id,
            offset=offset,
            max_messages=1,
            max_bytes=1,
        )
        return self._connection.ask_master(PULL, request, self._connection.deadline(timeout_s))

    def look_after(self, master: str | None) -> None:
        """End a session that is overdue, or with a broker that is no longer the master; called periodically."""
        with self._lock:
            overdue = self._due is not None and time.monotonic() > self._due
            elsewhere = master is not None and self._address not in ("", master)
            call = self._call if overdue or elsewhere else None
            self._overdue, self._moved = overdue, elsewhere
        if call is not None:
            call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped

    def stop(self) -> None:
        """Make the thread end; ``join`` waits for it."""
        self._stop.set()
        with self._lock:
            self._room.notify()
            call = self._call
        if call is not None:
            call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff(RETRY_WAIT_S_MIN, RETRY_WAIT_S_MAX)
        told = ""
        while not self._stop.is_set():
            try:
                if self._session():
                    backoff.succeeded()
                    told = ""
            except _BeyondEnd as beyond:
                try:
                    self._go_back(beyond.end, beyond.incarnation)
                except OffsetOutOfRangeError as error:
                    self._give_up(error)
                except DLedgerError as error:
                    _log.warning("queue %d of %s: %s; retrying", self.queue_id, self._pulls.topic, error)
                    self._stop.wait(backoff.pause())
            except DLedgerError as error:
                if self._stop.is_set():
                    return
                hopeless = self._is_hopeless(error)
                if self._address:
                    self._connection.directory.note_failure(self._address, error)
                if hopeless and self._pulls.patient and not isinstance(error, (BadAnswerError, OffsetOutOfRangeError)):
                    self._wait_out(error)
                elif hopeless:
                    self._give_up(error)
                elif str(error) != told:  # once, not for every attempt
                    told = str(error)
                    _log.warning("queue %d of %s: %s; retrying", self.queue_id, self._pulls.topic, told)
                self._stop.wait(backoff.pause())

    def _learn(self, incarnation: int) -> None:
        """A message that was read in an earlier life is known, too: the one before the position that was stored."""
        with self._lock:
            place, epoch = self._learn_at, self._epoch
            if place < 0 or self._last:
                return
        try:
            answer = self._message_at(place, LOOK_BACK_S)
        except DLedgerError as error:
            if not is_retried_read(error):
                self._learn_at = -1
            return
        records = bytes(answer.records)
        with self._lock:
            if self._epoch != epoch or self._learn_at != place or answer.incarnation != incarnation:
                return
            self._learn_at = -1
            if not self._last and records and _only(records).queue_offset == place:
                self._last = records

    def _look_back(self, incarnation: int) -> bool:
        """Another incarnation has answered: it may have lost messages, and taken new ones at their offsets.

        Returns whether its answer counts. A queue that has become shorter is not believed at once: see
        ``BEYOND_END_S``.
        """
        with self._lock:
            last, epoch, offset, known = self._last, self._epoch, self._offset, self._incarnation
            if not (last and known):
                self._needs_position = bool(known and self._pulls.group)
                self._incarnation = incarnation
                return True
        place = _only(last).queue_offset
        try:
            answer = self._message_at(place, LOOK_BACK_S)
        except StoreFailedError as error:  # it was read before: what follows is not held up
            _log.warning(
                "queue %d of %s: the last message is unreadable now: %s", self.queue_id, self._pulls.topic, error
            )
            with self._lock:
                if self._epoch == epoch:
                    self._incarnation = incarnation
            return True
        if answer.incarnation != incarnation:
            self._stop.wait(IDLE_PAUSE_S)
            return False
        if answer.max_offset <= place:
            return True
        target = min(self._begin_after(_only(last)), place) if _is_replaced(last, bytes(answer.records)) else None
        with self._lock:
            if self._epoch != epoch or self._offset != offset:
                return False
            if target is None:
                self._incarnation = incarnation
                if place + 1 < offset:  # what was not wanted there may have been replaced by what is
                    self._again_until, self._offset = offset, max(place + 1, answer.min_offset)
                return self._offset == offset
            self._go_to(
                target, incarnation, f"the message before {offset} is another one: the broker has lost messages"
            )
        self._arrived()
        return False

    def _is_hopeless(self, error: DLedgerError) -> bool:
        if isinstance(error, NotFoundError) and self._address != self._connection.directory.leader:
            return False  # a slave may not know the topic yet
        return not is_retried_read(error)

    def _give_up(self, error: DLedgerError) -> None:
        """Pass the error to ``take``, and wait until ``seek`` asks for more."""
        with self._lock:
            self._error = error
        self._arrived()
        with self._lock:
            while self._error is not None and not self._stop.is_set():
                self._room.wait()

    def _wait_out(self, error: DLedgerError) -> None:
        """Say once that the queue is refused, and try again after a while.

        A topic may be made anew, a permission be given back. ``take`` raises other refusals meanwhile.
        """
        if isinstance(error, (NotAllowedNowError, NotFoundError)):
            if not self.refused:
                _log.warning("queue %d of %s: %s; waiting", self.queue_id, self._pulls.topic, error)
        else:
            with self._lock:
                self._error = error
        self.refused = True
        self._arrived()
        self._stop.wait(REFUSED_PAUSE_S)

    def _go_back(self, end: int, incarnation: int) -> None:
        """The queue ends before our offset: behind what was lost, or where a queue in its place begins."""
        with self._lock:
            last, epoch, offset = self._last, self._epoch, self._offset
        target = min(self._begin_after(_only(last)), end) if last else end
        with self._lock:
            if self._epoch == epoch and self._offset == offset:
                self._go_to(target, incarnation, f"the queue ends at {end}, before {offset}")
        self._arrived()

    def _begin_after(self, last: ReceivedMessage) -> int:
        """The first message stored later than this one."""
        request = pb.OffsetByTimeRequest(
            topic=self._pulls.topic, queue_id=self.queue_id, timestamp_ms=last.store_timestamp + 1
        )
        return max(self._connection.ask_master(OFFSET_BY_TIME, request, self._connection.deadline()).offset, 0)

    def _session(self) -> bool:
        """Pull from one broker until there is a reason to leave it; returns whether it responded at all."""
        self._address = ""
        address = self._connection.seeker.reader(self._connection.deadline())
        at_master = self._connection.directory.leader == address
        until = float("inf") if at_master else time.monotonic() + SLAVE_SESSION_S
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        call = self._connection.channels.open_stream("PullStream", address, iter(requests.get, None))
        with self._lock:
            self._call, self._address, epoch = call, address, self._epoch
            self._overdue = self._moved = False
        answered = False
        try:
            while time.monotonic() < until and (request := self._next_request(epoch)) is not None:
                requests.put(request.SerializeToString())
                began = time.monotonic()
                response = self._answer(call, address)
                if at_master and response.incarnation:
                    if response.incarnation != self._incarnation and not self._look_back(response.incarnation):
                        continue
                    if not response.records:
                        self._learn(response.incarnation)
                if not self._take_in(response, epoch, at_master=at_master):
                    break
                answered = True
                idle = not response.count and time.monotonic() - began < IDLE_PAUSE_S
                if idle and response.next_offset <= request.offset:
                    self._stop.wait(IDLE_PAUSE_S)
        except grpc.RpcError as error:
            with self._lock:
                wanted = self._epoch != epoch or self._moved or self._stop.is_set()
                overdue = self._overdue
            if overdue:
                raise RequestTimeoutError(f"{address} did not answer a pull in time") from error
            if not wanted:
                raise failure_of(error, address, sent=False) from error
        finally:
            requests.put(None)
            call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
            with self._lock:
                self._call, self._due = None, None
        return answered

    def _next_request(self, epoch: int) -> pb.PullRequest | None:
        """Wait for room in the stock; None if the session must end."""
        pulls = self._pulls
        with self._lock:
            while self._stock_bytes >= pulls.stock_bytes_max and self._epoch == epoch and not self._stop.is_set():
                self._room.wait()
            if self._epoch != epoch or self._stop.is_set():
                return None
            return pb.PullRequest(
                group=pulls.group,
                topic=pulls.topic,
                queue_id=self.queue_id,
                offset=self._offset,
                max_messages=pulls.max_messages,
                max_bytes=pulls.max_bytes,
                tag_expression=pulls.tag_expression,
                wait_ms=pulls.wait_ms,
            )

    def _answer(self, call: _Call, address: str) -> pb.PullResponse:
        wait_s = self._pulls.wait_ms / 1000 + self._connection.timeout_s
        self._due = time.monotonic() + wait_s
        try:
            data: bytes = next(iter(call))
        except StopIteration:
            raise UnavailableError(f"{address} ended the stream") from None
        finally:
            self._due = None
        return parse_answer(pb.PullResponse, data, address)

    def _take_in(self, response: pb.PullResponse, epoch: int, *, at_master: bool) -> bool:
        """Process a response; False if it is no longer wanted."""
        with self._lock:
            if self._epoch != epoch or self._stop.is_set():
                return False
            self._note(response, at_master=at_master)
            self.max_offset = response.max_offset
            self.refused, self._error = False, None
        self._arrived()
        return True

    def _note(self, response: pb.PullResponse, *, at_master: bool) -> None:
        status, offset = response.status, self._offset
        if status in _GO_ON:
            if response.next_offset < offset or (response.records and response.next_offset == offset):
                raise BadAnswerError(
                    f"queue {self.queue_id}: asked for offset {offset}, but the answer continues at "
                    f"{response.next_offset}"
                )
            if response.next_offset > offset:
                self._offset = response.next_offset
                self._add_to_stock(response, offset)
        elif status == GetMessageStatus.OFFSET_TOO_SMALL:
            if response.min_offset <= offset:
                raise BadAnswerError(f"queue {self.queue_id}: {offset} cannot be below {response.min_offset}")
            self._go_to(
                response.min_offset, self._incarnation, f"messages {offset} to {response.min_offset - 1} are gone"
            )
        elif status == GetMessageStatus.OFFSET_OVERFLOW_BADLY or (
            status in _NOTHING_YET and response.max_offset < offset
        ):
            # A slave may lag; only the master knows that such a message will never exist.
            if not at_master:
                self._beyond_since = None
            elif self._is_long_beyond():
                raise _BeyondEnd(max(response.max_offset, 0), response.incarnation)
            return
        elif status not in _NOTHING_YET:
            raise BadAnswerError(f"queue {self.queue_id}: {status!r} is not a valid answer to a pull")
        self._beyond_since = None

    def _is_long_beyond(self) -> bool:
        now = time.monotonic()
        if self._beyond_since is None:
            self._beyond_since = now
        return now >= self._beyond_since + BEYOND_END_S

    def _add_to_stock(self, response: pb.PullResponse, offset: int) -> None:
        if offset < self._again_until:
            if response.records:
                self._stock.append(Chunk(b"", offset, rewinds=True))
            elif response.next_offset < self._again_until:
                return
            self._again_until = 0
        self._last = _last_of(response.records) or self._last
        self._stock.append(Chunk(response.records, response.next_offset))
        self._stock_bytes += len(response.records)

    def _go_to(self, offset: int, incarnation: int, why: str) -> None:
        if not self._pulls.go_on_when_out_of_range:
            raise OffsetOutOfRangeError(f"queue {self.queue_id}: {why}")
        _log.warning("queue %d of %s: %s; continuing at %d", self.queue_id, self._pulls.topic, why, offset)
        rewinds = offset <= self._offset
        if not rewinds:
            self.skipped += offset - self._offset
        self._begin_at(offset, incarnation)
        self._stock.append(Chunk(b"", offset, rewinds))


def _is_replaced(known: bytes, found: bytes) -> bool:
    """Whether another message than ``known`` is in its place now; a broker answers with a later one if it is gone."""
    return bool(found) and not is_same_message(found, known) and _only(found).queue_offset == _only(known).queue_offset


def _last_of(records: bytes) -> bytes:
    """The last one of whole records; empty if it is none, which is refused later."""
    at = 0
    while at + BLANK.size <= len(records):
        size = BLANK.unpack_from(records, at)[0]
        if size <= 0 or at + size >= len(records):
            break
        at += size
    with suppress(BadAnswerError):
        return _only(records[at:]).record if records else b""
    return b""


def _only(record: bytes) -> ReceivedMessage:
    return split_records(record, check_crc=False)[0]
