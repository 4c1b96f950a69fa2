"""Broker processes on loopback whose group grows and shrinks: by ``dledger member``, as an operator does it."""

from __future__ import annotations

from pathlib import Path

from cluster.drill.processes import LocalProxiedBrokers, ProcessTarget, told
from cluster.drill.target import SPARES, change_members
from dledger.types import NodeId
from dledger_cli.local.group import HOST


class MemberBrokers(LocalProxiedBrokers):
    """Brokers of which some wait to be added, without proxies: a member has one address for all others."""

    def __init__(self, directory: Path, *, size: int, spares: int) -> None:
        super().__init__(directory, size=size + spares)
        self.members = list(self.nodes)[:size]

    def members_of(self, node: NodeId) -> str:
        """The present members, and the node itself."""
        known = [*self.members, *([] if node in self.members else [node])]
        return ";".join(f"{one}-{HOST}:{self.nodes[one].peer_port}" for one in known)

    def conf_lines(self, node: NodeId) -> dict[str, str]:
        """A node that is no member yet waits to be added."""
        lines = super().conf_lines(node)
        return lines if node in self.members else {**lines, "dLegerJoin": "true"}


class ProcessMembers(ProcessTarget):
    """See ``MemberTarget``."""

    _group: MemberBrokers

    def _make_group(self, size: int) -> MemberBrokers:
        return MemberBrokers(self.directory, size=size, spares=SPARES)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The present members."""
        return tuple(self._group.members)

    @property
    def spares(self) -> tuple[NodeId, ...]:
        """The others."""
        return tuple(node for node in self._group.nodes if node not in self._group.members)

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the files are, if they are kept."""
        return super().notes[1:]

    def start(self) -> None:
        """Start the first members."""
        told(lambda: self._group.start_together(self.nodes))

    def add(self, node: NodeId) -> None:
        """Start it, and wait until it votes."""
        told(lambda: self._group.start(node))
        self._change("add", self._place(node))
        self._group.members.append(node)

    def remove(self, node: NodeId) -> None:
        """Remove it first: a member that is stopped before would be one less to count."""
        self._change("remove", node)
        self._group.members.remove(node)
        self.stop(node)
        self.empty_volume(node)

    def replace(self, lost: NodeId, node: NodeId) -> None:
        """One command does both steps."""
        told(lambda: self._group.start(node))
        self._change("replace", lost, self._place(node))
        self._group.members[self._group.members.index(lost)] = node
        self.empty_volume(lost)

    def _place(self, node: NodeId) -> str:
        return f"{node}={HOST}:{self._group.nodes[node].peer_port}"

    def _change(self, *words: str) -> None:
        change_members([self.address(node) for node in self.nodes], self._group.name, *words)
