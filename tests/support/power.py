"""Real power cuts of real file systems: ext4 on loop devices, from which one ``ioctl`` takes whatever is not durable.

``EXT4_IOC_SHUTDOWN`` with ``NOLOGFLUSH`` ends a file system at once: its journal is not written, cached pages never
reach the disk, and every later write fails. Mounted again, it is what a machine finds after a power cut.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from pathlib import Path
from typing import Final

from tests.support.lacking import lacks, need_root, program
from tests.support.waiting import wait_until

SHUTDOWN: Final = 0x8004587D
NO_LOG_FLUSH: Final = 2
IMAGE_MIB: Final = 512
"""Sparse: what is written is what it takes."""


def need_loop_disks(directory: Path) -> None:
    """Skip the test where there can be no power cuts."""
    need_root()
    program("mkfs.ext4", "e2fsprogs")
    try:
        disk = LoopDisk(directory / "probe.img", directory / "probe", mib=8)
    except (OSError, subprocess.CalledProcessError) as error:
        lacks("ext4 on loop devices", f"{error} {getattr(error, 'stderr', '')}")
    disk.close()


class LoopDisk:
    """A file system in a file, mounted at ``directory``. Raises ``CalledProcessError``."""

    def __init__(self, image: Path, directory: Path, *, mib: int = IMAGE_MIB) -> None:
        self.directory = directory
        self._image = image
        with image.open("wb") as file:
            file.truncate(mib << 20)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        directory.mkdir(parents=True)
        self._mount()
        (directory / "lost+found").rmdir()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.directory))

    def cut(self) -> None:
        """The power goes."""
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def restore(self) -> None:
        """It comes back. Nobody may have a file open there any more, nor a copy of the mount in a namespace."""
        wait_until(self._unmounted, f"{self.directory} is let go")
        wait_until(self._detached, f"{self._image} is let go: does another mount namespace hold {self.directory}?")
        self._mount()

    def _unmounted(self) -> bool:
        return subprocess.run(["umount", self.directory], check=False, capture_output=True).returncode == 0

    def _detached(self) -> bool:
        """Else the next mount would be one more of the file system that was shut down."""
        return not _run("losetup", "--associated", str(self._image)).stdout

    def close(self) -> None:
        """Remove it."""
        subprocess.run(["umount", "--lazy", self.directory], check=False, capture_output=True)
        self._image.unlink(missing_ok=True)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=True, capture_output=True, text=True)
