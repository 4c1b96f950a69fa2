"""Sets a damaged log aside, so that a follower can fetch it again from its leader.

Nothing is deleted: data, index and checkpoint move to ``damaged-<n>/``. That leaves an empty log of a node that
knows its term and vote but may not vote until it has caught up (an emptied log must not elect anyone, nor begin a group
anew: that would hide what all its members have set aside).
"""

from __future__ import annotations

from pathlib import Path

from dledger.config import StoreConfig
from dledger.errors import CorruptLogError
from dledger.store.aside import check_room_for_log, next_aside
from dledger.store.checkpoint import LogCheckpoint, create_checkpoint
from dledger.store.fs import FileSystem
from dledger.store.hard_state import HARD_STATE_FILE, create_hard_state, read_hard_state
from dledger.store.identity import DirectoryLock
from dledger.store.members_file import MEMBERS_FILE, begin_new_memory
from dledger.store.opening import CHECKPOINT_FILE, SNAPSHOTS_DIRECTORY, layout_of
from dledger.types import HardState


def set_aside_damaged(config: StoreConfig, node_id: str, fs: FileSystem | None = None) -> Path:
    """Move the damaged log of a stopped node away and leave an empty one; returns where its files are now.

    The vote is taken first, so that a crash in between leaves a node that may not vote. The fence of a node whose
    history is not the group's is lifted last, so that it serves none of it; its members and its memory of others, which
    are of that history, go with the log: they would make healthy members doubt themselves. If term and vote themselves
    are unreadable, they start over, which is safe only because the node may not vote. Data directories given by
    ``data_dirs`` get a ``damaged-<n>`` of their own. Raises ``DirectoryLockedError`` if the node is running, and
    ``ConfigError`` if too many logs were set aside before.
    """
    fs = fs or FileSystem()
    layout = layout_of(config, node_id)
    lock = DirectoryLock(layout.directory)
    try:
        check_room_for_log(layout.directory)
        try:
            state = read_hard_state(layout.directory)
        except CorruptLogError:
            state = HardState()
        aside = next_aside(layout.directory)
        fs.make_dir(aside)
        fs.sync_dir(layout.directory)
        old_hard_state = layout.directory / HARD_STATE_FILE
        if old_hard_state.exists():
            (aside / HARD_STATE_FILE).write_bytes(old_hard_state.read_bytes())
        blank = HardState(state.term, state.vote).after_loss(f"its damaged log was moved to {aside}")
        if not state.fenced:
            create_hard_state(fs, layout.directory, blank)
            begin_new_memory(fs, layout.directory)
        for data in layout.data:
            if data.exists() and data not in layout.read_only:
                _move_aside(fs, data, aside / "data" if data.parent == layout.directory else next_aside(data.parent))
        if layout.index.exists():
            _move_aside(fs, layout.index, aside / "index")
        snapshots = layout.directory / SNAPSHOTS_DIRECTORY
        if snapshots.exists():  # of the same history
            fs.rename(snapshots, aside / SNAPSHOTS_DIRECTORY)
        checkpoint = layout.directory / CHECKPOINT_FILE
        if checkpoint.exists():
            fs.rename(checkpoint, aside / CHECKPOINT_FILE)
        members = layout.directory / MEMBERS_FILE
        if state.fenced and members.exists():
            fs.rename(members, aside / MEMBERS_FILE)
        create_checkpoint(fs, checkpoint, LogCheckpoint())
        if state.fenced:
            create_hard_state(fs, layout.directory, blank)
        fs.sync_dir(aside)
        fs.sync_dir(layout.directory)
        return aside
    finally:
        lock.release()


def _move_aside(fs: FileSystem, directory: Path, target: Path) -> None:
    fs.rename(directory, target)
    fs.make_dir(directory)
    fs.sync_dir(directory.parent)
