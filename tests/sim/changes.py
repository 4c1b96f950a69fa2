"""Those who change a group's members, and what strikes it meanwhile, from the seed ``MEMBER_WORLDS`` on.

A change is asked for at whoever may lead, again if the answer is lost or there is another leader, sometimes with what
somebody saw long ago. What is said of it must be so: a change that is done is committed, one that is refused is in no
configuration, and one that is asked for twice is made once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

from dledger.core.node import Node
from dledger.errors import DLedgerError, InvariantError, StaleConfigurationError
from dledger.types import (
    ANY_CONFIGURATION,
    NO_ENTRY,
    NO_INDEX,
    ChangeKind,
    Configuration,
    EntryId,
    LogIndex,
    MemberChange,
    MemberRole,
    NodeId,
)
from tests.sim.members_file import Life
from tests.sim.options import MEMBER_FAULTS
from tests.sim.violations import require

if TYPE_CHECKING:
    from tests.sim.driver import SimNode
    from tests.sim.simulation import Simulation

MEMBERS_MAX: Final = 7
"""So that a world is not too slow; the program's own limit is higher."""
ATTEMPTS_MAX: Final = 8


class Attempt:
    """One request on its way."""

    def __init__(self, operators: Operators, node: SimNode, change: MemberChange, attempts_left: int) -> None:
        self._operators = operators
        self._node = node
        self.change = change
        self._attempts_left = attempts_left
        self.outcome = ""

    def ask(self, core: Node, now_ms: int) -> None:
        """Submit it."""
        core.changes.submit(self.change, now_ms, self.done)

    def done(self, result: Configuration | DLedgerError) -> None:
        """Hear the answer, exactly once."""
        require(not self.outcome, "a change was answered twice", self.change, self.outcome, result)
        require(not isinstance(result, InvariantError), "a change hit a bug", result)
        self._node.operations.remove(self)
        if isinstance(result, Configuration):
            self.outcome = "acked"
            self._operators.observe_done(self.change, result)
        else:
            self.outcome = result.outcome
            self._operators.outcomes[f"change {type(result).__name__}"] += 1
            if not isinstance(result, StaleConfigurationError):
                self._operators.again(self.change, self._attempts_left)

    def lose(self) -> None:
        """The member died: nobody knows, and asks again."""
        self.outcome = "unknown"
        self._operators.again(self.change, self._attempts_left)


class Operators:
    """Whoever adds, removes and replaces members."""

    def __init__(self, simulation: Simulation, random: Random) -> None:
        self._simulation = simulation
        self.random = random
        self._ids = 0
        self._attempts: list[Attempt] = []
        self._seen: list[LogIndex] = [ANY_CONFIGURATION]
        self.outcomes: Counter[str] = Counter()
        self._kinds = [
            kind for kind in MEMBER_FAULTS[: MEMBER_FAULTS.index("again_with_old_disk") + 1] if self._has(kind)
        ]
        self._strikes = [kind for kind in ("wipe_learner", "old_life", "old_conf", "file_lost") if self._has(kind)]

    def _has(self, kind: str) -> bool:
        return self._simulation.options.has(kind)

    def start(self) -> None:
        """Begin to change the members."""
        if self._simulation.options.is_changing:
            self._later()

    def _later(self) -> None:
        delay_us = self.random.expovariate(1) * self._simulation.options.change_interval_us
        self._simulation.scheduler.after(int(delay_us), self._think)

    def _think(self) -> None:
        if not self._simulation.nemesis.active:
            return
        self._later()
        if self._strikes and self._simulation.nemesis.is_striking and self.random.random() < 0.15:
            self._strike(self.random.choice(self._strikes))
            return
        kind = self.random.choice(self._kinds or ["add", "remove"])
        leader = self._simulation.nodes[self._simulation.believed_leader(0)]
        change = self._change(kind, leader)
        if change is not None:
            self._simulation.hit(kind, leader)
            self._submit(change, self.random.choice((0, 2, ATTEMPTS_MAX)))

    def open_operations(self) -> int:
        """How many wait for an answer."""
        return sum(not attempt.outcome for attempt in self._attempts)

    # -- requests --------------------------------------------------------------------------------------------------

    def _change(self, kind: str, leader: SimNode) -> MemberChange | None:
        """What somebody asks for; None if there is nobody of that kind."""
        seen = self._known(leader)
        voters = [name for name in seen.voters if name != leader.name]
        match kind:
            case "add" | "again_with_old_disk":
                return self._add(seen, "", old_disk=kind != "add")
            case "replace":
                return self._add(seen, self.random.choice(seen.voters), old_disk=False) if seen.voters else None
            case "promote":
                return self._one(ChangeKind.PROMOTE, seen, list(seen.learners))
            case "demote":
                return self._one(ChangeKind.DEMOTE, seen, voters)
            case "remove":
                names = [one.node_id for one in seen.members if one.node_id != leader.name]
                return self._one(ChangeKind.REMOVE, seen, names)
            case "remove_leader":
                kinds = (ChangeKind.REMOVE, ChangeKind.REMOVE, ChangeKind.DEMOTE)
                return self._one(self.random.choice(kinds), seen, [leader.name])
            case "update":
                change = self._one(ChangeKind.UPDATE, seen, [one.node_id for one in seen.members])
                return change and replace(change, host="127.0.0.2", port=1 + int(self.random.random() * 60_000))
            case "stale_client":
                other = self.random.choice(("add", "remove", "promote", "demote", "update"))
                change = self._change(other, leader)
                return change and replace(change, expected_index=self.random.choice(self._seen))
            case _:
                recent = self._attempts[-6:]
                return self.random.choice(recent).change if recent else None

    def _known(self, node: SimNode) -> Configuration:
        """What a client is told by ``node``."""
        found = self._simulation.checker.members.newest if node.core is None else node.core.state.membership.committed
        if found.index not in self._seen:
            self._seen.append(found.index)
        return found

    def _one(self, kind: ChangeKind, seen: Configuration, names: list[NodeId]) -> MemberChange | None:
        if not names:
            return None
        return MemberChange(kind, self.random.choice(names), self._new_id(), expected_index=self._expected(seen))

    def _add(self, seen: Configuration, replaces: str, *, old_disk: bool) -> MemberChange | None:
        """Add somebody who is no member; its process is started before or after that."""
        nodes = [node for node in self._simulation.nodes if seen.find(node.name) is None]
        if old_disk:
            nodes = [node for node in nodes if node.boots]
        if not nodes or len(seen.members) >= MEMBERS_MAX:
            return None
        node = self.random.choice(nodes)
        begins_anew = node not in self._simulation.group and node.boots and not old_disk and self.random.random() < 0.7
        if begins_anew and self._may_begin_anew(node):
            self._new_life(node)
        delay_us = int(self.random.random() * self.random.choice((1_000, 300_000, 2_000_000)))
        self._simulation.scheduler.after(delay_us, self._simulation.boot, node)
        place = self._simulation.options.everybody.index(node.name)
        return MemberChange(
            ChangeKind.ADD,
            node.name,
            self._new_id(),
            host="127.0.0.1",
            port=1 + place,
            promote=self.random.random() < 0.75,
            replaces=replaces,
            expected_index=self._expected(seen),
        )

    def _new_life(self, node: SimNode) -> None:
        """Whoever is no member begins anew: another directory, and so another memory."""
        simulation = self._simulation
        simulation.hit("new_life", node)
        if node.core is not None:
            simulation.crash(node, 100_000)
        simulation.network.forget(node.name)
        node.former = Life(node.log, node.hard, node.file, node.disk)
        node.replace_disk()
        node.joins = True
        node.forgetful = False

    def _may_begin_anew(self, node: SimNode) -> bool:
        """Not if somebody who counted, and missed that the group of the two shrank, would be elected with its empty
        directory: more than the rules bear (protocol.md, "Not covered" at M12). Nor while its directory counts as one
        of the disks before the newest change (M6).
        """
        if self._simulation.nemesis.is_needed_from_before(node):
            return False
        others = [one for one in self._simulation.nodes if one is not node]
        return not any(self._elects(one, Life(one.log, one.hard, one.file, one.disk), node, NO_ENTRY) for one in others)

    def _may_return(self, node: SimNode) -> bool:
        """Whether the directory of its first membership may come back: the same from the other side."""
        former = node.former
        others = [one for one in self._simulation.nodes if one is not node]
        return former is not None and not any(self._elects(node, former, one, one.log.last) for one in others)

    def _elects(self, node: SimNode, life: Life, other: SimNode, last: EntryId) -> bool:
        """Whether ``node``, with what ``life`` holds, takes itself and ``other`` for all voters, although the group has
        gone on, and ``other``, whose log ends at ``last``, holds nothing newer.
        """
        told = [self._simulation.checker.members.committed[0], *life.log.configurations, life.file.configuration]
        newest = max((one for one in told if one is not None), key=lambda one: one.index)
        is_old = life.hard.voter and newest.index < self._simulation.checker.members.newest.index
        return is_old and set(newest.voters) == {node.name, other.name} and last <= life.log.last

    def _expected(self, seen: Configuration) -> LogIndex:
        return seen.index if self.random.random() < 0.5 else ANY_CONFIGURATION

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids

    def _submit(self, change: MemberChange, attempts_left: int) -> None:
        nodes = self._simulation.nodes
        number = self._simulation.believed_leader(0)
        if self.random.random() < 0.1:
            number = int(self.random.random() * len(nodes))
        node = nodes[number]
        if node.core is None or len(node.operations) >= 30:
            return
        attempt = Attempt(self, node, change, attempts_left)
        self._attempts.append(attempt)
        node.operations.append(attempt)
        node.ask(attempt.ask, node.boots)

    def again(self, change: MemberChange, attempts_left: int) -> None:
        """A change was refused, or its answer lost: perhaps it is asked for again."""
        if attempts_left and self._simulation.nemesis.active:
            delay_us = int(self.random.random() * self.random.choice((3_000, 100_000, 1_000_000)))
            self._simulation.scheduler.after(delay_us, self._submit, change, attempts_left - 1)

    # -- what is said of them --------------------------------------------------------------------------------------

    def observe_done(self, change: MemberChange, result: Configuration) -> None:
        """A change is done: it is committed, as the caller wanted it and not upon another configuration."""
        self.outcomes["change acked"] += 1
        members = self._simulation.checker.members
        require(members.at(result.index) == result, "a change was said to be done and is not committed", change, result)
        require(result.change_id == change.change_id, "another change was said to be done", change, result)
        # Asked for again, a change is done that had later steps by now.
        result = next(one for one in members.committed if one.change_id == change.change_id)
        one = result.find(change.node_id)
        match change.kind:
            case ChangeKind.ADD:
                done = one is not None
            case ChangeKind.PROMOTE:
                done = one is not None and one.role is MemberRole.VOTER
            case ChangeKind.DEMOTE:
                done = one is not None and one.role is MemberRole.LEARNER
            case ChangeKind.REMOVE:
                done = one is None
            case ChangeKind.UPDATE:
                done = one is not None and (one.host, one.port) == (change.host, change.port)
        require(done, "a change was said to be done, and was not", change, result)
        before = members.before(result.index - 1)
        if change.expected_index != ANY_CONFIGURATION and before.change_id != change.change_id:
            require(before.index == change.expected_index, "a change upon another configuration", change, before)

    def finish(self) -> None:
        """No change was made twice, and none that was refused each time.

        Twice: if its caller said upon which configuration; else it is known only while it is the last one.
        """
        made = Counter[int]()
        last = 0
        careless = {one.change.change_id for one in self._attempts if one.change.expected_index == ANY_CONFIGURATION}
        for one in self._simulation.checker.members.committed[1:]:
            made[one.change_id] += one.change_id != last
            last = one.change_id
        twice = [change_id for change_id, times in made.items() if times > 1 and change_id not in {0, *careless}]
        require(not twice, "a change was made twice", twice, self._simulation.checker.members.committed)
        asked: dict[int, set[str]] = {}
        for attempt in self._attempts:
            asked.setdefault(attempt.change.change_id, set()).add(attempt.outcome)
        for change_id, outcomes in asked.items():
            refused = outcomes == {"not_applied"}
            require(not (refused and made[change_id]), "a refused change was made", change_id)

    # -- what strikes ----------------------------------------------------------------------------------------------

    def observe(self, node: SimNode | None, *, committed: bool) -> None:
        """A leader (``node``) has appended a configuration, or one was committed."""
        simulation = self._simulation
        leader = node or simulation.nodes[simulation.believed_leader(0)]
        if not simulation.nemesis.is_striking or leader.core is None:
            return
        chance = self.random.random()
        if node is not None and self._has("forgotten_vote") and self.random.random() < 0.3:
            self._cut_off(node)
        elif self._has("leader_dies") and chance < 0.15:
            delay_us = int(self.random.random() * self.random.choice((1_000, 5_000, 100_000)))
            simulation.scheduler.after(delay_us, self._kill_for_long, leader, leader.boots)
        elif self._has("learners_side") and chance < 0.35:
            delay_us = int(self.random.random() * self.random.choice((1_000, 100_000, 1_000_000)))
            simulation.scheduler.after(delay_us, self._with_learners, leader)
        elif self._has("harass_change") and chance < (0.6 if committed else 0.8):
            delay_us = int(self.random.random() * self.random.choice((1_000, 5_000, 100_000)))
            simulation.scheduler.after(
                delay_us, simulation.nemesis.strike_leader, leader, leader.boots, "harass_change"
            )

    def _cut_off(self, leader: SimNode) -> None:
        """Nobody hears of a change for so long that its leader gives up; then one of its voters forgets, and is alone
        with it: all but those whom the change removes or demotes (M6).
        """
        simulation = self._simulation
        names = leader.log.configurations[-1].voters
        others = [node for node in simulation.voters if node is not leader and node.name in names]
        if not others:
            return
        simulation.hit("forgotten_vote", leader)
        cut_us = 3000 * simulation.options.election.election_timeout_ms_max
        simulation.nemesis.split([leader], cut_us)
        simulation.nemesis.leave_alone(2 * cut_us)
        simulation.scheduler.after(cut_us, self._forget, leader, self.random.choice(others), cut_us)

    def _forget(self, leader: SimNode, voter: SimNode, for_us: int) -> None:
        simulation = self._simulation
        if simulation.nemesis.is_striking and simulation.nemesis.may_forget(voter):
            simulation.hit("wipe", voter)
            simulation.nemesis.wipe(voter)
            names = [name for one in simulation.relevant[1:] for name in one.voters]
            mine = [node for node in simulation.group if node in (leader, voter) or node.name in names]
            simulation.nemesis.split(mine, for_us)

    def _kill_for_long(self, leader: SimNode, boot: int) -> None:
        """The leader is gone for so long that the others must get on without it."""
        simulation = self._simulation
        if not simulation.nemesis.is_striking or leader.core is None or leader.boots != boot:
            return
        simulation.hit("leader_dies", leader)
        for_us = 2 * simulation.progress.limit_us
        simulation.nemesis.leave_alone(for_us)
        simulation.crash(leader, for_us)

    def _with_learners(self, leader: SimNode) -> None:
        """The leader is cut off from all voters, or all but less than half, together with all learners."""
        simulation = self._simulation
        if not simulation.nemesis.is_striking:
            return
        voters = simulation.voters
        others = [node for node in voters if node is not leader]
        friends = self.random.sample(others, self.random.randrange((len(voters) + 1) // 2)) if others else []
        learners = [node for node in simulation.group if node not in voters]
        simulation.hit("learners_side", leader)
        mine = [leader, *learners, *friends]
        simulation.nemesis.split(mine)
        if leader.core is None or self.random.random() < 0.5:
            return
        # The others elect a leader before the old one gives up: does anybody confirm that it leads?
        for node in voters:
            if node not in mine:
                node.ask(partial(_lose, leader.name), node.boots)
        for _ in range(8):
            delay_us = int(self.random.random() * 1000 * simulation.options.election.election_timeout_ms_max)
            simulation.scheduler.after(delay_us, self._read, leader)

    def _read(self, node: SimNode) -> None:
        if node.core is not None and len(node.operations) < 30:
            self._simulation.clients.read(node)

    def _strike(self, kind: str) -> None:
        simulation = self._simulation
        nemesis, voters = simulation.nemesis, simulation.voters
        match kind:
            case "wipe_learner":
                # One that was a voter before, too, may then have an empty directory under its id: as for a new life.
                learners = [node for node in simulation.group if node not in voters and node.boots]
                learner = self.random.choice(learners) if learners else None
                if learner is not None and nemesis.may_forget(learner) and self._may_begin_anew(learner):
                    simulation.hit(kind, learner)
                    nemesis.wipe(learner)
            case "old_life":
                # The disk of its first membership comes back, in place of the one that it has now.
                twice = [node for node in voters if self._may_return(node) and nemesis.may_forget(node)]
                if twice:
                    node = self.random.choice(twice)
                    simulation.hit(kind, node)
                    nemesis.lose(node)
                    node.take_former()
            case "old_conf":
                # What a start takes from its configuration counts only while the directory holds none.
                told = [node for node in simulation.nodes if node.file.configuration is not None]
                if told:
                    node = self.random.choice(told)
                    simulation.hit(kind, node)
                    node.change_conf(self.random)
                    if node.core is not None:
                        simulation.crash(node, nemesis.duration_us())
            case _:
                node = self.random.choice(simulation.group)
                # With its log's begin gone it would wait for a leader, and could be the only one that may be elected.
                explicit = node.file.configuration is not None and node.log.begin.index == NO_INDEX
                if node.core is not None and node.hard.voter and explicit and nemesis.may_forget(node):
                    simulation.hit(kind, node)
                    simulation.crash(node, nemesis.duration_us())
                    node.lose_file()


def _lose(leader: NodeId, core: Node, now_ms: int) -> None:
    """A follower takes its leader's process for gone."""
    core.leader_lost(leader, core.state.term, now_ms, gone=True)
