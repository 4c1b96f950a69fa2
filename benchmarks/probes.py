"""Raw costs of this machine, printed with the figures for comparison: no target, no project code."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks import stats

FILE_BYTES = 16 << 20
CACHED_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20


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


def page_cache_gigabytes_per_second(directory: Path) -> tuple[float, float]:
    """How fast ``pwrite`` fills a preallocated file for the first time, and how fast it overwrites it; no flush.

    On a dedicated machine, the two differ by a small factor. A virtual machine that returns freed memory to its host
    pays for every newly allocated page ten times the cost of copying, which limits everything that writes much.
    """
    path = directory / "probe-page-cache"
    block = os.urandom(_CHUNK_BYTES)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, CACHED_BYTES)
        rates = []
        for _ in range(2):
            started = time.perf_counter()
            for offset in range(0, CACHED_BYTES, _CHUNK_BYTES):
                os.pwrite(descriptor, block, offset)
            rates.append(CACHED_BYTES / (time.perf_counter() - started) / 1e9)
    finally:
        os.close(descriptor)
        path.unlink()
    return rates[0], rates[1]
