"""Real ``dledger broker -c A -c B`` processes on loopback: each is a member of several groups of brokers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dledger.errors import DLedgerError
from dledger.types import NodeId
from dledger_cli.local.brokers import ASK_TIMEOUT_S, LocalBrokers
from dledger_cli.local.group import HOST, LEADER_TIMEOUT_S, free_ports, wait_until

if TYPE_CHECKING:
    from rocketstore.client.blocking import Admin


class SeveralBrokers(LocalBrokers):
    """Each node is a process with a broker of every group. ``LocalBrokers``' own methods concern the first group.

    ``lines``: of every conf file, and of one group's, by its name; both may be changed before a start.
    """

    def __init__(
        self, directory: Path, groups: Sequence[str], *, size: int = 3, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(directory, size=size, name=groups[0], settings=settings)
        self.groups = tuple(groups)
        self.lines: dict[str, dict[str, str]] = {group: {} for group in groups}
        taken = {port for node in self.nodes.values() for port in (node.client_port, node.peer_port)}
        further = iter(free_ports(size * (len(groups) - 1), taken=taken) if groups[1:] else [])
        self._ports = {
            group: {
                node.node_id: node.client_port if group == groups[0] else next(further) for node in self.nodes.values()
            }
            for group in groups
        }

    def address(self, node: NodeId, group: str) -> str:
        """Where a node's broker of a group listens."""
        return f"{HOST}:{self._ports[group][node]}"

    def addresses_of(self, group: str) -> list[str]:
        """Those of all brokers of a group."""
        return [self.address(node, group) for node in self.nodes]

    def admin_of(self, group: str, timeout_s: float = 5.0) -> Admin:
        """A client that knows all brokers of a group; the caller closes it."""
        from rocketstore.client.blocking import Admin

        return Admin(self.addresses_of(group), timeout_s=timeout_s)

    def masters(self, group: str) -> list[NodeId]:
        """The nodes whose brokers of a group say at this moment that they are master, by term."""
        found: dict[NodeId, int] = {}
        with self.admin_of(group, ASK_TIMEOUT_S) as admin:
            for node in self.nodes:
                if self.is_running(node):
                    try:
                        status = admin.status(self.address(node, group)).runtime
                    except DLedgerError:
                        continue
                    if status.is_master:
                        found[node] = status.term
        return sorted(found, key=lambda node: found[node])

    def master_of(self, group: str, timeout_s: float = LEADER_TIMEOUT_S, *, other_than: NodeId | None = None) -> NodeId:
        """Wait until a broker of a group accepts messages, and return its node."""
        found: list[NodeId] = []

        def someone_is() -> bool:
            found[:] = [node for node in self.masters(group) if node != other_than]
            return bool(found)

        wait_until(someone_is, timeout_s, f"no broker became master of {group}")
        return found[-1]

    def lead(self, leaders: Mapping[str, NodeId], timeout_s: float = LEADER_TIMEOUT_S) -> None:
        """Transfer leadership of groups to these nodes, and wait until they are masters."""
        from dledger.client import DLedgerClient

        for group, node in leaders.items():
            with DLedgerClient(self.addresses_of(group), group=group, timeout_s=timeout_s) as client:

                def is_master(group: str = group, node: NodeId = node, client: DLedgerClient = client) -> bool:
                    try:
                        client.transfer_leadership(node)
                    except DLedgerError:  # it is not in sync yet
                        return False
                    return self.masters(group)[-1:] == [node]

                wait_until(is_master, timeout_s, f"{node} did not become master of {group}")

    def root_dir_of(self, node: NodeId, group: str) -> Path:
        """The ``storePathRootDir`` of a node's broker of a group."""
        return self.directory / group / node

    def command(self, node: NodeId) -> list[str]:
        """Write a conf file for each group, and return the command line."""
        words = super().command(node)
        ours = [*words[:4], *(word for group in self.groups for word in ("-c", str(self._conf(node, group))))]
        return self._ending_with_us(ours)

    def _conf(self, node: NodeId, group: str) -> Path:
        root = self.root_dir_of(node, group)
        lines = {
            **self.conf_lines(node),
            "brokerName": group,
            "dLegerGroup": group,
            "listenPort": str(self._ports[group][node]),
            "storePathRootDir": str(root),
            "storePathCommitLog": str(root / "commitlog"),
            **self.lines[group],
        }
        file = self.directory / f"broker-{node}-{group}.conf"
        file.write_text("".join(f"{name}={text}\n" for name, text in lines.items()))
        return file
