"""Opens a damaged log that peers can complete: keeps what is verified, and sets the rest aside.

There are two ways, neither of which needs a peer yet:

- A damaged, misshapen or missing segment that others follow is set aside, and an empty file takes its place. Nothing is
  read from it (records are verified), and the running node fetches the segment (``mending``): until then the member
  counts for nothing, but its memory stays valid, because the chain around the gap determines what was in it.
- Damage at the end, in the part that a start verifies: everything from there on is set aside, and the log ends with the
  last intact entry before it. The member may have acknowledged more, and nobody else need have it: so it first becomes
  as one with a new disk, durably; the leader's pushes bring the rest. If a majority has lost its end, a person decides.

Any other damage (no checkpoint, an entry at the mark other than the flushed one) is refused; the caller may then set
all of it aside (``repair``). After a crash in between, a start finds the same damage, or less.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dledger.errors import CorruptLogError
from dledger.store.aside import Aside
from dledger.store.checkpoint import REPAIR_ADVICE
from dledger.store.fs import FileSystem, create_durably
from dledger.store.hard_state import FileHardState
from dledger.store.log_files import LogFiles
from dledger.store.mmap_file import MappedFile
from dledger.store.mmap_file_list import FoundFile
from dledger.store.recovery import Cut, Damage, Keep, Refuse, ScanFacts, plan


class DamagedStart:
    """One opening that found damage, or may find some."""

    def __init__(self, fs: FileSystem, directory: Path) -> None:
        self._fs = fs
        self._directory = directory
        self._aside = Aside(fs, directory)
        self.holes: list[CorruptLogError] = []
        """Segments replaced by empty ones."""
        self.cut = False
        """Whether the log's end was set aside."""

    def settle(
        self, files: LogFiles, facts: ScanFacts, misshapen: tuple[FoundFile, ...], hard_state: FileHardState
    ) -> tuple[Keep | Cut, tuple[FoundFile, ...]]:
        """Set damaged files aside; returns the plan for the rest, and the misshapen files still in place.

        Raises ``CorruptLogError`` if nothing verifies what to keep.
        """
        step = files.segment_bytes
        last = files.data.base_of(facts.checkpoint.flushed.position)
        damaged = {files.data.base_of(one.position): one for one in reversed(facts.bad_files)}
        holes = {base: one for base, one in damaged.items() if base + step <= last}
        middle = facts.misshapen_middle
        left = replace(
            facts,
            bad_files=tuple(one for one in facts.bad_files if files.data.base_of(one.position) not in holes),
            misshapen_middle=None if middle is None or files.data.base_of(middle.position) in holes else middle,
        )
        decision = plan(left)
        if isinstance(decision, Refuse):
            decision = self._cut(files, facts, decision.damage, misshapen, hard_state)
            holes = {base: one for base, one in holes.items() if base + step <= decision.end.position}
        for base, one in sorted(holes.items()):
            self._leave_empty(files, base, one)
        return decision, tuple(one for one in misshapen if one.path.exists() and one.base not in holes)

    def put_aside(self, path: Path) -> None:
        """Set aside a file that is replaced."""
        self._fs.rename(path, self._aside.target(path))

    def _cut(
        self,
        files: LogFiles,
        facts: ScanFacts,
        damage: Damage,
        misshapen: tuple[FoundFile, ...],
        hard_state: FileHardState,
    ) -> Cut:
        end = facts.end
        if end.position > damage.position or not facts.mark_agrees:
            raise CorruptLogError(damage.path, damage.offset, damage.reason, REPAIR_ADVICE)
        lost = [one.path for one in misshapen if one.base >= end.position and one.path.exists()]
        behind = [file for file in files.data.files() if file.base + file.size > end.position]
        blank = [file for file in behind if file.base >= end.position and file.is_empty()]
        self._aside.check_room_for_log([*lost, *(file.path for file in behind if file not in blank)])
        reason = (
            f"its log was damaged ({damage.path}, offset {damage.offset}): fetching the entries after {end.index} again"
        )
        hard_state.lose(reason)
        self.cut = True
        self._aside.mark_as_log(reason)
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
        self._aside.sync()
        return Cut(end, f"damaged: {damage.reason}")

    def _keep_copy(self, file: MappedFile) -> None:
        path = self._aside.target(file.path)
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
