"""Who has forgotten what it said counts for nothing, until it cannot matter any more (reliability trap 30)."""

from __future__ import annotations

import pytest

from dledger.config import FlushMode
from dledger.core.log_matching import stated
from dledger.core.messages import HeartbeatRequest, HeartbeatResponse, PushAppend, PushKind, Readmission, VoteRequest
from dledger.errors import TransferFailedError
from dledger.types import NO_ENTRY, EntryId, HardState, LogIndex, Role, Standing, Term
from tests.support.cluster import N0, N1, N2, N3, N4, Cluster, Outcome, made_log
from tests.support.solo import Solo

# -- counting --------------------------------------------------------------------------------------------------------


def test_the_acknowledgement_of_a_wiped_member_commits_nothing() -> None:
    """A leader that was cut off and replaced without noticing, and a wiped member, are no majority of those who know.

    Else they would commit another entry over the one that the new leader and the lost disk had acknowledged.
    """
    cluster = Cluster(3)
    cluster.elect()
    cluster.isolate(N0)
    cluster.advance_until(lambda: cluster.role(N1) is Role.LEADER, 900)
    first = cluster.append(N1, b"X")
    cluster.advance(20)
    cluster.wipe(N2)
    cluster.cut.clear()
    cluster.isolate(N1)
    cluster.start(N2)
    cluster[N0].node.connection_lost(N2)
    cluster.act(N0)
    second = cluster.append(N0, b"Y")
    cluster.advance(300)
    assert cluster[N0].node.dispatchers[N2].next_index > 1, "it was replicated to the wiped member"

    assert second.pending
    cluster.heal()
    cluster.advance(5000)

    assert first.value
    assert cluster.bodies(N0) == cluster.bodies(N1) == cluster.bodies(N2) == [b"X"]


@pytest.mark.parametrize("standing", list(Standing))
def test_only_members_with_standing_count_for_anything(standing: Standing) -> None:
    """Commit, linearizable reads, check-quorum and hand-over: the same question each time."""
    solo = Solo()
    solo.lead()
    solo.flush()
    solo.dispatch(N1)
    solo.respond(N1, PushKind.COMPARE, verified=0, standing=standing)
    read: Outcome[object] = Outcome()
    solo.node.reads.submit(solo.now_ms, read)
    solo.tick()

    solo.beat(N1, 2, standing=standing)
    solo.settle_quorum()
    solo.tick()
    handed: Outcome[object] = Outcome()
    solo.node.elector.transfer(N1, solo.now_ms, handed)
    solo.take()
    refused = not handed.pending and isinstance(handed.error, TransferFailedError)
    for _ in range(11):
        solo.beat(N1, standing=standing)
        solo.tick(100)

    assert (solo.state.commit_index == 0) is standing.counts
    assert read.pending is not standing.counts or solo.role is Role.FOLLOWER
    assert refused is not standing.counts
    assert (solo.role is Role.LEADER) is standing.counts


def test_an_append_that_only_a_member_without_standing_holds_stays_open() -> None:
    """Else it were answered before that member knows of the commit, and two disks lost in turn left no majority."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.wipe(N1)
    cluster.start(N1)
    cluster.drop(HeartbeatRequest, target=N1)
    cluster.crash(N2)

    outcome = cluster.append(N0, b"x")
    cluster.advance(500)

    assert cluster.bodies(N1) == [b"x"]
    assert outcome.pending or outcome.error.outcome == "unknown"
    assert cluster.commit(N0) < cluster[N0].log.last.index


# -- votes -----------------------------------------------------------------------------------------------------------


def test_members_without_standing_elect_only_together_with_all_others() -> None:
    """Of five, two without standing and two with it are four: it is the fifth who might remember."""
    solo = Solo(5)
    solo.time_out()
    solo.vote(N1, pre_vote=True)
    for one in (N2, N3):
        solo.vote(one, pre_vote=True, standing=Standing.DOUBTFUL)
    assert solo.state.term == 0

    solo.vote(N4, pre_vote=True, standing=Standing.BLANK, used=True)

    assert solo.state.term == 1
    for one in (N1, N2, N3):
        solo.vote(one, standing=Standing.DOUBTFUL)
    before = solo.role
    solo.vote(N4, standing=Standing.BLANK)
    assert (before, solo.role) == (Role.CANDIDATE, Role.LEADER)


def test_a_member_without_standing_votes_once_per_term_and_for_no_poorer_log() -> None:
    """The usual rules hold for its votes, too, and they are durable."""
    solo = Solo(terms=(1, 1), hard_state=HardState(Term(1)))

    assert not solo.ask_vote(N1, 2, EntryId(Term(1), LogIndex(0))).granted
    given = solo.ask_vote(N1, 2, EntryId(Term(1), LogIndex(1)))
    assert (given.granted, given.standing) == (True, Standing.BLANK)
    assert solo.state.hard_state == HardState(Term(2), N1)
    assert not solo.ask_vote(N2, 2, EntryId(Term(1), LogIndex(5))).granted


def test_blank_members_that_know_of_committed_entries_do_not_begin_anew() -> None:
    """All three disks were lost, one after the other, too fast: what is left is told, not taken for all there was."""
    solo = Solo(terms=(1,), committed=0, hard_state=HardState(Term(1)))
    solo.time_out()
    for one in (N1, N2):
        solo.vote(one, pre_vote=True, standing=Standing.BLANK)

    assert solo.role is Role.CANDIDATE
    solo.time_out()
    assert "a majority of the disks is new" in solo.node.elector.vote_problem


@pytest.mark.parametrize("other", [Standing.BLANK, Standing.FOUNDER])
def test_a_member_that_lost_its_log_begins_no_new_group(other: Standing) -> None:
    """It is empty and knows of no committed entry, and what it and others have set aside may have been acknowledged."""
    solo = Solo(hard_state=HardState(Term(1)).after_loss("its log was damaged"))
    solo.time_out()
    solo.vote(N1, pre_vote=True, standing=Standing.BLANK)
    solo.vote(N2, pre_vote=True, standing=other)

    assert solo.state.term == 1
    answer = solo.ask_vote(N1, 2, EntryId(Term(1), LogIndex(5)))
    assert (answer.standing, answer.used) == (Standing.BLANK, True)


# -- the way back ----------------------------------------------------------------------------------------------------


def test_standing_comes_back_with_an_entry_that_was_appended_later() -> None:
    """Not with what its leader had committed before it heard of it: that may be as old as the forgotten votes."""
    solo = Solo()
    solo.lead()
    solo.flush()
    solo.matches(N1, 0)
    solo.settle_quorum()
    assert solo.state.commit_index == 0

    solo.beat(N2, standing=Standing.BLANK, boot_id=9)
    (before,) = [m for target, m in solo.tick(100) if target == N2 and isinstance(m, HeartbeatRequest)]
    assert solo.log.last.index == 1, "an entry for it"
    solo.beat(N2, standing=Standing.BLANK, boot_id=9)
    solo.flush()
    solo.matches(N1, 1)
    solo.settle_quorum()
    (after,) = [m for target, m in solo.tick(100) if target == N2 and isinstance(m, HeartbeatRequest)]

    assert before.readmission is None
    assert after.readmission is not None
    assert (after.readmission.boot_id, after.readmission.index) == (9, 1)
    solo.beat(N2, standing=Standing.BLANK, boot_id=10)
    (again,) = [m for target, m in solo.tick(100) if target == N2 and isinstance(m, HeartbeatRequest)]
    assert again.readmission is None, "another process needs another entry"


def test_standing_is_not_taken_for_another_process_or_term() -> None:
    """The leader's word is for the process it heard, and for its own term."""
    for boot_id, term in ((99, 1), (1, 2)):
        solo = Solo(hard_state=HardState(Term(1)))
        solo.hear(N1, 1, readmission=Readmission(boot_id, LogIndex(5)))
        solo.hear(N1, term)
        solo.hear(N1, term, readmission=Readmission(99, LogIndex(-1)))

        assert not solo.state.has_standing


def test_the_vote_of_the_term_goes_to_the_leader_that_readmits() -> None:
    """An earlier life may have voted in this term, so nobody may get a second vote."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.wipe(N2)
    cluster.start(N2)
    cluster.advance_until(lambda: cluster[N2].saved.voter, 1000)

    assert cluster[N2].saved.vote == N0
    restarted = cluster.restart(N2)
    assert not restarted.elector.on_vote_request(
        N1, VoteRequest(cluster.term(N0), cluster[N0].log.last), cluster.now_ms
    ).granted


def test_a_restart_costs_no_standing() -> None:
    """Killed and started again on its disk, a member counts with its first answer."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.crash(N2)
    cluster.restart(N1)

    outcome = cluster.append(N0, b"x")
    cluster.advance(120)

    assert outcome.value
    assert cluster[N1].saved.standing is Standing.FULL


# -- terms -----------------------------------------------------------------------------------------------------------


def test_a_new_disk_joins_a_group_of_a_high_term() -> None:
    """It comes nearer with every heartbeat, instead of refusing its leader for ever."""
    cluster = Cluster(3, start=False)
    for one in (N0, N1):
        cluster[one].saved = HardState(Term(5_000_001), None, Standing.FULL)
        cluster.start(one)
    cluster.advance_until(lambda: cluster.leader() is not None)
    cluster.append(N0, b"x")
    cluster[N2].saved = HardState()
    cluster.start(N2)

    cluster.advance(3000)

    assert cluster.bodies(N2) == [b"x"]
    assert cluster[N2].saved.voter


def test_members_whose_terms_have_come_apart_find_together() -> None:
    """Whatever brought one of them there, for example forged votes: no operator is needed."""
    cluster = Cluster(3, start=False)
    for one, term in ((N0, 1), (N1, 9 * 10**6)):
        cluster[one].saved = HardState(Term(term), None, Standing.FULL)
        cluster.start(one)

    cluster.advance_until(lambda: cluster.leader() is not None, 20_000)
    cluster.advance(500)

    assert cluster.same_logs()


def test_a_forged_hand_over_raises_no_term() -> None:
    """Any number of votes that claim to be a hand-over, of terms each of which could be believed."""
    cluster = Cluster(3)
    cluster.elect()
    for number in range(1, 10):
        request = VoteRequest(Term(number * 10**6), EntryId(Term(10**9), LogIndex(9)), transfer=True)
        cluster[N2].node.answer(N1, request, cluster.now_ms)
        cluster.act(N2)
    cluster.advance(500)

    assert [cluster.term(one) for one in cluster.ids] == [1, 1, 1]
    assert cluster.leader() == N0


def test_a_hand_over_is_announced_before_the_target_campaigns() -> None:
    """Five members: the target needs votes of members who hear their leader well, and they need its word."""
    cluster = Cluster(5)
    cluster.elect()

    outcome = cluster.transfer(N0, N3)

    assert outcome.value.node_id == N3


# -- peers remember --------------------------------------------------------------------------------------------------


def _set_back(cluster: Cluster, node_id: str, index: int) -> None:
    """The disk of a stopped member is set back: it holds nothing above ``index`` and believes itself well."""
    host = cluster[N0 if node_id == "n0" else N1 if node_id == "n1" else N2]
    terms = [host.log.term_at(LogIndex(at)) for at in range(index + 1)]
    entries = host.log.read_range(LogIndex(0), LogIndex(index), 1 << 20)
    log = made_log()
    for term, entry in zip(terms, entries, strict=True):
        log.append_as_leader(term, [entry.body], entry.magic)
    log.flush()
    host.log = log


def _group_with_a_lagging_member() -> Cluster:
    """n0 leads; n0 and n1 hold three entries, n2 none of them; but it hears heartbeats."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.drops.append(lambda sent: sent.target == N2 and not isinstance(sent.message, HeartbeatRequest))
    for body in (b"a", b"b", b"c"):
        assert cluster.append(N0, body).value
    cluster.advance(250)
    return cluster


def test_a_disk_set_back_elects_nobody_without_what_it_acknowledged() -> None:
    """The follower that acknowledged is set back, the leader is lost, and the third member never had the entries.

    It knows by the leader's heartbeats what the other one held, and says so before that one's vote counts.
    """
    cluster = _group_with_a_lagging_member()
    cluster.crash(N1)
    cluster.crash(N0)
    _set_back(cluster, "n1", 1)
    cluster.heal()
    cluster.start(N1)

    cluster.advance(20_000)

    assert cluster.leader() is None
    assert cluster[N1].saved.standing is Standing.DOUBTFUL
    assert "n2 has a record that it held entry 3 of term 1; its log ends at 1" in cluster[N1].saved.doubt

    cluster.start(N0)
    cluster.advance_until(lambda: cluster.leader() is not None)
    cluster.advance(1000)
    assert cluster.leader() == N0
    assert cluster.bodies(N1) == cluster.bodies(N2) == [b"a", b"b", b"c"]
    assert cluster[N1].saved.standing is Standing.FULL


def test_a_leader_set_back_does_not_lead_again() -> None:
    """What a leader itself holds, its followers remember, too."""
    cluster = _group_with_a_lagging_member()
    cluster.crash(N0)
    cluster.crash(N1)
    _set_back(cluster, "n0", 1)
    cluster.heal()
    cluster.start(N0)

    cluster.advance(20_000)

    assert cluster.leader() is None
    assert cluster[N0].saved.standing is Standing.DOUBTFUL


def test_a_leader_does_not_count_a_follower_that_came_back_with_less() -> None:
    """Whoever hears first of it: the leader by the answer to a comparison, the follower by a heartbeat."""
    for silent in (HeartbeatRequest, HeartbeatResponse):
        cluster = Cluster(3)
        cluster.elect()
        for body in (b"a", b"b", b"c"):
            cluster.append(N0, body)
        cluster.advance(200)
        cluster.crash(N1)
        _set_back(cluster, "n1", 1)
        cluster.isolate(N2)
        cluster.drop(silent, target=N1 if silent is HeartbeatRequest else N0)
        cluster.start(N1)

        outcome = cluster.append(N0, b"d")
        cluster.advance(300)

        assert outcome.pending, silent
        cluster.heal()
        cluster.advance(3000)
        assert cluster.same_logs()
        assert cluster[N1].saved.standing is Standing.FULL


def test_what_was_truncated_is_not_missed() -> None:
    """A member that held more of a history that lost has lost nothing: a leader forgets what its own log lacks."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.partition([N0, N1], [N2])
    cluster.hold(target=N0, sender=N1)
    cluster.append(N0, b"on n0 and n1, not committed")
    cluster.advance(50)
    cluster.crash(N0)
    cluster.crash(N1)
    cluster.heal()
    cluster.start(N0)
    cluster.advance(3000)

    cluster.start(N1)
    cluster.advance(3000)

    assert all(cluster[one].saved.standing is Standing.FULL for one in cluster.ids)


def test_a_power_cut_with_asynchronous_flushes_and_a_dead_leader_lose_nothing_that_is_remembered() -> None:
    """Its log ends before what it acknowledged: with standing it and the lagging member would elect one of them."""
    cluster = Cluster(3, flush_mode=FlushMode.ASYNC)
    cluster.elect()
    cluster.drops.append(lambda sent: sent.target == N2 and not isinstance(sent.message, HeartbeatRequest))
    cluster[N1].flush_paused = True
    assert cluster.append(N0, b"X").value
    cluster.advance(150)
    cluster.crash(N0)
    cluster.crash(N1)
    cluster[N1].flush_paused = False
    cluster.heal()
    cluster.start(N1)

    cluster.advance(10_000)
    assert cluster.leader() is None

    cluster.start(N0)
    cluster.advance(3000)
    assert cluster.bodies(N1) == [b"X"]


def test_a_vote_for_one_who_remembers_more_counts_for_nothing_and_costs_no_standing() -> None:
    """Anybody may send a question in a member's name: only an answer to its own question takes standing for good."""
    solo = Solo(terms=(1, 1))
    last = EntryId(Term(1), LogIndex(5))

    told_more = solo.ask_vote(N1, 2, last, remembered=EntryId(Term(1), LogIndex(2)))
    told_all = solo.ask_vote(N2, 3, last, remembered=EntryId(Term(1), LogIndex(1)))

    assert (told_more.granted, told_more.standing) == (True, Standing.DOUBTFUL)
    assert (told_all.granted, told_all.standing) == (True, Standing.FULL)
    assert solo.state.standing is Standing.FULL


def test_nobody_is_told_what_nobody_remembers() -> None:
    """Without a memory the answer to a vote carries none."""
    assert Solo().ask_vote(N1, 1).remembered == NO_ENTRY


@pytest.mark.parametrize("compared", [None, True, False])
def test_a_question_states_what_the_voter_must_hold(*, compared: bool | None) -> None:
    """Also before anything was compared: it costs a voter no more than this vote, and it may have been set back.

    Found by the simulator (seed 51998): asked by one that had just started, such a member voted twice in a term.
    """
    solo = Solo(terms=(1,), committed=0)
    held = EntryId(Term(1), LogIndex(5))
    solo.state.remembered = {N1: held}
    if compared is not None:
        solo.state.agrees[N1] = compared

    asked = [m.remembered for target, m in solo.time_out() if target == N1 and isinstance(m, VoteRequest)]

    assert asked == [NO_ENTRY if compared is False else held]


def test_a_member_in_doubt_leads_no_term_that_it_has_led_before() -> None:
    """Found by the simulator (seed 300435): it was set back, and all who knew were restarted within a second.

    Both others have their votes of term 2 for it on their disks, and would give them again.
    """
    cluster = Cluster(3)
    cluster.elect(N0)
    saved = cluster[N0].saved
    assert saved.term == 1
    entries = cluster[N0].log.last.index
    cluster.restart(N0)
    cluster.drop(PushAppend, sender=N0)
    cluster.drop(HeartbeatRequest, sender=N0)
    cluster.advance_until(lambda: cluster.role(N0) is Role.LEADER)
    first = cluster.term(N0)
    assert first == 2
    lost = cluster[N0].log.last
    assert lost == EntryId(Term(2), LogIndex(entries + 1))

    for one in cluster.ids:
        cluster.crash(one)
    cluster[N0].log.truncate(LogIndex(entries + 1))
    cluster[N0].log.flush()
    assert cluster[N0].log.last.index == entries
    cluster[N0].saved = saved.doubted("its disk was set back")
    cluster.heal()
    for one in cluster.ids:
        cluster.start(one)
    cluster.advance_until(lambda: cluster.leader() is not None)

    leader = cluster.leader()
    assert leader is not None
    assert cluster.term(leader) > first, (leader, cluster.term(leader))


def test_the_memory_of_one_that_contradicts_ends_no_campaign() -> None:
    """What a member of another history remembers takes no standing; nor may it end the elections of the others."""
    solo = Solo(terms=(1, 1, 1), committed=2)
    solo.time_out()
    solo.state.contradicted_by.add(N2)
    held = EntryId(solo.state.term, LogIndex(5000))

    solo.vote(N2, granted=False, pre_vote=True, remembered=held)
    assert solo.state.has_standing
    solo.vote(N1, pre_vote=True, committed=stated(solo.state))
    solo.vote(N1, committed=stated(solo.state))

    assert solo.role is Role.LEADER
