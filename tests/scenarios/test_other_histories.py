"""A directory with the right identity and another history: it leads nobody, stops nobody, and is fenced."""

from __future__ import annotations

import pytest

from dledger.core.messages import CommittedEntry, HeartbeatRequest, PushKind, Readmission, VoteRequest
from dledger.errors import ResponseCode
from dledger.types import EntryId, HardState, LogIndex, NodeId, Role, Standing, Term
from tests.support.cluster import N0, N1, N2, Cluster, fill, made_log
from tests.support.disk_log import DiskLog
from tests.support.solo import Solo, Source


def _other_log(*terms: int, committed: int, shared: int = 0) -> DiskLog:
    """Entries that nobody else has: but the first ``shared``, whose bodies are those of ``fill``."""
    log = made_log()
    fill(log, *terms[:shared])
    for number, term in enumerate(terms[shared:]):
        log.append_as_leader(Term(term), [b"foreign %d" % number])
    log.flush()
    log.set_committed(LogIndex(committed))
    return log


def _put_in(cluster: Cluster, node_id: NodeId, log: DiskLog) -> None:
    """Start a member on a directory that is not of this group."""
    host = cluster[node_id]
    cluster.crash(node_id)
    host.log, host.saved = log, HardState(log.last.term, None, Standing.FULL)
    cluster.start(node_id)
    host.checked = 1 << 60  # what it holds as committed is not this group's


@pytest.mark.parametrize("committed", [-1, 0, 3, 39])
@pytest.mark.parametrize("leader", [N0, N1])
@pytest.mark.parametrize("shared", [0, 2])
def test_a_foreign_directory_with_a_longer_log_of_a_higher_term_never_leads(
    committed: int, leader: NodeId, shared: int
) -> None:
    """Not by its log, which is the newest of all; nor do the others stop, nor stop believing in themselves.

    Where nothing of it is committed it is a log that lost, and follows.
    """
    cluster = Cluster(3, logs={one: _common() for one in (N0, N1, N2)})
    cluster.elect()
    assert cluster.append(N0, b"ours").value
    cluster.advance(300)
    _put_in(cluster, leader, _other_log(*[1] * shared, *[9] * (40 - shared), committed=committed, shared=shared))

    led = set()
    for _ in range(200):
        cluster.advance(50)
        led.add(cluster.leader())
    second = cluster.append(cluster.leader() or N2, b"more")
    cluster.advance(300)

    assert leader not in led
    assert second.value
    sound = [one for one in cluster.ids if one != leader]
    assert all(cluster[one].saved.standing is Standing.FULL and not cluster[one].node.state.fenced for one in sound)
    assert [cluster.bodies(one)[-2:] for one in sound] == [[b"ours", b"more"]] * 2
    state = cluster[leader].node.state
    if committed >= shared:
        assert "committed different entries than this member" in state.fenced
        assert cluster[leader].saved.standing is Standing.DOUBTFUL
    else:
        assert cluster.bodies(leader)[-2:] == [b"ours", b"more"]


def _common() -> DiskLog:
    log = made_log()
    fill(log, 1, 1, 1, 1, committed=2)
    return log


def test_what_a_foreign_directory_remembers_is_believed_by_nobody() -> None:
    """Else its memory of the other members would make all of them doubt themselves, and nobody could be elected."""
    cluster = Cluster(3, logs={one: _common() for one in (N0, N1, N2)})
    cluster.elect()
    _put_in(cluster, N2, _other_log(*[9] * 40, committed=30))
    cluster[N2].node.state.remembered = dict.fromkeys((N0, N1), EntryId(Term(9), LogIndex(39)))

    cluster.advance(5000)

    assert cluster.leader() in (N0, N1)
    assert [cluster[one].saved.standing for one in (N0, N1)] == [Standing.FULL] * 2
    assert cluster[N2].node.state.fenced


def test_a_member_that_the_leader_of_a_majority_contradicts_is_fenced() -> None:
    """It refuses the leader's entries; when the leader says the same of itself at its own address, that decides."""
    cluster = Cluster(3, logs={one: _common() for one in (N0, N1)})
    cluster.crash(N2)
    cluster.elect()
    assert cluster.append(N0, b"new").value
    cluster.crash(N1)
    _put_in(cluster, N2, _other_log(1, 1, 1, 1, 1, 1, committed=5))
    cluster[N0].node.connection_lost(N1)

    cluster.advance_until(lambda: bool(cluster[N2].node.state.fenced), 500)

    assert cluster[N2].node.state.fenced == "n0 committed different entries than this member"
    assert cluster[N2].saved.standing is Standing.DOUBTFUL
    cluster.start(N1)
    cluster.advance(10_000)
    assert cluster[N2].saved.standing is Standing.DOUBTFUL, "what it has committed is no agreement"
    assert cluster.append(cluster.leader() or N0, b"x").value


@pytest.mark.parametrize("standing", [Standing.FULL, Standing.DOUBTFUL, Standing.BLANK])
def test_a_fenced_member_is_fenced_after_a_restart_and_helps_elect_nobody(standing: Standing) -> None:
    """Alone with one that has nothing to compare, it would serve what it holds, and give its vote, once more."""
    solo = Solo(terms=(1,) * 6, committed=5, hard_state=HardState(Term(1), None, standing))
    solo.campaign()
    solo.state.fence("n1, n2 committed different entries than this member", 0)
    assert solo.role is Role.FOLLOWER

    again = Solo(log=solo.log, hard_state=solo.state.hard_state)
    asked = again.ask_vote(N1, 9, EntryId(Term(8), LogIndex(99)))
    again.hear(N2, 9, readmission=Readmission(1, LogIndex(-1)), founded=True)
    again.time_out()

    assert again.state.fenced == "n1, n2 committed different entries than this member"
    assert not asked.granted
    assert (again.state.standing, again.role, again.sent(VoteRequest)) == (Standing.DOUBTFUL, Role.FOLLOWER, [])


def _answer(solo: Solo, sender: NodeId, *, same: bool) -> None:
    """A member that was asked states its history."""
    crc = solo.log.chain_crc_at(LogIndex(0)) ^ (not same)
    solo.vote(sender, granted=False, pre_vote=True, committed=(CommittedEntry(LogIndex(0), crc),))


def test_who_has_agreed_since_contradicts_no_more() -> None:
    """Its directory was exchanged: what most members say is what they say now."""
    solo = Solo(terms=(1,), committed=0)
    _answer(solo, N1, same=False)
    _answer(solo, N1, same=True)

    _answer(solo, N2, same=False)
    before = solo.state.fenced
    _answer(solo, N1, same=False)

    assert (before, bool(solo.state.fenced)) == ("", True)


def test_the_memory_of_one_that_contradicts_takes_no_standing() -> None:
    """It remembers what a member of another history held."""
    solo = Solo(terms=(1,), committed=0)
    other = (CommittedEntry(LogIndex(0), solo.log.chain_crc_at(LogIndex(0)) ^ 1),)

    held = EntryId(Term(1), LogIndex(9))
    solo.vote(N1, granted=False, pre_vote=True, committed=other, remembered=held)
    assert solo.state.has_standing
    solo.vote(N2, granted=False, pre_vote=True, remembered=held)

    assert not solo.state.has_standing


def test_a_leader_is_not_fenced_by_answers() -> None:
    """A majority elected it: whoever contradicts it is asked by it to follow, and fenced then."""
    solo = Solo(terms=(1,), committed=0)
    solo.lead()

    _answer(solo, N1, same=False)
    _answer(solo, N2, same=False)

    assert (solo.role, solo.state.fenced) == (Role.LEADER, "")


def test_only_the_leader_of_the_present_term_fences_alone() -> None:
    """What it said in an earlier term may have been said by another log than the one that most have elected now."""
    solo = Solo(terms=(1,), committed=0)
    solo.hear(N1, 3)
    other = (CommittedEntry(LogIndex(0), solo.log.chain_crc_at(LogIndex(0)) ^ 1),)

    solo.vote(N1, granted=False, pre_vote=True, term=2, leads=True, committed=other)
    before = solo.state.fenced
    solo.vote(N1, granted=False, pre_vote=True, term=3, leads=True, committed=other)

    assert (before, bool(solo.state.fenced)) == ("", True)


def test_a_forged_push_fences_nobody() -> None:
    """Anybody may say that he is the leader; the leader itself, when asked, has committed the same."""
    solo = Solo(terms=(1, 1, 1), committed=2)
    leader = Source(2, 1, 1, 1)
    solo.push(N1, leader.compare(2))
    other = Source(2, 1, 1, 1)
    other.log = _other_log(1, 1, 1, committed=2)

    (answer,) = solo.push(N1, other.compare(1, epoch=5))

    assert (answer.code, answer.kind) == (ResponseCode.OTHER_HISTORY, PushKind.COMPARE)
    for index in range(3):
        told = (CommittedEntry(LogIndex(index), leader.log.chain_crc_at(LogIndex(index))),)
        solo.vote(N1, granted=False, pre_vote=True, committed=told, leads=True)
    assert not solo.state.fenced
    assert solo.state.has_standing


def test_the_other_half_of_a_comparison_is_the_voters() -> None:
    """A candidate that has committed less states what the voter can look up; it is refused, and learns why."""
    solo = Solo(terms=(1,) * 6, committed=5)
    stranger = _other_log(1, 1, 1, 9, committed=2)
    told = (CommittedEntry(LogIndex(2), stranger.chain_crc_at(LogIndex(2))),)

    request = VoteRequest(Term(10), stranger.last, committed=told)
    answer = solo.node.answer(N1, request, 0)

    assert not answer.granted  # type: ignore[union-attr]  # a vote's answer
    assert answer.other_history  # type: ignore[union-attr]  # a vote's answer


@pytest.mark.parametrize("index", [4, 9])
def test_a_vote_of_one_who_committed_what_the_candidate_lacks_counts_for_nothing(index: int) -> None:
    """Neither what is missing nor what is another entry there: the candidate may not lead, whoever votes for it."""
    solo = Solo(terms=(1,) * 6, committed=3)
    solo.time_out()

    solo.vote(N1, pre_vote=True, committed=(CommittedEntry(LogIndex(index), 12345),))

    assert (solo.role, solo.state.term) == (Role.CANDIDATE, 1)


def test_members_of_earlier_versions_state_nothing_and_count_as_before() -> None:
    """In a mixed group nothing is compared with them, and nothing is held against them."""
    solo = Solo(terms=(1,) * 6, committed=3)
    solo.campaign()
    solo.vote(N1)

    assert solo.role is Role.LEADER
    assert not solo.state.contradicted_by


def test_an_uncommitted_entry_of_another_term_contradicts_nobody() -> None:
    """A deposed leader's rest is no history: its member votes for whoever has committed more."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.isolate(N0)
    cluster.append(N0, b"never committed")
    cluster.advance_until(lambda: cluster.leader() == N1, 2000)
    assert cluster.append(N1, b"a").value
    cluster.crash(N2)
    cluster.crash(N1)
    cluster.heal()
    cluster.drop(HeartbeatRequest, target=N0)
    cluster.start(N1)

    cluster.advance_until(lambda: cluster.role(N1) is Role.LEADER, 5000)

    assert not cluster[N0].node.state.contradicted_by
