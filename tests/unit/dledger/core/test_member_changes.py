"""What a leader appends when its group changes, one step at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dledger.core.membership import encode_configuration
from dledger.core.messages import HeartbeatResponse
from dledger.errors import TermChangedError, WouldLoseQuorumError
from dledger.types import NO_INDEX, ChangeKind, Configuration, LogIndex, Magic, MemberChange, NodeId, Role
from tests.support.cluster import N0, N1, N2, N3, N4, Outcome
from tests.support.members import configuration
from tests.support.solo import Solo

_READY_MS = 700
"""A learner that has everything is ready by then."""


def _leader(size: int) -> Solo:
    """n0 leads n1 and so on, all of which have been heard."""
    solo = Solo(size, terms=[1], committed=0)
    solo.lead()
    _acknowledge(solo)
    return solo


def _acknowledge(solo: Solo) -> None:
    """All members answer, and hold everything."""
    for peer in solo.state.peers:
        solo.beat(peer)
        solo.leader_role.boot_ids[peer] = 7
        solo.matches(peer, solo.log.last.index)
    solo.flush()
    solo.settle_quorum()


def _put(solo: Solo, voters: str, learners: str = "", **more: dict[str, Any]) -> None:
    """The leader appends a configuration, which is committed at once. ``more``: fields of members, by id."""
    plain = configuration(voters, learners)
    members = tuple(replace(one, **more.get(one.node_id, {})) for one in plain.members)
    wanted = replace(plain, members=members)
    batch = solo.log.append_as_leader(solo.state.term, [encode_configuration(wanted)], Magic.NOOP)
    solo.state.adopt(replace(wanted, index=batch.last_index, term=solo.state.term))
    _acknowledge(solo)


def _pass(solo: Solo, ms: int) -> None:
    """Time passes, in which all are heard, and nothing new is acknowledged."""
    for _ in range(ms // 50):
        solo.tick(50)
        for peer in solo.state.peers:
            solo.beat(peer)
        solo.take()


def _ask(solo: Solo, kind: ChangeKind, member: NodeId, **more: Any) -> Outcome[Configuration]:  # noqa: ANN401  # by name
    outcome: Outcome[Configuration] = Outcome()
    solo.node.changes.submit(MemberChange(kind, member, 5, **more), solo.now_ms, outcome)
    solo.take()
    return outcome


def _voters(solo: Solo) -> tuple[NodeId, ...]:
    return solo.state.membership.current.voters


def _ids(numbers: str) -> tuple[NodeId, ...]:
    return tuple(NodeId(f"n{one}") for one in numbers)


def test_of_two_learners_that_are_ready_at_once_one_is_promoted_at_a_time() -> None:
    """M1: the second one waits until the configuration with the first is committed."""
    solo = _leader(3)
    _put(solo, "012", "34", n3={"promote": True}, n4={"promote": True})

    _pass(solo, _READY_MS)

    assert _voters(solo) == (N0, N1, N2, N3)
    assert solo.state.membership.previous_voters == (N0, N1, N2)
    _acknowledge(solo)
    _pass(solo, 100)
    assert _voters(solo) == (N0, N1, N2, N3, N4)


def test_a_learner_waits_while_there_are_nine_voters() -> None:
    """M13: two that were added when there were eight."""
    solo = _leader(8)
    _put(solo, "01234567", "89", n8={"promote": True}, n9={"promote": True})

    for _ in range(3):
        _pass(solo, _READY_MS)
        _acknowledge(solo)

    assert _voters(solo) == _ids("012345678")


def test_of_nine_voters_the_one_that_is_replaced_leaves_first() -> None:
    """M13, M14: there is no room for ten."""
    solo = _leader(9)
    _put(solo, "012345678", "9", n9={"promote": True, "replaces": "n8"})

    _pass(solo, _READY_MS)
    assert _voters(solo) == _ids("01234567")
    _acknowledge(solo)
    _pass(solo, 100)

    assert _voters(solo) == _ids("012345679")


def test_one_that_is_replaced_and_was_demoted_meanwhile_leaves_first() -> None:
    """M14: it counts for nothing, so nothing is gained by keeping it."""
    solo = _leader(3)
    _put(solo, "01", "23", n3={"promote": True, "replaces": "n2"})

    _pass(solo, _READY_MS)

    current = solo.state.membership.current
    assert (current.voters, current.learners) == ((N0, N1), (N3,))


def test_a_leader_that_is_replaced_hands_over_every_ten_seconds() -> None:
    """Each attempt refuses appends for a while."""
    solo = _leader(4)
    _put(solo, "0123", n3={"replaces": "n0"})

    begun = _transfers_begun(solo, 9_000)
    assert len(begun) == 1
    begun += _transfers_begun(solo, 2_000)

    assert len(begun) == 2
    assert solo.state.membership.is_committed


def test_a_leader_that_nobody_can_succeed_now_hands_over_as_soon_as_somebody_can() -> None:
    """What was refused at once made no append wait, so the next attempt need not be late."""
    solo = _leader(4)
    _put(solo, "0123", n3={"replaces": "n0"})
    solo.leader_role.disk_full |= {N1: True, N2: True, N3: True}
    assert _transfers_begun(solo, 500, disk_full=True) == []

    begun = _transfers_begun(solo, 500)

    assert len(begun) == 1


def _transfers_begun(solo: Solo, ms: int, *, disk_full: bool = False) -> list[int]:
    """When the leader begins to transfer leadership, while time passes in which all are heard."""
    begun: list[int] = []
    before = solo.leader_role.transferring
    for _ in range(ms // 50):
        solo.tick(50)
        for peer in solo.state.peers:
            solo.beat(peer, disk_full=disk_full)
        solo.take()
        if solo.leader_role.transferring and not before:
            begun.append(solo.now_ms)
        before = solo.leader_role.transferring
    return begun


def test_a_demoted_voter_replaces_nobody_any_more() -> None:
    """Else a later promotion would remove another voter."""
    solo = _leader(4)
    _put(solo, "0123", n3={"replaces": "n2"})

    _ask(solo, ChangeKind.DEMOTE, N3)

    member = solo.state.membership.current.find(N3)
    assert member is not None
    assert (solo.state.membership.current.learners, member.replaces, member.promote) == ((N3,), "", False)


def test_a_voter_that_counts_for_nothing_is_no_part_of_what_is_left() -> None:
    """M5: one that is heard but has no standing can commit nothing."""
    solo = _leader(3)
    solo.leader_role.counts[N1] = False

    outcome = _ask(solo, ChangeKind.REMOVE, N2)

    assert isinstance(outcome.error, WouldLoseQuorumError)


def test_what_is_intended_is_not_done_while_it_would_stop_the_group() -> None:
    """M5: the one that is replaced stays as long as it is needed."""
    solo = _leader(4)
    _put(solo, "0123", n3={"replaces": "n2"})
    solo.leader_role.counts |= {N1: False, N3: False}

    solo.tick()
    assert _voters(solo) == (N0, N1, N2, N3)
    solo.leader_role.counts[N3] = True
    solo.tick()

    assert _voters(solo) == (N0, N1, N3)


def test_another_leaders_configuration_is_no_success() -> None:
    """The change asked for was truncated, before its leader noticed anything."""
    solo = _leader(3)
    index = solo.log.last.index + 1
    outcome = _ask(solo, ChangeKind.REMOVE, N2)
    assert solo.state.membership.current.index == index

    solo.state.follow(N1, solo.state.term + 1, solo.now_ms)  # type: ignore[arg-type]  # a term
    solo.log.truncate(LogIndex(index))
    solo.state.truncated(LogIndex(index))
    solo.log.append_as_leader(solo.state.term, [b"x", b"y"])
    solo.state.adopt(configuration("0123", index=index + 1, term=solo.state.term))
    solo.state.advance_commit(LogIndex(index + 1))
    solo.tick()

    assert isinstance(outcome.error, TermChangedError)


@pytest.mark.parametrize("by_another", [True, False])
def test_an_earlier_farewell_shortens_no_later_one(*, by_another: bool) -> None:
    """M9: a member that was added again, perhaps by another leader meanwhile, and removed has ten seconds from then."""
    solo = _leader(3)
    solo.streaming(N2)
    _put(solo, "01")
    solo.tick()
    assert N2 in solo.node.dispatchers
    if by_another:
        solo.hear(N1, solo.state.term + 1)
        index = solo.log.append_as_leader(solo.state.term, [b"x"]).last_index
        solo.state.adopt(configuration("012", index=index, term=solo.state.term))
        solo.state.advance_commit(index)
        solo.now_ms += 11_000
        solo.lead()
        _acknowledge(solo)
    else:
        _put(solo, "012")
        _pass(solo, 11_000)

    _put(solo, "01")
    solo.tick()

    assert N2 in solo.node.dispatchers


def test_attempts_towards_a_member_that_comes_back_are_numbered_on() -> None:
    """Within one term it takes those with earlier numbers for given up (world 400,147); whoever left after it."""
    solo = _leader(4)
    for _ in range(2):
        solo.streaming(N2)
        solo.node.connection_lost(N2)
    before = solo.node.dispatchers[N2].epoch
    for voters, gone in (("013", N2), ("01", N3)):
        _put(solo, voters)
        _pass(solo, 11_000)
        assert gone not in solo.node.dispatchers

    _put(solo, "012")

    assert solo.node.dispatchers[N2].epoch >= before > 0


def test_a_memory_is_recorded_once_it_has_been_readmitted() -> None:
    """M11: a process with another uid may be sure of itself, and knows nothing of what it acknowledged."""
    solo = _leader(3)
    _put(solo, "012", n1={"uid": 9}, n2={"uid": 9})
    for peer, stood in ((N1, False), (N2, True)):
        if stood:
            solo.leader_role.blank_boot_ids[peer] = 7
        solo.node.receive(peer, HeartbeatResponse(solo.state.term, boot_id=7, uid=8), solo.now_ms)
    leader = solo.leader_role
    assert (leader.doubted, leader.counts) == ({N1: 7}, {N1: False, N2: True})
    assert leader.match == {N1: NO_INDEX, N2: solo.log.last.index}

    solo.tick()

    members = solo.state.membership.current.members
    assert [(one.node_id, one.uid) for one in members] == [(N0, 0), (N1, 9), (N2, 8)]
    assert solo.role is Role.LEADER
