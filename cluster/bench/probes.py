"""Raw costs of this machine, printed beside the figures so that they can be read: no target, no project code."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cluster.bench import stats

FILE_BYTES = 16 << 20


def flush_milliseconds(directory: Path, write_bytes: int, seconds: float = 1.0) -> float:
    """The median time of one ``pwrite`` of ``write_bytes`` followed by ``fdatasync``, into a preallocated file."""
    path = directory / f"probe-{write_bytes}"
    block = os.urandom(write_bytes)
    samples: list[float] = []
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.pwrite(descriptor, bytes(FILE_BYTES), 0)
        os.fdatasync(descriptor)
        deadline = time.perf_counter() + seconds
        offset = 0
        while not samples or time.perf_counter() < deadline:
            started = time.perf_counter()
            os.pwrite(descriptor, block, offset)
            os.fdatasync(descriptor)
            samples.append((time.perf_counter() - started) * 1e3)
            offset = (offset + write_bytes) % FILE_BYTES
    finally:
        os.close(descriptor)
        path.unlink()
    return stats.median(samples)
