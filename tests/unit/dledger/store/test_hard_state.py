"""Term and vote: once saved, no crash takes them back, whatever it does to the next save."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dledger.store.hard_state import FileHardState, create_hard_state, read_hard_state
from dledger.types import HardState, NodeId, Standing, Term
from tests.crash.crash_fs import CrashState, RecordingFs, crash_states

VOTED = HardState(Term(3), NodeId("n1"), Standing.FULL)
NEXT = HardState(Term(4), NodeId("n2"), Standing.FULL)


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_save_takes_back_no_saved_vote(tmp_path: Path, seed: int) -> None:
    """The file has two slots; both are durable before a save returns, so that one of them survives the next one."""
    directory = tmp_path / "node"
    directory.mkdir()
    fs, dice = RecordingFs(), random.Random(seed)
    create_hard_state(fs, directory, HardState(Term(2)))
    file = FileHardState(fs, directory)
    file.save(VOTED)
    saved = len(fs.changes)
    file.save(NEXT)
    file.close()

    looked_at = 0
    for at in range(saved, len(fs.changes)):
        for state in crash_states(fs.changes, at, subsets=6):
            looked_at += 1
            target = tmp_path / f"crash-{looked_at}"
            _torn(fs, state, at, dice).write_to(directory, target)
            assert read_hard_state(target) in (VOTED, NEXT)
    assert looked_at > 4


def _torn(fs: RecordingFs, state: CrashState, at: int, dice: random.Random) -> CrashState:
    """With the change under way half done, if it is a write."""
    change = fs.changes[at]
    if change.kind != "write" or change.path not in state.files:
        return state
    content = bytearray(state.files[change.path])
    length = dice.randrange(1, len(change.data))
    content.extend(bytes(max(0, change.offset + length - len(content))))
    content[change.offset : change.offset + length] = dice.randbytes(length)
    return CrashState(state.at, state.lost, {**state.files, change.path: bytes(content)})
