"""A member whose disk was set back is told by one that was itself restarted meanwhile."""

from __future__ import annotations

from pathlib import Path

from dledger.store.identity import read_members
from dledger.types import NO_ENTRY, Standing
from tests.support.running_group import RunningGroup
from tests.support.waiting import wait_until


def _contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _set_back(directory: Path, contents: dict[Path, bytes]) -> None:
    """As a snapshot of the volume would: in place, so that the directory itself tells nothing."""
    for path in directory.rglob("*"):
        if path.is_file() and path not in contents:
            path.unlink()
    for path, content in contents.items():
        path.write_bytes(content)


def test_a_member_that_was_set_back_is_told_by_a_witness_that_was_restarted(tmp_path: Path) -> None:
    """The leader is lost, so all that is left of the missing entries is what the third member remembers on its disk."""
    group = RunningGroup(tmp_path)
    try:
        group.append(3)
        group.wait_converged()
        leader = group.wait_for_leader()
        lost, witness = (number for number in range(3) if number != leader)
        group.nodes[lost].stop()
        directory = group.nodes[lost].log.directory
        before = _contents(directory)
        group.restart(lost)
        wait_until(lambda: group.nodes[lost].status().voter, "it counts")
        group.append(20)
        group.wait_converged()
        name = group.nodes[lost].config.node_id
        end = group.nodes[lost].log.last
        memory = group.nodes[witness].log.directory

        def is_saved() -> bool:
            saved = read_members(memory)
            return saved is not None and saved.remembered.get(name, NO_ENTRY) >= end

        wait_until(is_saved, "the witness has saved it")
        group.stop()
        _set_back(directory, before)

        set_back = group.restart(lost)
        group.restart(witness)
        wait_until(lambda: not set_back.status().voter, "it was told")
        saved = set_back.log.hard_state.load
        wait_until(lambda: saved().standing is Standing.DOUBTFUL, "it has saved its doubt")

        state = saved()
        assert "has a record that it held entry" in state.doubt
        group.restart(leader)
        wait_until(lambda: set_back.status().voter, "it counts again")
        group.wait_converged()
    finally:
        group.stop()
