"""From one start of transactions to their stop: what is open, and which ends are on their way into the log.

Threads: requests come on read threads, what the log shows on the dispatch thread, which only queues it for
``rocketstore-transactions``; that one owns everything but the marks, which a lock guards.

*Marks* say from where the next master reads: the offsets at which open halves begin, and the ops that concern them.
They are consumer offsets of a group of the broker's own. All ops so far concern halves so far. A mark keeps both ends:
once every half before it has ended, no op before it is needed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from dledger.clock import Backoff, Clock
from dledger.errors import CorruptLogError, ShutdownError
from dledger.runtime.threads import Supervisor, Worker
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.transactions.checks import (
    Askers,
    Begin,
    Checks,
    StoppedError,
    commits_in,
    holds_end,
    read_rounds,
    recover,
)
from rocketstore.broker.transactions.halves import (
    Half,
    OpenHalves,
    Phase,
    committed,
    given_up,
    half_of,
    op_message,
    op_target,
)
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.columns import topics_of
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.properties import encode_properties
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QueueOffset
from rocketstore.store.message_store import MessageStore
from rocketstore.types import HALF_TOPIC, OP_TOPIC, Outcome, PutResult, RecordHead

GROUP: Final = "CID_RMQ_SYS_TRANS"
"""Whose consumer offsets they are."""
_PROGRESS_MS: Final = 1000
RETRY_MS: Final = 100
_IDLE_MS: Final = 10_000
_MARKS_MAX: Final = 1024


class Marks:
    """Owned by the thread of transactions."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._marks: deque[tuple[int, int]] = deque()  # next offsets of halves and ops at the same time
        self._noted = (-1, -1)
        self._noting = False
        self._due_ms = 0
        self.op_next = 0
        """The next op."""

    def note(self, now_ms: int, oldest: int, half_next: int) -> int:
        """Pass on where open halves begin, if it is time; returns when to do so again."""
        if now_ms < self._due_ms or self._noting:
            return max(self._due_ms, now_ms + RETRY_MS)
        self._due_ms = now_ms + _PROGRESS_MS
        marks = self._marks
        if not marks or marks[-1] != (half_next, self.op_next):
            marks.append((half_next, self.op_next))
        if len(marks) > _MARKS_MAX:
            self._marks = marks = deque(one for at, one in enumerate(marks) if at % 2 == 0)
        op = self._noted[1]
        while marks and marks[0][0] <= oldest:
            op = max(op, marks.popleft()[1])
        found = (oldest, op)
        if found == self._noted:
            return now_ms + _IDLE_MS
        offsets = [(topic, 0, offset) for topic, offset in ((HALF_TOPIC, oldest), (OP_TOPIC, op)) if offset > 0]
        if not offsets:
            self._noted = found
            return now_ms + _IDLE_MS
        self._noting = True

        def done(result: PutResult) -> None:
            if result.outcome == "stored":
                self._noted = found
            self._noting = False

        self._state.commit_own_offsets(GROUP, offsets, done)
        return self._due_ms


RETRY_MS_MAX: Final = 5000
STOP_TIMEOUT_S: Final = 10.0
DISPATCH_WAIT_S: Final = 2.0
_OP_RETRY_MS: Final = 5000
"""How long after a commit its op is written again, if the log does not show it. Two do no harm."""
_OPS_AT_ONCE: Final = 256
ARRIVED_AT_ONCE: Final = 1024
NOT_READY: Final = "this broker does not know yet which transactions are open"

_log = logging.getLogger("rocketstore")

EndDone = Callable[[PutResult], None]
"""Called once, on any thread, with what became of a transaction's end."""


class EndRefusedError(Refusal):
    """Raised when a transaction is not ended by a request, and why."""

    def __init__(self, sentence: str) -> None:
        super().__init__(RefusalKind.INVALID, sentence)


class EndedBeforeError(EndRefusedError):
    """Raised when a transaction has ended already, or there is none."""


class EndingError(EndRefusedError):
    """Raised when an earlier request's end is on its way."""


class NotReadyError(Refusal):
    """Raised while this broker does not know which transactions are open."""

    def __init__(self, sentence: str) -> None:
        super().__init__(RefusalKind.UNAVAILABLE, sentence)


class _Result(NamedTuple):
    """The result of putting an end into the log: if it is there, then between ``begin`` and ``end``."""

    half: Half
    outcome: Outcome
    """Of the commit, or of the op if there is no commit."""
    begin: int
    end: int
    is_unreadable: bool = False
    """Whether that part of the log could not be read; logged once."""


class Run:
    """From one ``start`` to its ``stop``."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        state: BrokerState,
        clock: Clock,
        host: Callable[[], HostAddress],
        askers: Askers,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._store = store
        self._state = state
        self._clock = clock
        self._host = host
        self._on_ready = on_ready
        self._stopped = False
        self._stepping = threading.Lock()  # held while stepping
        self._lock = threading.Lock()  # guards the marks and ``halves``; held while an end is given to the log
        self._worker: Worker | None = None
        self._arrivals: deque[RecordHead] = deque()
        self._results: deque[_Result] = deque()
        self._doubts: deque[_Result] = deque()
        self._backoff = Backoff(RETRY_MS, RETRY_MS_MAX)
        self._retry_at_ms = 0
        self._marks = Marks(state)
        self._heard = 0  # what the log holds before this position has been queued
        self._scanned = 0
        self._checks = Checks(self, config, store, state, clock, askers)
        self.halves = OpenHalves()
        self.dropped = 0
        """How many messages were to be committed after their topic was deleted."""
        self.given_up = 0
        """How many transactions nobody answered for."""
        self.is_ready = False

    def start(self, supervisor: Supervisor) -> None:
        self._worker = Worker("rocketstore-transactions", self.step, self._clock, supervisor)
        self._worker.start()

    def stop(self) -> None:
        """When it returns, no end reaches the log any more."""
        with self._lock:
            self._stopped = True
        with self._stepping:
            self.is_ready = False
        if self._worker is not None:
            self._worker.stop(STOP_TIMEOUT_S)

    def refusal(self, group: str, coming: int = 0, coming_of_group: int = 0) -> str:
        """See ``TransactionService.refusal``."""
        most = self._config.transactions_open_max
        share = max(1, most * self._config.access.account_share_percent // 100)
        waiting = len(self._arrivals) + coming
        if len(self.halves) + waiting >= most:
            return f"{most} transactions are open: end some first (transactions_open_max)"
        if self.halves.of_group(group) + coming_of_group >= share:
            return (
                f"producer group {group} has {share} open transactions: end some first (transactions_open_max, "
                "account_share_percent)"
            )
        return ""

    # -- what the log shows: on the dispatch thread --------------------------------------------------------------------

    def on_arrival(self, heads: Sequence[RecordHead]) -> None:
        """Take what concerns transactions."""
        names = topics_of(heads)
        found = [one for one in heads if one.topic in _OWN] if any(name in _OWN for name in names) else []
        commits = commits_in(heads)
        if found or commits:
            self._arrivals.extend(sorted(found + commits, key=_offset_of) if commits else found)
            self.wake()
        self._heard = heads[-1].offset

    # -- requests: on any thread ---------------------------------------------------------------------------------------

    def end(self, queue_offset: int, offset: int, group: str, *, commit: bool, done: EndDone) -> None:
        """See ``TransactionService.end``."""
        if not self.is_ready:
            raise NotReadyError(NOT_READY)
        half = self._mark(queue_offset, offset, group)
        gone = ""
        try:
            messages = [self._op(half)]
            if commit:
                message = self._committed(half)
                gone = "" if self._place(message, half) else message.topic
                messages[:0] = [] if gone else [message]
        except BaseException:
            with self._lock:
                half.phase = Phase.OPEN
            raise
        with self._lock:
            if self._stopped:
                raise NotReadyError("this broker is not the master any more")
            self._submit(half, messages, _ignore if gone else done, commit=commit and not gone)
            self.dropped += bool(gone)
        if gone:
            why = f"topic {gone} was deleted since transaction {queue_offset} began: its message is dropped"
            _log.warning("transactions: %s (producer group %s)", why, group)
            raise EndRefusedError(why)

    def is_open(self, queue_offset: int) -> bool:
        """Whether a transaction is open, and no end of it is on its way."""
        with self._lock:
            half = self.halves.find(queue_offset)
            return half is not None and half.phase is Phase.OPEN

    def open_before(self, is_due: Callable[[Half], bool]) -> list[Half]:
        """Those that are open and due."""
        with self._lock:
            return [one for one in self.halves if one.phase is Phase.OPEN and is_due(one)]

    def excess(self) -> int:
        """How many must end for half of the places to be free again, if all are taken; else 0."""
        count, most = len(self.halves), self._config.transactions_open_max
        return count - most // 2 if count >= most else 0

    def give_up(self, half: Half, times: int) -> None:
        """Put an open transaction where an operator finds it, and end it. On the thread."""
        record = self._store.read_record(half.offset)
        try:
            message = None if record is None else given_up(record, times, self._host())
        except CorruptRecordError as error:
            _log.error("transactions: half message %d cannot be given up: %s", half.queue_offset, error)
            return
        with self._lock:
            if message is None:
                _log.error("transactions: half message %d has expired", half.queue_offset)
                self.halves.ended(half.queue_offset)
            elif half.phase is Phase.OPEN and not self._stopped:
                half.phase = Phase.ENDING
                self.given_up += 1
                _log.warning(
                    "transactions: half message %d of %s is given up after %d checks",
                    half.queue_offset,
                    half.group,
                    times,
                )
                self._submit(half, [message, self._op(half)], lambda _result: None, commit=False)

    def _mark(self, queue_offset: int, offset: int, group: str) -> Half:
        with self._lock:
            half = self.halves.find(queue_offset)
            unseen = queue_offset >= self.halves.next_offset
        early = self._read_half(queue_offset, offset) if half is None and unseen else None
        with self._lock:
            if early is not None and queue_offset >= self.halves.next_offset:
                self.halves.add_early(early)
            half = self.halves.find(queue_offset)
            if half is None:
                raise EndedBeforeError(f"transaction {queue_offset} has ended already, or there is none")
            if half.offset != offset:
                raise EndRefusedError(f"the commit log offset wrong: {offset} instead of {half.offset}")
            if half.group != group:
                raise EndRefusedError(f"the producer group wrong: {group}")
            if half.phase is not Phase.OPEN:
                raise EndingError(f"transaction {queue_offset} is being ended already")
            half.phase = Phase.ENDING
        return half

    def _read_half(self, queue_offset: int, offset: int) -> Half:
        """One that its producer knows of before the thread does. Only the queue says what is a half message: bytes at
        any position may look like one.
        """
        if not self._store.wait_dispatched(DISPATCH_WAIT_S):
            raise NotReadyError("the consume queues are too far behind the log")
        try:
            found = self._store.position_of(HALF_TOPIC, 0, queue_offset)
            record = self._store.read_record(found) if found == offset >= 0 else None
            message = None if record is None else decode_record(record)
        except (CorruptRecordError, CorruptLogError) as error:
            raise EndRefusedError(f"find prepared transaction message failed: {error}") from error
        if message is None:
            raise EndRefusedError("find prepared transaction message failed")
        return half_of(queue_offset, offset, message.store_timestamp, encode_properties(message.properties))

    def _committed(self, half: Half) -> Message:
        try:
            record = self._store.read_record(half.offset)
            if record is None:
                raise EndRefusedError("find prepared transaction message failed")
            return committed(record)
        except (CorruptRecordError, CorruptLogError, ShutdownError) as error:
            raise EndRefusedError(f"the prepared message cannot be read: {error}") from error

    def _place(self, message: Message, half: Half) -> bool:
        """Choose the queue for a message to be committed; False if its topic was deleted since it was prepared."""
        waited = QueueOffset(HALF_TOPIC, 0, half.queue_offset)
        queue_id = self._state.place_for(message.topic, message.queue_id, waited)
        if queue_id is not None:
            message.queue_id = queue_id
        return queue_id is not None

    def _op(self, half: Half) -> Message:
        return op_message(half.queue_offset, self._host(), self._clock.wall_ms())

    def _submit(self, half: Half, messages: list[Message], done: EndDone, *, commit: bool) -> None:
        """Give an end to the log, the commit before the op. Requires the lock."""
        log = self._store.log
        begin = log.end_offset

        def answered(results: Sequence[PutResult]) -> None:  # on any thread, perhaps under the lock
            decisive = results[0 if commit else -1]  # a commit without its op is finished later
            self._results.append(_Result(half, decisive.outcome, begin, log.end_offset))
            self.wake()
            done(decisive)

        self._store.submit(messages, answered)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """See ``TransactionService.step``."""
        with self._stepping:
            now_ms = self._clock.monotonic_ms()
            if self._stopped or now_ms < self._retry_at_ms:
                return max(self._retry_at_ms, now_ms + RETRY_MS)
            try:
                if not self.is_ready:
                    self._recover()
                due_ms = self._turn(now_ms)
            except StoppedError:
                return now_ms + _IDLE_MS
            except (ShutdownError, CorruptLogError) as error:
                self._retry_at_ms = now_ms + round(self._backoff.pause())
                _log.warning("transactions: the log cannot be read now: %s", error)
                return self._retry_at_ms
            self._backoff.succeeded()
            return due_ms

    def _recover(self) -> None:
        began_ms = self._clock.monotonic_ms()
        noted = {one.topic: one.offset for one in self._state.offsets(GROUP)}
        begin = Begin(noted.get(HALF_TOPIC, 0), noted.get(OP_TOPIC, 0))
        rounds = read_rounds(self._store)
        position = self._store.dispatch_position
        halves, self._marks.op_next = recover(self._store, begin, rounds.scanned, self._check)
        commit = halves.oldest_commit
        self._scanned = position if commit is None else commit
        self._checks.begin(rounds)
        with self._lock:
            self.halves = halves
            self.is_ready = True
        self._on_ready()
        if len(halves):
            took_ms = self._clock.monotonic_ms() - began_ms
            _log.info("transactions: %d are open, read from the log in %d ms", len(halves), took_ms)

    def _check(self) -> None:
        if self._stopped:
            raise StoppedError

    def _turn(self, now_ms: int) -> int:
        heard = self._heard
        self._take_arrivals(now_ms)
        if not self._arrivals:
            commit = self.halves.oldest_commit
            self._scanned = max(self._scanned, heard if commit is None else min(heard, commit))
        self._take_results()
        self._settle_doubts()
        self._end_expired()
        self._finish_commits(now_ms)
        with self._lock:
            oldest, half_next = self.halves.oldest, self.halves.next_offset
        dues = [
            now_ms + _IDLE_MS,
            self._marks.note(now_ms, oldest, half_next),
            self._checks.step(now_ms, self._scanned),
        ]
        if self._arrivals:
            dues.append(now_ms)
        if self._doubts or self.halves.oldest_commit is not None:
            dues.append(now_ms + RETRY_MS)
        return min(dues)

    def _take_arrivals(self, now_ms: int) -> None:
        for _ in range(min(len(self._arrivals), ARRIVED_AT_ONCE)):
            head = self._arrivals[0]
            target = self._ended_by(head) if head.topic == OP_TOPIC else -1
            with self._lock:
                if head.topic == HALF_TOPIC:
                    self.halves.add(half_of(head.queue_offset, head.offset, head.store_timestamp, head.properties))
                elif head.topic == OP_TOPIC:
                    self._marks.op_next = max(self._marks.op_next, head.queue_offset + 1)
                    self.halves.ended(target)
                else:
                    self.halves.committed(head.prepared_offset, head.offset, now_ms + _OP_RETRY_MS)
            self._arrivals.popleft()

    def _ended_by(self, head: RecordHead) -> int:
        record = self._store.read_record(head.offset)
        try:
            return -1 if record is None else op_target(decode_record(record))
        except CorruptRecordError as error:
            _log.error("transactions: an op message is passed over: %s", error)
            return -1

    def _take_results(self) -> None:
        """Open refused transactions again; the log will show whether those of unknown outcome have ended."""
        while self._results:
            found = self._results.popleft()
            with self._lock:
                if found.half.phase is Phase.ENDING and found.outcome == "not_applied":
                    found.half.phase = Phase.OPEN
            if found.outcome == "unknown":
                self._doubts.append(found)

    def _settle_doubts(self) -> None:
        """A master's log loses nothing: what is not in it where it would be, is nowhere."""
        for _ in range(len(self._doubts)):
            one = self._doubts[0]
            known = self._store.log.max_offset >= one.end
            try:
                if known and not holds_end(self._store, one.half, one.begin, one.end, self._check):
                    with self._lock:
                        if one.half.phase is Phase.ENDING:
                            one.half.phase = Phase.OPEN
            except (ShutdownError, CorruptLogError) as error:  # others need not wait for this part of the log
                known = False
                if not one.is_unreadable:
                    _log.warning("transactions: whether one has ended cannot be read now: %s", error)
                one = one._replace(is_unreadable=True)
            self._doubts.popleft()
            if not known:
                self._doubts.append(one)

    def _end_expired(self) -> None:
        """Retention may remove a half message that is still open: nobody can be asked about it, or commit it."""
        begin = self._store.log.min_offset
        while True:
            with self._lock:
                half = next(iter(self.halves), None)  # they are in the log's order
                if half is None or half.offset >= begin or half.phase is Phase.ENDING:
                    return
                self.halves.ended(half.queue_offset)
            if half.phase is Phase.OPEN:
                _log.error(
                    "transactions: half message %d of %s has expired: the transaction has ended without a commit",
                    half.queue_offset,
                    half.group,
                )

    def _finish_commits(self, now_ms: int) -> None:
        """Write ops that are missing: of commits before which a master died, or that a full disk has separated."""
        with self._lock:
            due = [one for one in self.halves.unfinished if one.op_due_ms <= now_ms]
            for half in due[:_OPS_AT_ONCE]:
                half.op_due_ms = now_ms + _OP_RETRY_MS
                if not self._stopped:
                    self._store.submit([self._op(half)], lambda _results: None)

    def wake(self) -> None:
        """Step soon; from any thread."""
        if self._worker is not None:
            self._worker.wake()


def _ignore(_result: PutResult) -> None:
    """Nobody waits for it."""


_OWN: Final = frozenset({HALF_TOPIC, OP_TOPIC})


def _offset_of(head: RecordHead) -> int:
    return head.offset
