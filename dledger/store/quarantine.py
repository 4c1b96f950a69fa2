"""Keeps damaged files that were replaced: in ``damaged-<n>``, the newest with the highest number.

Segments replaced by a repair are evidence of what others hold: when there are too many, the oldest are removed, with a
line in the log. A whole log that was set aside, or the end of one that a start cut off, may hold entries that no other
member has: only people may remove those, and beyond a limit no further log is set aside.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from dledger.config import StoreConfig
from dledger.errors import ConfigError, CorruptLogError
from dledger.store.durable_state import (
    HARD_STATE_FILE,
    REPAIR_ADVICE,
    FileHardState,
    LogCheckpoint,
    create_checkpoint,
    create_hard_state,
    read_hard_state,
)
from dledger.store.fs import TMP_SUFFIX, FileSystem, create_durably, make_dirs_durably
from dledger.store.identity import (
    CHECKPOINT_FILE,
    MEMBERS_FILE,
    SNAPSHOTS_DIRECTORY,
    DirectoryLock,
    begin_new_memory,
    layout_of,
)
from dledger.store.log_files import LogFiles
from dledger.store.mmap_file import FoundFile, MappedFile
from dledger.store.recovery import Cut, Damage, Keep, Refuse, ScanFindings, plan
from dledger.types import HardState

_log = logging.getLogger("dledger")

QUARANTINED_MAX: Final = 16
"""The limit of directories of damaged segments in one place."""
QUARANTINED_BYTES_MAX: Final = 16 << 30
"""The limit of their disk space, not counting the newest one."""
QUARANTINED_LOGS_MAX: Final = 8
"""The limit of whole logs kept in one place."""
_NAME: Final = re.compile(r"damaged-([1-9][0-9]*)")
_SEGMENTS: Final = "data"
_REASON: Final = "reason.txt"


class Quarantine:
    """Keeps what one start, or one repair, replaces: in one directory per disk, made on demand."""

    def __init__(self, fs: FileSystem, node: Path) -> None:
        """``node`` is the node's directory."""
        self._fs = fs
        self._node = node
        self._made: dict[Path, Path] = {}
        self._cut_off = ""

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories made, in order."""
        return tuple(self._made.values())

    def target(self, path: Path) -> Path:
        """The path under which to keep the file ``path``. Raises ``OSError``."""
        parent = _place_of(self._fs, self._node, path.parent)
        if parent not in self._made:
            made = make_quarantine_near(self._fs, self._node, path.parent)
            if self._cut_off:
                _mark_as_log(self._fs, made, self._cut_off)
            self._made[parent] = made
        return self._made[parent] / path.name

    def check_room_for_log(self, paths: Iterable[Path]) -> None:
        """Raise ``ConfigError`` if too many logs are already set aside in a place where one of ``paths`` would go."""
        for place in sorted({_place_of(self._fs, self._node, path.parent) for path in paths}):
            check_room_for_log(place)

    def mark_as_log(self, reason: str) -> None:
        """Mark what follows as the end of a log, which others do not provably hold. Raises ``OSError``.

        Durable before any of it is moved: whatever happens in between, it is not taken for mere segments.
        """
        self._cut_off = reason
        for made in self.directories:
            _mark_as_log(self._fs, made, reason)

    def sync(self) -> None:
        """Make the moves durable. Raises ``OSError``."""
        for made in self.directories:
            self._fs.sync_dir(made)


def make_quarantine_near(fs: FileSystem, node: Path, data: Path) -> Path:
    """A new directory, durable, for damaged segments of the directory ``data``. Raises ``OSError``."""
    parent = _place_of(fs, node, data)
    _remove_oldest(fs, parent)
    path = _next_quarantine(parent) / _SEGMENTS
    make_dirs_durably(fs, path)
    return path


def _place_of(fs: FileSystem, node: Path, data: Path) -> Path:
    """The node's directory or, if that is on another disk, the one beside the segments."""
    return node if fs.device(data) == fs.device(node) else data


def _mark_as_log(fs: FileSystem, segments: Path, reason: str) -> None:
    text = f"{reason}\n".encode()
    create_durably(fs, segments.parent / _REASON, lambda fd: fs.write(fd, text, 0))


def _next_quarantine(parent: Path) -> Path:
    """The name of the next directory."""
    return parent / f"damaged-{max(_numbered(parent), default=0) + 1}"


def check_room_for_log(parent: Path) -> None:
    """Raise ``ConfigError`` if ``parent`` holds too many whole logs set aside."""
    logs = [path for path in _numbered(parent).values() if not _holds_segments_alone(path)]
    if len(logs) >= QUARANTINED_LOGS_MAX:
        names = ", ".join(path.name for path in logs)
        raise ConfigError(
            [f"{parent} holds {len(logs)} logs set aside earlier ({names}): remove those no longer needed"]
        )


def _numbered(parent: Path) -> dict[int, Path]:
    matches = ((_NAME.fullmatch(path.name), path) for path in parent.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match and path.is_dir()))


def _holds_segments_alone(path: Path) -> bool:
    names = {one.name for one in path.iterdir()} - {f"{_REASON}{TMP_SUFFIX}"}
    if names == {_SEGMENTS, _REASON}:  # of a start that failed before it moved anything
        return not any((path / _SEGMENTS).iterdir())
    return names <= {_SEGMENTS}


def _remove_oldest(fs: FileSystem, parent: Path) -> None:
    kept = [path for path in _numbered(parent).values() if _holds_segments_alone(path)]
    sizes = [_disk_bytes(path) for path in kept]
    while len(kept) >= QUARANTINED_MAX or (len(kept) > 1 and sum(sizes) > QUARANTINED_BYTES_MAX):
        oldest, size = kept.pop(0), sizes.pop(0)
        for path in sorted(oldest.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
            else:
                fs.unlink(path)
        oldest.rmdir()
        fs.sync_dir(parent)
        text = "removed %s (%d MiB), the oldest of the damaged segments kept there: the limit is %d directories, %d GiB"
        _log.warning(text, oldest, size >> 20, QUARANTINED_MAX, QUARANTINED_BYTES_MAX >> 30)


def _disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*"))


def set_aside_damaged(config: StoreConfig, node_id: str, fs: FileSystem | None = None) -> Path:
    """Sets a damaged log aside, so that a follower can fetch it again from its leader.

    Nothing is deleted: data, index and checkpoint move to ``damaged-<n>/``. That leaves an empty log of a node that
    knows its term and vote but may not vote until it has caught up (an emptied log must not elect anyone, nor begin a
    group anew: that would hide what all its members have set aside).

    Move the damaged log of a stopped node away and leave an empty one; returns where its files are now.

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
        aside = _next_quarantine(layout.directory)
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
                _move_aside(
                    fs, data, aside / "data" if data.parent == layout.directory else _next_quarantine(data.parent)
                )
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


class DamagedStart:
    """Opens a damaged log that peers can complete: keeps what is verified, and sets the rest aside.

    There are two ways, neither of which needs a peer yet:

    - A damaged, misshapen or missing segment that others follow is set aside, and an empty file takes its place.
      Nothing is read from it (records are verified), and the running node fetches the segment (``repair``): until then
      the member counts for nothing, but its memory stays valid, because the chain around the gap determines what was
      in it.
    - Damage at the end, in the part that a start verifies: everything from there on is set aside, and the log ends with
      the last intact entry before it. The member may have acknowledged more, and nobody else need have it: so it first
      becomes as one with a new disk, durably; the leader's pushes bring the rest. If a majority has lost its end, a
      person decides.

    Any other damage (no checkpoint, an entry at the mark other than the flushed one) is refused; the caller may then
    set all of it aside (``set_aside_damaged``). After a crash in between, a start finds the same damage, or less.

    One opening that found damage, or may find some.
    """

    def __init__(self, fs: FileSystem, directory: Path) -> None:
        self._fs = fs
        self._directory = directory
        self._quarantine = Quarantine(fs, directory)
        self.holes: list[CorruptLogError] = []
        """Segments replaced by empty ones."""
        self.cut = False
        """Whether the log's end was set aside."""

    def settle(
        self, files: LogFiles, findings: ScanFindings, misshapen: tuple[FoundFile, ...], hard_state: FileHardState
    ) -> tuple[Keep | Cut, tuple[FoundFile, ...]]:
        """Set damaged files aside; returns the plan for the rest, and the misshapen files still in place.

        Raises ``CorruptLogError`` if nothing verifies what to keep.
        """
        step = files.segment_bytes
        last = files.data.base_of(findings.checkpoint.flushed.position)
        damaged = {files.data.base_of(one.position): one for one in reversed(findings.bad_files)}
        holes = {base: one for base, one in damaged.items() if base + step <= last}
        middle = findings.misshapen_middle
        left = replace(
            findings,
            bad_files=tuple(one for one in findings.bad_files if files.data.base_of(one.position) not in holes),
            misshapen_middle=None if middle is None or files.data.base_of(middle.position) in holes else middle,
        )
        decision = plan(left)
        if isinstance(decision, Refuse):
            decision = self._cut(files, findings, decision.damage, misshapen, hard_state)
            holes = {base: one for base, one in holes.items() if base + step <= decision.end.position}
        for base, one in sorted(holes.items()):
            self._leave_empty(files, base, one)
        return decision, tuple(one for one in misshapen if one.path.exists() and one.base not in holes)

    def put_aside(self, path: Path) -> None:
        """Set aside a file that is replaced."""
        self._fs.rename(path, self._quarantine.target(path))

    def _cut(
        self,
        files: LogFiles,
        findings: ScanFindings,
        damage: Damage,
        misshapen: tuple[FoundFile, ...],
        hard_state: FileHardState,
    ) -> Cut:
        end = findings.end
        if end.position > damage.position or not findings.mark_agrees:
            raise CorruptLogError(damage.path, damage.offset, damage.reason, REPAIR_ADVICE)
        lost = [one.path for one in misshapen if one.base >= end.position and one.path.exists()]
        behind = [file for file in files.data.files() if file.base + file.size > end.position]
        blank = [file for file in behind if file.base >= end.position and file.is_empty()]
        self._quarantine.check_room_for_log([*lost, *(file.path for file in behind if file not in blank)])
        reason = (
            f"its log was damaged ({damage.path}, offset {damage.offset}): fetching the entries after {end.index} again"
        )
        hard_state.lose(reason)
        self.cut = True
        self._quarantine.mark_as_log(reason)
        for path in lost:
            self.put_aside(path)
        for file in behind:
            if file.base < end.position:
                self._keep_copy(file)
                continue
            files.data.forget(file.base)
            if file in blank:
                self._fs.unlink(file.path)
            else:
                self.put_aside(file.path)
        self._quarantine.sync()
        return Cut(end, f"damaged: {damage.reason}")

    def _keep_copy(self, file: MappedFile) -> None:
        path = self._quarantine.target(file.path)
        fd = self._fs.create(path)
        try:
            file.salvage(fd, file.size)
            self._fs.sync(fd)
        except OSError:
            path.unlink(missing_ok=True)  # the original is still in place
            raise
        finally:
            self._fs.close(fd)

    def _leave_empty(self, files: LogFiles, base: int, damage: Damage) -> None:
        known, path = files.data.find(base), damage.path
        if path.parent in files.data.placement.read_only:
            raise CorruptLogError(path, damage.offset, damage.reason, REPAIR_ADVICE)
        self.holes.append(CorruptLogError(path, damage.offset, damage.reason, REPAIR_ADVICE))
        if known is not None and known.is_empty():
            return  # an earlier start left it so
        if path.exists():
            self.put_aside(path)
        size = files.segment_bytes
        create_durably(self._fs, path, lambda fd: self._fs.allocate(fd, size))
        files.data.replace(MappedFile(self._fs, path, base, size, writable=True))
