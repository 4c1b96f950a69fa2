"""Removes entries from a node's log: expired ones that neither followers, producers nor the application
need, that the newest snapshot of a state machine includes, and that this member does not need to know who belongs to
its group.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dledger.config import ServerConfig
from dledger.core.member_state import Leader
from dledger.core.node import Node
from dledger.core.producers import needed_from
from dledger.errors import CorruptLogError
from dledger.member_records import MemberRecords
from dledger.runtime.driver import NodeDriver
from dledger.statemachine.host import MachineHost
from dledger.store import cleaner
from dledger.store.cleaner import Room
from dledger.store.file_store import FileStore
from dledger.types import NO_INDEX, LogIndex


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
