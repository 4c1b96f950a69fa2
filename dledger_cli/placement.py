"""Where the leaders of several groups are, and which should move so that each machine leads its share. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dledger.types import NodeId
from dledger.values import host_of


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """One group: who leads it, and who could."""

    name: str
    leader: NodeId | None
    addresses: Mapping[NodeId, str]
    """The peer addresses of its voters."""
    unable: Mapping[NodeId, str] = field(default_factory=dict)
    """Voters that cannot lead now, and why."""


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer of a group's leadership."""

    group: str
    source: NodeId
    target: NodeId


class LeaderPlacement:
    """The groups' leaders by place: a machine, or a process where two voters of a group are on one machine.

    Machines are told apart by the hosts of the peer addresses, processes by host and port, which the groups of a
    process share.
    """

    def __init__(self, groups: Sequence[GroupPlacement]) -> None:
        self.groups = {one.name: one for one in groups}
        several = any(_has_twins(map(host_of, one.addresses.values())) for one in groups)
        self._place_of = {
            one.name: {node: address if several else host_of(address) for node, address in one.addresses.items()}
            for one in groups
        }

    def place(self, group: str, node: NodeId) -> str:
        """Where a voter is."""
        return self._place_of[group][node]

    def led(self) -> dict[str, list[str]]:
        """The groups led at each place, also at those that lead none."""
        found: dict[str, list[str]] = {place: [] for places in self._place_of.values() for place in places.values()}
        for name, one in sorted(self.groups.items()):
            if one.leader is not None:
                found[self.place(name, one.leader)].append(name)
        return dict(sorted(found.items()))

    def after(self, moves: Iterable[Move]) -> LeaderPlacement:
        """As it will be."""
        leaders = {move.group: move.target for move in moves}
        return LeaderPlacement(
            [replace(one, leader=leaders.get(name, one.leader)) for name, one in self.groups.items()]
        )

    def moves(self, *, even_unable: bool = False) -> list[Move]:
        """The transfers, in order, after which no place leads two groups more than another that could lead one of them.

        ``even_unable``: as if every voter could lead now. No place ever leads more than the most at the beginning.
        """
        led = {place: set(groups) for place, groups in self.led().items()}
        leaders = {name: one.leader for name, one in self.groups.items() if one.leader is not None}
        found: list[Move] = []
        while path := self._path(led, leaders, even_unable=even_unable):
            for move in reversed(path):  # the last first: it makes room for the one before
                source, target = self.place(move.group, move.source), self.place(move.group, move.target)
                led[source].remove(move.group)
                led[target].add(move.group)
                leaders[move.group] = move.target
                found.append(move)
        return found

    def _path(self, led: Mapping[str, set[str]], leaders: Mapping[str, NodeId], *, even_unable: bool) -> list[Move]:
        """Moves from a place to another that leads at least two groups fewer, through others; empty if there are none.

        Each such path makes the sum of squares smaller, so there is an end.
        """
        for begin in sorted(led, key=lambda place: (-len(led[place]), place)):
            reached: dict[str, Move | None] = {begin: None}
            waiting = deque([begin])
            while waiting:
                place = waiting.popleft()
                if len(led[place]) <= len(led[begin]) - 2:
                    return self._back(reached, place)
                for move in self._moves_from(led[place], leaders, even_unable=even_unable):
                    target = self.place(move.group, move.target)
                    if target not in reached:
                        reached[target] = move
                        waiting.append(target)
        return []

    def _moves_from(
        self, groups: Collection[str], leaders: Mapping[str, NodeId], *, even_unable: bool
    ) -> Iterable[Move]:
        for name in sorted(groups):
            one = self.groups[name]
            for node in sorted(one.addresses):
                if node != leaders[name] and (even_unable or node not in one.unable):
                    yield Move(name, leaders[name], node)

    def _back(self, reached: Mapping[str, Move | None], place: str) -> list[Move]:
        path: list[Move] = []
        while (move := reached[place]) is not None:
            path.insert(0, move)
            place = self.place(move.group, move.source)
        return path


def _has_twins(hosts: Iterable[str]) -> bool:
    listed = list(hosts)
    return len(set(listed)) < len(listed)
