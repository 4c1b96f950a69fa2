"""The elector's own timers and decisions; how members elect together is in tests/scenarios."""

from __future__ import annotations

import pytest

from dledger.config import ReplicationConfig, ServerConfig
from dledger.core.member_state import Candidate, Follower
from dledger.core.messages import (
    CommittedEntry,
    HeartbeatRequest,
    HeartbeatResponse,
    Readmission,
    TakeLeadership,
    VoteRequest,
    VoteResult,
    Wake,
)
from dledger.errors import ConfigError, DiskFullError
from dledger.store.format import HEADER, EntryHeader
from dledger.types import NOOP_CHANNEL, AppendedBatch, EntryId, HardState, LogIndex, Magic, Role, Standing, Term
from tests.support.cluster import N0, N1, N2, N3, Outcome
from tests.support.disk_log import DiskLog
from tests.support.members import configuration, put
from tests.support.solo import Solo


def test_the_step_gives_the_next_due_time_of_every_role() -> None:
    """A follower and a candidate wait for their timeout, a leader for its next heartbeat."""
    solo = Solo()
    assert solo.node.elector.step(0) == 500
    assert solo.node.elector.step(499) == 500
    solo.time_out()
    assert isinstance(solo.state.role, Candidate)
    assert solo.node.elector.step(1200) == 1500
    solo.vote(N1, pre_vote=True)
    solo.vote(N1)

    assert solo.node.elector.step(1000) == 1100


def test_a_leader_beats_as_soon_as_it_is_elected() -> None:
    """Its followers must not time out first; the no-op goes out with the woken dispatchers."""
    solo = Solo(noop_body=b"first")
    solo.campaign()
    solo.take()
    solo.vote(N1)

    beats = [message for _, message in solo.take() if isinstance(message, HeartbeatRequest)]

    assert len(beats) == 2
    assert solo.woken & (Wake.DISPATCHERS | Wake.FLUSH | Wake.ELECTOR) == Wake.DISPATCHERS | Wake.FLUSH | Wake.ELECTOR
    entry = solo.log.read(solo.log.last.index)
    assert (entry.magic, entry.body) == (Magic.NOOP, b"first")


def test_a_no_op_for_java_readers_is_an_ordinary_entry_to_them_and_a_no_op_to_us() -> None:
    """Stored with magic 1, its channel reads NOOP; readers before DLedger 0.4 know no magic 2."""
    solo = Solo(noop_body=b"a record", noop_compatible=True)
    solo.campaign()
    solo.vote(N1)

    last = solo.log.last.index
    entry, stored = solo.log.read(last), solo.log.read_run(last, last).data
    header = EntryHeader(*HEADER.unpack_from(stored))
    assert (header.magic, header.channel, stored[32:36]) == (Magic.NORMAL, NOOP_CHANNEL, b"NOOP")
    assert (entry.magic, entry.channel, entry.body) == (Magic.NOOP, NOOP_CHANNEL, b"a record")


def test_a_no_op_for_java_readers_needs_a_body() -> None:
    """They would take an empty one for a message."""
    with pytest.raises(ConfigError, match="noop_compatible requires a noop_body"):
        ServerConfig(replication=ReplicationConfig(noop_compatible=True)).check()


def test_heartbeats_carry_the_client_address() -> None:
    """Followers give it as hint."""
    solo = Solo()
    solo.node.elector.client_address = "here:1"
    solo.lead()

    ((_, beat), _) = solo.tick(100)

    assert beat == HeartbeatRequest(Term(1), 2, "here:1", founded=True)
    assert solo.hear(N1, 5).client_address == "here:1"


def test_a_silent_quorum_ends_the_leadership() -> None:
    """Check-quorum: no answer for the longest election timeout."""
    solo = Solo()
    solo.lead()
    solo.tick(600)
    solo.beat(N1)
    solo.tick(999)
    assert solo.role is Role.LEADER

    solo.tick(1)

    assert solo.state.role == Follower(None, solo.now_ms + 500)


def test_heartbeat_answers_of_strange_terms_count_for_nothing() -> None:
    """An answer of an older term is no contact; one on a follower changes nothing."""
    solo = Solo()
    solo.beat(N1, term=0)
    assert solo.role is Role.FOLLOWER
    solo.lead()
    solo.tick(500)

    solo.beat(N1, term=0)

    assert solo.leader_role.contact_ms[N1] == 1000


def test_a_heartbeat_answer_tells_a_full_disk() -> None:
    """What the hand-over and the dispatcher look at."""
    solo = Solo()
    solo.lead()

    solo.beat(N1, disk_full=True)

    assert solo.leader_role.disk_full == {N1: True, N2: False}


def test_a_granted_vote_postpones_the_own_election() -> None:
    """§5.2: whoever has just voted gives the candidate time to win; a pre-vote promises nothing."""
    solo = Solo(hard_state=HardState(Term(1), standing=Standing.FULL))
    solo.now_ms = 400

    solo.ask_vote(N1, 2, pre_vote=True)
    assert solo.node.elector.step(400) == 500
    solo.ask_vote(N1, 1)

    assert solo.node.elector.step(400) == 900


def test_a_vote_is_given_once_in_a_term_also_to_one_with_a_newer_log() -> None:
    """Two candidates of one term, each with a majority that this member is in, would both lead it."""
    solo = Solo(terms=(1, 1))
    last = solo.state.log.last

    first = solo.ask_vote(N1, 2, last)
    second = solo.ask_vote(N2, 2, EntryId(Term(2), LogIndex(9)))
    again = solo.ask_vote(N1, 2, last)

    assert (first.granted, second.granted, again.granted) == (True, False, True)
    assert second.result is VoteResult.REJECT_ALREADY_VOTED
    assert solo.state.hard_state.vote == N1


def test_a_vote_given_while_asking_for_pre_votes_keeps_the_role() -> None:
    """The vote counts; the own questions stay asked."""
    solo = Solo(hard_state=HardState(Term(1), standing=Standing.FULL))
    solo.time_out()

    assert solo.ask_vote(N1, 1).granted
    assert isinstance(solo.state.role, Candidate)


def test_answers_to_votes_that_nobody_asked_for_are_ignored() -> None:
    """A follower and a leader have no election to win."""
    solo = Solo()
    solo.vote(N1)
    before = solo.role
    solo.lead()
    solo.vote(N2)

    assert before is Role.FOLLOWER
    assert solo.role is Role.LEADER


class _FullAtTheNoOp(DiskLog):
    """A disk that turns out to be full when it is written to."""

    def append_as_leader(self, *_: object, **__: object) -> AppendedBatch:
        raise DiskFullError("the disk is full")


def _doubtful() -> Solo:
    """A candidate for a pre-vote that lost its memory: only the votes of all can elect it."""
    solo = Solo()
    solo.hear(N1, 4)
    solo.state.lose_standing("its disk was set back", solo.now_ms)
    solo.time_out()
    assert isinstance(solo.state.role, Candidate)
    return solo


@pytest.mark.parametrize("granted", [True, False])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_term_of_which_others_remember_entries_of_this_member_is_not_led_again(*, granted: bool, ahead: int) -> None:
    """It may have led that very term and written others under the same numbers, which its disk has lost."""
    solo = _doubtful()
    for voter in (N1, N2):
        solo.vote(voter, pre_vote=True)
    assert (solo.role, solo.state.term) == (Role.CANDIDATE, 5)

    solo.vote(N1, granted=granted, remembered=EntryId(Term(5 + ahead), LogIndex(0)))

    assert isinstance(solo.state.role, Follower)
    for voter in (N1, N2):
        solo.vote(voter, term=5)
    assert solo.role is Role.FOLLOWER, "votes of that term elect it no more"


def test_a_term_that_was_led_before_is_passed_over_in_the_pre_vote() -> None:
    """The same, told while it asks: the next campaign is in a later term."""
    solo = _doubtful()

    solo.vote(N1, pre_vote=True, remembered=EntryId(Term(5), LogIndex(0)))

    assert isinstance(solo.state.role, Follower)
    assert solo.state.term == 5


def test_forgotten_entries_of_an_older_term_do_not_end_the_campaign() -> None:
    """Nobody can have led this term: all vote for the one that forgot, and it leads."""
    solo = _doubtful()
    for voter in (N1, N2):
        solo.vote(voter, pre_vote=True, remembered=EntryId(Term(4), LogIndex(0)))
    assert (solo.role, solo.state.term) == (Role.CANDIDATE, 5)

    for voter in (N1, N2):
        solo.vote(voter, remembered=EntryId(Term(4), LogIndex(0)))

    assert solo.role is Role.LEADER


def test_a_winner_that_cannot_write_its_no_op_resigns() -> None:
    """Without the no-op nothing could ever be committed; another member gets its chance."""
    solo = Solo(log=_FullAtTheNoOp())
    solo.campaign()

    solo.vote(N1)

    assert solo.state.role == Follower(None, solo.now_ms + 500)
    assert solo.state.term == 1


def test_take_leadership_starts_a_campaign_without_pre_vote() -> None:
    """§3.10: at once, and marked, so that the leader's followers do not protect it."""
    solo = Solo(hard_state=HardState(Term(1), standing=Standing.FULL))
    solo.hear(N1, 1)

    solo.node.receive(N1, TakeLeadership(Term(1)), 0)

    assert solo.state.term == 2
    assert solo.take() == [(peer, VoteRequest(Term(2), solo.log.last, transfer=True)) for peer in (N1, N2)]


@pytest.mark.parametrize("ready", [False, True])
def test_take_leadership_is_sent_once_the_target_holds_everything(ready: bool) -> None:
    """And a quorum has heard of it, without which they would keep to their leader; repeated until the transfer ends."""
    solo = Solo()
    solo.lead()
    solo.flush()
    solo.streaming(N1)
    if not ready:
        solo.log.append_as_leader(Term(1), [b"x"])
    outcome: Outcome[object] = Outcome()
    solo.node.elector.transfer(N1, solo.now_ms, outcome)

    early = [message for _, message in solo.tick() if isinstance(message, TakeLeadership)]
    solo.beat(N2, 2)

    asked = [message for _, message in solo.tick() if isinstance(message, TakeLeadership)]
    repeated = [message for _, message in solo.tick(100) if isinstance(message, TakeLeadership)]

    assert not early
    assert len(asked) == len(repeated) == ready
    assert outcome.pending


def test_the_first_leader_of_a_group_is_n0_in_these_tests() -> None:
    """The support code's promise, on which scenarios rely."""
    solo = Solo()
    solo.lead()

    assert solo.state.leader_id == N0


def test_a_group_is_founded_only_while_all_its_members_have_standing() -> None:
    """One that lost its disk again in between has none: whoever is told of it as founded could not begin anew."""
    solo = Solo(hard_state=HardState(Term(1), standing=Standing.FOUNDER))
    solo.lead()
    solo.beat(N1)
    solo.beat(N1, standing=Standing.BLANK, boot_id=8)
    solo.beat(N2)
    before = solo.state.standing

    solo.beat(N1, boot_id=8)

    assert (before, solo.state.standing) == (Standing.FOUNDER, Standing.FULL)


def test_who_has_forgotten_seeks_the_votes_of_all_only_with_a_durable_log() -> None:
    """Elected by all it counts at once: a power cut must not make it forget a second time, unnoticed."""
    solo = Solo(terms=(1, 1), hard_state=HardState(Term(1), standing=Standing.DOUBTFUL))
    solo.log.append_as_leader(Term(1), [b"not flushed yet"])

    solo.time_out()
    asked_early, woken = solo.node.elector.pre_votes, solo.woken
    solo.flush()
    solo.time_out()

    assert asked_early == 0
    assert woken & Wake.FLUSH
    assert solo.node.elector.pre_votes == 1


# -- when the members change --------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", [False, True])
def test_who_is_no_voter_takes_no_leadership(removed: bool) -> None:
    """M7, M8: it was one when it was asked, and the question was long on its way."""
    solo = Solo(hard_state=HardState(Term(1), standing=Standing.FULL))
    solo.hear(N1, 1)
    if removed:
        solo.state.learn_removed(LogIndex(5))
    else:
        solo.state.adopt(configuration("12", "0", index=1))
    solo.take()

    solo.node.receive(N1, TakeLeadership(Term(1)), 0)

    assert (solo.role, solo.state.term) == (Role.FOLLOWER, 1)
    assert solo.take() == []


def test_everybody_is_asked_who_may_be_a_voter_by_some_configuration() -> None:
    """M6, M7: learners, which may not know that they were promoted, and those whose removal is not committed."""
    solo = Solo()
    solo.state.adopt(configuration("01", "3", index=1))

    asked = [target for target, message in solo.time_out() if isinstance(message, VoteRequest)]

    assert asked == [N1, N3, N2]


def test_who_leaves_hears_the_leader_until_it_knows() -> None:
    """M9: else it asks for votes."""
    solo = Solo()
    solo.lead()
    solo.state.adopt(configuration("01", index=1, term=int(solo.state.term)))

    told = [target for target, message in solo.tick(100) if isinstance(message, HeartbeatRequest)]

    assert told == [N1, N2]


def test_the_vote_of_another_memory_is_that_of_a_blank_member() -> None:
    """M11: the one that the configuration names may have voted for somebody else, in a term that this one forgot."""
    solo = Solo()
    solo.state.adopt(configuration("012", index=1, n1=7))
    solo.time_out()

    solo.vote(N1, pre_vote=True, uid=8)
    role = solo.state.role
    assert isinstance(role, Candidate)
    assert role.pre_vote
    assert role.ballots[N1].standing is Standing.BLANK

    solo.vote(N1, pre_vote=True, uid=7)
    assert solo.state.term == 1


def test_the_refusal_of_a_learner_says_nothing_of_who_can_be_elected() -> None:
    """A candidate that hurries because of it splits the votes again."""
    solo = Solo()
    solo.state.adopt(configuration("012", "3", index=1))
    solo.campaign()

    solo.vote(N3, granted=False)
    solo.vote(N2, granted=False)

    assert isinstance(solo.state.role, Candidate)
    assert solo.state.role.refused == {N2}


def test_a_leader_that_was_removed_hears_of_it_from_those_that_it_leads() -> None:
    """M8: by the next answer to its heartbeats."""
    solo = Solo()
    solo.lead()

    solo.node.receive(N1, HeartbeatResponse(solo.state.term, removed_at=LogIndex(9)), solo.now_ms)

    assert solo.state.removed_at == 9


def test_a_learner_that_is_not_heard_keeps_nobody_a_founder() -> None:
    """M1 d: changes wait for the voters of a new group; a learner that never comes must be removable."""
    alone = Solo(1, hard_state=HardState(standing=Standing.FOUNDER))
    alone.state.adopt(configuration("0", "1", index=0))
    alone.time_out()
    assert (alone.role, alone.state.standing) == (Role.LEADER, Standing.FULL)

    solo = Solo(3)
    solo.lead()
    solo.state.hard_state = HardState(solo.state.term, N0, Standing.FOUNDER)
    solo.state.adopt(configuration("012", "3", index=1, term=int(solo.state.term)))
    standings = []
    for voter in (N1, N2):
        solo.beat(voter)
        standings.append(solo.state.standing)
    assert standings == [Standing.FOUNDER, Standing.FULL]


def test_a_refusal_tells_that_the_configuration_is_committed() -> None:
    """M6: then the voters before it are not needed, nor the one that refuses; the rest has voted already."""
    solo = Solo(3, terms=[1, 1], committed=0)
    index = put(solo.log, 1, "01", "2")
    solo.state.adopt(configuration("01", "2", index=index))
    solo.flush()
    solo.time_out()
    solo.vote(N1, pre_vote=True, standing=Standing.BLANK)
    assert solo.node.elector.elections == 0
    committed = (CommittedEntry(index, solo.log.chain_crc_at(index)),)

    solo.vote(N2, granted=False, pre_vote=True, committed=committed)

    assert solo.node.elector.elections == 1


def test_who_has_forgotten_waits_for_an_entry_that_a_majority_holds_without_it() -> None:
    """What it holds itself, or its leader alone, keeps nobody from being elected who lacks it."""
    solo = Solo(3, terms=[1], committed=0)
    solo.lead()
    solo.flush()
    solo.beat(N1, standing=Standing.BLANK, boot_id=8)
    solo.tick(solo.config.election.heartbeat_interval_ms)
    index = solo.log.last.index
    solo.flush()
    solo.leader_role.match[N1] = index
    solo.settle_quorum()
    assert _readmissions(solo) == [None]

    solo.matches(N2, index)
    solo.settle_quorum()

    assert _readmissions(solo) == [Readmission(8, index)]


def _readmissions(solo: Solo) -> list[Readmission | None]:
    """What the next heartbeat tells n1."""
    sent = solo.tick(solo.config.election.heartbeat_interval_ms)
    return [beat.readmission for to, beat in sent if to == N1 and isinstance(beat, HeartbeatRequest)]
