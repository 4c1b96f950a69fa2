"""What the tests' group of members does when its leader changes while entries are appended."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from dledger.errors import DLedgerError, LeaderHint
from dledger.server import DLedgerServer
from dledger.types import LogIndex, Magic
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
            assert not isinstance(handed_over.get(timeout=20), DLedgerError)
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
