"""``dledger.member_texts``: who belongs to a group, and what became different, in words."""

from __future__ import annotations

from dataclasses import replace

from dledger.member_texts import difference_text, members_text, peers_setting
from dledger.members import ClusterMember, Configuration, MemberRole
from dledger.types import LogIndex, NodeId

N1, N2, N3, N4 = (ClusterMember(NodeId(f"n{number}"), "h", number, number=number) for number in range(1, 5))
THREE = Configuration((N1, N2, N3))


def members(*ones: ClusterMember) -> Configuration:
    return Configuration(ones, LogIndex(5))


def test_a_list_names_what_each_does_and_becomes() -> None:
    """Voters are the rule, so only their names are said."""
    learner = replace(N4, role=MemberRole.LEARNER)
    assert members_text(members(N1, learner)) == "n1, n4 (learner)"
    assert members_text(members(replace(learner, promote=True))) == "n4 (learner, becomes a voter)"
    assert members_text(members(replace(learner, promote=True, replaces="n3"))) == "n4 (learner, replaces n3)"
    assert members_text(Configuration()) == "nobody"


def test_a_difference_names_every_kind_of_change() -> None:
    """Who came, who went, who does something else, who moved."""
    learner = replace(N4, role=MemberRole.LEARNER, promote=True, replaces="n3")
    added, promoted = members(N1, N2, N3, learner), members(N1, N2, N4)
    assert difference_text(THREE, added) == "+n4 (learner, replaces n3)"
    assert difference_text(added, promoted) == "n4: learner → voter, -n3"
    assert difference_text(THREE, members(N1, N2, replace(N3, role=MemberRole.LEARNER))) == "n3: voter → learner"
    assert difference_text(THREE, members(N1, N2, replace(N3, host="::1"))) == "n3 at [::1]:3"
    assert difference_text(THREE, members(N1, N2, replace(N3, uid=7))) == "n3 with a new memory"
    stays = members(N1, N2, N3, replace(learner, promote=False, replaces=""))
    assert difference_text(added, stays) == "n4 (learner)"
    assert difference_text(THREE, members(N1, N2, N3)) == "the same members"


def test_the_setting_is_what_a_conf_file_takes() -> None:
    """As ``dLegerPeers`` is written."""
    assert peers_setting(THREE) == "n1-h:1;n2-h:2;n3-h:3"
