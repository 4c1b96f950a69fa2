"""Which ballots elect whom."""

from __future__ import annotations

from dledger.core.messages import Readmission
from dledger.core.standing import Ballot, Electorate, Readmissions, Victory, victory
from dledger.types import LogIndex, NodeId, Standing

C, A, B, D, E = (NodeId(name) for name in "cabde")
THREE, FOUR, FIVE = (Electorate(frozenset((C, A, B, D, E)[:size])) for size in (3, 4, 5))


def test_a_majority_of_others_elects_no_candidate_that_may_have_forgotten_a_vote() -> None:
    """Its forgotten vote could elect a second leader in a later term, which lacks what it acknowledges now."""
    others = {one: Ballot(Standing.FULL, 2, used=True) for one in (A, B, D)}

    assert victory({C: Ballot(Standing.DOUBTFUL, 1, used=True)} | others, FIVE, C) is None
    assert victory({C: Ballot(Standing.FULL, 1, used=True)} | others, FIVE, C) is Victory.MAJORITY
    assert victory({C: Ballot(Standing.DOUBTFUL, 1, used=True)} | others, FOUR, C) is Victory.UNANIMITY


def test_founders_begin_again_with_blank_ones_only_while_nobody_knows_of_a_committed_entry() -> None:
    """A majority had standing when it was committed: if one is blank now, disks were lost, perhaps with more."""
    blank = {one: Ballot(Standing.BLANK, 2, used=False) for one in (A, B)}

    assert victory({C: Ballot(Standing.FOUNDER, 1, used=False)} | blank, THREE, C) is Victory.FOUNDING
    assert victory({C: Ballot(Standing.FOUNDER, 1, used=True)} | blank, THREE, C) is None
    assert victory({A: Ballot(Standing.FOUNDER, 1, used=True), B: blank[B]}, THREE, B) is None
    told = {A: blank[A], B: Ballot(Standing.BLANK, 2, used=True)}
    assert victory({C: Ballot(Standing.FOUNDER, 1, used=False)} | told, THREE, C) is None
    assert victory({C: Ballot(Standing.BLANK, 1, used=True)}, Electorate(frozenset({C})), C) is Victory.FOUNDING


def test_each_term_readmits_with_an_entry_of_its_own() -> None:
    """What the same leader asked for in an earlier term was appended before it was deposed in between."""
    readmissions = Readmissions()
    readmissions.begin({}, LogIndex(5), unanimous=False)
    readmissions.note(A, Standing.BLANK, 9, LogIndex(5))
    assert readmissions.due(A, LogIndex(6)) == Readmission(9, LogIndex(6))

    readmissions.begin({}, LogIndex(10), unanimous=False)
    readmissions.note(A, Standing.BLANK, 9, LogIndex(10))

    assert readmissions.due(A, LogIndex(10)) is None
    assert readmissions.due(A, LogIndex(11)) == Readmission(9, LogIndex(11))


def test_only_the_process_that_voted_needs_no_new_entry() -> None:
    """Its successor on a new disk knows nothing of the vote that made the election unanimous."""
    readmissions = Readmissions()
    readmissions.begin({A: Ballot(Standing.BLANK, 1, used=False)}, LogIndex(5), unanimous=True)
    assert readmissions.due(A, LogIndex(0)) == Readmission(1, LogIndex(5))

    readmissions.note(A, Standing.BLANK, 2, LogIndex(8))

    assert not readmissions.is_elector(A, 2)
    assert readmissions.due(A, LogIndex(8)) is None
    assert readmissions.due(A, LogIndex(9)) == Readmission(2, LogIndex(9))


def test_unanimity_needs_the_voters_of_the_configuration_before_unless_it_is_known_to_be_over() -> None:
    """M6: who left may have elected another leader, with one that has forgotten it since."""
    ballots = {C: Ballot(Standing.FULL, 1, used=True), A: Ballot(Standing.BLANK, 2, used=False)}
    removing = Electorate(frozenset({C, A}), previous=frozenset({C, A, B}))

    assert victory(ballots, removing, C) is None
    assert victory(ballots, Electorate(frozenset({C, A})), C) is Victory.UNANIMITY
    assert victory(ballots | {B: Ballot(Standing.FULL, 3, used=True)}, removing, C) is Victory.UNANIMITY


def test_of_any_majority_of_either_configuration_one_must_remember() -> None:
    """M6: what a majority of the one before committed must be known to somebody who votes."""
    removing = Electorate(frozenset({C, A}), previous=frozenset({C, A, B}))
    blank = {one: Ballot(Standing.BLANK, 2, used=False) for one in (A, B)}

    assert victory({C: Ballot(Standing.FULL, 1, used=True)} | blank, removing, C) is None


def test_each_configuration_has_a_majority_of_its_own() -> None:
    """M6: two blank ones of four may be outvoted, two of the three before are a majority of them."""
    growing = Electorate(frozenset({C, A, B, D}), previous=frozenset({C, A, B}))
    full = {one: Ballot(Standing.FULL, 1, used=True) for one in (C, D)}

    assert victory(full | {one: Ballot(Standing.BLANK, 2, used=False) for one in (A, B)}, growing, C) is None
    rest = {A: Ballot(Standing.DOUBTFUL, 2, used=True), B: Ballot(Standing.BLANK, 2, used=False)}
    assert victory(full | rest, growing, C) is Victory.UNANIMITY


def test_votes_of_others_than_voters_elect_nobody() -> None:
    """M7: neither those of learners nor of strangers."""
    standing = Ballot(Standing.FULL, 1, used=True)

    assert victory({C: standing, D: standing, E: standing}, THREE, C) is None
    assert victory({C: standing, A: standing}, THREE, C) is Victory.MAJORITY
