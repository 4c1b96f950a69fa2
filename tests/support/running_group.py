"""Three members in this process, on loopback, whose files a test may damage."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from dledger.config import Member, ServerConfig, StoreConfig
from dledger.errors import DLedgerError
from dledger.server import DLedgerServer
from dledger.types import AppendedBatch, LogIndex, Magic, NodeId, Role
from dledger_cli.local.group import free_ports
from tests.support.waiting import wait_until

_LEADERS_MAX = 5
"""How many are followed while entries are appended."""


def _entries_after(node: DLedgerServer, index: int) -> int:
    """How many entries of the application follow one."""
    last = node.log.last.index
    entries = node.log.read_range(LogIndex(index + 1), last, 1 << 30) if last > index else []
    return sum(entry.magic is Magic.NORMAL for entry in entries)


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
        wait_until(lambda: self.leader() >= 0, "a leader")
        return self.leader()

    def append(self, count: int, size: int = 0) -> None:
        """Append entries of at least ``size`` bytes and wait until a quorum has them, whoever leads meanwhile.

        A new leader keeps its predecessor's entries from the first to some other: it is given the rest.
        """
        before = self.nodes[self.wait_for_leader()].log.last.index
        for _ in range(_LEADERS_MAX):
            leader = self.nodes[self.wait_for_leader()]
            first = _entries_after(leader, before)
            if self._append_to(leader, [(b"entry %d" % number).ljust(size, b".") for number in range(first, count)]):
                return
            wait_until(self._settled, "a leader all of whose entries are committed")
        raise AssertionError(f"{_LEADERS_MAX} leaders came and went while {count} entries were appended")

    def _append_to(self, leader: DLedgerServer, bodies: list[bytes]) -> bool:
        """Whether all were appended; false once one was not."""
        answers: queue.SimpleQueue[AppendedBatch | DLedgerError] = queue.SimpleQueue()
        for body in bodies:
            leader.submit_append([body], answers.put)
        told = [answers.get(timeout=60) for _ in bodies]
        return not any(isinstance(one, DLedgerError) for one in told)

    def _settled(self) -> bool:
        number = self.leader()
        return number >= 0 and self.nodes[number].log.committed_index == self.nodes[number].log.last.index

    def wait_converged(self) -> None:
        """Until all hold and know as committed what the leader does."""
        leader = self.nodes[self.wait_for_leader()]
        wait_until(lambda: {node.log.committed_index for node in self.nodes} == {leader.log.last.index}, "all have all")

    def segment(self, number: int, segment: int) -> Path:
        """A member's data file."""
        base = segment * int(self._store["segment_bytes"])
        return self.nodes[number].log.data_directories[0] / f"{base:020d}"

    def stop(self) -> None:
        """Stop all."""
        for node in self.nodes:
            node.stop(graceful=False)
