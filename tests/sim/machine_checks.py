"""What must hold of state machines and their snapshots (S1 to S7), across members and over all their lives.

The first member that applies an entry says what the state is then, and what the result: it is the same wherever and
whenever that entry is applied, as every state keeps a digest of all that led to it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from crc32c import crc32c

from dledger.errors import DamagedSnapshotError
from dledger.statemachine.ports import Applied
from dledger.statemachine.snapshots import PRODUCERS_FILE, SnapshotMeta
from dledger.types import LogIndex
from tests.sim.checker import Checker
from tests.sim.configurations import is_noop
from tests.sim.register import BEGIN, Found, State, decode_state
from tests.sim.violations import require

if TYPE_CHECKING:
    from tests.sim.driver import SimNode


class MachineChecks:
    """Of one run."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._indexes: list[int] = []
        """Of the entries that some member has applied, which are all but no-ops."""
        self._states: list[State] = []
        self._results: dict[int, bytes] = {}
        self._numbers: dict[bytes, tuple[str, int]] = {}
        self._snapshots: dict[int, tuple[int, int]] = {}
        self.applied = 0
        """By all members, in all their lives."""

    def expect_number(self, body: bytes, producer: str, sequence: int) -> None:
        """A command is about to be sent under a number."""
        self._numbers[body] = producer, sequence

    def result_of(self, body: bytes) -> bytes | None:
        """The result of the first application of a command; None if it has never been applied."""
        index = self._checker.bodies.get(body)
        return None if index is None else self._results.get(index)

    def at(self, index: int) -> State:
        """The state as of an entry; the first ones may all be no-ops."""
        found = bisect_right(self._indexes, index)
        return self._states[found - 1] if found else BEGIN

    def observe_applied(self, node: SimNode, entry: Applied, before: State, state: State, result: bytes) -> None:
        """A member applies an entry, after all that came before it, and after it was committed (S1, S2)."""
        checker, index = self._checker, entry.index
        require(index < len(checker.records), "applied before it was committed", node.name, index)
        require(checker.records[index][48:] == entry.body, "another entry was applied", node.name, index)
        require(checker.committed[index].term == entry.term, "applied in another term", node.name, index, entry.term)
        require(before.at < index, "applied twice, or in another order", node.name, before.at, index)
        between = range(before.at + 1, index)
        require(all(is_noop(checker.records[at]) for at in between), "an entry was left out", node.name, before.at)
        require(before.time_ms <= entry.time_ms, "time goes back", node.name, index, before.time_ms, entry.time_ms)
        number = self._numbers.get(entry.body)
        told = entry.producer, entry.sequence
        require(number in (None, told), "a command with another number", node.name, index, number, told)
        self.applied += 1
        if not self._indexes or index > self._indexes[-1]:
            self._indexes.append(index)
            self._states.append(state)
            self._results[index] = result
            return
        require(self.at(index) == state, "states differ", node.name, index, self.at(index), state)
        require(self._results[index] == result, "results differ", node.name, index, self._results[index], result)

    def observe_loaded(self, node: SimNode, state: State) -> None:
        """A member begins with a state that was the group's (S6, S8)."""
        known = self.at(state.at)
        require(known == state, "another state was loaded", node.name, state, known)

    def observe_snapshot(self, node: SimNode, meta: SnapshotMeta) -> None:
        """A snapshot counts: it holds what is committed and nothing else, and is the same on every member (S6)."""
        checker, at, machine = self._checker, meta.boundary, node.machine
        require(at.index < len(checker.chain), "a snapshot of what is not committed", node.name, at)
        chain = checker.committed[at.index].term, checker.chain[at.index]
        require((at.term, at.chain_crc) == chain, "a snapshot of another history", node.name, at, chain)
        newest = checker.members.before(at.index)
        told = newest if meta.configuration is None else meta.configuration
        require(told == newest or newest.index < 0, "a snapshot names other members", node.name, told, newest)
        if machine is None:
            return
        store = machine.host.snapshots
        try:
            with store.reader(meta) as state_file, store.reader(meta, PRODUCERS_FILE) as producers_file:
                state, producers = state_file.read_all(), producers_file.read_all()
        except DamagedSnapshotError:  # by a fault, just now
            return
        require(decode_state(state) == self.at(at.index), "a snapshot of another state", node.name, at)
        content = crc32c(state), crc32c(producers)
        known = self._snapshots.setdefault(at.index, content)
        require(known == content, "two snapshots of one entry", node.name, at, known, content)

    def observe_found(self, node: SimNode, found: Found, at_least: LogIndex) -> None:
        """A query was answered from a state that the group had, and that includes what was applied before."""
        require(
            found.at >= at_least or self.at(at_least) == self.at(found.at),
            "an older state than it was said",
            node.name,
            found,
            at_least,
        )
        known = self.at(found.at)
        require(known.digest == found.digest, "an answer from a state that never was", node.name, found)

    def finish(self, members: list[SimNode]) -> None:
        """All members have applied all."""
        end = self.at(len(self._checker.records) - 1)
        for node in members:
            machine = node.machine
            require(machine is not None, "a member without a state machine", node.name)
            if machine is not None:
                require(machine.register.state == end, "a member's state differs", node.name, machine.register.state)
