"""What a start can tell of the life before it: on which boot of the machine it ran, how it flushed, with which files.

The file ``traces`` is written at every start. A directory that was copied, or restored file by file, has files of its
own with other inodes than those written down: what its member said since the copy was made is not in it. Inodes are
compared with their generation where the file system has one (ext4, xfs, btrfs), since a copy may get an inode of the
same number. Devices are not compared: their numbers change with the next boot.

A set-back of the whole volume (a snapshot of it, a virtual machine's) leaves no trace here; the other members remember.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger.config import FlushMode
from dledger.store.fs import FileSystem, read_whole, replace_durably

TRACES_FILE: Final = "traces"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_GET_GENERATION: Final = 0x80087601
"""``FS_IOC_GETVERSION`` of 64-bit machines."""
_UNREADABLE: Final = "the record of its last start is unreadable"


@dataclass(frozen=True, slots=True)
class Inode:
    """Which file a name stands for; ``generation`` is 0 where the file system has none."""

    number: int
    generation: int

    def is_another_than(self, other: Inode) -> bool:
        """Whether they are certainly two files."""
        generations = {self.generation, other.generation}
        return self.number != other.number or (0 not in generations and len(generations) > 1)


@dataclass(frozen=True, slots=True)
class Traces:
    """What was written down at a start."""

    boot_id: str
    flush_mode: str
    inodes: Mapping[str, Inode]


@dataclass(frozen=True, slots=True)
class LastLife:
    """What recovery knows of the life before: nothing at all of one that left no traces (an earlier version's)."""

    same_boot: bool = True
    """Whether the machine has not been started since, so that the page cache has what was written."""
    flushed_late: bool = False
    """Whether it acknowledged what was not flushed yet (``flush_mode=async``)."""
    replaced: str = ""
    """Why its files are not those that it left; empty if they are."""


def kernel_boot_id() -> str:
    """What the kernel calls this boot of the machine; empty if it does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def traces_of(directory: Path, names: tuple[str, ...], flush_mode: FlushMode) -> Traces:
    """What this start leaves. Raises ``OSError``."""
    return Traces(kernel_boot_id(), flush_mode.value, {name: _inode(directory / name) for name in names})


def write_traces(fs: FileSystem, directory: Path, traces: Traces) -> None:
    """Write them down durably, unless they are there already. Raises ``OSError``."""
    if _read(directory) == traces:
        return
    inodes = {name: [inode.number, inode.generation] for name, inode in traces.inodes.items()}
    text = json.dumps({"boot_id": traces.boot_id, "flush_mode": traces.flush_mode, "inodes": inodes}, indent=2)
    replace_durably(fs, directory / TRACES_FILE, f"{text}\n".encode())


def forget_traces(fs: FileSystem, directory: Path) -> None:
    """Have the next start believe the directory as it is: somebody vouches for it. Raises ``OSError``."""
    with suppress(FileNotFoundError):
        fs.unlink(directory / TRACES_FILE)
        fs.sync_dir(directory)


def last_life(directory: Path) -> LastLife:
    """What the traces in a directory tell now. Raises ``OSError``."""
    if not (directory / TRACES_FILE).exists():
        return LastLife()
    left = _read(directory)
    if left is None:
        return LastLife(same_boot=False, flushed_late=True, replaced=_UNREADABLE)
    replaced = [
        name
        for name, inode in left.inodes.items()
        if not (directory / name).exists() or _inode(directory / name).is_another_than(inode)
    ]
    names = ", ".join(sorted(replaced))
    return LastLife(
        same_boot=left.boot_id == kernel_boot_id(),
        flushed_late=left.flush_mode == FlushMode.ASYNC,
        replaced=f"the directory was copied or restored ({names} changed since its last start)" if replaced else "",
    )


def _read(directory: Path) -> Traces | None:
    try:
        found = json.loads(read_whole(directory / TRACES_FILE))
        inodes = {str(name): Inode(int(number), int(age)) for name, (number, age) in found["inodes"].items()}
        return Traces(str(found["boot_id"]), str(found["flush_mode"]), inodes)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _inode(path: Path) -> Inode:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        generation = array.array("Q", [0])
        with suppress(OSError):  # most file systems in memory and over the network have none
            fcntl.ioctl(fd, _GET_GENERATION, generation)
        return Inode(os.fstat(fd).st_ino, generation[0] & 0xFFFFFFFF)
    finally:
        os.close(fd)
