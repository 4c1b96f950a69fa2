"""What the tests' group of members does when its leader changes while entries are appended."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dledger.errors import DLedgerError, LeaderHint, NotLeaderError
from dledger.server import DLedgerServer
from dledger.types import AppendedBatch, EntryId, LogIndex, Magic, Role, Term
from tests.support.running_group import RunningGroup


def test_entries_are_appended_once_each_and_in_order_though_leadership_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the leader that goes refuses, its successor is given; what it kept is not appended again."""
    group = RunningGroup(tmp_path)
    handed_over: queue.SimpleQueue[LeaderHint | DLedgerError] = queue.SimpleQueue()
    append_to = group._append_to

    def hand_over_in_the_middle(leader: DLedgerServer, bodies: list[bytes]) -> bool:
        whole = append_to(leader, bodies[:10])
        if len(bodies) == 30:
            leader.submit_transfer(None, handed_over.put)
            assert not isinstance(handed_over.get(timeout=60), DLedgerError)
        return append_to(leader, bodies[10:]) and whole

    monkeypatch.setattr(group, "_append_to", hand_over_in_the_middle)
    try:
        group.append(30, 100)
        group.wait_converged()
        for node in group.nodes:
            entries = node.log.read_range(LogIndex(1), node.log.last.index, 1 << 20)
            bodies = [entry.body for entry in entries if entry.magic is Magic.NORMAL]
            assert bodies == [(b"entry %d" % number).ljust(100, b".") for number in range(30)]
    finally:
        group.stop()


class Deposed:
    """A leader that appends one entry, refuses the others, and loses those as soon as it is asked what is committed."""

    fatal = None

    def __init__(self) -> None:
        self.log = self
        self.bodies: list[bytes] = []
        self.is_cut = False

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(term=1, role=Role.LEADER)

    @property
    def last(self) -> EntryId:
        return EntryId(Term(1), LogIndex(len(self.bodies) - 1))

    @property
    def committed_index(self) -> LogIndex:
        if not self.is_cut:
            self.is_cut = True
            del self.bodies[1:]
        return self.last.index

    def read_range(self, first: int, last: int, _bytes_max: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(magic=Magic.NORMAL) for _ in range(first, last + 1)]

    def submit_append(self, bodies: list[bytes], answer: Callable[[AppendedBatch | DLedgerError], None]) -> None:
        self.bodies += bodies
        done = self.is_cut or len(self.bodies) == 1
        answer(AppendedBatch(Term(1), self.last.index, self.last.index, (0,)) if done else NotLeaderError("no"))


def test_entries_that_a_leader_may_lose_yet_do_not_count_as_appended() -> None:
    """Who is given the rest is asked only once all that it has is committed."""
    group = RunningGroup.__new__(RunningGroup)
    node = Deposed()
    group.nodes = [node]  # type: ignore[list-item]

    group.append(3)

    assert node.bodies == [b"entry 0", b"entry 1", b"entry 2"]
    assert node.is_cut
