"""What a disk does to a file behind its owner's back."""

from __future__ import annotations

import os
from pathlib import Path


def turn(path: Path, at: int, mask: int = 1) -> None:
    """Turn the bits ``mask`` of the byte at ``at``, in a file that may be open and mapped."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ mask]), at)
    finally:
        os.close(fd)
