"""The record of a start for the next one: the boot of the machine, the flush mode, and the files' identity.

The file ``traces`` is written at every start. A directory that was copied, or restored file by file, has files with
other inodes than those recorded: it lacks what its member said since the copy was made. Inodes are compared with their
generation where the file system has one (ext4, xfs, btrfs), since a copy may get an inode of the same number. Devices
are not compared: their numbers change with the next boot.

Resetting the whole volume (to a snapshot, or a virtual machine's) leaves no trace here; the other members remember.
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

BOOT_RECORD_FILE: Final = "traces"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_GET_GENERATION: Final = 0x80087601
"""``FS_IOC_GETVERSION`` of 64-bit machines."""
_UNREADABLE: Final = "the record of its last start is unreadable"


@dataclass(frozen=True, slots=True)
class Inode:
    """The identity of a file; ``generation`` is 0 where the file system has none."""

    number: int
    generation: int

    def is_another_than(self, other: Inode) -> bool:
        """Whether they are certainly different files."""
        generations = {self.generation, other.generation}
        return self.number != other.number or (0 not in generations and len(generations) > 1)


@dataclass(frozen=True, slots=True)
class BootRecord:
    """The record of a start."""

    boot_id: str
    flush_mode: str
    inodes: Mapping[str, Inode]


@dataclass(frozen=True, slots=True)
class LastLife:
    """Recovery's knowledge of the previous run: none if it left no traces."""

    same_boot: bool = True
    """Whether the machine has not been restarted since, so that the page cache has everything written."""
    flushed_late: bool = False
    """Whether it acknowledged before flushing (``flush_mode=async``)."""
    replaced: str = ""
    """Why its files are not those that it left; empty if they are."""


def kernel_boot_id() -> str:
    """The kernel's id of this boot; empty if there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def boot_record_of(directory: Path, names: tuple[str, ...], flush_mode: FlushMode) -> BootRecord:
    """The traces of this start. Raises ``OSError``."""
    return BootRecord(kernel_boot_id(), flush_mode.value, {name: _inode(directory / name) for name in names})


def write_boot_record(fs: FileSystem, directory: Path, traces: BootRecord) -> None:
    """Write them durably, unless they are already there. Raises ``OSError``."""
    if _read(directory) == traces:
        return
    inodes = {name: [inode.number, inode.generation] for name, inode in traces.inodes.items()}
    text = json.dumps({"boot_id": traces.boot_id, "flush_mode": traces.flush_mode, "inodes": inodes}, indent=2)
    replace_durably(fs, directory / BOOT_RECORD_FILE, f"{text}\n".encode())


def last_life(directory: Path) -> LastLife:
    """Compare a directory with its traces. Raises ``OSError``."""
    if not (directory / BOOT_RECORD_FILE).exists():
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


def _read(directory: Path) -> BootRecord | None:
    try:
        found = json.loads(read_whole(directory / BOOT_RECORD_FILE))
        inodes = {str(name): Inode(int(number), int(age)) for name, (number, age) in found["inodes"].items()}
        return BootRecord(str(found["boot_id"]), str(found["flush_mode"]), inodes)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _inode(path: Path) -> Inode:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        generation = array.array("Q", [0])
        with suppress(OSError):  # most in-memory and network file systems have none
            fcntl.ioctl(fd, _GET_GENERATION, generation)
        return Inode(os.fstat(fd).st_ino, generation[0] & 0xFFFFFFFF)
    finally:
        os.close(fd)
