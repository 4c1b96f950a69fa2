"""Topics, subscription groups, consumer offsets and delay progress of a broker.

RocketMQ keeps them in the master's files, which its slaves copy periodically: after a failover they are outdated or
lost. Here every change is a message of a hidden topic in the same log, so it is replicated, ordered and durable like
other messages, and every node applies it. A change is answered once it is stored and applied on the master.

Life cycle: ``load`` (the snapshot), ``start``, ``catch_up`` before the store becomes master (also on a plain broker),
``shutdown`` before the store's. One thread, ``rocketstore-state``, applies messages, answers callers, writes snapshots
and publishes the full state; listeners and callers only wake it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Final

from dledger.access.rules import DEAD_PREFIX, RETRY_PREFIX
from dledger.clock import Clock
from dledger.errors import DiskError, DLedgerError, InvalidRequestError, ShutdownError
from dledger.monitoring import Conditions
from dledger.runtime.threads import Supervisor, Worker
from dledger.store.fs import FileSystem
from rocketstore.message.columns import topics_of
from rocketstore.state.applier import StateApplier
from rocketstore.state.attributes import REQUEST_MODES_MAX, TopicRequestMode
from rocketstore.state.changes import (
    Change,
    CommitOffsets,
    DeleteGroup,
    DeleteTopic,
    ExpireMessages,
    GroupConfig,
    PutGroup,
    PutTopic,
    QueueOffset,
    SetDelayOffsets,
    SetRequestMode,
    SetTimedProgress,
    TopicConfig,
    check_group,
    encode_change,
)
from rocketstore.state.files import StateFiles
from rocketstore.state.publisher import (
    RETRY_MS,
    FullStates,
    LimitChecks,
    LimitReachedError,
    PopState,
    StateDone,
    StateLimits,
    StatePublisher,
    is_past,
)
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.hours import TimedProgress
from rocketstore.types import (
    BROKER_STATE_TOPIC,
    CHECKED_TOO_OFTEN_TOPIC,
    HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMED_TOPIC,
    BrokerRole,
    PutMessageStatus,
    PutResult,
    RecordHead,
)

TICK_MS: Final = 10_000
"""How often to check whether the last full state is about to expire."""
STEP_MS_MIN: Final = 10
CATCH_UP_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 10.0
_WAITING: Final = frozenset({SCHEDULE_TOPIC, HALF_TOPIC, CHECKED_TOO_OFTEN_TOPIC, TIMED_TOPIC})
"""Topics in which messages wait before they get to their own one."""

_APPLIED: Final = PutResult(PutMessageStatus.PUT_OK)
_SLAVE: Final = PutResult(
    PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason="this broker is not the master"
)
_log = logging.getLogger("rocketstore")
_default_group: Final = lru_cache(maxsize=1024)(GroupConfig)
"""The settings of a group that has none, kept because every pull asks for them."""


class StateBehindError(DLedgerError):
    """Raised when applying the log's changes takes too long; retry."""


class StateIncompleteError(DLedgerError):
    """Raised when this node must not become master because changes no longer in the log are missing from its tables."""


class StateBlockedError(DLedgerError):
    """Raised when this node must not become master because of changes from a newer version, which it cannot read."""


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Times in milliseconds."""

    timeout_ms: int = 10_000
    """How long a change may take to be stored and applied."""
    snapshot_interval_ms: int = 30_000
    rocketmq_files_interval_ms: int = 5_000
    """How often RocketMQ's own files are written if something has changed; less often if that takes long."""
    full_interval_ms: int = 6 * 3_600_000
    """How often a master publishes the full state; well below the log's retention (``fileReservedTime``, 72 hours)."""
    accept_incomplete: bool = False
    """Become master even if changes are missing from the tables. For a plain broker, which has no peers, and for a
    group in which every node lost its snapshot.
    """
    limits: StateLimits = field(default_factory=StateLimits)


class BrokerState:
    """The replicated tables. All methods are thread-safe."""

    def __init__(
        self,
        store: MessageStore,
        config_dir: Path,
        *,
        clock: Clock | None = None,
        fs: FileSystem | None = None,
        supervisor: Supervisor | None = None,
        settings: StateSettings | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        self._store = store
        self._clock = clock or Clock()
        self._settings = settings or StateSettings()
        self._stepping = threading.Lock()  # held while applying (worker, catch_up); acquired before applier.lock
        self._applier = StateApplier(store)
        self._publisher = StatePublisher(
            store, self._clock, timeout_ms=self._settings.timeout_ms, wake=lambda: self._worker.wake()
        )
        self._supervisor = supervisor or Supervisor(self._on_fatal)
        self._worker = Worker("rocketstore-state", self.step, self._clock, self._supervisor)
        self._full_states = FullStates(
            store, self._applier, self._publisher, self._clock, self._settings.full_interval_ms
        )
        self._files = StateFiles(
            store,
            self._applier,
            config_dir,
            fs or FileSystem(),
            self._clock,
            self._settings.snapshot_interval_ms,
            self._settings.rocketmq_files_interval_ms,
        )
        self.limits: Final = LimitChecks(self._settings.limits, conditions or Conditions("state", self._clock))
        """Limits on what may be created; its methods are called under the applier's lock."""
        self.pop: Final = PopState(self._applier, self.limits, self._change)
        """Messages that groups were given singly."""
        store.add_arrival_listener(self._on_arrival)
        store.keep_for(self._files.needed_from)

    # Life cycle

    def load(self) -> None:
        """Read the snapshot; or RocketMQ's own files if there is neither a snapshot nor a log, and where they are
        newer.

        Call after the store's ``load``.
        """
        self._files.load()

    def start(self) -> None:
        self._worker.start()

    def shutdown(self) -> None:
        """Answer waiting callers, end the thread and write a snapshot. Idempotent; before the store's shutdown."""
        ended = self._worker.stop(STOP_TIMEOUT_S)
        self._publisher.close("the broker is stopping")
        if ended:
            try:
                self._store.log.flush()
            except (DiskError, ShutdownError) as error:  # a node whose start failed has closed its log
                _log.warning("broker state: %s", error)
            self.flush()

    def flush(self) -> None:
        """Write a snapshot now or, if the log is not durable up to it, soon; and RocketMQ's files.

        A disk error is only logged, because the log has everything.
        """
        with self._stepping:
            self._files.flush()

    def catch_up(self, timeout_s: float = CATCH_UP_TIMEOUT_S, cancelled: threading.Event | None = None) -> None:
        """Wait until everything in the log is dispatched and applied, before the store becomes master.

        Raises ``StateBehindError`` after ``timeout_s`` or when ``cancelled``; ``StateIncompleteError`` and
        ``StateBlockedError`` if this node should leave the role to another.
        """
        deadline = time.monotonic() + timeout_s
        if not self._store.wait_dispatched(timeout_s):
            raise StateBehindError(f"broker state: the log was not fully dispatched within {timeout_s:g} s")
        cancelled = cancelled or threading.Event()
        while not self._apply_to_end():
            if self._applier.blocked:
                raise StateBlockedError(self._applier.blocked)
            if time.monotonic() > deadline:
                raise StateBehindError(f"broker state: not fully applied within {timeout_s:g} s")
            if cancelled.wait(0.01):
                raise StateBehindError("broker state: the takeover was cancelled")
        if not self._applier.is_complete:
            self._accept_incomplete()
        if not self._store.log.is_replicated:
            with self._stepping:
                self._applier.forget_what_is_not_there(self._end_of)
        self._full_states.wanted = True
        self._worker.wake()

    def mirror(self, changes: Iterable[Change]) -> None:
        """On a slave of RocketMQ's master: take over its tables, which are not in the log.

        They go into the log once, when this broker is started as a master.
        """
        with self._stepping:
            self._applier.mirror(changes)
        self._worker.wake()

    def wake(self) -> None:
        """Check the store's role soon; called when it becomes master."""
        self._worker.wake()

    @property
    def fatal(self) -> BaseException | None:
        """The error that ended the thread, after which the broker must stop."""
        return self._supervisor.fatal

    # Reading

    def topics(self) -> list[TopicConfig]:
        """All topics by name."""
        with self._applier.lock:
            return sorted(self._applier.tables.topics.values(), key=lambda topic: topic.name)

    def topic_count(self) -> int:
        """The number of topics."""
        with self._applier.lock:
            return len(self._applier.tables.topics)

    @property
    def topic_changes(self) -> int:
        """Another number after every change of a topic."""
        return self._applier.tables.topic_changes

    def topic(self, name: str) -> TopicConfig | None:
        """The topic of this name. Every message asks: one look at a dictionary needs no lock."""
        return self._applier.tables.topics.get(name)

    def groups(self) -> list[str]:
        """The names of all subscription groups."""
        with self._applier.lock:
            return sorted(self._applier.tables.groups)

    def has_group(self, name: str) -> bool:
        """Whether there is a subscription group of this name."""
        with self._applier.lock:
            return name in self._applier.tables.groups

    def group(self, name: str) -> GroupConfig:
        """A group's settings: the defaults for one that has none, or is none."""
        with self._applier.lock:
            return self._applier.tables.group_configs.get(name) or _default_group(name)

    def offsets(self, group: str, topic: str = "") -> list[QueueOffset]:
        """The group's offsets, in one topic or (empty) in all."""
        with self._applier.lock:
            noted = self._applier.tables.groups.get(group, {})
            return sorted(QueueOffset(*key, offset) for key, offset in noted.items() if topic in ("", key[0]))

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        """The group's offset in one queue; -1 if it has none."""
        with self._applier.lock:
            return self._applier.tables.groups.get(group, {}).get((topic, queue_id), -1)

    def begin_offset(self, topic: str, queue_id: int) -> int:
        """The first queue offset that is neither of a deleted topic of this name nor past the topic's retention: reads
        must not start before it.
        """
        with self._applier.lock:
            return self._applier.tables.begins.get(topic, {}).get(queue_id, 0)

    def place_for(self, name: str, queue_id: int, waited: QueueOffset) -> int | None:
        """See ``Tables.place_for``."""
        with self._applier.lock:
            return self._applier.tables.place_for(name, queue_id, waited)

    def request_mode(self, topic: str, group: str) -> TopicRequestMode | None:
        """Whether the group's consumers shall pull the topic or pop it; None: nobody has said."""
        with self._applier.lock:
            return self._applier.tables.request_modes.get((topic, group))

    def request_modes(self) -> list[TopicRequestMode]:
        """Of all pairs that have one, by topic and group."""
        with self._applier.lock:
            found = self._applier.tables.request_modes
            return [found[key] for key in sorted(found)]

    def delay_offset(self, level: int) -> int:
        """The next message of a delay level to deliver; 0 if none was delivered yet."""
        with self._applier.lock:
            return self._applier.tables.delay_offsets.get(level, 0)

    @property
    def timed_progress(self) -> TimedProgress:
        """How far timed messages have been delivered."""
        with self._applier.lock:
            return self._applier.tables.timed

    @property
    def is_applied(self) -> bool:
        """Whether the tables match the log: every change in it was applied, and none is missing."""
        with self._applier.lock:
            return self._applier.next_offset >= self._applier.end_offset and self._applier.is_complete

    def runtime_info(self) -> dict[str, str]:
        """Names and values for status commands."""
        applier = self._applier
        with applier.lock:
            return {
                "brokerStateOffset": f"{applier.next_offset},{applier.end_offset}",
                "brokerStateComplete": str(applier.is_complete).lower(),
                "brokerStateBlocked": applier.blocked,
                "brokerStateMalformed": str(applier.malformed),
            }

    # Changes: each method raises InvalidRequestError for what is never allowed; other errors are passed to ``done``

    def put_topic(self, topic: TopicConfig, done: StateDone, *, automatic: bool = False) -> None:
        """Create or change a topic. ``automatic``: created by a send, for which a lower limit applies."""
        stored = self._store.queues()
        with self._applier.lock:
            tables = self._applier.tables
            same = tables.topics.get(topic.name) == topic
            if not same and self._store.role is not BrokerRole.SLAVE:
                done = self.limits.take_queues(tables, topic, stored, done, automatic=automatic)
        self._change(PutTopic(topic), done, changes_nothing=same)

    def delete_topic(self, name: str, done: StateDone) -> None:
        """Delete a topic and the groups' offsets in it. Messages now in its queues are no longer readable: a topic of
        the same name created later starts at ``begin_offset``. Its files go when retention removes them.
        """
        self._change(self._deletion(name), done)

    def expire_messages(self, name: str, begins: Iterable[tuple[int, int]], done: StateDone) -> None:
        """Let a topic's queues begin at these offsets, (queue id, offset), if they begin earlier."""
        self._change(ExpireMessages(name, tuple(begins)), done)

    def _deletion(self, name: str) -> DeleteTopic:
        # Includes messages not yet dispatched: their producers know that they were stored before.
        names = {name, *_WAITING}
        numbering = {key: end for key, end in self._store.log.queue_offsets.copy().items() if key[0] in names}
        for key in self._store.queues():
            if key[0] in names:
                numbering[key] = max(numbering.get(key, 0), self._store.max_offset(*key))
        ends = sorted((queue_id, end) for (topic, queue_id), end in numbering.items() if topic == name)
        with self._applier.lock:
            waits = [
                QueueOffset(*key, end)
                for key, end in sorted(numbering.items())
                if key[0] in _WAITING and not is_past(self._store, self._applier.tables, *key, end)
            ]
        return DeleteTopic(name, tuple(ends), tuple(waits))

    def commit_offsets(
        self,
        group: str,
        offsets: Iterable[tuple[str, int, int]],
        reset: bool = False,
        done: StateDone = lambda _result: None,
    ) -> None:
        """Commit offsets of ``group``, which is created if necessary: (topic, queue id, queue offset).

        An offset never moves back unless ``reset``: a lower one has no effect. An offset beyond the queue's end is
        refused, because it would skip future messages, and so is one of an unknown queue.
        """
        change = CommitOffsets(group, tuple(QueueOffset(*one) for one in offsets), reset)
        if not self.has_group(group):
            check_group(group)
        if self._store.role is not BrokerRole.SLAVE:
            self._check_places(change)
        with self._applier.lock:
            tables = self._applier.tables
            same = tables.changes_nothing(change)
            if not same and self._store.role is not BrokerRole.SLAVE:
                done = self.limits.take_offsets(tables, change, done)
        self._change(change, done, changes_nothing=same)

    def commit_own_offsets(self, group: str, offsets: Iterable[tuple[str, int, int]], done: StateDone) -> None:
        """Commit offsets of a group of the broker itself, in topics that need not be among the tables."""
        change = CommitOffsets(group, tuple(QueueOffset(*one) for one in offsets))
        with self._applier.lock:
            same = self._applier.tables.changes_nothing(change)
        self._change(change, done, changes_nothing=same)

    def _check_places(self, change: CommitOffsets) -> None:
        """Raises ``InvalidRequestError`` for an offset of an unknown queue, or beyond a queue's end."""
        for name, queue_id, offset in change.offsets:
            # Messages not yet dispatched may be committed: their producers know their offsets.
            end = self._end_of(name, queue_id)
            topic = self.topic(name)
            if topic is None:
                raise InvalidRequestError(f"topic {name!r} does not exist")
            if not end and queue_id >= topic.queues:
                raise InvalidRequestError(
                    f"topic {name} has {topic.queues} queues, numbered from 0: there is no queue {queue_id}"
                )
            if offset > end:
                raise InvalidRequestError(f"offset {offset} of {name} queue {queue_id} is beyond its end, {end}")

    def put_group(self, group: GroupConfig, done: StateDone) -> None:
        """Make a group or change its settings; members of an older version stop at any that are not the defaults."""
        if not self.has_group(group.name):
            check_group(group.name)
        with self._applier.lock:
            tables = self._applier.tables
            known = group.name in tables.groups
            same = known and (tables.group_configs.get(group.name) or GroupConfig(group.name)) == group
            is_new_default = not known and group.is_default
            if not known and self._store.role is not BrokerRole.SLAVE:
                done = self.limits.take_offsets(tables, CommitOffsets(group.name, ()), done)
        change = CommitOffsets(group.name, ()) if is_new_default else PutGroup(group)
        self._change(change, done, changes_nothing=same)

    def set_request_mode(self, mode: TopicRequestMode, done: StateDone) -> None:
        """Have a group's consumers pull a topic, or pop it. Raises ``LimitReachedError``."""
        with self._applier.lock:
            known = self._applier.tables.request_modes
            same = known.get((mode.topic, mode.group)) == mode
            is_full = len(known) >= REQUEST_MODES_MAX and (mode.topic, mode.group) not in known
        if is_full:
            why = f"{REQUEST_MODES_MAX} pairs of topic and group have a request mode, and no more may"
            raise LimitReachedError(f"{why}: delete groups (dledger consumer delete)")
        self._change(SetRequestMode(mode), done, changes_nothing=same)

    def delete_group(self, group: str, done: StateDone) -> None:
        """Delete a group, its offsets, what it has to try again and its dead letters, as RocketMQ's ``deleteSubGroup``:
        a group of this name made later begins anew.
        """
        names = [f"{RETRY_PREFIX}{group}", *self.pop.retry_topics(group), f"{DEAD_PREFIX}{group}"]
        changes: list[Change] = [self._deletion(name) for name in names if self.topic(name) is not None]
        changes.append(DeleteGroup(group))
        results: list[PutResult] = []
        answered = count(1)

        def one(result: PutResult) -> None:  # on any thread
            results.append(result)
            if next(answered) == len(changes):
                done(next((each for each in results if not each.ok), result))

        for change in changes:
            self._change(change, one)

    def commit_delay_offsets(self, offsets: Mapping[int, int], done: StateDone) -> None:
        """Record how far delay levels have been delivered: level to next queue offset. The last call wins."""
        self._change(SetDelayOffsets(tuple(sorted(offsets.items()))), done)

    def note_timed_progress(self, progress: TimedProgress, done: StateDone) -> None:
        """Record how far timed messages have been delivered."""
        self._change(SetTimedProgress(progress), done)

    def wait(self, change: Callable[[StateDone], None]) -> PutResult:
        """Make a change and wait for it: ``state.wait(lambda done: state.put_topic(topic, done))``."""
        answered = threading.Event()
        results: list[PutResult] = []

        def done(result: PutResult) -> None:
            results.append(result)
            answered.set()

        change(done)
        if not answered.wait(2 * self._settings.timeout_ms / 1000):
            return PutResult(PutMessageStatus.UNKNOWN_ERROR, outcome="unknown", reason="broker state: no answer")
        return results[0]

    # The thread

    def step(self) -> int:
        """Do what is due now; returns when the next step is. Tests call it instead of the thread."""
        with self._stepping:
            now_ms = self._clock.monotonic_ms()
            more = self._step_applier()
            self._publisher.step(self._applier.next_offset)
            if not more:
                self._full_states.step(now_ms)
            behind = self._applier.next_offset < self._applier.end_offset
            dues = [now_ms + (RETRY_MS if self._full_states.wanted or behind else TICK_MS), self._files.step(now_ms)]
            dues += [due for due in (self._publisher.due_ms(),) if due is not None]
            return now_ms if more else max(min(dues), now_ms + STEP_MS_MIN)

    def _on_fatal(self, error: BaseException) -> None:
        self._publisher.close(f"broker state failed: {error}")

    def _on_arrival(self, heads: Sequence[RecordHead]) -> None:
        if BROKER_STATE_TOPIC in topics_of(heads):
            self._worker.wake()

    def _change(self, change: Change, done: StateDone, *, changes_nothing: bool = False) -> None:
        if self._store.role is BrokerRole.SLAVE:
            done(_SLAVE)
        elif changes_nothing:
            done(_APPLIED)
        else:
            self._publisher.offer(encode_change(change), done)

    def _step_applier(self) -> bool:
        try:
            return self._applier.step()
        except ShutdownError:
            return False  # the store is not running

    def _apply_to_end(self) -> bool:
        with self._stepping:
            self._applier.settle_end()
            self._step_applier()
            return not self._applier.blocked and self._applier.next_offset >= self._applier.end_offset

    def _accept_incomplete(self) -> None:
        if not self._settings.accept_incomplete:
            raise StateIncompleteError(
                "broker state changes are missing here, and the log holds no full state: let another node lead, "
                "or let this one continue with what is left (accept_incomplete)"
            )
        _log.error("broker state: changes are missing on every node; continuing with what is left")
        self._applier.accept_incomplete()

    def _end_of(self, topic: str, queue_id: int) -> int:
        """The next queue offset; includes messages not yet dispatched, and queues that were removed."""
        return max(self._store.log.queue_offsets.get((topic, queue_id), 0), self._store.max_offset(topic, queue_id))
