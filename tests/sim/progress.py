"""Progress while things are broken: a majority that can talk gets on, whatever happens to the others.

A *sound* member is up and not paused, has standing, room on its disk, a disk that answers and threads that run. Two are
*linked* if everything that one sends arrives at the other within bounded time, and the other way round. Whenever the
same majority has been sound and linked in pairs for ``LIMIT_MS``, it has committed something new meanwhile, or has a
leader that has committed whatever there was. What cannot be reached from a majority does not disturb it; others that
can (a leader whose pushes are lost, or whose disk hangs) have to be got rid of first, which ``DISTURBED`` times the
limit allows for: a leader is patient for up to four times three election time-outs before it gives up.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

from dledger.core.member_state import Leader
from dledger.types import NO_INDEX, LogIndex, NodeId
from tests.sim.checker import require

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.simulation import Simulation

LIMIT_MS: Final = 10_000
"""With the usual timers; with others as much longer or shorter."""
LIMIT_MS_MIN: Final = 3_000
DISTURBED: Final = 3
LOOKS: Final = 40
"""How often it looks within the limit."""


class _Majority:
    """One set of members that is just large enough, and since when all has been well among them."""

    def __init__(self, members: tuple[SimNode, ...], others: tuple[SimNode, ...], now_us: int) -> None:
        self.members = members
        self.others = others
        self.since_us = now_us
        self.quiet_since_us = now_us
        """Since when nobody outside could disturb them."""
        self.commit = LogIndex(-1)


class Progress:
    """Looks now and then; ``due_us`` is when the next time is."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        options = simulation.options
        self.limit_us = 1000 * max(LIMIT_MS_MIN, LIMIT_MS * options.tempo // 1000)
        self.due_us = 0
        self.got_on = 0
        """How often a majority that was well had got on."""
        self._noise = bool(options.drop or options.spike)
        self._majorities: list[_Majority] = []
        self.regroup()

    def regroup(self) -> None:
        """The members have changed, or may soon: a majority is now one of each configuration that may count."""
        configurations, nodes = self._simulation.relevant, self._simulation.nodes
        voters = [set(one.voters) for one in configurations]
        candidates = self._simulation.voters
        found: list[tuple[SimNode, ...]] = []
        for size in range(1, len(candidates) + 1):
            for chosen in combinations(candidates, size):
                names = {node.name for node in chosen}
                enough = all(len(names & some) > len(some) // 2 for some in voters)
                if enough and not any(set(smaller) <= set(chosen) for smaller in found):
                    found.append(chosen)
        now_us = self._simulation.scheduler.now_us or -1
        self._majorities = [
            _Majority(chosen, tuple(node for node in nodes if node not in chosen), now_us) for chosen in found
        ]

    def look(self) -> None:
        """Raise ``Violation`` if a majority that could get on did not."""
        now_us = self._simulation.scheduler.now_us
        self.due_us = now_us + self.limit_us // LOOKS
        self._simulation.look_at_members()
        network = self._simulation.network
        noisy = self._noise and not network.is_calm
        sound = {node.name: not noisy and self._is_sound(node) for node in self._simulation.nodes}
        for majority in self._majorities:
            members = majority.members
            well = all(sound[node.name] for node in members) and all(
                self._is_linked(one.name, other.name) for one, other in combinations(members, 2)
            )
            well = well and self._may_commit(members)
            commit = max(node.core.state.commit_index if node.core else LogIndex(-1) for node in members)
            gets_on = well and (commit > majority.commit or self._is_settled(members))
            self.got_on += gets_on
            if not well or gets_on:
                majority.commit = max(commit, majority.commit)
                majority.since_us = majority.quiet_since_us = now_us
                continue
            if any(self._may_disturb(other, sound[other.name], members) for other in majority.others):
                majority.quiet_since_us = now_us
            self._judge(majority, now_us)

    def _judge(self, majority: _Majority, now_us: int) -> None:
        names = [node.name for node in majority.members]
        quiet_us, well_us = now_us - majority.quiet_since_us, now_us - majority.since_us
        require(quiet_us < self.limit_us, "a majority that can talk does not get on", *names, f"{quiet_us} us")
        late = well_us >= DISTURBED * self.limit_us
        require(not late, "a majority that can talk is kept from getting on", *names, f"{well_us} us")

    def _is_sound(self, node: SimNode) -> bool:
        now_us = self._simulation.scheduler.now_us
        held_up = node.paused_until_us > now_us or node.hang_read_until_us > now_us or node.is_stalled
        slow = node.slow_flush_us > 0 or node.is_flushing_long
        disk = node.log.disk_full or slow or not self._simulation.mender.is_sound(node)
        if node.core is None or held_up or disk:
            return False
        return node.core.state.has_standing and self._simulation.remembers(node)

    def _may_commit(self, members: tuple[SimNode, ...]) -> bool:
        """Whether these can commit: who committed the newest configuration may have told nobody, and be gone.

        If it has a new voter, that takes a majority of the voters before, too (M2): both of two that made a third one.
        """
        known = self._simulation.checker.members
        newest, before = known.newest, known.before(known.newest.index - 1)
        if newest.index == NO_INDEX or set(newest.voters) <= set(before.voters):
            return True
        states = [node.core.state for node in members if node.core is not None]
        told = any(state.membership.committed.index >= newest.index for state in states)
        return told or sum(node.name in before.voters for node in members) >= before.quorum

    def _is_linked(self, one: NodeId, other: NodeId) -> bool:
        network = self._simulation.network
        return network.is_open(one, other) and network.is_open(other, one)

    def _may_disturb(self, node: SimNode, is_sound: bool, members: tuple[SimNode, ...]) -> bool:
        """Whether somebody outside is heard by some of them, but is not one of a larger sound majority."""
        network = self._simulation.network
        if node.core is None or not any(network.is_heard(node.name, member.name) for member in members):
            return False
        return not (is_sound and all(self._is_linked(node.name, member.name) for member in members))

    def _is_settled(self, members: tuple[SimNode, ...]) -> bool:
        """Whether one of them leads, the others follow it, and all that it holds is committed."""
        for node in members:
            core = node.core
            if core is not None and isinstance(core.state.role, Leader):
                state = core.state
                follow = all(
                    other.core is not None
                    and other.core.state.term == state.term
                    and other.core.state.leader_id == node.name
                    for other in members
                )
                if follow and state.commit_index == state.log.last.index:
                    return True
        return False
