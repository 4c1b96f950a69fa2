"""Three running members, and a bit that turns in the log of one of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.local_group import free_ports
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.errors import CorruptLogError
from dledger.server import DLedgerServer
from dledger.store.format import CHAIN_CRC_OFFSET
from dledger.types import LogIndex, NodeId, Role
from tests.support.waiting import wait_until

_INDEX_SEGMENT_BYTES = 1 << 16


class _Group:
    """Members n0 to n2, and who leads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members = tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(free_ports(3)))
        self.nodes = [self._make(number) for number in range(3)]

    def _make(self, number: int) -> DLedgerServer:
        store = StoreConfig(self._path, segment_bytes=1 << 20, index_segment_bytes=_INDEX_SEGMENT_BYTES)
        config = ServerConfig(node_id=NodeId(f"n{number}"), members=self._members, client_port=0, store=store)
        return DLedgerServer(config).start()

    def leader(self) -> int:
        found = [number for number, node in enumerate(self.nodes) if node.status().role is Role.LEADER]
        return found[0] if found else -1

    def append(self, count: int) -> None:
        leader = self.nodes[self.leader()]
        done = threading.Semaphore(0)
        for number in range(count):
            leader.submit_append([b"entry %d" % number], lambda _result: done.release())
        for _ in range(count):
            assert done.acquire(timeout=20)

    def restart(self, number: int) -> DLedgerServer:
        self.nodes[number] = self._make(number)
        return self.nodes[number]


@contextmanager
def _a_follower_away(path: Path) -> Iterator[tuple[_Group, int, int, int]]:
    """A group, its leader, and a follower that has stopped, with the last entry that it holds."""
    group = _Group(path)
    try:
        wait_until(lambda: group.leader() >= 0, "a leader", 20)
        leader = group.leader()
        group.append(5)
        away = (leader + 1) % 3
        wait_until(lambda: group.nodes[away].status().committed_index == 5, "the follower has all", 20)
        group.nodes[away].stop()
        group.append(5)
        yield group, leader, away, 5
    finally:
        for node in group.nodes:
            node.stop(graceful=False)


def _turn(path: Path, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)
    finally:
        os.close(fd)


def test_damage_at_the_leader_stops_the_leader_and_not_the_follower_that_would_meet_it(tmp_path: Path) -> None:
    """A turned bit in a stored chain CRC is found where it is: by its own disk, before anybody is told."""
    with _a_follower_away(tmp_path) as (group, leader, away, end):
        damaged = group.nodes[leader]
        position = damaged.log.positions(LogIndex(end), LogIndex(end))[0]
        _turn(damaged.log.data_directories[0] / f"{0:020d}", position + CHAIN_CRC_OFFSET)

        returned = group.restart(away)

        assert damaged.wait(20) == 70
        assert isinstance(damaged.fatal, CorruptLogError)
        assert damaged.fatal.index == end
        wait_until(lambda: returned.status().committed_index >= 10, "the follower has what it lacked", 20)
        assert returned.fatal is None


@pytest.mark.parametrize("byte", [3, 10, 31], ids=["magic", "position", "term"])
def test_a_turned_bit_in_the_leaders_index_disturbs_nobody(tmp_path: Path, byte: int) -> None:
    """The index is derived: it is put right, and the follower gets what it lacks from the same leader."""
    with _a_follower_away(tmp_path) as (group, leader, away, end):
        path = group.nodes[leader].log.directory / "index" / f"{0:020d}"
        sound = path.read_bytes()
        _turn(path, end * 32 + byte)

        returned = group.restart(away)

        wait_until(lambda: returned.status().committed_index >= 10, "the follower has what it lacked", 20)
        assert [node.fatal for node in group.nodes] == [None] * 3
        assert path.read_bytes()[: len(sound.rstrip(b"\0"))] == sound.rstrip(b"\0")
