"""The work on a node's log by time: its checkpoint is synced, segments are prepared, and expired ones removed; and the
conditions that follow from the node's state are shown. Each may wait for the disk, so each has a thread of the process.

Tasks that only follow writes run often while the log changes, and otherwise once per second.

``Retention`` removes expired entries that neither followers, producers nor the application need, that the newest
snapshot of a state machine includes, and that this member does not need to know who belongs to its group.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.core.failure_detection import full_members
from dledger.core.member_state import Leader
from dledger.core.node import Node
from dledger.core.producers import needed_from
from dledger.errors import CorruptLogError
from dledger.group_members import MemberRecords
from dledger.monitoring import REMOVED_EARLY_TOLD_MS, ConditionKind, Conditions
from dledger.runtime.driver import NodeDriver
from dledger.runtime.threads import JOIN_TIMEOUT_S, Housekeeping, Supervisor, Task
from dledger.statemachine.host import MachineHost
from dledger.store import cleaner
from dledger.store.cleaner import ForcedRemoval, Room
from dledger.store.file_store import FileStore
from dledger.types import NO_INDEX, LogIndex, NodeId


class Retention:
    """The retention of one node; for one thread."""

    def __init__(
        self,
        config: ServerConfig,
        node: Node,
        log: FileStore,
        driver: NodeDriver,
        records: MemberRecords,
        machine: MachineHost | None = None,
    ) -> None:
        self._config = config
        self._node = node
        self._log = log
        self._driver = driver
        self._records = records
        self._machine = machine
        self._needed: tuple[LogIndex, LogIndex | None] = (NO_INDEX, None)
        """The commit index at which it last determined what the producer table needs, and the result."""
        self._wanted: Callable[[], int | None] = lambda: None
        self._held_back: Callable[[int], None] = lambda _end: None

    def keep_from(self, wanted: Callable[[], int | None], held_back: Callable[[int], None]) -> None:
        """See ``DLedgerServer.keep_from``."""
        self._wanted, self._held_back = wanted, held_back

    def clean(self) -> Room:
        """Remove what may go; returns the disk space measured before."""
        room, keep_from = self._log.measure_room(), self._wanted()
        kept: list[int] = []
        if self._driver.call(lambda now_ms: self._retire(now_ms, room, keep_from, kept.append)):
            self._log.remove_retired()
        if kept:
            self._held_back(kept[-1])
        return room

    def _retire(
        self, now_ms: int, room: Room, keep_from: int | None, held_back: Callable[[int], None]
    ) -> tuple[Path, ...]:
        """Retire expired segments; records that a new leader needs to rebuild the producer table are first written
        again."""
        node, log = self._node, self._log
        blocked = False

        def may_go(last_index: LogIndex) -> LogIndex:
            nonlocal blocked
            committed, needed = self._needed
            if committed != log.committed_index:
                needed = needed_from(log, self._config)
                self._needed = (log.committed_index, needed)
            blocked = needed is not None and needed <= last_index
            machine = self._machine
            limits = (
                last_index if machine is None else machine.last_removable(last_index),
                None if needed is None else needed - 1,
                self._records.last_removable(node.state),
            )
            return LogIndex(min(limit for limit in limits if limit is not None))

        try:
            retired = log.retire(protected_index(node, now_ms), room, may_go, keep_from, held_back)
        except CorruptLogError as damage:  # in what verifies the rest, or in producer records: remove nothing
            node.state.outbox.damage.append(damage)
            return ()
        if blocked:
            node.quorum_ack.write_snapshot(now_ms)
        return retired


def protected_index(node: Node, now_ms: int) -> LogIndex:
    """Entries above this index must not expire: not committed, or still needed by a live follower.

    Live in the sense of check-quorum. One that only restarts needs recent entries, which do not expire.
    """
    state = node.state
    leader = state.role
    if not isinstance(leader, Leader):
        return state.commit_index
    limit = now_ms - state.election.election_timeout_ms_max
    alive = (peer for peer, contact in leader.contact_ms.items() if contact > limit)
    return cleaner.protected(state.commit_index, [leader.match[peer] for peer in alive])


_WARM_INTERVAL_MS: Final = 20
_REMEMBER_INTERVAL_MS: Final = 1000
_REST_INTERVAL_MS: Final = 1000


class _Pace:
    """When a task steps that has work while something changes: then every ``interval_ms``, otherwise seldom."""

    task: Task

    def __init__(self, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self._rest_ms = max(interval_ms, _REST_INTERVAL_MS)
        self._has_changed = True
        self._is_resting = False

    def changed(self) -> None:
        """Something changed; cheap, from any thread."""
        self._has_changed = True
        if self._is_resting:
            self._is_resting = False
            self.task.wake()

    def begin(self) -> bool:
        """A step begins, which sees what changed until now; whether anything did since the last one began."""
        self._is_resting = False
        had_changed, self._has_changed = self._has_changed, False
        return had_changed

    def pause_ms(self, *, more: bool) -> int:
        """The pause after the step; ``more``: not a long one. A change from now on ends a long one."""
        self._is_resting = not more  # before the look: a change after it wakes the task
        return self._interval_ms if more or self._has_changed else self._rest_ms


class LogMaintenance:
    """The maintenance of one node's log. Stop it before the driver, which it uses."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        config: ServerConfig,
        node: Node,
        log: FileStore,
        driver: NodeDriver,
        conditions: Conditions,
        clock: Clock,
        supervisor: Supervisor,
        records: MemberRecords,
        look_after_members: Callable[[], None],
        housekeeping: Housekeeping,
        machine: MachineHost | None = None,
    ) -> None:
        self._config = config
        self._node = node
        self._log = log
        self._driver = driver
        self._conditions = conditions
        self._clock = clock
        self._look_after_members = look_after_members
        self._records = records
        self.retention: Final = Retention(config, node, log, driver, records, machine)
        self._remember_due_ms = clock.monotonic_ms() + _REMEMBER_INTERVAL_MS
        self._told_of_removed: ForcedRemoval | None = None
        self._checkpoints, self._warming = _Pace(config.store.checkpoint_interval_ms), _Pace(_WARM_INTERVAL_MS)
        self._checkpoints.task = Task(housekeeping.checkpoint, self._checkpoint, supervisor)
        self._warming.task = Task(housekeeping.warm, self._warm, supervisor)
        self._tasks = (
            self._checkpoints.task,
            self._warming.task,
            Task(housekeeping.clean, self._clean, supervisor),
        )

    def start(self) -> None:
        for task in self._tasks:
            task.start()

    def stop(self) -> None:
        """End, after the steps in progress."""
        for task in self._tasks:
            task.stop(JOIN_TIMEOUT_S)

    def log_changed(self) -> None:
        """More of the log is durable or committed; cheap, from any thread."""
        self._checkpoints.changed()
        self._warming.changed()

    def save_remembered(self) -> None:
        """Write down who the members are, and what this one remembers of them."""
        self._records.keep(self._driver.look)

    def _checkpoint(self) -> int:
        had_changed = self._checkpoints.begin()
        self._log.sync_checkpoint()
        if self._clock.monotonic_ms() >= self._remember_due_ms:
            self.save_remembered()
            self._log.hard_state.mirror()
            self._remember_due_ms = self._clock.monotonic_ms() + _REMEMBER_INTERVAL_MS
        return self._clock.monotonic_ms() + self._checkpoints.pause_ms(more=had_changed)

    def _warm(self) -> int:
        had_changed = self._warming.begin()
        more = self._log.warm()
        return self._clock.monotonic_ms() + (0 if more else self._warming.pause_ms(more=had_changed))

    def _clean(self) -> int:
        self._look_after_conditions(self.retention.clean())
        return self._clock.monotonic_ms() + self._config.store.clean_interval_ms

    def _look_after_conditions(self, room: Room) -> None:
        """Set the conditions that follow from the node's state; others expire, or are cleared."""
        conditions, log = self._conditions, self._log
        if log.disk_full:
            conditions.set(ConditionKind.DISK_FULL, room.refusal(self._config.store))
        else:
            conditions.clear(ConditionKind.DISK_FULL)
        if (removed := log.last_forced) is not None and removed is not self._told_of_removed:
            self._told_of_removed = removed
            told = (
                f"{log.forced_segments} segments were removed before they had expired, the last one with entries "
                f"{removed.first_index} to {removed.last_index}, {removed.age_ms // 1000} s after its last write: the "
                f"disk is {removed.usage_ratio:.0%} full, and force_clean=true"
            )
            conditions.set(ConditionKind.REMOVED_EARLY, told, subject="log", for_ms=REMOVED_EARLY_TOLD_MS)
        state = self._node.state
        if state.has_standing:
            conditions.clear(ConditionKind.NO_STANDING)
        elif state.hard_state.voter:
            conditions.set(ConditionKind.NO_STANDING, "its vote does not count until its missing log is fetched")
        else:
            why = state.hard_state.doubt or "its disk is new"
            message = f"its vote does not count until it has caught up with a leader: {why}"
            conditions.set(ConditionKind.NO_STANDING, message)
        if problem := self._node.elector.vote_problem:
            conditions.set(ConditionKind.NO_STANDING, problem, subject="election")
        else:
            conditions.clear(ConditionKind.NO_STANDING, "election")
        if full := self._driver.look(_full_members):
            why = f"it refuses appends: the disks of {', '.join(full)} are full, and the others do not form a quorum"
            conditions.set(ConditionKind.STUCK_LEADER, why, subject="disks")
        else:
            conditions.clear(ConditionKind.STUCK_LEADER, "disks")
        self._look_after_members()
        conditions.now()


def _full_members(node: Node) -> tuple[NodeId, ...]:
    role = node.state.role
    return full_members(node.state, role) if isinstance(role, Leader) else ()
