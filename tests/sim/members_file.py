"""A member's ``members`` file, in memory: each state of it is what a crash would leave; and the lives of an id."""

from __future__ import annotations

from dataclasses import dataclass, field

from dledger.types import NO_INDEX, Configuration, EntryId, HardState, LogIndex, NodeId
from tests.sim.sim_log import SimLog
from tests.sim_store.disk import Disk


@dataclass(frozen=True, slots=True)
class MembersFile:
    """Committed configurations at or below ``clear_to`` are not looked for in the log."""

    uid: int
    configuration: Configuration | None = None
    clear_to: LogIndex = NO_INDEX
    remembered: dict[NodeId, EntryId] = field(default_factory=dict)
    is_lost: bool = False
    """It could not be read, and has been made anew."""


@dataclass(frozen=True, slots=True)
class Life:
    """A directory that an id had once."""

    log: SimLog
    hard: HardState
    file: MembersFile
    disk: Disk
    """With its snapshots."""
