"""Local processes that each are a member of several groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dledger.errors import DLedgerError
from dledger.types import NodeId, Role
from dledger_cli.local.group import LocalGroup, wait_until

if TYPE_CHECKING:
    from dledger.client import DLedgerClient


class SeveralGroups(LocalGroup):
    """Each node is a process with a member of every group; ``name`` is the first of them."""

    def __init__(
        self, directory: Path, groups: Sequence[str], *, size: int = 3, settings: Mapping[str, str] | None = None
    ) -> None:
        self.groups = tuple(groups)
        self.lines = dict(settings or {})
        """Of every conf file; may be changed before a start."""
        super().__init__(directory, size=size, name=groups[0])

    def command(self, node: NodeId) -> list[str]:
        """The command line of a node: a conf file for each group."""
        words = super().command(node)
        ours = [*words[:4], *(word for group in self.groups for word in ("-c", str(self._conf(node, group))))]
        return self._ending_with_us(ours)

    def _conf(self, node: NodeId, group: str) -> Path:
        file = self.directory / f"{node}-{group}.conf"
        lines = {
            "group": group,
            "node_id": node,
            "members": self.members_of(node),
            "base_dir": str(self.directory / group),
            "client_port": str(self.nodes[node].client_port),
            **self._metrics_lines(node),
            **self.lines,
        }
        file.write_text("".join(f"{name}={text}\n" for name, text in lines.items()))
        return file

    def client_of(self, group: str, timeout_s: float = 10) -> DLedgerClient:
        """A client of one group; the caller closes it."""
        from dledger.client import DLedgerClient

        return DLedgerClient(self.addresses, group=group, timeout_s=timeout_s)

    def leader_of(self, group: str, timeout_s: float = 30, *, other_than: NodeId | None = None) -> NodeId:
        """Wait until a node leads a group and can commit, and return it."""
        found: list[NodeId] = []

        def someone_leads() -> bool:
            found[:] = []
            with self.client_of(group, timeout_s=2) as client:
                for node in self.nodes.values():
                    if not self.is_running(node.node_id) or node.node_id == other_than:
                        continue
                    try:
                        status = client.metadata(address=node.client_address)
                    except DLedgerError:
                        continue
                    if status.role is Role.LEADER and status.committed_index >= 0:
                        found.append(node.node_id)
            return bool(found)

        wait_until(someone_leads, timeout_s, f"no node became leader of {group}")
        return found[0]

    def lead(self, group: str, node: NodeId, timeout_s: float = 30) -> None:
        """Transfer leadership of a group to a node, and wait until it leads."""

        def leads() -> bool:
            with self.client_of(group, timeout_s) as client:
                try:
                    return client.transfer_leadership(node).node_id == node
                except DLedgerError:  # it is not in sync yet
                    return False

        wait_until(leads, timeout_s, f"{node} did not become leader of {group}")

    def directory_of(self, node: NodeId, group: str) -> Path:
        """The directory of a node's member of a group."""
        return self.directory / group / f"dledger-{node}"
