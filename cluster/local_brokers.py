"""Real ``dledger broker`` processes on loopback: a group of three, or one plain broker.

Started from conf files as RocketMQ's DLedger quick start has them, so what works here works with those.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.local_group import HOST, LEADER_TIMEOUT_S, LocalGroup, wait_until
from dledger.errors import DLedgerError
from dledger.types import NodeId

if TYPE_CHECKING:
    from rocketstore.client import Admin


class LocalBrokers(LocalGroup):
    """Like ``LocalGroup``; its client addresses are the brokers'. ``size=0``: one plain broker, called ``n0``.

    ``settings`` are lines of every conf file, by any name that a broker knows.
    """

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 3,
        name: str = "RaftNode00",
        settings: Mapping[str, str] | None = None,
        detached: bool = False,
    ) -> None:
        super().__init__(directory, size=max(size, 1), name=name, detached=detached)
        self._replicated = size > 0
        self._lines = dict(settings or {})

    def admin(self, timeout_s: float = 5.0) -> Admin:
        """An administrator's client that knows all brokers; to be closed by the caller."""
        from rocketstore.client import Admin

        return Admin(self.addresses, timeout_s=timeout_s)

    def master(self, timeout_s: float = LEADER_TIMEOUT_S, *, other_than: NodeId | None = None) -> NodeId:
        """Wait until a broker takes messages, and name it."""
        found: list[NodeId] = []

        def someone_does() -> bool:
            with self.admin(timeout_s=1.0) as admin:
                for node in self.nodes.values():
                    if node.node_id != other_than and self.is_running(node.node_id):
                        try:
                            status = admin.status(node.client_address)
                        except DLedgerError:
                            continue
                        if status.is_master:
                            found.append(node.node_id)
            return bool(found)

        wait_until(someone_does, timeout_s, "no broker became master")
        return found[0]

    def broker_dir(self, node: NodeId) -> Path:
        """A broker's ``storePathRootDir``."""
        return self.directory / node

    def conf(self, node: NodeId) -> str:
        """A broker's conf file."""
        here = self.nodes[node]
        lines = {
            "brokerClusterName": "LocalCluster",
            "brokerName": self.name,
            "listenPort": str(here.client_port),
            "storePathRootDir": str(self.broker_dir(node)),
        }
        if self._replicated:
            lines |= {
                "enableDLegerCommitLog": "true",
                "dLegerGroup": self.name,
                "dLegerPeers": ";".join(f"{one.node_id}-{HOST}:{one.peer_port}" for one in self.nodes.values()),
                "dLegerSelfId": node,
                "client_port": "0",  # the peer port + 10000 may be taken; everybody asks at the broker's port anyway
            }
        return "".join(f"{name}={text}\n" for name, text in (lines | self._lines).items())

    def command(self, node: NodeId) -> list[str]:
        """The command line of a broker; writes its conf file."""
        file = self.directory / f"broker-{node}.conf"
        file.write_text(self.conf(node))
        words = [sys.executable, "-m", "cluster.cli", "broker", "start", "-c", str(file)]
        return words if self._detached else [*words, "--until-stdin-closes"]
