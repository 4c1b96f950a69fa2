"""File systems for tests: one that records changes and rebuilds what a crash leaves, one that fails on demand."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dledger.store.fs import DiskUsage, FileSystem


@dataclass(frozen=True, slots=True)
class Change:
    """One recorded call; ``inode`` names a file across renames."""

    kind: str
    path: Path
    inode: int = -1
    offset: int = 0
    data: bytes = b""
    target: Path = Path()


class RecordingFs(FileSystem):
    """Works on a real directory and remembers every change in order. Nothing is really synced: the record says when."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._inodes: dict[Path, int] = {}
        self._open: dict[int, tuple[int, Path]] = {}
        self._next_inode = 0

    def inode(self, path: Path) -> int:
        """Which file has that name now."""
        return self._inodes[path]

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._next_inode += 1
        self._inodes[path] = self._next_inode
        self._open[fd] = (self._next_inode, path)
        self.changes.append(Change("create", path, self._next_inode))
        return fd

    def open(self, path: Path, *, writable: bool = True) -> int:
        fd = super().open(path, writable=writable)
        self._open[fd] = (-1 if path.is_dir() else self._inodes[path], path)
        return fd

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        super().write(fd, data, offset)
        inode, path = self._open[fd]
        self.changes.append(Change("write", path, inode, offset, bytes(data)))

    def allocate(self, fd: int, length: int) -> None:
        super().allocate(fd, length)
        inode, path = self._open[fd]
        self.changes.append(Change("write", path, inode, 0, bytes(length)))

    def sync(self, fd: int) -> None:
        inode, path = self._open[fd]
        self.changes.append(Change("sync", path, inode))

    def sync_all(self, fd: int) -> None:
        self.changes.append(Change("sync_all", self._open[fd][1]))

    def sync_dir(self, path: Path) -> None:
        self.changes.append(Change("sync_dir", path))

    def make_dir(self, path: Path) -> None:
        is_new = not path.exists()
        super().make_dir(path)
        if is_new:
            self.changes.append(Change("mkdir", path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        inode = self._inodes[target] = self._inodes.pop(source)
        self.changes.append(Change("rename", source, inode, target=target))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        del self._inodes[path]
        self.changes.append(Change("unlink", path))


@dataclass(frozen=True, slots=True)
class CrashState:
    """What a disk holds after a crash, and how it came about."""

    at: int
    lost: tuple[int, ...]
    files: dict[Path, bytes]

    @property
    def content(self) -> bytes:
        """The same for disks that hold the same: many crashes leave what another one left, and opening takes long."""
        digest = hashlib.blake2b()
        for path, data in sorted(self.files.items()):
            digest.update(f"{path}\0{len(data)}\0".encode() + data)
        return digest.digest()

    def write_to(self, source: Path, target: Path) -> None:
        """Put the files below ``target`` where they were below ``source``.

        They are as old as those there, so that nothing tells what was lost from what was not but the content.
        """
        for path, content in self.files.items():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            if path.exists():
                shutil.copystat(path, place)


def crash_states(changes: list[Change], at: int, lost_max: int = 4, *, subsets: int = 0) -> Iterator[CrashState]:
    """Disks after a crash before change ``at``: all unsynced changes kept; none; all but one; one alone (bounded).

    ``subsets``: besides, so many with any of them lost, the same ones each time.
    """
    pending = [number for number in range(at) if not _durable(changes, number, at)]
    choices: list[tuple[int, ...]] = [(), tuple(pending)]
    for one in pending[max(0, len(pending) - lost_max) :]:
        choices += [(one,), tuple(other for other in pending if other != one)]
    dice = random.Random(at)
    for _ in range(subsets):
        share = dice.random()
        choices.append(tuple(one for one in pending if dice.random() < share))
    for lost in dict.fromkeys(choices):
        yield CrashState(at, lost, _disk(changes, at, set(lost)))


def sectors_lost(changes: list[Change], at: int, path: Path, dice: random.Random) -> CrashState:
    """A disk after a power cut before change ``at``: each sector of ``path`` as any write since its last sync left it.

    The other files are as they were last written.
    """
    pending = [n for n in range(at) if changes[n].path == path and not _durable(changes, n, at)]
    versions = [_disk(changes, at, set(pending[count:]))[path] for count in range(len(pending) + 1)]
    mixed = [dice.choice(versions)[start : start + 512] for start in range(0, len(versions[0]), 512)]
    return CrashState(at, tuple(pending), {**_disk(changes, at, set()), path: b"".join(mixed)})


def _durable(changes: list[Change], number: int, at: int) -> bool:
    change = changes[number]
    rest = changes[number + 1 : at]
    if change.kind in ("sync", "sync_dir", "sync_all") or any(one.kind == "sync_all" for one in rest):
        return True
    if change.kind == "write":
        return any(one.kind == "sync" and one.inode == change.inode for one in rest)
    directory = (change.target if change.kind == "rename" else change.path).parent
    return any(one.kind == "sync_dir" and one.path == directory for one in rest)


def _disk(changes: list[Change], at: int, lost: set[int]) -> dict[Path, bytes]:
    names: dict[Path, int] = {}
    contents: dict[int, bytearray] = {}
    for number, change in enumerate(changes[:at]):
        if number in lost:
            continue
        if change.kind == "create":
            names[change.path] = change.inode
        elif change.kind == "write":
            content = contents.setdefault(change.inode, bytearray())
            content.extend(bytes(max(0, change.offset + len(change.data) - len(content))))
            content[change.offset : change.offset + len(change.data)] = change.data
        elif change.kind == "rename":
            names.pop(change.path, None)
            names[change.target] = change.inode
        elif change.kind == "unlink":
            names.pop(change.path, None)
    gone = {changes[number].path for number in lost if changes[number].kind == "mkdir"}
    left = (path for path in names if not gone or gone.isdisjoint(path.parents))
    return {path: bytes(contents.get(names[path], b"")) for path in left}


class FailingFs(FileSystem):
    """Fails the calls that ``fails`` picks: it is asked with the call's name and the path or descriptor's path."""

    def __init__(self, fails: Callable[[str, str], int | None] = lambda _call, _path: None) -> None:
        self.fails = fails
        self.calls: list[tuple[str, str]] = []
        self.disk = DiskUsage(1_000_000, 900_000, 100_000)

    def _ask(self, call: str, path: str) -> None:
        self.calls.append((call, path))
        number = self.fails(call, path)
        if number is not None:
            raise OSError(number, os.strerror(number))

    def _path(self, fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        self._ask("write", self._path(fd))
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._ask("sync", self._path(fd))

    def sync_all(self, fd: int) -> None:
        self._ask("sync_all", self._path(fd))

    def sync_dir(self, path: Path) -> None:
        self._ask("sync_dir", str(path))

    def allocate(self, fd: int, length: int) -> None:
        self._ask("allocate", self._path(fd))
        super().allocate(fd, length)

    def rename(self, source: Path, target: Path) -> None:
        self._ask("rename", str(target))
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._ask("unlink", str(path))
        super().unlink(path)

    def usage(self, path: Path) -> DiskUsage:
        return self.disk


class OpeningFs(FailingFs):
    """Is asked about files that are opened, too."""

    def open(self, path: Path, *, writable: bool = True) -> int:
        if not path.is_dir():
            self._ask("open", str(path))
        return super().open(path, writable=writable)


NO_SPACE = errno.ENOSPC
IO_ERROR = errno.EIO
