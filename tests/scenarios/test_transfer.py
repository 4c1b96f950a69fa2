"""Leadership transfer: asked for, preferred, or forced by a full disk (dissertation §3.10, reliability trap 27)."""

from __future__ import annotations

import pytest

from dledger.core.messages import HeartbeatRequest, PushAppend, PushResponse, TakeLeadership, VoteRequest
from dledger.errors import (
    FallBehindError,
    LeaderTransferringError,
    NotLeaderError,
    TransferFailedError,
    UnknownMemberError,
)
from dledger.types import HardState, NodeId, Role, Standing, Term
from tests.support.cluster import N0, N1, N2, Cluster
from tests.support.solo import Solo


@pytest.mark.parametrize("size", [2, 3, 5])
def test_transfer_to_a_named_member(size: int) -> None:
    """The target leads the next term, the caller hears of it, and no acknowledged append is lost."""
    cluster = Cluster(size)
    cluster.elect()
    cluster.append(N0, b"before")

    outcome = cluster.transfer(N0, N1)
    cluster.advance(200)

    assert outcome.value.node_id == N1
    assert cluster.leader() == N1
    assert cluster.term(N1) == 2
    assert cluster.append(N1, b"after").value
    cluster.advance(20)
    assert cluster.same_logs()


def test_transfer_to_nobody_in_particular_takes_the_most_caught_up() -> None:
    """Without a target the member with the highest watermark takes over."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.drop(PushAppend, target=N1)
    cluster.append(N0, b"a")
    cluster.heal()

    outcome = cluster.transfer(N0, None)
    cluster.advance(200)

    assert outcome.value.node_id == N2


def test_transfer_in_a_group_of_one_fails_at_once() -> None:
    """There is nobody to hand over to."""
    cluster = Cluster(1)
    cluster.elect()

    assert isinstance(cluster.transfer(N0, None).error, TransferFailedError)
    assert cluster.append(N0, b"a").value


def test_transfer_to_the_leader_itself_is_done_already() -> None:
    """Asking the leader to hand over to itself changes nothing."""
    cluster = Cluster(3)
    cluster.elect()

    assert cluster.transfer(N0, N0).value.node_id == N0
    assert cluster.term(N0) == 1


def test_transfer_asked_of_a_follower_is_refused_with_a_hint() -> None:
    """Only the leader hands over."""
    cluster = Cluster(3)
    cluster.elect()

    error = cluster.transfer(N1, N2).error

    assert isinstance(error, NotLeaderError)
    assert error.leader is not None
    assert error.leader.node_id == N0


def test_transfer_to_a_stranger_is_refused() -> None:
    """The target must be a voter; the answer names all of them, and why one cannot lead now."""
    cluster = Cluster(3)
    cluster.elect()

    error = cluster.transfer(N0, NodeId("n9")).error

    assert isinstance(error, UnknownMemberError)
    assert str(error).startswith("'n9' is not a voter; voters: n0 (leads), n1")


def test_transfer_to_a_lagging_member_is_refused() -> None:
    """A member that lags too far would stop appends for too long."""
    cluster = Cluster(3, transfer_max_lag_entries=2)
    cluster.elect()
    cluster.drop(PushAppend, target=N1)
    cluster.append(N0, b"a", b"b", b"c")

    assert isinstance(cluster.transfer(N0, N1).error, FallBehindError)
    assert cluster.append(N0, b"d").value


def test_transfer_to_a_silent_member_is_refused() -> None:
    """A member that has not answered for an election timeout is not asked."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.crash(N1)
    cluster.advance(1500)

    assert isinstance(cluster.transfer(N0, N1).error, TransferFailedError)
    assert cluster.append(N0, b"a").value


def test_transfer_waits_for_the_target_to_catch_up() -> None:
    """TakeLeadership is sent once the target holds everything, and appends wait meanwhile."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.hold(PushResponse, sender=N1)
    cluster.append(N0, b"a")

    outcome = cluster.transfer(N0, N1)
    assert not [sent for sent in cluster.delivered if isinstance(sent.message, TakeLeadership)]
    assert isinstance(cluster.append(N0, b"b").error, LeaderTransferringError)
    cluster.release()
    cluster.advance(200)

    assert outcome.value.node_id == N1


def test_transferring_twice_is_refused() -> None:
    """One hand-over at a time."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.hold(TakeLeadership)
    cluster.transfer(N0, N1)

    assert isinstance(cluster.transfer(N0, N2).error, LeaderTransferringError)


def test_transfer_timeout_aborts_and_appends_resume() -> None:
    """A target that does nothing costs at most the transfer timeout; then the old leader goes on."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.drop(TakeLeadership)
    outcome = cluster.transfer(N0, N1)
    assert isinstance(cluster.append(N0, b"a").error, LeaderTransferringError)

    cluster.advance(1001)

    assert isinstance(outcome.error, TransferFailedError)
    assert cluster.leader() == N0
    assert cluster.append(N0, b"b").value


def test_transfer_ends_when_its_target_dies() -> None:
    """A target that dies before it campaigns leaves the old leader in charge."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.hold(TakeLeadership)
    outcome = cluster.transfer(N0, N1)

    cluster.crash(N1)
    cluster.advance(1001)

    assert isinstance(outcome.error, TransferFailedError)
    assert cluster.append(N0, b"b").value


def test_take_leadership_is_repeated_until_it_is_heard() -> None:
    """One lost TakeLeadership does not fail the transfer."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.drop(TakeLeadership)
    outcome = cluster.transfer(N0, N1)
    cluster.advance(50)
    cluster.heal()

    cluster.advance(300)

    assert outcome.value.node_id == N1


def test_transfer_tells_when_another_member_wins() -> None:
    """The caller hears who leads instead of the target."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.hold(TakeLeadership)
    outcome = cluster.transfer(N0, N1)

    cluster.take_leadership(N2)
    cluster.advance(100)

    error = outcome.error
    assert isinstance(error, TransferFailedError)
    assert error.leader is not None
    assert error.leader.node_id == N2


def test_transfer_fails_in_time_when_leadership_is_lost_to_nobody() -> None:
    """A leader that is deposed while no successor appears still answers within the timeout."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.hold(VoteRequest, HeartbeatRequest)
    outcome = cluster.transfer(N0, N1)

    cluster.advance(1001)

    assert isinstance(outcome.error, TransferFailedError)


def test_take_leadership_of_another_term_or_sender_is_ignored() -> None:
    """A late TakeLeadership starts no election (trap 19), nor does one from a member that does not lead."""
    solo = Solo(hard_state=HardState(Term(2), standing=Standing.FULL))
    solo.hear(N1, 2)

    solo.node.receive(N1, TakeLeadership(Term(1)), 0)
    solo.node.receive(N2, TakeLeadership(Term(2)), 0)

    assert solo.role is Role.FOLLOWER
    assert solo.state.term == 2


def test_a_non_voter_does_not_take_leadership() -> None:
    """A member with a new disk never campaigns, whoever asks."""
    solo = Solo(hard_state=HardState(Term(2)))
    solo.hear(N1, 2)

    solo.node.receive(N1, TakeLeadership(Term(2)), 0)

    assert solo.role is Role.FOLLOWER


def test_preferred_leader_takes_over() -> None:
    """A live, caught-up preferred member is handed leadership (DLedger's preferredLeaderIds)."""
    cluster = Cluster(3, preferred_leaders=(N2,))
    cluster.elect()

    cluster.advance(1500)

    assert cluster.leader() == N2
    cluster.advance(5000)
    assert cluster.leader() == N2
    assert cluster.term(N2) == 2


def test_preferred_leader_takes_back_after_its_restart() -> None:
    """It is handed leadership again once it has caught up (DLedger LeaderElectorTest)."""
    cluster = Cluster(3, preferred_leaders=(N0,))
    cluster.elect()
    cluster.crash(N0)
    cluster.advance_until(lambda: cluster.leader() is not None)
    assert cluster.append(cluster.leader() or N1, b"a").value

    cluster.start(N0)
    cluster.advance(3000)

    assert cluster.leader() == N0
    assert cluster.same_logs()


def test_a_dead_preferred_leader_does_not_stop_appends() -> None:
    """#85 / 8ac0960: a preferred member that cannot lead costs nothing."""
    cluster = Cluster(3, preferred_leaders=(N2,))
    cluster.crash(N2)
    cluster.elect()

    for number in range(50):
        assert cluster.append(N0, b"%d" % number).value
        cluster.advance(100)


def test_a_leader_with_a_full_disk_hands_over() -> None:
    """Trap 10: leadership moves to a member that has room."""
    cluster = Cluster(3)
    cluster.elect()
    cluster[N0].log.disk_full = True

    cluster.advance(1500)
    leader = cluster.leader()

    assert leader in (N1, N2)
    assert leader is not None
    assert cluster.append(leader, b"a").value


def test_a_leader_with_a_full_disk_stays_when_all_others_are_full() -> None:
    """Nobody would be better, so nothing moves, and appends are taken again once there is room."""
    cluster = Cluster(3)
    cluster.elect()
    for one in cluster.ids:
        cluster[one].log.disk_full = True

    cluster.advance(5000)
    assert cluster.leader() == N0
    assert cluster.term(N0) == 1
    for one in cluster.ids:
        cluster[one].log.disk_full = False
    cluster.advance(200)  # heartbeats tell

    assert cluster.append(N0, b"a").value


def test_transfer_to_nobody_in_particular_passes_over_a_dead_member() -> None:
    """The most caught-up member may be dead; a live one is asked then."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.drop(PushAppend, target=N1)
    cluster.append(N0, b"a")
    cluster.crash(N2)
    cluster.advance(1500)
    cluster.heal()

    outcome = cluster.transfer(N0, None)
    cluster.advance(1000)

    assert outcome.value.node_id == N1


def test_a_preferred_leader_that_never_takes_over_leaves_appends_most_of_the_time() -> None:
    """8ac0960: hand-overs that fail again and again must not refuse appends half of the time."""
    cluster = Cluster(3, preferred_leaders=(N2,))
    cluster.elect()
    cluster.drop(TakeLeadership)

    refused = 0
    for _ in range(1800):
        refused += isinstance(cluster.append(N0, b"x").results[0], LeaderTransferringError)
        cluster.advance(100)

    assert cluster.leader() == N0
    assert refused <= 30  # of 1800: half a second each after 1, 11, 31, 71 and 151 s


def test_a_preferred_leader_that_could_not_lead_takes_over_once_it_can() -> None:
    """The pause after failures ends: here a program that can read the log is put in place of one that cannot."""
    cluster = Cluster(3, preferred_leaders=(N2,))
    cluster.elect()
    cluster[N2].node.elector.unreadable_producers = "written by a later version"
    cluster.advance(5000)
    assert cluster.leader() == N0

    cluster[N2].node.elector.unreadable_producers = None
    cluster.advance(20_000)

    assert cluster.leader() == N2


def test_transfer_to_a_member_with_a_full_disk_is_refused() -> None:
    """It could not write the no-op of its term, so the group would be left without a leader."""
    cluster = Cluster(3)
    cluster.elect()
    cluster[N1].log.disk_full = True
    cluster.advance(200)

    assert isinstance(cluster.transfer(N0, N1).error, TransferFailedError)
    cluster.take_leadership(N1)

    assert cluster.leader() == N0
    assert cluster.term(N0) == 1


def test_a_member_with_a_full_disk_does_not_campaign() -> None:
    """It would win, fail to write its no-op and resign, term after term, and keep able members from leading."""
    cluster = Cluster(3)
    cluster[N0].log.disk_full = True

    cluster.advance(5000)

    assert cluster.leader() == N1
    assert cluster.term(N1) == 1


def test_a_group_of_one_leads_once_its_disk_has_room() -> None:
    """A full disk at the start raises no terms."""
    cluster = Cluster(1, start=False)
    cluster[N0].log.disk_full = True
    cluster.start(N0)

    cluster.advance(5000)
    assert cluster.leader() is None
    assert cluster.term(N0) == 0
    cluster[N0].log.disk_full = False
    cluster.advance(1000)

    assert cluster.leader() == N0
