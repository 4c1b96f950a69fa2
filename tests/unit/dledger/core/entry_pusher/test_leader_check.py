"""Pushes are taken from a leader that says so where it is asked, and from nobody who only claims to be it."""

from __future__ import annotations

import pytest

from dledger.core.log_matching import LeaderCheck
from dledger.core.member_state import Follower
from dledger.core.messages import (
    HeartbeatRequest,
    PushCommit,
    PushCompare,
    PushInstall,
    PushResponse,
    PushTruncate,
    Readmission,
    VoteRequest,
    VoteResponse,
)
from dledger.errors import ResponseCode
from dledger.types import GENESIS, Boundary, EntryId, HardState, LogIndex, Position, Standing, Term
from tests.support.cluster import N0, N1, N2, Cluster
from tests.support.solo import Solo, Source

FORGED = Term(9)
FAR = EntryId(FORGED, LogIndex(10**6))


def follower() -> tuple[Solo, Source]:
    """Three entries, two of them committed, taken from n1, which leads term 1."""
    solo, source = Solo(), Source(1, 1, 1, 1)
    solo.push(N1, source.compare(-1))
    solo.push(N1, source.append(0, 2, commit=1))
    return solo, source


def facts(solo: Solo) -> tuple[object, ...]:
    state = solo.state
    return state.term, state.leader_id, state.commit_index, solo.log.begin, solo.log.last, state.hard_state


@pytest.mark.parametrize(
    "forged",
    [
        PushCompare(FORGED, 10**6, EntryId(Term(1), LogIndex(1)), 123),
        PushTruncate(FORGED, 10**6, EntryId(Term(7), LogIndex(2)), 123),
        PushCommit(FORGED, 10**6, LogIndex(2)),
        PushInstall(FORGED, 10**6, FAR, 7, Position(1 << 40)),
    ],
)
def test_a_push_of_one_that_does_not_lead_changes_nothing(
    forged: PushCompare | PushTruncate | PushCommit | PushInstall,
) -> None:
    """Whoever connects may name any member and any term; the member itself says at its own address that it does not.

    Not even the term is taken over, and the real leader's pushes are taken as before.
    """
    solo, source = follower()
    before = facts(solo)

    answers = solo.push(N2, forged, confirm=False)
    solo.confirm(N2, 1, leads=False)

    assert answers == []
    assert facts(solo) == before
    assert solo.node.handler.leader_check.refused == 1
    assert [answer.code for answer in solo.push(N1, source.compare(2))] == [ResponseCode.SUCCESS]


def test_who_says_that_it_does_not_lead_is_not_believed_whatever_it_hears() -> None:
    """A forger may use the present term: the member in whose name it speaks hears that term's leader, and says so."""
    solo, source = Solo(), Source(4, 1)

    answers = solo.push(N2, source.compare(-1), confirm=False)
    solo.confirm(N2, 4, leads=False)

    assert answers == []
    assert (solo.state.leader_id, solo.node.handler.leader_check.refused) == (None, 1)


def test_what_was_confirmed_of_one_install_is_not_believed_of_another() -> None:
    """Each would drop the whole log: the leader was asked about the first one only."""
    leader_check = LeaderCheck(Solo().state)
    asked, other = (PushInstall(Term(1), 1, EntryId(Term(1), LogIndex(at)), 7, Position(at)) for at in (10, 20))
    confirmed = VoteResponse(Term(1), False, True, leads=True, begin=Boundary(LogIndex(10), Term(1), Position(10), 7))
    leader_check.hold(N1, asked, 0)
    assert leader_check.on_answer(N1, confirmed) == (asked, 0)

    assert leader_check.judge(other) is None
    assert leader_check.judge(asked) is True


@pytest.mark.parametrize("term", [FORGED + 1, FORGED - 1, 1])
def test_leading_another_term_confirms_no_push(term: int) -> None:
    """The real leader says of its own term that it leads; a push in its name, in a term it never led, is not its."""
    solo, _ = follower()
    before = facts(solo)

    answers = solo.push(N1, PushTruncate(FORGED, 10**6, EntryId(Term(7), LogIndex(2)), 123), confirm=False)
    solo.confirm(N1, term)

    assert answers == []
    assert facts(solo) == before
    assert solo.node.handler.leader_check.refused == 1
    assert not solo.node.handler.leader_check.is_known(N1, FORGED)


def test_a_push_is_held_back_until_its_sender_has_confirmed_that_it_leads() -> None:
    """The question is a pre-vote, which changes nothing anywhere."""
    solo, source = Solo(), Source(4, 1)
    solo.node.receive(N1, source.compare(-1), 0)
    solo.node.handler.step(0)

    question = VoteRequest(Term(1), solo.log.last, pre_vote=True, countersign=solo.state.countersign)
    assert solo.take() == [(N1, question)]
    assert solo.state.term == 0
    solo.confirm(N1, 4)

    assert solo.state.leader_id == N1
    assert solo.state.term == 4
    assert [type(message).__name__ for _, message in solo.take()] == ["PushResponse"]


def test_a_question_that_was_lost_is_asked_again_with_the_next_heartbeat() -> None:
    """The leader would else wait for its push's time-out."""
    solo, source = Solo(), Source(4, 1)
    solo.push(N1, source.compare(-1), confirm=False)

    solo.hear(N1, 4)

    question = VoteRequest(Term(5), solo.log.last, pre_vote=True, countersign=solo.state.countersign)
    assert solo.sent(VoteRequest) == [question]
    solo.confirm(N1, 4)
    solo.hear(N1, 4)
    assert solo.sent(VoteRequest) == []


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (Standing.FULL, {"watermarks": ((N2, EntryId(Term(1), LogIndex(10**9))),)}),
        (Standing.FULL, {"watermarks": ((N0, EntryId(Term(1), LogIndex(10**9))),)}),
        (Standing.FULL, {"doubted_boot_id": 1}),
        (Standing.FULL, {"transfer_target": N2}),
        (Standing.FOUNDER, {"founded": True}),
        (Standing.DOUBTFUL, {"readmission": Readmission(1, LogIndex(-1))}),
    ],
    ids=lambda case: "+".join(case) if isinstance(case, dict) else "",
)
def test_what_a_heartbeat_says_of_memory_is_believed_of_the_leader_alone(
    standing: Standing, words: dict[str, object]
) -> None:
    """Whoever connects can speak in its name, in its term; the countersign of its question reaches only its address.

    Else one message would have members doubt themselves, or each other for ever, or count although they forgot.
    """

    def after(countersign: int, **said: object) -> tuple[object, ...]:
        solo, source = Solo(terms=(1, 1), hard_state=HardState(Term(1), None, standing)), Source(1, 1, 1)
        solo.push(N1, source.compare(1))
        solo.hear(N1, 1, countersign=countersign, **said)  # type: ignore[arg-type]  # by name
        solo.flush()
        role = solo.state.role
        assert isinstance(role, Follower)
        return solo.state.hard_state, solo.state.remembered, role.transfer_target

    known = Solo().state.countersign
    plain = after(known)

    assert [after(forged, **words) for forged in (0, 1, known + 1)] == [plain] * 3
    assert after(known, **words) != plain


def test_a_heartbeat_without_the_countersign_is_a_reason_to_ask_for_it() -> None:
    """As a new leader's first one is; forged ones make the member ask only so often."""
    solo = Solo()
    question = VoteRequest(Term(2), solo.log.last, pre_vote=True, countersign=solo.state.countersign)

    for _ in range(100):
        solo.hear(N1, 1, countersign=0)

    assert solo.sent(VoteRequest) == [question]
    solo.now_ms += solo.config.election.heartbeat_interval_ms
    solo.hear(N1, 1, countersign=0)
    assert solo.sent(VoteRequest) == [question]
    solo.now_ms += solo.config.election.heartbeat_interval_ms
    solo.hear(N1, 1)
    assert solo.sent(VoteRequest) == []


def test_a_leader_repeats_the_countersign_that_it_was_asked_for_at_once() -> None:
    """Of this term: what a member asked an earlier leader for, or this one when it did not lead, says nothing."""
    solo = Solo()
    request = VoteRequest(Term(2), solo.log.last, pre_vote=True, countersign=99)
    before = solo.node.answer(N1, request, 0)
    solo.lead()
    answer = solo.node.answer(N1, request, solo.now_ms)
    beats = {target: message.countersign for target, message in solo.tick() if isinstance(message, HeartbeatRequest)}

    assert isinstance(before, VoteResponse)
    assert isinstance(answer, VoteResponse)
    assert (before.leads, answer.leads) == (False, True)
    assert beats == {N1: 99, N2: 0}
    solo.node.answer(N1, request, solo.now_ms)
    assert solo.tick() == []


def test_forged_heartbeats_keep_nobody_from_electing_a_leader_later() -> None:
    """One each, in the leader's name, of entries that nobody has: else nobody would ever be believed to remember."""
    cluster = Cluster(3)
    cluster.elect()
    assert cluster.append(N0, b"a").value
    cluster.advance(300)
    huge = tuple((one, EntryId(cluster.term(N0), LogIndex(10**12))) for one in cluster.ids)
    for one in (N1, N2):
        cluster[one].node.answer(N0, HeartbeatRequest(cluster.term(N0), watermarks=huge), cluster.now_ms)
        cluster.act(one)
    cluster.crash(N0)

    cluster.advance_until(lambda: cluster.leader() is not None, 5000)

    assert cluster.append(cluster.leader() or N1, b"b").value
    assert [cluster[one].saved.standing for one in (N1, N2)] == [Standing.FULL] * 2


def test_an_install_that_the_leader_does_not_confirm_drops_nothing() -> None:
    """Even in the name of the present leader, in its term: where its log begins it says itself."""
    solo, _ = follower()
    before = facts(solo)

    forged = PushInstall(Term(1), 10**6, EntryId(Term(1), FAR.index), 7, Position(1 << 40))
    answers = solo.push(N1, forged, confirm=False)
    solo.confirm(N1, 1, begin=GENESIS)

    assert answers == []
    assert facts(solo) == before
    assert [answer.code for answer in solo.sent(PushResponse) if isinstance(answer, PushResponse)] == [
        ResponseCode.INCONSISTENT_STATE
    ]


def test_an_install_that_the_leader_confirms_is_done() -> None:
    """A member that was down for longer than what it lacks was kept begins anew where the leader's log begins."""
    solo, _ = follower()
    begin = Boundary(LogIndex(50), Term(1), Position(4000), 77)
    push = PushInstall(Term(1), 7, EntryId(begin.term, begin.index), begin.chain_crc, begin.position)

    solo.push(N1, push, confirm=False)
    assert solo.log.begin == GENESIS
    solo.confirm(N1, 1, begin=begin)

    assert solo.log.begin == begin


def test_epochs_of_another_connection_block_nobody() -> None:
    """They count the leader's attempts; a forged one would else outlast all that the leader ever makes in its term."""
    solo, source = follower()
    solo.push(N1, PushCommit(Term(1), 10**6, LogIndex(1)), connection=5)

    ignored = solo.push(N1, source.compare(2, epoch=8), connection=5)
    taken = solo.push(N1, source.compare(2, epoch=8), connection=6)
    late = solo.push(N1, source.compare(2, epoch=9), connection=5)

    assert [len(answers) for answers in (ignored, taken, late)] == [0, 1, 0]


def test_a_leader_says_that_it_leads_and_where_its_log_begins() -> None:
    """What followers ask before they take pushes; others say that they do not lead."""
    cluster = Cluster(3)
    cluster.elect()
    leader, other = cluster[N0].node, cluster[N1].node
    question = VoteRequest(Term(2), cluster[N2].log.last, pre_vote=True)

    said = leader.answer(N2, question, cluster.now_ms)
    also = other.answer(N2, question, cluster.now_ms)

    assert isinstance(said, VoteResponse)
    assert isinstance(also, VoteResponse)
    assert (said.term, said.leads, said.begin) == (1, True, cluster[N0].log.begin)
    assert (also.leads, also.begin) == (False, None)


def test_a_forged_leader_does_not_stop_the_real_one() -> None:
    """A whole group: pushes in the name of a member that does not lead, in a later term, at every follower."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, b"a")
    for target in (N1, N2):
        forger = N2 if target == N1 else N1
        cluster[target].node.receive(forger, PushInstall(Term(2), 10**6, FAR, 7, Position(1 << 40)), cluster.now_ms)
        cluster.act(target)

    cluster.advance(2000)

    assert cluster.leader() == N0
    assert cluster.term(N0) == 1
    assert cluster.append(N0, b"b").value
    cluster.advance(200)
    assert cluster.same_logs()
