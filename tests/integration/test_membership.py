"""Members come and go while the group serves: real servers over TCP."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.types import ChangeKind, Role
from tests.support.running_members import RunningMembers
from tests.support.waiting import wait_until


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RunningMembers]:
    made = RunningMembers(tmp_path)
    yield made
    made.stop()


def test_a_single_node_becomes_three_and_one_again(group: RunningMembers) -> None:
    """M16: newcomers need no more than the address of one member; the last one goes on alone."""
    group.found(0)
    group.append(10)

    for newcomer in (1, 2):
        group.start(newcomer, 0, join=True)
        group.change(ChangeKind.ADD, newcomer)
    group.wait_for_voters(0, 1, 2)
    group.append(10)
    for leaving in (1, 2):
        group.change(ChangeKind.REMOVE, leaving)
    group.wait_for_voters(0)
    group.append(10)

    assert len(group.bodies(0)) >= 30


def test_three_become_five_and_three_others_under_load(group: RunningMembers) -> None:
    """The leader is removed last: it hands over first (D6). No append fails, none is lost, none is there twice."""
    group.found(0, 1, 2)
    with group.load() as load:
        load.more()
        for newcomer in (3, 4):
            group.start(newcomer, 0, join=True)
            group.change(ChangeKind.ADD, newcomer)
        group.wait_for_voters(0, 1, 2, 3, 4)
        load.more()
        group.move_leadership(0)
        for leaving in (1, 2):
            group.change(ChangeKind.REMOVE, leaving)
            group.kill(leaving)
        group.change(ChangeKind.REMOVE, 0)
        group.wait_for_voters(3, 4)
        load.more()
        group.start(5, 4, join=True)
        group.change(ChangeKind.ADD, 5)
        group.wait_for_voters(3, 4, 5)
        load.more()

    group.kill(0)
    group.wait_converged()
    for number in (3, 4, 5):
        load.check(group.bodies(number))


def test_a_dead_node_is_replaced_by_one_request(group: RunningMembers) -> None:
    """Whoever leads carries it on: here the leader dies while the newcomer has yet to come."""
    group.found(0, 1, 2)
    with group.load() as load:
        load.more()
        group.move_leadership(0)
        group.kill(2)
        group.change(ChangeKind.ADD, 3, replaces="n2")
        group.kill(0)
        group.start(0, 1, 2)
        load.more()

        group.start(3, 0, 1, join=True)

        group.wait_for_voters(0, 1, 3)
        load.more()
    group.wait_converged()
    for number in (0, 1, 3):
        load.check(group.bodies(number))


def test_a_member_that_joined_leads_after_the_restart_of_all(group: RunningMembers) -> None:
    """M3: who belongs to the group is in the log and in a file beside it; confs are as they were written once.

    That of n0 names itself alone, which must not make it a group of its own again.
    """
    group.found(0)
    for newcomer in (1, 2):
        group.start(newcomer, 0, join=True)
        group.change(ChangeKind.ADD, newcomer)
    group.wait_for_voters(0, 1, 2)
    group.append(10)
    for number in (0, 1, 2):
        group.kill(number)

    group.start(0)
    assert group.leader() is None
    group.start(1, 0, join=True)
    group.start(2, 0, join=True)

    group.wait_for_voters(0, 1, 2)
    group.append(10)
    group.move_leadership(2)
    group.append(10)


def test_a_group_is_restored_from_the_copy_of_one_member(group: RunningMembers, tmp_path: Path) -> None:
    """As docs/operating.md says: each node starts from it, with its own id, and none is another one's memory (M11)."""
    group.found(0)
    for newcomer in (1, 2):
        group.start(newcomer, 0, join=True)
        group.change(ChangeKind.ADD, newcomer)
    group.wait_for_voters(0, 1, 2)
    group.append(10)
    group.wait_converged()
    bodies = group.bodies(2)
    for number in (0, 1, 2):
        group.kill(number)

    for number in (0, 1):
        directory = tmp_path / f"dledger-n{number}"
        shutil.rmtree(directory)
        shutil.copytree(tmp_path / "dledger-n2", directory)
        identity = directory / "identity"
        identity.write_text(identity.read_text().replace('"node_id": "n2"', f'"node_id": "n{number}"'))
    for number in (0, 1, 2):
        group.start(number, *((0,) if number else ()), join=number > 0)

    group.wait_for_voters(0, 1, 2)
    group.append(10)
    group.wait_converged()
    assert group.bodies(0)[: len(bodies)] == bodies


def test_a_member_that_lost_its_disk_counts_again_with_another_uid(group: RunningMembers, tmp_path: Path) -> None:
    """M11: it is readmitted as ever, and then the leader records whose memory it is now: no voter changes."""
    group.found(0)
    for newcomer in (1, 2):
        group.start(newcomer, 0, join=True)
        group.change(ChangeKind.ADD, newcomer)
    group.wait_for_voters(0, 1, 2)
    with group.load() as load:
        load.more()
        lost = group.nodes[2].log.members.uid
        group.kill(2)
        shutil.rmtree(tmp_path / "dledger-n2")

        again = group.start(2, 0, 1)

        group.wait_for_voters(0, 1, 2)
        uid = again.log.members.uid
        wait_until(lambda: uid in group.uids(), "its uid is in the configuration")
        load.more()
    assert lost != uid
    assert lost not in group.uids()
    group.wait_converged()
    load.check(group.bodies(2))


def test_all_restart_while_a_member_is_added(group: RunningMembers) -> None:
    """The configuration with the learner is committed, or it is not; either way one request or none is left to do."""
    group.found(0, 1, 2)
    group.append(10)
    group.change(ChangeKind.ADD, 3)
    for number in (0, 1, 2):
        group.kill(number)

    group.start(3, 0, join=True)
    for number in (0, 1, 2):
        group.start(number, *(one for one in (0, 1, 2) if one != number))

    group.wait_for_voters(0, 1, 2, 3)
    group.append(10)


def test_a_joiner_finds_a_leader_that_is_none_of_its_seeds(group: RunningMembers) -> None:
    """M12: its seed is a follower, and knows the leader from the log."""
    group.found(0)
    group.start(1, 0, join=True)
    group.change(ChangeKind.ADD, 1)
    group.wait_for_voters(0, 1)
    group.move_leadership(1)

    joiner = group.start(2, 0, join=True)
    group.change(ChangeKind.ADD, 2)

    group.wait_for_voters(0, 1, 2)
    assert joiner.config.peers == (group.member(0),)
    group.append(10)
    group.wait_converged()


def test_members_with_certificates_need_none_of_each_others(tmp_path: Path) -> None:
    """The one of a newcomer has its id, and is signed by the CA that all trust: nobody need have heard of it before."""
    group = RunningMembers(tmp_path, tls=True)
    try:
        group.found(0)
        for newcomer in (1, 2):
            group.start(newcomer, 0, join=True)
            group.change(ChangeKind.ADD, newcomer)
            group.wait_for_voters(*range(newcomer + 1))
            group.move_leadership(newcomer)
        group.append(10)
        group.wait_converged()
    finally:
        group.stop()


def test_a_node_that_waits_to_be_added_founds_nothing(group: RunningMembers) -> None:
    """M12: not even when nobody whom it knows is there; and when it is added, it comes."""
    joiner = group.start(2, 0, join=True)
    group.found(0)
    group.append(5)
    before = joiner.status()

    group.change(ChangeKind.ADD, 2)

    group.wait_for_voters(0, 2)
    assert (before.role, before.term, before.end_index) == (Role.FOLLOWER, 0, -1)


def test_a_removed_member_that_goes_on_running_disturbs_nobody(group: RunningMembers) -> None:
    """M8: it asks for no votes, so nobody's term moves; and it says that it was removed."""
    group.found(0, 1, 2)
    group.append(10)
    group.move_leadership(0)
    term = group.nodes[0].status().term

    group.change(ChangeKind.REMOVE, 2)
    wait_until(lambda: bool(group.nodes[2].removed), "it knows")
    group.append(10)

    assert {node.status().term for node in group.nodes.values()} == {term}
    assert group.nodes[2].status().role is Role.FOLLOWER


def test_a_member_that_moves_is_found_at_its_new_address(group: RunningMembers) -> None:
    """From the commit on at the new one alone. It needs no change of its own conf to be heard."""
    group.found(0, 1, 2)
    group.append(10)
    group.move_leadership(0)
    group.kill(2)

    moved = group.move(2)
    group.change(ChangeKind.UPDATE, 2, host=moved.host, port=moved.port)
    group.start(2, 0, 1)

    group.append(10)
    group.wait_converged()


def test_a_group_whose_members_all_moved_while_it_was_stopped_meets_again(group: RunningMembers) -> None:
    """By the addresses in their confs, although the log has others; then the log is told."""
    group.found(0, 1)
    group.start(2, 0, join=True)
    group.change(ChangeKind.ADD, 2)
    group.wait_for_voters(0, 1, 2)
    for number in (0, 1, 2):
        group.kill(number)
    for number in (0, 1, 2):
        group.move(number)
    for number in (0, 1, 2):
        group.start(number, *(one for one in (0, 1, 2) if one != number))

    group.append(10)
    for number in (0, 1, 2):
        moved = group.member(number)
        group.change(ChangeKind.UPDATE, number, host=moved.host, port=moved.port)
    group.append(10)
    group.wait_converged()


def test_a_joiner_gets_a_log_whose_begin_has_expired_with_its_members(tmp_path: Path) -> None:
    """M10: the entry that added the members before it is gone, so INSTALL brings them; and they survive its restart."""
    group = RunningMembers(
        tmp_path,
        segment_bytes=1 << 12,
        index_segment_bytes=320,
        retention_hours=0,
        delete_hour=tuple(range(24)),
        clean_interval_ms=50,
        max_entry_bytes=1 << 10,
    )
    try:
        group.found(0)
        group.start(1, 0, join=True)
        group.change(ChangeKind.ADD, 1)
        group.wait_for_voters(0, 1)
        added_at = group.nodes[0]._node.state.membership.committed.index
        with group.load():
            wait_until(lambda: all(one.log.begin.index > added_at for one in group.nodes.values()), "it has expired")
        group.kill(1)
        group.start(1, 0, join=True)

        joiner = group.start(2, 0, join=True)
        group.change(ChangeKind.ADD, 2)
        group.wait_for_voters(0, 1, 2)
        assert joiner.log.begin.index > added_at
        for number in (0, 1, 2):
            group.kill(number)
        for number in (0, 1, 2):
            group.start(number, *((0,) if number else ()), join=number > 0)

        group.wait_for_voters(0, 1, 2)
        group.append(10)
    finally:
        group.stop()
