"""A small disk that tests fill: a file system of its own."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.lacking import lacks, need_root


@contextmanager
def small_disk(directory: Path, mib: int) -> Iterator[None]:
    """A tmpfs of ``mib`` MiB on ``directory``."""
    need_root()
    directory.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "dledger-test", directory],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        lacks("mounting of file systems", mounted.stderr)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def enlarge(directory: Path, mib: int) -> None:
    """More room, at once."""
    subprocess.run(["mount", "-o", f"remount,size={mib}m", directory], check=True)


def fill(file: Path) -> None:
    """Write into a file until the disk is full; ``unlink`` it to have room again."""
    try:
        with file.open("wb", buffering=0) as rest:
            while rest.write(bytes(1 << 16)):
                pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
