"""A log with entries that cannot be read, and its repair from another member: what the driver makes of damage.

Whatever is proven by what cannot be read raises ``CorruptLogError``, until the bytes have been fetched from a member
that holds them as committed. A member that starts with such a gap is not whole (``MemberState.whole``) until then.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from dledger.errors import CorruptLogError
from dledger.types import Entry, EntryRun, LogIndex, Term
from tests.sim.sim_log import Disk, SimLog

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.simulation import Simulation


class Onlooker:
    """Whoever looks from outside sees what the disk would give if it were sound."""

    def __init__(self) -> None:
        self.looks = False


class DamagedLog(SimLog):
    """Raises for what lies in ``damage``: the first and the last entry that cannot be read."""

    def __init__(self, segment_bytes: int, onlooker: Onlooker, disk: Disk | None = None) -> None:
        self._onlooker = onlooker
        self.damage: tuple[int, int] | None = None
        super().__init__(segment_bytes, disk)

    def _prove(self, first: int, last: int) -> None:
        damage = self.damage
        if damage is not None and not self._onlooker.looks and first <= damage[1] and last >= damage[0]:
            raise CorruptLogError(Path("log"), 0, "a bad sector", "wait for the repair", index=damage[0])

    def term_at(self, index: LogIndex) -> Term:
        self._prove(index, index)
        return super().term_at(index)

    def chain_crc_at(self, index: LogIndex) -> int:
        self._prove(index, index)
        return super().chain_crc_at(index)

    def positions(self, first_index: LogIndex, last_index: LogIndex) -> tuple[int, ...]:
        self._prove(first_index, last_index)
        return super().positions(first_index, last_index)

    def channel_runs(self, first_index: LogIndex, last_index: LogIndex) -> list[tuple[int, int, int]]:
        self._prove(first_index, last_index)
        return super().channel_runs(first_index, last_index)

    def read(self, index: LogIndex) -> Entry:
        self._prove(index, index)
        return super().read(index)

    def read_run(self, first_index: LogIndex, last_index: LogIndex, *, verified: bool = False) -> EntryRun:
        self._prove(first_index - 1, last_index)
        return super().read_run(first_index, last_index, verified=verified)


class Mender:
    """Damages logs and repairs them, for all members."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(f"mender/{simulation.options.seed}")
        self._busy: dict[str, bool] = {}
        self.onlooker = Onlooker()

    def new_log(self, disk: Disk | None = None) -> SimLog:
        """A log on a new disk, or on ``disk``."""
        options = self._simulation.options
        if options.has("damage"):
            return DamagedLog(options.segment_bytes, self.onlooker, disk)
        return SimLog(options.segment_bytes, disk)

    def damage(self, node: SimNode) -> bool:
        """Some of what a member has committed cannot be read any more; not if that holds of any other one."""
        log = node.log
        others = [other.log for other in self._simulation.nodes]
        if not isinstance(log, DamagedLog) or any(isinstance(one, DamagedLog) and one.damage for one in others):
            return False
        first = 1 + max(one.begin.index for one in others)
        last = min(log.committed_index, log.flushed.index)
        if first >= last:
            return False
        first += int(self._random.random() * (last - first))
        log.damage = first, min(last, first + int(self._random.random() * self._random.choice((1, 8, 100))))
        self.look_after(node)  # the scrub finds it, if nothing else does before
        return True

    def look_after(self, node: SimNode) -> None:
        """A member has met damage of its own log: it fetches what is lost, as soon as it can."""
        if not self._busy.get(node.name):
            self._busy[node.name] = True
            tempo = self._simulation.options.tempo
            delay_us = int(self._random.random() * self._random.choice((20, 400, 3_000)) * tempo)
            self._simulation.scheduler.after(delay_us, self._mend, node)

    def _mend(self, node: SimNode) -> None:
        self._busy[node.name] = False
        log = node.log
        if not isinstance(log, DamagedLog) or log.damage is None:
            return
        if node.core is None or not any(self._gives(other, node, log.damage) for other in self._simulation.nodes):
            self.look_after(node)
            return
        self.mend(node)

    def mend(self, node: SimNode) -> None:
        """All of the log can be read again."""
        if isinstance(node.log, DamagedLog) and node.log.damage is not None:
            node.log.damage = None
            self._simulation.event("mended", node)
            node.become_whole()

    def _gives(self, other: SimNode, node: SimNode, damage: tuple[int, int]) -> bool:
        """Whether another member holds it as committed, or it is old enough to be forgotten everywhere."""
        log, network = other.log, self._simulation.network
        if other is node or other.core is None or not network.is_heard(other.name, node.name):
            return False
        return log.begin.index >= damage[0] or log.committed_index >= damage[1]

    def is_sound(self, node: SimNode) -> bool:
        """Whether all of a member's log can be read."""
        return not isinstance(node.log, DamagedLog) or node.log.damage is None

    def tell(self, node: SimNode) -> None:
        """A member starts: it is not whole if its log is not."""
        if isinstance(node.log, DamagedLog) and node.log.damage is not None and node.core is not None:
            node.core.state.whole = False
            self.look_after(node)
