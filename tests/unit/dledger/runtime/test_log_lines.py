"""``runtime.log_lines``: one line for each configuration that is adopted, committed or reverted."""

from __future__ import annotations

import logging

import pytest

from dledger.core.membership import Membership
from dledger.members import ClusterMember, Configuration
from dledger.runtime.log_lines import NodeLines
from dledger.types import LogIndex, NodeId, Term

N0, N1 = NodeId("n0"), NodeId("n1")
ALONE = Configuration((ClusterMember(N0, "h", 1),))
BOTH = Configuration((*ALONE.members, ClusterMember(N1, "h", 2)), LogIndex(7), Term(3))


def test_every_step_of_a_configuration_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    """With what became different; what was there at the start has none, and nothing is told twice."""
    lines, membership = NodeLines(N0), Membership(N0, ALONE)
    lines.members_are(membership)
    with caplog.at_level(logging.INFO, "dledger"):
        lines.members_changed(membership)
        membership.adopt(BOTH)
        lines.members_changed(membership.copy())
        lines.members_changed(membership.copy())
        membership.truncated(LogIndex(7))
        lines.members_changed(membership.copy())
        membership.adopt(BOTH)
        membership.commit(LogIndex(7))
        lines.members_changed(membership.copy())
    assert caplog.messages == [
        "n0: members adopted: n0, n1, of entry 7, term 3 (+n1)",
        "n0: members reverted: n0, as configured (-n1)",
        "n0: members adopted: n0, n1, of entry 7, term 3 (+n1)",
        "n0: members committed: n0, n1, of entry 7, term 3 (+n1)",
    ]
    assert [one.change for one in caplog.records] == ["adopted", "reverted", "adopted", "committed"]  # type: ignore[attr-defined]  # a field of the line
