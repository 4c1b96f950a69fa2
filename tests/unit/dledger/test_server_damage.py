"""Three running members, and a bit that turns in the log of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger.errors import CorruptLogError
from dledger.records import ENTRY_HEADER_BYTES
from dledger.store.format import CHAIN_CRC_OFFSET
from dledger.types import LogIndex
from dledger_cli.commands.inspect import restore_vote
from tests.support.damage import turn
from tests.support.running_group import RunningGroup
from tests.support.waiting import wait_until


@contextmanager
def _a_follower_away(path: Path, *, auto_repair: bool = True) -> Iterator[tuple[RunningGroup, int, int, int]]:
    """A group, its leader, and a follower that has stopped, with the last entry that it holds."""
    group = RunningGroup(path, auto_repair=auto_repair, scrub_bytes_per_s=0)
    try:
        leader = group.wait_for_leader()
        group.append(5)
        away = (leader + 1) % 3
        wait_until(lambda: group.nodes[away].status().committed_index == 5, "the follower has all")
        group.nodes[away].stop()
        group.append(5)
        yield group, leader, away, 5
    finally:
        group.stop()


def test_damage_at_the_leader_stops_the_leader_and_not_the_follower_that_would_meet_it(tmp_path: Path) -> None:
    """A turned bit in a stored chain CRC is found where it is: by its own disk, before anybody is told.

    Without ``auto_repair``; with it the leader fetches the segment from the other follower.
    """
    with _a_follower_away(tmp_path, auto_repair=False) as (group, leader, away, end):
        damaged = group.nodes[leader]
        position = damaged.log.positions(LogIndex(end), LogIndex(end))[0]
        turn(damaged.log.data_directories[0] / f"{0:020d}", position + CHAIN_CRC_OFFSET)

        returned = group.restart(away)

        assert damaged.wait(60) == 70
        assert isinstance(damaged.fatal, CorruptLogError)
        assert damaged.fatal.index == end
        wait_until(lambda: returned.status().committed_index >= 10, "the follower has what it lacked")
        assert returned.fatal is None


def test_damage_at_the_leader_is_mended_and_the_follower_gets_what_it_lacks(tmp_path: Path) -> None:
    """The same leader goes on, with what the other follower holds."""
    with _a_follower_away(tmp_path) as (group, leader, away, end):
        damaged = group.nodes[leader]
        position = damaged.log.positions(LogIndex(end), LogIndex(end))[0]
        turn(damaged.log.data_directories[0] / f"{0:020d}", position + CHAIN_CRC_OFFSET)

        returned = group.restart(away)

        wait_until(lambda: returned.status().committed_index >= 10, "the follower has what it lacked")
        assert [node.fatal for node in group.nodes] == [None] * 3
        wait_until(lambda: damaged.conditions.now() == (), "nothing is the matter any more")
        assert (damaged.log.directory / "damaged-1" / "data" / f"{0:020d}").exists()


@pytest.mark.parametrize("byte", [3, 10, 31], ids=["magic", "position", "term"])
def test_a_turned_bit_in_the_leaders_index_disturbs_nobody(tmp_path: Path, byte: int) -> None:
    """The index is derived: it is put right, and the follower gets what it lacks from the same leader."""
    with _a_follower_away(tmp_path) as (group, leader, away, end):
        path = group.nodes[leader].log.directory / "index" / f"{0:020d}"
        sound = path.read_bytes()
        turn(path, end * 32 + byte)

        returned = group.restart(away)

        wait_until(lambda: returned.status().committed_index >= 10, "the follower has what it lacked")
        assert [node.fatal for node in group.nodes] == [None] * 3
        assert path.read_bytes()[: len(sound.rstrip(b"\0"))] == sound.rstrip(b"\0")


@pytest.mark.parametrize("how", ["its end", "everything"])
def test_a_group_whose_members_all_lost_flushed_entries_waits_for_a_person(tmp_path: Path, how: str) -> None:
    """Each has set aside what was acknowledged: the longest remainder, or none, must not become the group's log.

    Nobody is elected until a person has given two of them their votes back.
    """
    group = RunningGroup(tmp_path, scrub_bytes_per_s=0, clean_interval_ms=200)
    try:
        group.append(5)
        group.wait_converged()
        directories = [node.log.directory for node in group.nodes]
        end = group.nodes[0].log.last.index
        (position,) = {node.log.positions(end, end)[0] for node in group.nodes}
        group.stop()
        for number, directory in enumerate(directories):
            if how == "everything":
                (directory / "checkpoint").write_bytes(bytes(100))
            else:
                turn(group.segment(number, 0), position + ENTRY_HEADER_BYTES)

        nodes = [group.restart(number) for number in range(3)]

        assert {node.log.last.index for node in nodes} == {-1 if how == "everything" else end - 1}
        wait_until(
            lambda: any("has lost entries" in one.message for node in nodes for one in node.conditions.now()),
            "why nobody is elected, though all answer",
        )
        assert group.leader() == -1
        assert {node.log.last.index for node in nodes} == {-1 if how == "everything" else end - 1}
        assert all((one / "damaged-1" / "data").is_dir() for one in directories)

        group.stop()
        for directory in directories[:2]:
            told = CliRunner().invoke(restore_vote, [str(directory), "--yes"])
            assert told.exit_code == 0, told.output
        for number in range(3):
            group.restart(number)
        group.append(2)
    finally:
        group.stop()
