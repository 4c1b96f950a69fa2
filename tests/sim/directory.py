"""What a start of a simulated member finds: its directory, which outlives its process, and its configuration file.

Faults change it while the member is down, or exchange it for an older one, an earlier one's, or an empty one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from dledger.core.member_state import MemberState
from dledger.core.membership import Membership, implicit_configuration, recover_membership
from dledger.errors import CorruptLogError
from dledger.types import NO_INDEX, Configuration, EntryId, HardState, LogIndex, NodeId
from tests.sim.members_file import Life, MembersFile
from tests.sim.sim_log import Disk
from tests.sim_store.disk import Disk as FileDisk

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a member's disk."""

    disk: Disk
    hard: HardState
    file: MembersFile
    files: tuple[dict[Path, bytes], set[Path]]
    """Of its snapshots."""
    members: LogIndex
    """The newest committed configuration then: nothing tells a disk that is set back beyond it whom to ask."""

    @property
    def last(self) -> EntryId:
        """Where its log ends."""
        return self.disk.last


class MemberDirectory:
    """Log, hard state, members file and snapshots of a member, and its configuration file."""

    def __init__(self, simulation: Simulation, name: NodeId, new_disk: Callable[[], FileDisk]) -> None:
        """``new_disk`` makes an empty one for its snapshots."""
        self._simulation = simulation
        self._new_disk = new_disk
        self.config = simulation.options.config_of(name)
        self._uids = Random(f"uids/{simulation.options.seed}/{name}")
        self.name = name
        self.joins = name in simulation.options.spares
        """Whether its configuration says that it is to be added to a group that exists."""
        self.log = simulation.mender.new_log()
        self.disk = new_disk()
        self.hard = HardState()
        self.file = self._new_file()
        """Its members file, as it was saved last."""
        self.saved_to = NO_INDEX
        """The newest snapshot that it had, and that no fault took away."""
        self.damaged_to = NO_INDEX
        """The newest one when a fault damaged one."""
        self.forgetful = False
        """Its disk was lost or set back, and it has not had standing again since."""
        self.is_unread = False
        """Whether damage hides configurations in its log."""
        self.former: Life | None = None
        """The directory with which it was a member before."""
        self.file_is_lost = self.file_was_lost = False
        """Whether its next start cannot read its members file, and whether that is so and no configuration knows."""
        self.snapshot: Snapshot | None = None

    @property
    def knows_group(self) -> bool:
        """Whether its directory or its configuration file tells that a group exists."""
        told = self.joins or self.file.configuration is not None
        return told or self.hard.voter or self.log.committed_index != NO_INDEX

    @property
    def remembered(self) -> dict[NodeId, EntryId]:
        """What it knows others to have held, as it was saved last."""
        return self.file.remembered

    def _new_file(self) -> MembersFile:
        changing = self._simulation.options.is_changing
        return MembersFile(self._uids.randrange(1, 1 << 62) if changing else 0)

    # -- what a start makes of it, and what a member saves -------------------------------------------------------------

    @property
    def has_damage(self) -> bool:
        """Whether a snapshot of it may be damaged, and no newer one is there."""
        return self.damaged_to >= self.saved_to

    def recover(self) -> Membership:
        """What the server makes of its configuration, its directory and its members file."""
        file, log = self.file, self.log
        unknown = file.is_lost and log.begin.index > NO_INDEX
        implicit = implicit_configuration(self.config)
        if unknown or (self.joins and not self.hard.voter):  # one that counts has not yet to join
            implicit = Configuration()
        clear_to = LogIndex(min(file.clear_to, log.committed_index))  # as ``MembersFile.hold_to`` at each opening
        self.file = file = replace(file, clear_to=clear_to)
        try:
            found = recover_membership(self.name, log, file.configuration, clear_to, implicit)
        except CorruptLogError:  # until all of it is there, it counts for nothing
            self.is_unread = True
            return Membership(self.name, file.configuration or implicit)
        self.is_unread = False
        if file.is_lost and found.is_explicit:
            if self.may_be_old():
                found.distrust()
                return found
            own = found.current.find(self.name)
            if own is not None and own.uid:
                self.file = replace(file, uid=own.uid)
        return found

    def may_be_old(self) -> bool:
        """Whether its log may end with an old configuration: see ``MemberRecords``."""
        return self.file.is_lost and not self.hard.voter

    def take_installed(self) -> None:
        """A reset brought a configuration: the store writes the file before it empties the log."""
        installed = self.log.installed_configuration
        if installed is not None:
            self.log.installed_configuration = None
            clear_to = max(self.log.begin.index, installed.index)
            self.file = replace(self.file, configuration=installed, clear_to=clear_to, is_lost=False)

    def save_file(self, state: MemberState) -> None:
        """What happens once per second: the file says up to where the log need not be searched."""
        committed = state.membership.committed
        if self.file.is_lost and not committed.members:
            return  # it does not know
        configuration = self.file.configuration if committed.index == NO_INDEX else committed
        self.file = replace(
            self.file,
            configuration=configuration,
            clear_to=self.file.clear_to if self.is_unread else state.commit_index,
            remembered=dict(state.remembered),
            is_lost=False,
        )

    # -- faults --------------------------------------------------------------------------------------------------------

    def change_conf(self, random: Random) -> None:
        """Its configuration file is of another time, which counts for nothing: its directory holds the members."""
        options = self._simulation.options
        names = [name for name in options.everybody if name == self.name or random.random() < 0.5]
        known = {member.node_id: member for name in options.everybody for member in options.config_of(name).members}
        self.config = replace(self.config, members=tuple(known[name] for name in names))
        self.joins = random.random() < 0.5

    def lose_file(self) -> None:
        """Its next start cannot read its members file."""
        self.file_is_lost = self.file_was_lost = True
        self._take_first_conf()

    def _take_first_conf(self) -> None:
        """Its directory tells no members; one that may be none does not begin a group.

        Nor do all with whom it began, once the directory of none of the others knows of a group: an operator gives
        ``join`` to whoever lost its disk after a change of members (docs/operating.md, "Rules for wiped disks").
        """
        simulation = self._simulation
        self.config = simulation.options.config_of(self.name)
        others = [node for node in simulation.nodes if node is not self and node.name in simulation.options.names]
        self.joins = self.name in simulation.options.spares or not any(node.knows_group for node in others)

    def replace_disk(self) -> None:
        """Come back, once started, with nothing."""
        self._take_first_conf()
        self.log = self._simulation.mender.new_log()
        self._change_disk(self._new_disk())
        self.hard = HardState()
        self.snapshot, self.file = None, self._new_file()
        self.forgetful = True

    def take_former(self) -> None:
        """Come back, once started, with the directory of an earlier membership."""
        if self.former is not None:
            self.log, self.hard, self.file = self.former.log, self.former.hard, self.former.file
            self._change_disk(self.former.disk)
            self.former, self.snapshot = None, None
            self.forgetful = True
            self._take_first_conf()

    def _change_disk(self, disk: FileDisk) -> None:
        self.disk = disk
        self.saved_to = self.damaged_to = NO_INDEX

    def doubt(self, reason: str) -> None:
        """Its start finds that it may have forgotten something."""
        self.forgetful = True
        self.hard = self.hard.doubted(reason)

    def take_snapshot(self) -> None:
        """Keep a copy of what is durable now."""
        members = self._simulation.checker.members.newest.index
        self.snapshot = Snapshot(self.log.copy_of_disk(), self.hard, self.file, self.disk.snapshot(), members)

    def set_back(self, doubt: str) -> None:
        """Come back, once started, with what the snapshot holds; ``doubt`` is what the start finds out, if anything."""
        if self.snapshot is not None:
            self.forgetful = True
            self.log = self._simulation.mender.new_log(self.snapshot.disk.copy())
            self.hard = self.snapshot.hard.doubted(doubt) if doubt else self.snapshot.hard
            self.file = self.snapshot.file
            self.disk.become(*self.snapshot.files)
            self._change_disk(self.disk)
