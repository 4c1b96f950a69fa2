"""Which ballots elect whom."""

from __future__ import annotations

from dledger.core.standing import Ballot, Victory, victory
from dledger.types import NodeId, Standing

C, A, B, D = (NodeId(name) for name in "cabd")


def test_a_majority_of_others_elects_no_candidate_that_may_have_forgotten_a_vote() -> None:
    """Its forgotten vote could elect a second leader in a later term, which lacks what it acknowledges now."""
    others = {one: Ballot(Standing.VOTER, 2, used=True) for one in (A, B, D)}

    assert victory({C: Ballot(Standing.DOUBTFUL, 1, used=True)} | others, 5, C) is None
    assert victory({C: Ballot(Standing.VOTER, 1, used=True)} | others, 5, C) is Victory.MAJORITY
    assert victory({C: Ballot(Standing.DOUBTFUL, 1, used=True)} | others, 4, C) is Victory.UNANIMITY
