"""Broker containers whose group grows and shrinks. A node that is no member has neither container nor volume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.drill.containers import GROUP, PEER_PORT, ContainerTarget
from cluster.drill.target import SPARES, change_members
from dledger.types import NodeId

if TYPE_CHECKING:
    import docker


class ContainerMembers(ContainerTarget):
    """See ``MemberTarget``."""

    def __init__(self, client: docker.DockerClient, image: str, *, size: int, keep: bool = False) -> None:
        super().__init__(client, image, size=size + SPARES, keep=keep)
        self._members = list(self._all[:size])

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The present members."""
        return tuple(self._members)

    @property
    def spares(self) -> tuple[NodeId, ...]:
        """The others."""
        return tuple(node for node in self._all if node not in self._members)

    def add(self, node: NodeId) -> None:
        """Start it, and wait until it votes."""
        self._join(node)
        self._change("add", self._place(node))
        self._members.append(node)

    def remove(self, node: NodeId) -> None:
        """Remove it first: a member that is stopped before would be one less to count."""
        self._change("remove", node)
        self._members.remove(node)
        self.stop(node)
        self._discard(node)

    def replace(self, lost: NodeId, node: NodeId) -> None:
        """One command does both steps."""
        self._join(node)
        self._change("replace", lost, self._place(node))
        self._members[self._members.index(lost)] = node
        self._discard(lost)

    def _join(self, node: NodeId) -> None:
        """Start it; it waits until it is added."""
        self._create(node)
        self._start([node])

    def _members_of(self, node: NodeId) -> tuple[NodeId, ...]:
        """The present members, and the node itself."""
        return self.nodes if node in self._members else (*self.nodes, node)

    def _settings(self, node: NodeId) -> dict[str, str]:
        settings = super()._settings(node)
        return settings if node in self._members else {**settings, "dLegerJoin": "true"}

    def _place(self, node: NodeId) -> str:
        return f"{node}={self._hosts[node]}:{PEER_PORT}"

    def _change(self, *words: str) -> None:
        change_members((self.address(node) for node in self.nodes), GROUP, *words)
