"""Three members in this process, on loopback, whose files a test may damage."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from cluster.local_group import free_ports
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.server import DLedgerServer
from dledger.types import NodeId, Role
from tests.support.waiting import wait_until


class RunningGroup:
    """Members n0 to n2, started; ``stop`` them."""

    def __init__(self, path: Path, **store: Any) -> None:  # noqa: ANN401 - one keyword per setting
        self._path = path
        self._store = {"segment_bytes": 1 << 20, "index_segment_bytes": 1 << 16, **store}
        self._members = tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(free_ports(3)))
        self.nodes = [self.make(number) for number in range(3)]
        for node in self.nodes:
            node.start()

    def make(self, number: int, *, repair: bool = False) -> DLedgerServer:
        """A member that is not started; it opens its directory."""
        store = StoreConfig(self._path, **self._store)
        config = ServerConfig(node_id=NodeId(f"n{number}"), members=self._members, client_port=0, store=store)
        return DLedgerServer(config, repair=repair)

    def restart(self, number: int) -> DLedgerServer:
        """Start a member that was stopped."""
        self.nodes[number] = self.make(number)
        return self.nodes[number].start()

    def leader(self) -> int:
        """Who leads; -1 for nobody."""
        leading = [
            (node.status().term, number)
            for number, node in enumerate(self.nodes)
            if node.fatal is None and node.status().role is Role.LEADER
        ]
        return max(leading)[1] if leading else -1

    def wait_for_leader(self) -> int:
        """Who leads, once somebody does."""
        wait_until(lambda: self.leader() >= 0, "a leader", 20)
        return self.leader()

    def append(self, count: int, size: int = 0) -> None:
        """Append entries of at least ``size`` bytes and wait until a quorum has them."""
        leader = self.nodes[self.wait_for_leader()]
        done = threading.Semaphore(0)
        for number in range(count):
            leader.submit_append([(b"entry %d" % number).ljust(size, b".")], lambda _result: done.release())
        for _ in range(count):
            assert done.acquire(timeout=20)

    def wait_converged(self) -> None:
        """Until all hold and know as committed what the leader does."""
        leader = self.nodes[self.wait_for_leader()]
        wait_until(
            lambda: {node.log.committed_index for node in self.nodes} == {leader.log.last.index}, "all have all", 20
        )

    def segment(self, number: int, segment: int) -> Path:
        """A member's data file."""
        base = segment * int(self._store["segment_bytes"])
        return self.nodes[number].log.data_directories[0] / f"{base:020d}"

    def stop(self) -> None:
        """Stop all."""
        for node in self.nodes:
            node.stop(graceful=False)
