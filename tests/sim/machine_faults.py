"""Faults of state machines and their snapshots, from the seed ``MACHINE_WORLDS`` on; they draw apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from dledger.errors import DLedgerError, InvalidRequestError
from dledger.statemachine.snapshots import PRODUCERS_FILE, STATE_FILE, SnapshotMeta
from dledger.types import LogIndex
from tests.sim.machines import flipped
from tests.sim.violations import require

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.faults import Nemesis
    from tests.sim.simulation import Simulation


class MachineFaults:
    """What the nemesis does to them."""

    def __init__(self, simulation: Simulation, nemesis: Nemesis) -> None:
        self._simulation = simulation
        self._nemesis = nemesis
        self._random = Random(f"machine faults/{simulation.options.seed}")
        self.strikes: dict[str, Callable[[], bool]] = {
            "left_behind": self._leave_behind,
            "snapshot_asked": self._ask,
            "snapshot_damage": self._damage,
        }

    def _ask(self) -> bool:
        """Somebody wants a member to save its state now."""
        node = self._random.choice(self._simulation.group)
        if node.machine is None:
            return False
        self._nemesis.note(node)
        applied = node.machine.host.applied_index
        node.machine.host.request_snapshot(partial(self._saved, node, applied))
        return True

    def _saved(self, node: SimNode, applied: LogIndex, result: SnapshotMeta | DLedgerError) -> None:
        if isinstance(result, DLedgerError):
            require(applied < 0 or not isinstance(result, InvalidRequestError), "nothing to save", node.name, result)
            return
        self._simulation.hits["snapshot_told"] += 1
        require(result.index >= applied, "an older snapshot than was asked for", node.name, result.index, applied)
        node.saved_to = max(node.saved_to, result.index)

    def _leave_behind(self) -> bool:
        """A member is down until the others have saved their states, and dropped the log before."""
        victim = self._random.choice(self._simulation.group)
        if victim.core is None or victim.role == "leader":
            return False
        self._nemesis.note(victim)
        down_us = int((0.5 + self._random.random()) * 2_000 * self._simulation.options.tempo)
        self._simulation.crash(victim, down_us)
        for node in self._simulation.group:
            if node is not victim:
                self._simulation.scheduler.after(down_us // 2, self._save, node, node.boots)
                self._simulation.scheduler.after(down_us * 9 // 10, self._drop, node, node.boots)
        return True

    def _save(self, node: SimNode, boot: int) -> None:
        if self._nemesis.active and node.machine is not None and node.boots == boot:
            node.machine.host.request_snapshot()

    def _drop(self, node: SimNode, boot: int) -> None:
        if self._nemesis.active and node.core is not None and node.boots == boot:
            self._nemesis.expire(node, 1.0)

    def _damage(self) -> bool:
        """Bits of a member's snapshots flip, which its next start finds; not if another member has lost anything."""
        node = self._random.choice(self._simulation.group)
        others = [one for one in self._simulation.nodes if one is not node]
        found = sorted(node.disk.names)
        files = [path for path in found if path.name in (STATE_FILE, PRODUCERS_FILE, "meta.json") and path.exists()]
        if any(one.has_damage for one in others if one.boots) or not files or not self._nemesis.may_forget(node):
            return False
        self._nemesis.note(node)
        indices = [LogIndex(int(path.parent.name)) for path in files if path.parent.name.isdigit()]
        node.damaged_to = max((node.saved_to, *indices))  # also of the one that is being written
        everything = self._random.random() < 0.5
        for path in files if everything else files[-3:]:
            content = path.read_bytes()
            if content and (everything or self._random.random() < 0.6):
                node.disk.names[path].durable = flipped(content, self._random)
                path.write_bytes(node.disk.names[path].durable)
        if node.core is not None and self._random.random() < 0.6:
            self._simulation.crash(node, self._nemesis.duration_us())
        return True
