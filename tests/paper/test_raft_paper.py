"""The rules of the Raft paper, one test each, in the order of the list that etcd's raft keeps of them.

Sections are those of the extended paper (Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm").
Where this core differs in form (pre-vote before a campaign, heartbeats apart from appends, a durable watermark as
acknowledgement) the rule is tested in that form.
"""

from __future__ import annotations

import random as random_module
from collections.abc import Callable

import pytest

from dledger.core.member_state import Candidate, Follower, Leader
from dledger.core.messages import (
    HeartbeatRequest,
    PushAppend,
    PushCompare,
    PushKind,
    PushResponse,
    VoteRequest,
    VoteResponse,
)
from dledger.errors import ResponseCode
from dledger.types import NO_ENTRY, EntryId, HardState, LogIndex, Magic, NodeId, Role, Standing, Term
from tests.support.cluster import N0, N1, N2, N3, N4, Cluster, Outcome, made_log
from tests.support.solo import Solo, Source, load_runs

ROLES = (Role.FOLLOWER, Role.CANDIDATE, Role.LEADER)
RANDOM_ROUNDS = 1000


def entry(term: int, index: int) -> EntryId:
    return EntryId(Term(term), LogIndex(index))


def in_role(role: Role) -> Solo:
    """A member of that role in term 1."""
    solo = Solo(hard_state=HardState(Term(0 if role is not Role.FOLLOWER else 1), standing=Standing.FULL))
    if role is Role.CANDIDATE:
        solo.campaign()
    if role is Role.LEADER:
        solo.lead()
    solo.take()
    assert (solo.role, solo.state.term) == (role, 1)
    return solo


# -- §5.1 ----------------------------------------------------------------------------------------------------------


def check_update_term_from_message(role: Role) -> None:
    """Every kind of message of a later term makes the member a follower of that term."""
    source = Source(2, 2)
    arrivals: list[Callable[[Solo], object]] = [
        lambda solo: solo.hear(N1, 2),
        lambda solo: solo.beat(N1, term=2),
        lambda solo: solo.ask_vote(N1, 2, entry(2, 9), transfer=True),  # the leader's word for it: below
        lambda solo: solo.vote(N1, granted=False, term=2),
        lambda solo: solo.push(N1, source.compare(-1)),
        lambda solo: solo.push(N1, source.append(0)),
        lambda solo: solo.respond(N1, PushKind.APPEND, ResponseCode.EXPIRED_TERM, term=2),
    ]
    for arrive in arrivals:
        solo = in_role(role)
        if isinstance(solo.state.role, Follower | Leader):
            solo.state.role.transfer_target = N1

        arrive(solo)

        assert solo.state.term == 2
        assert solo.role is Role.FOLLOWER


def test_follower_update_term_from_message() -> None:
    """§5.1: if one server's current term is smaller than the other's, it updates its term to the larger value."""
    check_update_term_from_message(Role.FOLLOWER)


def test_candidate_update_term_from_message() -> None:
    """§5.1: a candidate that discovers that its term is out of date immediately reverts to follower state."""
    check_update_term_from_message(Role.CANDIDATE)


def test_leader_update_term_from_message() -> None:
    """§5.1: a leader that discovers that its term is out of date immediately reverts to follower state."""
    check_update_term_from_message(Role.LEADER)


@pytest.mark.parametrize("role", ROLES)
def test_reject_stale_term_message(role: Role) -> None:
    """§5.1: a request with a stale term number is rejected, and the answer tells the current term."""
    solo = in_role(role)
    solo.state.become_follower(Term(3), None, 0)
    source = Source(2, 1, 2)
    before = solo.log.last

    assert solo.hear(N1, 2).term == 3
    vote = solo.ask_vote(N1, 2, entry(2, 9))
    assert (vote.granted, vote.term) == (False, 3)
    pre_vote = solo.ask_vote(N1, 2, entry(2, 9), pre_vote=True)
    assert (pre_vote.granted, pre_vote.term) == (False, 3)
    for push in (source.compare(-1), source.append(0)):
        (answer,) = solo.push(N1, push)
        assert (answer.code, answer.term) == (ResponseCode.EXPIRED_TERM, 3)
    solo.vote(N1, term=1)
    solo.beat(N1, term=1)
    solo.respond(N1, PushKind.APPEND, term=1)

    assert (solo.role, solo.state.leader_id, solo.log.last) == (Role.FOLLOWER, None, before)


# -- §5.2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", [0, 4])
def test_start_as_follower(term: int) -> None:
    """§5.2: when servers start up, they begin as followers (also those that led before)."""
    solo = Solo(hard_state=HardState(Term(term), N0 if term else None, standing=Standing.FULL))

    assert isinstance(solo.state.role, Follower)
    assert solo.state.term == term
    assert solo.take() == []


def test_leader_bcast_beat() -> None:
    """§5.2: leaders send periodic heartbeats to all followers to maintain their authority."""
    solo = in_role(Role.LEADER)
    interval = solo.config.election.heartbeat_interval_ms

    assert solo.tick(interval - 1) == []
    for _ in range(3):
        beats = solo.tick(interval)
        assert [target for target, message in beats if isinstance(message, HeartbeatRequest)] == [N1, N2]
        assert all(isinstance(message, HeartbeatRequest) and message.term == 1 for _, message in beats)
        solo.beat(N1)


def check_non_leader_starts_election(role: Role) -> None:
    solo = in_role(role)
    timeout = solo.config.election.election_timeout_ms_max
    assert solo.tick(solo.config.election.election_timeout_ms_min - 1) == []

    asked = solo.tick(timeout)

    assert isinstance(solo.state.role, Candidate)
    assert solo.state.term == 1  # asking disturbs nobody (pre-vote)
    question = VoteRequest(Term(2), solo.log.last, pre_vote=True, countersign=solo.state.countersign)
    assert asked == [(peer, question) for peer in (N1, N2)]
    solo.vote(N1, pre_vote=True)
    assert solo.state.term == 2
    assert solo.state.hard_state.vote == N0
    assert solo.take() == [(peer, VoteRequest(Term(2), solo.log.last)) for peer in (N1, N2)]


def test_follower_start_election() -> None:
    """§5.2: a follower that hears nothing over the election timeout increments its term, votes for itself and asks."""
    check_non_leader_starts_election(Role.FOLLOWER)


def test_candidate_start_new_election() -> None:
    """§5.2: a candidate whose election yields no winner times out and starts a new one in a new term."""
    check_non_leader_starts_election(Role.CANDIDATE)


@pytest.mark.parametrize(
    ("size", "granting", "refusing", "role"),
    [
        (1, 0, 0, Role.LEADER),
        (3, 2, 0, Role.LEADER),
        (3, 1, 0, Role.LEADER),
        (3, 1, 1, Role.LEADER),
        (3, 0, 2, Role.CANDIDATE),
        (3, 0, 0, Role.CANDIDATE),
        (5, 4, 0, Role.LEADER),
        (5, 3, 0, Role.LEADER),
        (5, 2, 0, Role.LEADER),
        (5, 2, 2, Role.LEADER),
        (5, 1, 3, Role.CANDIDATE),
        (5, 1, 0, Role.CANDIDATE),
        (5, 0, 4, Role.CANDIDATE),
        (5, 0, 0, Role.CANDIDATE),
    ],
)
def test_leader_election_in_one_round_rpc(size: int, granting: int, refusing: int, role: Role) -> None:
    """§5.2: a candidate wins with the votes of a majority of the full cluster, and only then."""
    solo = Solo(size)
    solo.campaign()
    peers = solo.state.peers

    for peer in peers[: min(granting, solo.state.quorum - 1)]:
        solo.vote(peer)
    for peer in peers[granting : granting + refusing]:
        solo.vote(peer, granted=False)

    assert (solo.role, solo.state.term) == (role, 1)


@pytest.mark.parametrize(
    ("vote", "asks", "granted"),
    [(None, N1, True), (None, N2, True), (N1, N1, True), (N2, N2, True), (N1, N2, False), (N2, N1, False)],
)
def test_follower_vote(vote: NodeId | None, asks: NodeId, granted: bool) -> None:
    """§5.2: each server votes for at most one candidate in a given term, first come first served."""
    solo = Solo(hard_state=HardState(Term(1), vote, standing=Standing.FULL))

    response = solo.ask_vote(asks, 1)

    assert response == VoteResponse(Term(1), granted, False, response.result, boot_id=1)
    assert solo.state.hard_state.vote == (asks if granted else vote)


@pytest.mark.parametrize("term", [1, 2])
def test_candidate_fallback(term: int) -> None:
    """§5.2: a candidate that hears a leader of at least its own term returns to follower state."""
    solo = in_role(Role.CANDIDATE)

    solo.hear(N2, term)

    assert (solo.role, solo.state.term, solo.state.leader_id) == (Role.FOLLOWER, term, N2)


def timeouts_of(role: Role) -> set[int]:
    """The election timeouts that a member of that role draws, in ms."""
    solo = Solo(random=random_module.Random(20140622))
    found = set()
    for _ in range(RANDOM_ROUNDS):
        if role is Role.FOLLOWER:
            solo.state.become_follower(solo.state.term, None, solo.now_ms)
        else:
            solo.state.become_candidate(solo.now_ms, pre_vote=False)
        found.add(solo.node.elector.step(solo.now_ms))
    assert None not in found
    return {due - solo.now_ms for due in found if due is not None}


def check_timeouts_are_randomized(role: Role) -> None:
    drawn = timeouts_of(role)

    assert min(drawn) >= 500
    assert max(drawn) < 1000
    assert len(drawn) > 300


def test_follower_election_timeout_randomized() -> None:
    """§5.2: a follower's election timeout is chosen randomly from a fixed interval."""
    check_timeouts_are_randomized(Role.FOLLOWER)


def test_candidate_election_timeout_randomized() -> None:
    """§5.2: each candidate restarts its randomized election timeout at the start of an election."""
    check_timeouts_are_randomized(Role.CANDIDATE)


def check_timeouts_rarely_conflict(role: Role) -> None:
    members = [Solo(5, random=random_module.Random(seed)) for seed in range(5)]
    conflicts = 0
    for _ in range(RANDOM_ROUNDS):
        dues = []
        for solo in members:
            if role is Role.FOLLOWER:
                solo.state.become_follower(solo.state.term, None, 0)
            else:
                solo.state.become_candidate(0, pre_vote=False)
            dues.append(solo.node.elector.step(0))
        first, second = sorted(due for due in dues if due is not None)[:2]
        conflicts += second - first < 5  # nearer together than a vote takes

    assert conflicts / RANDOM_ROUNDS < 0.3


def test_followers_election_timeout_nonconflict() -> None:
    """§5.2: in most cases only a single server times out, wins, and sends heartbeats before any other times out."""
    check_timeouts_rarely_conflict(Role.FOLLOWER)


def test_candidates_election_timeout_nonconflict() -> None:
    """§5.2: randomized timeouts make another split vote in the new election unlikely."""
    check_timeouts_rarely_conflict(Role.CANDIDATE)


# -- §5.3 ----------------------------------------------------------------------------------------------------------


def leading(size: int = 3) -> Solo:
    """A leader of term 1 whose no-op (entry 0) is committed and whose peers are all caught up."""
    solo = Solo(size)
    solo.lead()
    solo.flush()
    for peer in solo.state.peers:
        solo.streaming(peer)
    solo.settle_quorum()
    assert solo.state.commit_index == 0
    return solo


def append(solo: Solo, body: bytes) -> Outcome[object]:
    outcome: Outcome[object] = Outcome()
    solo.node.quorum_ack.append([body], solo.now_ms, outcome)
    solo.take()
    return outcome


def test_leader_start_replication() -> None:
    """§5.3: the leader appends the command to its log, then sends it to all others, with the preceding entry's id."""
    solo = leading()

    outcome = append(solo, b"some data")

    assert solo.log.last == entry(1, 1)
    assert solo.log.read(LogIndex(1)).body == b"some data"
    for peer in (N1, N2):
        assert load_runs(solo.dispatch(peer)) == [(1, 1)]
    assert solo.log.read_run(LogIndex(1), LogIndex(1)).previous == entry(1, 0)
    assert outcome.pending
    assert solo.state.commit_index == 0


def test_leader_commit_entry() -> None:
    """§5.3: once the entry is safely replicated it is committed, answered, and its commit index told to all."""
    solo = leading()
    outcome = append(solo, b"some data")
    solo.flush()
    solo.dispatch(N1)

    solo.respond(N1, PushKind.APPEND, verified=1)
    solo.settle_quorum()

    assert solo.state.commit_index == 1
    assert not outcome.pending
    append(solo, b"next")
    for peer in (N1, N2):
        (first, *_) = solo.dispatch(peer)
        assert getattr(first, "commit_index", None) == 1


@pytest.mark.parametrize(
    ("size", "acknowledging", "committed"),
    [(1, 0, True), (3, 0, False), (3, 1, True), (3, 2, True), (5, 0, False), (5, 1, False), (5, 2, True), (5, 4, True)],
)
def test_leader_acknowledge_commit(size: int, acknowledging: int, committed: bool) -> None:
    """§5.3: an entry is committed once a majority of all servers stores it, its leader's own flush included."""
    solo = leading(size)
    outcome = append(solo, b"some data")
    for peer in solo.state.peers[:acknowledging]:
        solo.dispatch(peer)
        solo.respond(peer, PushKind.APPEND, verified=1)
    solo.settle_quorum()
    assert outcome.pending or acknowledging >= solo.state.quorum  # without its own flush it counts for nobody

    solo.flush()
    solo.settle_quorum()

    assert (solo.state.commit_index == 1) is committed
    assert outcome.pending is not committed


@pytest.mark.parametrize("terms", [(), (2,), (1, 2), (1,)])
def test_leader_commit_preceding_entries(terms: tuple[int, ...]) -> None:
    """§5.3: committing an entry commits all preceding ones, those of earlier leaders too."""
    solo = Solo(terms=terms, hard_state=HardState(Term(2), standing=Standing.FULL))
    solo.lead()
    append(solo, b"some data")
    solo.flush()

    solo.streaming(N1)
    solo.settle_quorum()

    assert solo.state.commit_index == len(terms) + 1
    held = solo.log.read_range(LogIndex(0), solo.log.last.index, 1 << 20)
    assert [one.term for one in held] == [*terms, 3, 3]
    assert held[-2].magic is Magic.NOOP


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("commit", [0, 1, 2])
def test_follower_commit_entry(count: int, commit: int) -> None:
    """§5.3: a follower that learns that an entry is committed commits it, as far as it holds it."""
    solo = Solo()
    source = Source(1, *[1] * count)
    solo.push(N1, source.compare(-1))

    solo.push(N1, source.append(0, commit=commit))

    assert solo.state.commit_index == min(commit, count - 1)


@pytest.mark.parametrize(
    ("asked", "code", "conflict"),
    [
        (entry(-1, -1), ResponseCode.SUCCESS, NO_ENTRY),
        (entry(1, 0), ResponseCode.SUCCESS, NO_ENTRY),
        (entry(2, 1), ResponseCode.SUCCESS, NO_ENTRY),
        (entry(1, 1), ResponseCode.INCONSISTENT_STATE, entry(2, 1)),
        (entry(3, 3), ResponseCode.INCONSISTENT_STATE, NO_ENTRY),
    ],
)
def test_follower_check_append(asked: EntryId, code: ResponseCode, conflict: EntryId) -> None:
    """§5.3: a follower that has no entry of that index and term refuses, and tells where its log conflicts."""
    solo = Solo(terms=(1, 2))
    chain = solo.log.chain_crc_at(asked.index) if asked.index <= 1 else 0

    (answer,) = solo.push(N1, PushCompare(Term(4), 1, asked, chain))

    assert answer.code is code
    assert answer.conflict == conflict
    assert answer.end_index == 1


@pytest.mark.parametrize(
    ("own", "theirs", "first"),
    [
        ((1, 2), (1, 2, 3), 2),
        ((1, 2), (1, 3, 4), 1),
        ((), (1,), 0),
        ((1, 2), (3,), 0),
        ((1, 2), (1, 2), 1),
        ((1, 2, 2, 2), (1, 2, 3), 2),
    ],
)
def test_follower_append_entries(own: tuple[int, ...], theirs: tuple[int, ...], first: int) -> None:
    """§5.3: a follower deletes its entry that conflicts and all that follow it, then appends what it lacks."""
    cluster = Cluster(2, logs={N0: made_log(*theirs), N1: made_log(*own)})

    cluster.elect()

    new = max((*theirs, *own)) + 1
    assert cluster.terms(N1)[:-1] == list(theirs)
    assert cluster.terms(N1)[-1] == new
    assert cluster.same_logs()
    assert cluster[N1].log.read_range(LogIndex(0), LogIndex(first), 1 << 20)


FIGURE_7_LEADER = (1, 1, 1, 4, 4, 5, 5, 6, 6, 6)


@pytest.mark.parametrize(
    "follower",
    [
        pytest.param((1, 1, 1, 4, 4, 5, 5, 6, 6), id="a"),
        pytest.param((1, 1, 1, 4), id="b"),
        pytest.param((1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6), id="c"),
        pytest.param((1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7), id="d"),
        pytest.param((1, 1, 1, 4, 4, 4, 4), id="e"),
        pytest.param((1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3), id="f"),
    ],
)
def test_leader_sync_follower_log(follower: tuple[int, ...]) -> None:
    """§5.3, figure 7: a leader brings any follower log into agreement with its own, without removing what matches."""
    logs = {N0: made_log(*FIGURE_7_LEADER), N1: made_log(*follower), N2: made_log(1)}
    cluster = Cluster(3, logs=logs)
    for host in cluster.hosts.values():
        host.node.state.become_follower(Term(7), None, 0)
    common = [mine == theirs for mine, theirs in zip(FIGURE_7_LEADER, follower, strict=False)]
    matching = common.index(False) if False in common else len(common)
    kept = [cluster[N1].log.record_bytes(LogIndex(index)) for index in range(matching)]

    cluster.deliver_election(N0, [N2])
    cluster.advance(3000)

    assert cluster.terms(N1) == [*FIGURE_7_LEADER, 8]
    assert cluster.same_logs()
    assert [cluster[N1].log.record_bytes(LogIndex(index)) for index in range(matching)] == kept
    answers = [sent.message for sent in cluster.delivered if sent.sender == N1]
    compares = [one for one in answers if isinstance(one, PushResponse) and one.kind is PushKind.COMPARE]
    assert len(compares) <= 6  # a term at a time, not an entry at a time


# -- §5.4 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [(1,), (1, 2)])
def test_vote_request(terms: tuple[int, ...]) -> None:
    """§5.4.1: the vote request includes information about the candidate's log and goes to every other member."""
    solo = Solo(terms=terms)

    solo.campaign()

    requests = [(target, message) for target, message in solo.take() if isinstance(message, VoteRequest)]
    last = entry(terms[-1], len(terms) - 1)
    assert requests == [(peer, VoteRequest(Term(terms[-1] + 1), last)) for peer in (N1, N2)]


@pytest.mark.parametrize("pre_vote", [False, True])
@pytest.mark.parametrize(
    ("own", "last", "granted"),
    [
        ((1,), (1, 0), True),
        ((1,), (1, 1), True),
        ((1, 1), (1, 0), False),
        ((1,), (2, 0), True),
        ((1,), (2, 1), True),
        ((1, 1), (2, 0), True),
        ((2,), (1, 0), False),
        ((2,), (1, 1), False),
        ((2, 2), (1, 0), False),
        ((1, 1), (1, 1), True),
    ],
)
def test_voter(own: tuple[int, ...], last: tuple[int, int], granted: bool, pre_vote: bool) -> None:
    """§5.4.1: the voter denies its vote if its own log is more up-to-date: by the last term first, then by length."""
    solo = Solo(terms=own)

    response = solo.ask_vote(N1, 3, entry(*last), pre_vote=pre_vote)

    assert response.granted is granted


@pytest.mark.parametrize(("match", "commit"), [(0, -1), (1, -1), (2, 2)])
def test_leader_only_commits_log_from_current_term(match: int, commit: int) -> None:
    """§5.4.2: only entries of the leader's current term are committed by counting replicas."""
    solo = Solo(terms=(1, 2))
    solo.lead()
    solo.flush()
    solo.streaming(N1, match=match)

    solo.settle_quorum()

    assert solo.log.last == entry(3, 2)
    assert solo.state.commit_index == commit


def figure_8_c() -> Cluster:
    """S1 to S5 are n0 to n4. S1 leads term 4; a majority holds its entry of term 2, nobody else the one of term 4.

    Before: (a) S1 led term 2 and replicated entry 1 to S2 only; (b) S5 led term 3 and wrote another entry 1.
    """
    logs = {
        N0: made_log(1, 2, committed=0),
        N1: made_log(1, 2, committed=0),
        N2: made_log(1, committed=0),
        N3: made_log(1, committed=0),
        N4: made_log(1, 3, committed=0),
    }
    cluster = Cluster(5, logs=logs, push_bytes_max=1)
    for host in cluster.hosts.values():
        host.node.state.become_follower(Term(3), None, 0)
    cluster.partition([N0, N1, N2], [N3, N4])
    cluster.drops.append(lambda sent: isinstance(sent.message, PushAppend) and sent.message.run.last_index >= 2)
    cluster.deliver_election(N0, [N1, N2])
    assert [cluster.terms(one) for one in cluster.ids] == [[1, 2, 4], [1, 2], [1, 2], [1], [1, 3]]
    assert cluster.commit(N0) == 0
    return cluster


def test_figure_8_d() -> None:
    """§5.4.2, figure 8 (d): an entry of an old term on a majority may still be overwritten, so it is not committed."""
    cluster = figure_8_c()
    for one in (N0, N1):
        cluster.crash(one)
    cluster.heal()

    cluster.advance(5000)
    for one in (N0, N1):
        cluster.start(one)
    cluster.advance(5000)

    assert cluster.leader() == N4
    assert cluster.terms(N0)[:2] == [1, 3]
    assert cluster.same_logs()


def test_figure_8_e() -> None:
    """§5.4.2, figure 8 (e): once an entry of the leader's own term is on a majority, the earlier ones are committed."""
    cluster = figure_8_c()
    cluster.drops.clear()
    cluster.advance(1500)
    assert cluster.commit(N0) == 2
    for one in (N0, N1):
        cluster.crash(one)
    cluster.heal()

    cluster.advance(5000)

    assert cluster.leader() == N2
    assert cluster.terms(N4)[:3] == [1, 2, 4]
