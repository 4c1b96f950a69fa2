"""The few file system calls that change anything, behind a port, so that tests can record them and make them fail.

Reading (list, stat, map, pread) is not part of it, because it cannot lose data.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LOG = logging.getLogger("dledger")

TMP_SUFFIX: Final = ".tmp"
_WHOLE_BYTES_MAX: Final = 1 << 30
"""More than any of our files that are read whole; a larger one is not ours, or was extended."""
_STAT_BLOCK_BYTES: Final = 512
_GROUP_READS: Final = 0o050
"""In a directory's mode without access for others: the administrator lets its group read the contents."""
_CHUNK: Final = bytes(512 * 1024)


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """How full a path's file system is, in bytes; ``available`` is what an ordinary process may still use."""

    total_bytes: int
    available_bytes: int
    used_bytes: int

    @property
    def ratio(self) -> float:
        """Used share of what ordinary processes can use, as ``df`` shows it."""
        usable = self.used_bytes + self.available_bytes
        return self.used_bytes / usable if usable else 1.0


class FileSystem:
    """The machine's file system, as far as the store uses it. Every method raises ``OSError``."""

    def create(self, path: Path) -> int:
        """Create or empty a file and open it for reading and writing."""
        mode = 0o640 if _is_read_by_group(path.parent) else 0o600
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def open(self, path: Path, *, writable: bool = True) -> int:
        """Open an existing file."""
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        written = os.pwrite(fd, data, offset)
        if written != len(data):
            rest = memoryview(data)
            while written < len(data):
                written += os.pwrite(fd, rest[written:], offset + written)

    def sync(self, fd: int) -> None:
        """Make a file's data durable (``fdatasync``)."""
        os.fdatasync(fd)

    def sync_all(self, fd: int) -> None:
        """Make everything on the file system of an open file durable (``syncfs``): many files cost no more than one.

        It also fails if another program's file could not be written since ``fd`` was opened, and where failures are not
        reported: on older kernels, on kinds of file systems that we do not know, and on one that has become read-only,
        as an error makes it. Then sync each file. Failures before ``fd`` was opened may be unknown here: open it
        before writing.
        """
        _syncfs(fd)

    def begin_sync(self, fd: int, offset: int, length: int) -> None:
        """Have the disk begin to write what was written there, without waiting; ``sync`` makes it durable."""
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)  # which writes what is dirty, and keeps it

    def allocate(self, fd: int, length: int) -> None:
        """Give a file real blocks for ``length`` bytes, all zero.

        Takes nothing if there is no room for all of them: trying would use up what is left for a moment, also for
        everybody else on this disk.
        """
        disk = os.fstatvfs(fd)
        free = (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize
        if length - os.fstat(fd).st_blocks * _STAT_BLOCK_BYTES > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, length)

    def sync_dir(self, path: Path) -> None:
        """Make a directory's entries durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file or directory, replacing a file."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def make_dir(self, path: Path) -> None:
        """Create one directory; no error if it is there."""
        path.mkdir(0o750 if _is_read_by_group(path.parent) else 0o700, exist_ok=True)

    def usage(self, path: Path) -> DiskUsage:
        """How full the path's file system is."""
        stat = os.statvfs(path)
        return DiskUsage(
            total_bytes=stat.f_blocks * stat.f_frsize,
            available_bytes=stat.f_bavail * stat.f_frsize,
            used_bytes=(stat.f_blocks - stat.f_bfree) * stat.f_frsize,
        )

    def device(self, path: Path) -> int:
        """The file system of the path: nothing can be renamed from one to another."""
        return path.stat().st_dev


_REPORTING_FILE_SYSTEMS: Final = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994})
"""ext4, XFS, Btrfs, tmpfs (``statfs(2)``). Layers above others, like overlayfs, may not pass errors on."""
_SYNCFS_KERNEL_MIN: Final = (5, 17)
"""Earlier ones report no failed commits of the journal; before 5.8, no failed writes of data either."""
_STATFS_BYTES: Final = 256


def _syncfs(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    release = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    if libc.fstatfs(fd, found) or ctypes.c_long.from_buffer(found).value not in _REPORTING_FILE_SYSTEMS:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    if release < _SYNCFS_KERNEL_MIN:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:  # then it has done nothing, and said nothing
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _is_read_by_group(directory: Path) -> bool:
    return stat.S_IMODE(directory.stat().st_mode) & 0o077 == _GROUP_READS


def keep_private(directory: Path) -> None:
    """Close a directory to other users of the machine; its group keeps read access if others had none.

    Directories made by earlier versions may be open to everyone, depending on the umask. Their files need no other
    mode, because they cannot be reached.
    """
    mode = stat.S_IMODE(directory.stat().st_mode)
    if not mode & 0o077 or mode & 0o077 == _GROUP_READS:
        return
    try:
        directory.chmod(mode & ~0o077)
    except PermissionError:
        _LOG.warning(
            "%s is readable by other users (mode %o), and belongs to another user: fix its mode", directory, mode
        )


def read_whole(path: Path, bytes_max: int = _WHOLE_BYTES_MAX) -> bytes:
    """A file's content. Raises ``OSError``, also for a file of more than ``bytes_max``: it may claim any length."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > bytes_max:
            raise OSError(errno.EFBIG, f"larger than {bytes_max} bytes", str(path))
        return file.read(bytes_max)


def create_durably(fs: FileSystem, path: Path, fill: Callable[[int], None]) -> None:
    """Create or replace ``path`` so that a crash leaves nothing new or all of it; ``fill`` gets the open file."""
    temporary = path.with_name(path.name + TMP_SUFFIX)
    try:
        fd = fs.create(temporary)
        try:
            fill(fd)
            fs.sync(fd)
        finally:
            fs.close(fd)
        fs.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # release the blocks at once: the disk may be full
        raise
    fs.sync_dir(path.parent)


def replace_durably(fs: FileSystem, path: Path, content: bytes) -> None:
    """Replace a small file's content."""
    create_durably(fs, path, lambda fd: fs.write(fd, content, 0))


def make_dirs_durably(fs: FileSystem, path: Path) -> None:
    """Create a directory and its missing ancestors, each made durable in its parent."""
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for directory in reversed(missing):
        fs.make_dir(directory)
        fs.sync_dir(directory.parent)


def non_zero_end(fd: int, offset: int, size: int) -> int:
    """Finds the end of the content of a sparse file.

    It reads with ``pread``: a bad sector in a mapping raises SIGBUS, which ends the process.

    The end of the last byte other than 0 in ``[offset, size)``; ``offset`` if there is none. Raises ``OSError``.

    Skips holes and blocks never written, and searches from the end, so it costs only the zeros written there.
    """
    for start, end in reversed(extents(fd, offset, size)):
        found = _last_non_zero(fd, start, end)
        if found:
            return found
    return offset


def extents(fd: int, offset: int, size: int) -> list[tuple[int, int]]:
    """The written ranges from ``offset`` on, in order."""
    found = []
    while offset < size:
        try:
            start = max(offset, os.lseek(fd, offset, os.SEEK_DATA))
        except OSError:  # ENXIO: no data from here on
            break
        offset = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((start, min(offset, size)))
    return found


def _last_non_zero(fd: int, start: int, end: int) -> int:
    while end > start:
        low = max(start, end - len(_CHUNK))
        chunk = os.pread(fd, end - low, low)
        if chunk != _CHUNK[: end - low]:
            return low + len(chunk.rstrip(b"\0"))
        end = low
    return 0
