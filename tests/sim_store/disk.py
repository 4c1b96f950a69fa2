"""A disk: real files in memory, and beside them what of each is durable, so that a power cut can take the rest back.

What is written and not yet synced is lost in any part and order: every sector of 512 bytes is as some write left it, or
as the last sync did; so is every change of a directory. A killed process loses nothing, but what it had not synced goes
with the next power cut. A sync that fails may have forgotten what it should have kept.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from dledger.store.fs import DiskUsage, FileSystem
from tests.sim_store.threads import EPOCH_MS, Killed, Scheduler

SECTOR_BYTES: Final = 512
LOCK_NAME: Final = "lock"
_VERSIONS_MAX: Final = 6
_DISK_BYTES: Final = 1 << 30


@dataclass(eq=False)
class Inode:
    """A file's content as far as it is durable, and what was written since."""

    durable: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    forgotten: bool = False
    """A sync failed: the page cache holds what will never be on the disk."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A change of a directory that is not durable yet."""

    kind: str
    path: Path
    inode: Inode | None = None
    source: Path | None = None


class Disk:
    """One machine's disk below ``root``; it outlives processes and boots."""

    def __init__(self, root: Path, scheduler: Scheduler, random: Random) -> None:
        self.root = root
        self.scheduler = scheduler
        self.random = random
        self.hits: Counter[str] = Counter()
        self.names: dict[Path, Inode] = {}
        """What is where, as the processes see it."""
        self._listing: dict[Path, dict[str, Path]] = {}
        self.durable_names: dict[Path, Inode] = {}
        self.durable_dirs: set[Path] = {root}
        self.pending: list[_Entry] = []
        self.full = False
        self.full_chance = 0.7
        self.fail_sync = 0.0
        self.fail_write = 0.0
        self.hang_until_us = 0
        self.slow_us = 0
        self.changes = 0
        self.stop_after: int | None = None
        """Whoever makes so many more changes stands still then: the machine is about to die."""
        self.stopped = False
        self.trace: Callable[[str, str], None] = lambda _what, _where: None
        root.mkdir(parents=True, exist_ok=True)

    # -- crashes -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """A process ends without a word: its locks are gone, and nothing else."""
        self.stop_after, self.stopped = None, False
        for path in [one for one in self.root.rglob(LOCK_NAME) if one.is_file()]:
            path.unlink()
        self._look_around()

    def cut_power(self) -> None:
        """Only what is durable is left for sure."""
        self.kill()
        random = self.random
        share = random.choice((0.0, 1.0, random.random()))
        entries = [one for one in self.pending if random.random() < share]
        names, dirs = dict(self.durable_names), set(self.durable_dirs)
        for one in entries:
            _apply(one, names, dirs)
        self.become({path: self._content(inode) for path, inode in names.items()}, dirs)
        self.hits["power cut"] += 1

    def become(self, contents: dict[Path, bytes], dirs: set[Path]) -> None:
        """Hold these files, all durable, and nothing else, while nobody runs."""
        times = {path: (self.root / path).stat().st_mtime_ns for path in contents if (self.root / path).exists()}
        dirs = {one for one in dirs if one == self.root or all(above in dirs for above in _dirs_above(self.root, one))}
        kept = {path for path in contents if all(above in dirs for above in _dirs_above(self.root, path))}
        for path in sorted(self.root.rglob("*")):
            if path.is_dir() and path not in dirs:
                shutil.rmtree(path)
            elif path.is_file() and path not in kept:
                path.unlink()
        for directory in sorted(dirs):
            directory.mkdir(parents=True, exist_ok=True)
        self.names, self._listing, self.durable_names, self.durable_dirs, self.pending = {}, {}, {}, dirs, []
        for path in sorted(kept):
            self._put(path, contents[path], times.get(path, (EPOCH_MS + self.scheduler.now_ms) * 1_000_000))

    def snapshot(self) -> tuple[dict[Path, bytes], set[Path]]:
        """What ``become`` brings back: what is durable now."""
        return {path: inode.durable for path, inode in self.durable_names.items()}, set(self.durable_dirs)

    def _put(self, path: Path, content: bytes, time_ns: int) -> None:
        """In place, because members know their files by their inodes."""
        with path.open("r+b" if path.exists() else "wb") as file:
            file.truncate(0)
            file.write(content)
        os.utime(path, ns=(time_ns, time_ns))
        inode = self.durable_names[path] = Inode(content)
        self.enter(path, inode)

    def _look_around(self) -> None:
        """What was removed without our knowing (temporary files, empty directories)."""
        for path in [path for path in self.names if not path.exists()]:
            self.pending.append(_Entry("unlink", path))
            self.leave(path)
        for directory in sorted(self.durable_dirs, reverse=True):
            if not directory.exists():
                self.pending.append(_Entry("rmdir", directory))

    def _content(self, inode: Inode) -> bytes:
        """What is left of a file."""
        real = self._real(inode)
        if not inode.writes and real == inode.durable:
            return real
        random = self.random
        versions = [inode.durable]
        count = len(inode.writes)
        marks = sorted({int(random.random() * (count + 1)) for _ in range(_VERSIONS_MAX)} | {count})
        content, done = bytearray(inode.durable), 0
        for mark in marks:
            for offset, data in inode.writes[done:mark]:
                content.extend(bytes(max(0, offset + len(data) - len(content))))
                content[offset : offset + len(data)] = data
            done = mark
            versions.append(bytes(content))
        if not inode.forgotten and real is not None:
            versions.append(real)  # what was written through mappings is in it, too
        self.hits["torn file"] += 1
        how = random.random()
        if how < 0.2:
            return versions[0]
        if how < 0.4:
            return versions[-1]
        if how < 0.55:
            return random.choice(versions)
        length = len(random.choice((versions[-1], random.choice(versions))))
        oldest = random.random()
        pieces = []
        for start in range(0, length, SECTOR_BYTES):
            version = versions[0] if random.random() < oldest * 0.5 else random.choice(versions)
            size = min(SECTOR_BYTES, length - start)
            pieces.append(version[start : start + size].ljust(size, b"\0"))
        return b"".join(pieces)

    def _real(self, inode: Inode) -> bytes | None:
        path = next((path for path, one in self.names.items() if one is inode), None)
        return None if path is None or not path.exists() else path.read_bytes()

    def copy(self) -> dict[Path, bytes]:
        """What is there now."""
        return {path: path.read_bytes() for path in sorted(self.names) if path.exists()}

    # -- what the file system does -------------------------------------------------------------------------------

    def sync(self, path: Path, inode: Inode) -> None:
        """Make a file durable."""
        if inode.forgotten:
            content = bytearray(inode.durable)
            for offset, data in inode.writes:
                content.extend(bytes(max(0, offset + len(data) - len(content))))
                content[offset : offset + len(data)] = data
            inode.durable = bytes(content)
        elif path.exists() and self.names.get(path) is inode:
            inode.durable = path.read_bytes()
        inode.writes = []

    def forget(self, inode: Inode) -> None:
        """A sync failed."""
        if self.random.random() < 0.7:
            inode.writes, inode.forgotten = [], True

    def sync_dir(self, directory: Path) -> None:
        """Make a directory's entries durable."""
        self._look_around_in(directory)
        left = []
        for entry in self.pending:
            if entry.path.parent == directory:
                _apply(entry, self.durable_names, self.durable_dirs)
            else:
                left.append(entry)
        self.pending = left

    def _look_around_in(self, directory: Path) -> None:
        present = set(os.listdir(directory)) if directory.exists() else set()
        for path in [path for name, path in self._listing.get(directory, {}).items() if name not in present]:
            self.pending.append(_Entry("unlink", path))
            self.leave(path)

    def enter(self, path: Path, inode: Inode) -> None:
        """A name is a file's from now on."""
        self.names[path] = inode
        self._listing.setdefault(path.parent, {})[path.name] = path

    def leave(self, path: Path) -> Inode | None:
        """A name is nobody's from now on."""
        self._listing.get(path.parent, {}).pop(path.name, None)
        return self.names.pop(path, None)

    def entered(self, kind: str, path: Path, inode: Inode | None = None, source: Path | None = None) -> None:
        """A directory was changed."""
        self.pending.append(_Entry(kind, path, inode, source))


def _apply(entry: _Entry, names: dict[Path, Inode], dirs: set[Path]) -> None:
    if entry.kind == "mkdir":
        dirs.add(entry.path)
    elif entry.kind == "rmdir":
        dirs.discard(entry.path)
    elif entry.kind == "unlink":
        names.pop(entry.path, None)
    elif entry.inode is not None:
        if entry.source is not None and names.get(entry.source) is entry.inode:
            del names[entry.source]
        names[entry.path] = entry.inode


def _always() -> bool:
    return True


def _dirs_above(root: Path, path: Path) -> list[Path]:
    return [one for one in path.parents if one != root and root in one.parents]


class SimFs(FileSystem):
    """What one process sees of a disk. Whatever it does, somebody else may run before it."""

    def __init__(self, disk: Disk, is_dead: Callable[[], bool]) -> None:
        self._disk = disk
        self._is_dead = is_dead
        self._open: dict[int, tuple[Path, Inode]] = {}

    def _begin(self, what: str, path: Path) -> None:
        """Before a call: time passes, and it may fail."""
        if self._is_dead():
            raise Killed
        disk, scheduler = self._disk, self._disk.scheduler
        scheduler.point(0.5)
        if disk.slow_us:
            scheduler.sleep_us(int(disk.random.random() * disk.slow_us))
        while disk.hang_until_us > scheduler.now_us:
            disk.hits["hung call"] += 1
            scheduler.sleep_us(disk.hang_until_us - scheduler.now_us)
        if disk.stop_after is not None:
            disk.stop_after -= 1
            disk.stopped = disk.stopped or disk.stop_after < 0
        while disk.stopped:
            scheduler.sleep_us(1_000_000)
        disk.changes += 1
        disk.trace(what, str(path))

    def _fill(self, path: Path) -> None:
        disk = self._disk
        if disk.full and disk.random.random() < disk.full_chance:
            disk.hits["no space"] += 1
            raise OSError(errno.ENOSPC, "no space left on device", str(path))

    def _fail(self, chance: float, path: Path, what: str) -> None:
        if chance and self._disk.random.random() < chance:
            self._disk.hits[what] += 1
            self._disk.trace(what, str(path))
            raise OSError(errno.EIO, "input/output error", str(path))

    def _touch(self, path: Path) -> None:
        now_ns = EPOCH_MS * 1_000_000 + self._disk.scheduler.now_us * 1000
        os.utime(path, ns=(now_ns, now_ns))

    def create(self, path: Path) -> int:
        self._begin("create", path)
        self._fill(path)
        fd = super().create(path)
        disk, inode = self._disk, Inode()
        disk.enter(path, inode)
        disk.entered("create", path, inode)
        self._open[fd] = (path, inode)
        self._touch(path)
        return fd

    def open(self, path: Path, *, writable: bool = True) -> int:
        if self._is_dead():
            raise Killed
        fd = super().open(path, writable=writable)
        inode = Inode() if path.is_dir() else self._disk.names.get(path)
        if inode is None:
            self._disk.enter(path, inode := Inode())
        self._open[fd] = (path, inode)
        return fd

    def close(self, fd: int) -> None:
        if self._open.pop(fd, None) is not None:  # else its number is another's by now
            super().close(fd)

    def let_go(self) -> None:
        """The process is dead: what it had open is closed, and who closes files late holds nothing of its world."""
        for fd in list(self._open):
            self.close(fd)
        self._is_dead = _always
        if hasattr(self, "_disk"):
            del self._disk

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        path, inode = self._open[fd]
        self._begin("write", path)
        self._fail(self._disk.fail_write, path, "failed write")
        try:
            self._fill(path)
        except OSError:
            part = bytes(data[: int(self._disk.random.random() * len(data))])
            if part:
                super().write(fd, part, offset)
                inode.writes.append((offset, part))
            raise
        super().write(fd, data, offset)
        inode.writes.append((offset, bytes(data)))
        self._touch(Path(f"/proc/self/fd/{fd}"))

    def sync(self, fd: int) -> None:
        path, inode = self._open[fd]
        self._begin("sync", path)
        try:
            self._fail(self._disk.fail_sync, path, "failed sync")
        except OSError:
            self._disk.forget(inode)
            raise
        self._disk.sync(self._path_of(path, inode), inode)
        self._disk.scheduler.point(0.5)

    def _path_of(self, path: Path, inode: Inode) -> Path:
        if self._disk.names.get(path) is inode:
            return path
        return next((name for name, one in self._disk.names.items() if one is inode), path)

    def allocate(self, fd: int, length: int) -> None:
        path, inode = self._open[fd]
        self._begin("allocate", path)
        self._fill(path)
        super().allocate(fd, length)
        inode.writes.append((0, bytes(length)))

    def sync_dir(self, path: Path) -> None:
        self._begin("sync_dir", path)
        self._fail(self._disk.fail_sync, path, "failed sync")
        self._disk.sync_dir(path)

    def sync_all(self, fd: int) -> None:
        path, _ = self._open[fd]
        self._begin("sync_all", path)
        self._fail(self._disk.fail_sync, path, "failed sync")
        for name, inode in list(self._disk.names.items()):
            self._disk.sync(name, inode)
        for directory in {entry.path.parent for entry in self._disk.pending}:
            self._disk.sync_dir(directory)

    def rename(self, source: Path, target: Path) -> None:
        self._begin("rename", target)
        super().rename(source, target)
        disk = self._disk
        olds = [source]
        if target.is_dir():
            olds = [old for old in disk.names if source in old.parents]
        for old in olds:
            inode = disk.leave(old)
            if inode is not None:
                new = target / old.relative_to(source)
                disk.enter(new, inode)
                disk.entered("rename", new, inode, old)

    def unlink(self, path: Path) -> None:
        self._begin("unlink", path)
        super().unlink(path)
        self._disk.leave(path)
        self._disk.entered("unlink", path)

    def make_dir(self, path: Path) -> None:
        self._begin("mkdir", path)
        if not path.exists():
            self._fill(path)
            super().make_dir(path)
            self._disk.entered("mkdir", path)

    def usage(self, path: Path) -> DiskUsage:  # one disk
        used = _DISK_BYTES * (99 if self._disk.full else 10) // 100
        return DiskUsage(_DISK_BYTES, _DISK_BYTES - used, used)
