"""``Consumer``: reads a topic as a member of a group, from the group's committed offsets."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Final, Literal, TypedDict, Unpack, cast

from dledger.client.discovery import Addresses
from dledger.client.security import ClientSecurity
from dledger.client.shared import Deadline
from dledger.errors import ConfigError, DLedgerError, UnavailableError
from dledger.forks import LostLock, mind_forks
from dledger.limits import AboveZero, Bytes, Positive, Range, Unit, out_of_range
from dledger.values import MIB
from rocketstore.client.aio.received import ReceivedMessage, sent_expression, split_records, tags_of_expression
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.errors import MessageRefusedError, NotAllowedNowError, NotFoundError, OtherIncarnationError
from rocketstore.client.fetcher import PullOptions, QueueFetcher
from rocketstore.client.group_offsets import LOOKS_MAX, Beginnings, BrokerOffsets, Fetched, Start
from rocketstore.client.shares import QueueName
from rocketstore.client.topic_cache import TopicCache, no_such_topic
from rocketstore.client.topics import PERMISSION_READ

_log = logging.getLogger(__name__)
COMMIT_PAUSE_S: Final = 0.05
"""Before a commit looks again whether a broker that has become master still has what was read."""
LOOK_AFTER_S: Final = 1.0
"""How often a consumer checks whether its pulls are overdue or its broker is no longer the master."""


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Which messages, from where, and how much at once. ``Consumer`` takes these as keyword arguments.

    ``start``: where a group begins in a topic that is new to it, in all queues at once; a queue that is added later
    begins with its first message. ``queues``: only these; ``instance`` (i, n): every n-th queue from the i-th on (a
    static share); default: all. ``tags``: ``"TagA || TagB"`` or ``"*"``. ``auto_commit_s``: how often ``poll`` commits
    what earlier polls gave; None: only ``commit`` and ``close`` do (the beginning is stored at once all the same).
    ``when_out_of_range``: if the next message is gone, ``"go_on"`` at the
    nearest that exists (logged, counted in ``skipped``), or raise ``OffsetOutOfRangeError``.
    """

    start: Start = "last"
    tags: str = "*"
    queues: Sequence[int] | None = None
    instance: tuple[int, int] | None = None
    auto_commit_s: float | None = 5.0
    when_out_of_range: Literal["go_on", "error"] = "go_on"
    timeout_s: AboveZero = 5.0
    pull_messages: Positive = 1024
    pull_bytes: Bytes = MIB
    pull_wait_ms: Annotated[int, Range(0), Unit.MS] = 5000
    stock_bytes_max: Bytes = 4 * MIB

    def __post_init__(self) -> None:
        problems = out_of_range(self)
        if self.queues is not None and self.instance is not None:
            problems.append("give either queues or instance")
        if self.instance is not None and not 0 <= self.instance[0] < self.instance[1]:
            problems.append(f"instance {self.instance[0]} of {self.instance[1]} does not exist: instances count from 0")
        if isinstance(self.start, str) and self.start not in ("first", "last"):
            problems.append(f"start must be 'first', 'last' or a time, not {self.start!r}")
        if problems:
            raise ConfigError(problems)


class ConsumerSettings(TypedDict, total=False):
    """The fields of ``ConsumerOptions``, for type checkers."""

    start: Start
    tags: str
    queues: Sequence[int] | None
    instance: tuple[int, int] | None
    auto_commit_s: float | None
    when_out_of_range: Literal["go_on", "error"]
    timeout_s: float
    pull_messages: int
    pull_bytes: int
    pull_wait_ms: int
    stock_bytes_max: int


@dataclass(slots=True, eq=False)
class _Queue:
    """One assigned queue, guarded by the consumer's lock."""

    queue_id: int
    fetcher: QueueFetcher
    delivered: int  # the first offset not yet returned
    finished: int  # the first offset that may not be committed yet, because its message is still in use
    committed: int | None = None
    offered: int | None = None  # by the last commit: it may be stored although no response arrived
    in_doubt: bool = False  # the broker may have lost, and replaced, what was read: nothing is committed
    awaits_look: bool = False  # and that will be known soon
    rewind: bool = False  # the next commit may go back
    rest: deque[ReceivedMessage] = field(default_factory=deque)
    rest_next: int = 0  # where the queue continues after the rest


class Consumer:
    """Pulls ahead in the background; ``poll`` or iteration returns messages, in order within each queue.

    Delivery is at least once: a message is committed only after the next ``poll`` (or ``commit``, or ``close``) shows
    that it is done. Where a group begins is stored before anything is read. Queues that are added to the topic are
    taken up within half a minute, those that are removed or may not be read now are left out until they may, with one
    warning. Committed offsets never move back, except after ``seek``. Before each commit, and every
    ``auto_commit_s``, the consumer checks whether somebody else has moved the group's offsets; if so, it logs that and
    continues from there: they were reset, or a second consumer reads the same queues. Consumers of one group do not
    divide queues among themselves: give each its own (``queues``, ``instance``), or each receives every message. Reads
    go to the master, or to any live broker while there is none. Without a ``group`` (an empty one), nothing is
    committed. Only one thread may poll; ``commit``, ``seek`` and ``close`` may be called by others.
    """

    def __init__(
        self,
        addresses: Addresses,
        *,
        group: str,
        topic: str,
        options: ConsumerOptions | None = None,
        security: ClientSecurity | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self.group = group
        self.topic = topic
        self._options = options or ConsumerOptions(**settings)
        self._tags = tags_of_expression(self._options.tags)
        self._connection = BrokerConnection(addresses, timeout_s=self._options.timeout_s, security=security)
        self._topics = TopicCache(self._connection)
        self._store = BrokerOffsets(self._connection, group, "")
        self._beginnings = Beginnings(self._connection, self._store, "")
        self._committing = threading.RLock()  # one commit at a time
        self._lock = threading.RLock()  # guards the fields below
        self._queues: dict[int, _Queue] = {}
        self._turn: deque[_Queue] = deque()
        self._in_hand: list[_Queue] = []
        self._commit_at = float("inf")
        self._started = False
        self._news = threading.Event()  # set when a fetcher has news
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._look_after, name=f"rocketstore-consumer-{topic}", daemon=True)
        self._is_left_behind = False
        mind_forks(self)

    def leave_behind(self) -> None:
        """In a forked child, where its threads are not: every call fails at once."""
        self._is_left_behind = True
        self._lock = cast(threading.RLock, LostLock())

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The messages returned last may not be done: only earlier ones are committed.
        try:
            self._close(lambda: self._commit(finished_only=True))
        except DLedgerError as failure:
            _log.warning("cannot commit the offsets: %s", failure)

    # --- messages ---------------------------------------------------------------------------------------------------

    def poll(self, max_messages: int = 1024, timeout_s: float = 1.0) -> list[ReceivedMessage]:
        """Up to ``max_messages`` of one queue, at least one unless none arrives within ``timeout_s``.

        Messages of earlier polls count as done. The first call finds the queues and the group's offsets, which takes up
        to the consumer's own ``timeout_s`` longer. Raises ``NotFoundError`` if the topic does not exist then, and
        ``OffsetOutOfRangeError`` or ``BadAnswerError`` at every call until ``seek`` moves elsewhere.
        """
        deadline = Deadline(timeout_s)
        self._begin_poll()
        while True:
            self._news.clear()
            with self._lock:
                messages = self._take(max_messages)
            if messages:
                return messages
            if not self._news.wait(deadline.remaining_s) and deadline.expired:
                return []
            if self._closing.is_set():
                raise UnavailableError("the consumer is closed")

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Every message until the consumer is closed, waiting for more. Requesting the next completes the last."""
        while not self._closing.is_set():
            try:
                yield from self.poll(1, 1.0)
            except UnavailableError:
                if not self._closing.is_set():
                    raise

    def _begin_poll(self) -> None:
        with self._lock:
            self._start()
            for queue in self._in_hand:
                queue.finished = queue.delivered
            self._in_hand.clear()
            due = time.monotonic() >= self._commit_at
        if due:
            try:
                self._commit(finished_only=True)
            except DLedgerError as error:  # retried later; close() and commit() report it
                _log.warning("cannot commit the offsets of group %s: %s", self.group, error)
            self._commit_at = time.monotonic() + (self._options.auto_commit_s or 0)

    def _take(self, max_messages: int) -> list[ReceivedMessage]:
        for _ in range(len(self._turn)):
            queue = self._turn[0]
            self._turn.rotate(-1)
            while not queue.rest and queue.fetcher.ready:
                self._unpack(queue)
            if queue.rest:
                return self._hand_out(queue, max_messages)
        return []

    def _unpack(self, queue: _Queue) -> None:
        chunk = queue.fetcher.take()
        if chunk is None:
            return
        try:
            messages = split_records(chunk.records)
            if self._tags is not None:  # the broker compares only hashes
                messages = [message for message in messages if message.tags in self._tags]
        except DLedgerError:
            queue.fetcher.seek(queue.delivered)  # what was damaged in transit may be intact the next time
            raise
        if chunk.rewinds:
            queue.rewind = True
            queue.finished = min(queue.finished, chunk.next_offset)
        queue.rest.extend(messages)
        queue.rest_next = chunk.next_offset
        if not messages:
            queue.delivered = chunk.next_offset
            self._in_hand.append(queue)

    def _hand_out(self, queue: _Queue, max_messages: int) -> list[ReceivedMessage]:
        rest = queue.rest
        if len(rest) <= max_messages:
            messages = list(rest)
            rest.clear()
            queue.delivered = queue.rest_next
        else:
            messages = [rest.popleft() for _ in range(max_messages)]
            queue.delivered = messages[-1].queue_offset + 1
        self._in_hand.append(queue)
        return messages

    # --- offsets ----------------------------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """How many offsets were skipped because their messages no longer exist."""
        with self._lock:
            return sum(queue.fetcher.skipped for queue in self._queues.values())

    def positions(self) -> dict[int, int]:
        """For each assigned queue, the offset of the next message from ``poll``."""
        with self._lock:
            self._start()
            return {queue_id: queue.delivered for queue_id, queue in self._queues.items()}

    def lag(self) -> dict[int, int]:
        """For each assigned queue, how many messages follow its position, as of the last response; -1: unknown."""
        with self._lock:
            self._start()
            return {
                queue_id: max(queue.fetcher.max_offset - queue.delivered, 0) if queue.fetcher.max_offset >= 0 else -1
                for queue_id, queue in self._queues.items()
            }

    def commit(self) -> None:
        """Commit everything returned so far; returns when the broker has stored it."""
        with self._lock:
            self._start()
        self._commit_all()

    def seek(self, queue_id: int, offset: int) -> None:
        """Continue at ``offset``, before or after the current position; the next commit may then go back."""
        if offset < 0:
            raise ConfigError([f"negative offset: {offset}"])
        with self._lock:
            self._start()
            queue = self._queues.get(queue_id)
            if queue is None:
                raise NotFoundError(
                    f"queue {queue_id} of {self.topic} is not assigned to this consumer, which has "
                    f"{sorted(self._queues)}"
                )
            self._go_to(queue, offset, 0)
            queue.rewind = True

    def seek_to(self, start: Start) -> None:
        """Move every assigned queue to its first message, after its last, or to the first one stored at a time (ms)."""
        with self._lock:
            self._start()
            queue_ids = list(self._queues)
        for queue_id in queue_ids:
            self.seek(queue_id, self._beginnings.offset_at(self._name(queue_id), start))

    def _commit(self, *, finished_only: bool) -> None:
        with self._lock:
            is_due = finished_only or any(one.rewind or one.committed != one.delivered for one in self._queues.values())
        if self.group and is_due:
            with self._committing:  # from before the look on: a commit after it would seem to have been undone
                self._look_and_store(lambda: self._to_commit(finished_only=finished_only))

    def _commit_all(self) -> None:
        """Commit everything returned so far, once it is known that the broker still has it.

        Raises ``UnavailableError`` if that is not known soon.
        """
        deadline = Deadline(self._options.timeout_s)
        while True:
            self._commit(finished_only=False)
            with self._lock:
                waiting = [
                    one
                    for one in self._queues.values()
                    if self.group and one.in_doubt and one.awaits_look and one.committed != one.delivered
                ]
            if not waiting:
                return
            if deadline.expired:
                raise UnavailableError(
                    f"group {self.group}: the offsets of queues {sorted(one.queue_id for one in waiting)} are not "
                    "committed: their broker was restarted or replaced, and it is not known yet whether it still has "
                    "what was read"
                )
            time.sleep(COMMIT_PAUSE_S)

    def _look_and_store(self, places: Callable[[], Sequence[tuple[_Queue, int, bool]]]) -> None:
        for left in reversed(range(LOOKS_MAX)):
            incarnation = self._adopt_changes()
            try:
                self._store_places(places(), incarnation)
            except OtherIncarnationError:
                if not left:
                    raise
            else:
                return

    def _store_places(self, places: Sequence[tuple[_Queue, int, bool]], incarnation: int) -> None:
        for reset in (False, True):
            chosen = [(queue, offset) for queue, offset, rewind in places if rewind is reset]
            if not chosen:
                continue
            with self._lock:
                for queue, offset in chosen:
                    queue.offered = offset
            offsets = {self._name(queue.queue_id): offset for queue, offset in chosen}
            self._store.commit(offsets, incarnation, rewind=reset)
            with self._lock:
                for queue, offset in chosen:
                    queue.committed = offset
                    queue.rewind = queue.rewind and not reset

    def _to_commit(self, *, finished_only: bool) -> list[tuple[_Queue, int, bool]]:
        """Queues, their offsets to commit, and whether the commit may go back."""
        with self._lock:
            return [
                (queue, queue.finished if finished_only else queue.delivered, queue.rewind)
                for queue in self._queues.values()
                if not queue.in_doubt
                and (queue.rewind or queue.committed != (queue.finished if finished_only else queue.delivered))
            ]

    def _name(self, queue_id: int) -> QueueName:
        return QueueName(self.topic, queue_id)

    def _adopt_changes(self) -> int:
        """Adopt offsets changed elsewhere since the last commit: committing ours would undo a reset.

        An offset that moved forward, but not beyond what was returned here, has no effect. Offsets that are gone are
        written again. Returns the incarnation of the broker for which ours may be committed then.
        """
        stored, incarnation = self._store.fetch([self.topic])
        moved: list[str] = []
        gone: list[_Queue] = []
        for queue in list(self._queues.values()):
            same = self._has_what_was_read(queue, incarnation)
            queue.awaits_look = same is False and not queue.fetcher.has_looked_at(incarnation)
            unsure = queue.fetcher.has_nothing_to_compare
            offset = stored.get(self._name(queue.queue_id))
            first = self._first(queue) if unsure and offset is None else None
            with self._lock:
                told = offset is not None or first is not None
                queue.in_doubt = not (same or (unsure and told))
                if first is not None:
                    self._go_to(queue, first, incarnation)
                elif offset is not None and self._adopt(queue, offset, incarnation, unsure=unsure):
                    moved.append(f"queue {queue.queue_id} from {queue.committed} to {offset}")
                if unsure and told:
                    queue.fetcher.confirm(incarnation)
                if offset is not None:
                    queue.committed = offset
                elif queue.committed is not None and not queue.in_doubt:
                    queue.committed = queue.offered = None
                    gone.append(queue)
        self._tell_changes(moved, gone)
        return incarnation

    def _adopt(self, queue: _Queue, offset: int, incarnation: int, *, unsure: bool) -> bool:
        """Go there if it is not ours; requires the lock. Returns whether it was changed elsewhere."""
        if unsure:
            before = offset < queue.finished
        elif offset in (queue.committed, queue.offered) or queue.rewind:
            return False
        else:
            before = offset < (queue.finished if queue.committed is None else queue.committed)
        if offset > queue.delivered or before:
            self._go_to(queue, offset, incarnation)
            queue.in_doubt = False
            return True
        return not unsure

    def _has_what_was_read(self, queue: _Queue, incarnation: int) -> bool | None:
        """None: it may not be read now, perhaps later."""
        try:
            return queue.fetcher.is_at(incarnation)
        except (NotAllowedNowError, NotFoundError):
            return None

    def _first(self, queue: _Queue) -> int | None:
        """Where the queue begins; None if it may not be read."""
        return self._beginnings.offsets_at([name := self._name(queue.queue_id)], "first").get(name)

    def _tell_changes(self, moved: Sequence[str], gone: Sequence[_Queue]) -> None:
        if moved:
            _log.warning(
                "group %s: its offsets in %s were changed elsewhere (%s): they were reset, or another consumer "
                "of the group reads the same queues; continuing from the new offsets",
                self.group,
                self.topic,
                ", ".join(moved),
            )
        if gone:
            _log.warning(
                "group %s: its offsets in %s are gone: the group or the topic was deleted, or the broker lost its "
                "disk; they are stored again (%s)",
                self.group,
                self.topic,
                ", ".join(f"queue {one.queue_id}: {one.finished}" for one in gone),
            )

    @staticmethod
    def _go_to(queue: _Queue, offset: int, incarnation: int) -> None:
        queue.fetcher.seek(offset, incarnation)
        queue.rest.clear()
        queue.delivered = queue.finished = offset

    # --- start and end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Commit what was returned so far, then close all connections. Raises if the commit failed. Idempotent."""
        self._close(self._commit_all)

    def _close(self, commit: Callable[[], None]) -> None:
        if self._is_left_behind or self._closing.is_set():
            return
        self._closing.set()
        self._news.set()
        try:
            if self._started:
                commit()
        finally:
            for queue in self._queues.values():
                queue.fetcher.stop()
            self._connection.close()
            if self._started:
                self._watch.join()
            for queue in self._queues.values():  # the watch may have added some
                queue.fetcher.stop()
            for queue in self._queues.values():
                queue.fetcher.join()

    def _start(self) -> None:
        """Find the queues and the group's offsets; requires the lock."""
        if self._closing.is_set():
            raise UnavailableError("the consumer is closed")
        if self._started:
            return
        options = self._options
        known = self._topics.find(self.topic)
        if known is None:
            raise no_such_topic(self._connection, self.topic)
        if not (known.permission & PERMISSION_READ and known.read_queues > 0):
            raise MessageRefusedError(f"topic {self.topic} does not allow reads (permission {known.permission})")
        missing = [one for one in options.queues or () if not 0 <= one < known.read_queues]
        if missing:
            raise NotFoundError(f"topic {self.topic} has queues 0 to {known.read_queues - 1}, not {missing}")
        assigned = [self._name(one) for one in self._assigned(known.read_queues)]
        if self.group:
            self._begin(known.read_queues)
            places, incarnation = self._beginnings.of(assigned)
        else:
            places, incarnation = Fetched(self._beginnings.offsets_at(assigned, options.start))
        self._add(places, incarnation)
        if options.auto_commit_s is not None:
            self._commit_at = time.monotonic() + options.auto_commit_s
        self._watch.start()
        self._started = True

    def _begin(self, read_queues: int) -> None:
        """If the group is new in the topic, store where it begins, in all queues: members may read them by shares."""
        survey = self._beginnings.survey({self.topic: read_queues}, self._options.start)
        if offsets := survey[self.topic]:
            self._beginnings.begin(offsets)

    def _add(self, places: Mapping[QueueName, int], incarnation: int) -> None:
        """Read these queues, too; requires the lock."""
        options = self._options
        pulls = PullOptions(
            group=self.group,
            topic=self.topic,
            tag_expression=sent_expression(options.tags),
            max_messages=options.pull_messages,
            max_bytes=options.pull_bytes,
            wait_ms=options.pull_wait_ms,
            stock_bytes_max=options.stock_bytes_max,
            go_on_when_out_of_range=options.when_out_of_range == "go_on",
            patient=True,
        )
        for name, offset in sorted(places.items()):
            fetcher = QueueFetcher(self._connection, name.queue_id, offset, pulls, self._arrived, incarnation)
            queue = _Queue(name.queue_id, fetcher, offset, offset, offset if self.group else None)
            self._queues[name.queue_id] = queue
            self._turn.append(queue)

    def _arrived(self) -> None:
        self._news.set()

    def _assigned(self, read_queues: int) -> list[int]:
        """Those of ours that exist."""
        options = self._options
        if options.queues is not None:
            return sorted({one for one in options.queues if 0 <= one < read_queues})
        first, step = options.instance or (0, 1)
        return list(range(first, read_queues, step))

    def _look_after(self) -> None:
        told = ""
        while not self._closing.wait(LOOK_AFTER_S):
            self._connection.seeker.look()
            master = self._connection.directory.leader
            for queue in list(self._queues.values()):
                queue.fetcher.look_after(master)
            try:
                self._follow_the_topic()
                told = ""
            except (DLedgerError, OSError) as error:
                if str(error) != told and not self._closing.is_set():
                    told = str(error)
                    _log.warning("cannot look for queues of topic %s: %s; retrying", self.topic, told)

    def _follow_the_topic(self) -> None:
        """Take up queues that were added to the topic, drop those that were removed."""
        if any(one.fetcher.refused for one in list(self._queues.values())):
            self._topics.forget()
        known = self._topics.find(self.topic)
        if known is None or not (known.permission & PERMISSION_READ and known.read_queues > 0):
            return  # each queue waits until it may be read again
        wanted = set(self._assigned(known.read_queues))
        removed = sorted(self._queues.keys() - wanted)
        if removed:
            self._drop(removed)
        added = [self._name(one) for one in sorted(wanted - self._queues.keys())]
        if added:
            found = self._beginnings
            offsets, incarnation = found.of(added) if self.group else Fetched(found.offsets_at(added, "first"))
            with self._lock:
                if not self._closing.is_set():
                    self._add(offsets, incarnation)
            _log.info("topic %s has got queues %s: they are read, too", self.topic, [one.queue_id for one in added])

    def _drop(self, queue_ids: Sequence[int]) -> None:
        """What is done of them is committed: they may come back."""
        dropped = [self._queues[one] for one in queue_ids]
        if self.group:
            with self._committing:
                self._look_and_store(lambda: [one for one in self._to_commit(finished_only=True) if one[0] in dropped])
        with self._lock:
            for queue in dropped:
                del self._queues[queue.queue_id]
                self._turn.remove(queue)
                if queue in self._in_hand:
                    self._in_hand.remove(queue)
        for queue in dropped:
            queue.fetcher.stop()
        told = [one.queue_id for one in dropped if not one.fetcher.refused]
        if told:
            _log.warning("topic %s does not have queues %s any more: they are read no longer", self.topic, told)
