"""``runtime.log_lines``: one line for each configuration that is adopted, committed or reverted.

``dledger.runtime.events``: who belongs to a group, and what became different, in words.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from dledger.core.membership import Membership
from dledger.runtime.events import NodeLines, difference_text, members_text, peers_setting
from dledger.types import ClusterMember, Configuration, LogIndex, MemberRole, NodeId, Term

N0, N1 = NodeId("n0"), NodeId("n1")
ALONE = Configuration((ClusterMember(N0, "h", 1),))
BOTH = Configuration((*ALONE.members, ClusterMember(N1, "h", 2)), LogIndex(7), Term(3))
M1, M2, M3, M4 = (ClusterMember(NodeId(f"n{number}"), "h", number, number=number) for number in range(1, 5))
THREE = Configuration((M1, M2, M3))


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


def members(*ones: ClusterMember) -> Configuration:
    return Configuration(ones, LogIndex(5))


def test_a_list_names_what_each_does_and_becomes() -> None:
    """Voters are the rule, so only their names are said."""
    learner = replace(M4, role=MemberRole.LEARNER)
    assert members_text(members(M1, learner)) == "n1, n4 (learner)"
    assert members_text(members(replace(learner, promote=True))) == "n4 (learner, becomes a voter)"
    assert members_text(members(replace(learner, promote=True, replaces="n3"))) == "n4 (learner, replaces n3)"
    assert members_text(Configuration()) == "nobody"


def test_a_difference_names_every_kind_of_change() -> None:
    """Who came, who went, who does something else, who moved."""
    learner = replace(M4, role=MemberRole.LEARNER, promote=True, replaces="n3")
    added, promoted = members(M1, M2, M3, learner), members(M1, M2, M4)
    assert difference_text(THREE, added) == "+n4 (learner, replaces n3)"
    assert difference_text(added, promoted) == "n4: learner → voter, -n3"
    assert difference_text(THREE, members(M1, M2, replace(M3, role=MemberRole.LEARNER))) == "n3: voter → learner"
    assert difference_text(THREE, members(M1, M2, replace(M3, host="::1"))) == "n3 at [::1]:3"
    assert difference_text(THREE, members(M1, M2, replace(M3, uid=7))) == "n3 with a new memory"
    stays = members(M1, M2, M3, replace(learner, promote=False, replaces=""))
    assert difference_text(added, stays) == "n4 (learner)"
    assert difference_text(THREE, members(M1, M2, M3)) == "the same members"


def test_the_setting_is_what_a_conf_file_takes() -> None:
    """As ``dLegerPeers`` is written."""
    assert peers_setting(THREE) == "n1-h:1;n2-h:2;n3-h:3"
