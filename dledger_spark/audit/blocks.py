"""Selects the bytes to digest on each replica, and digests them: the bulk of an audit, done in parallel.

The common range is cut into *stretches*, each within one segment and held by the same replicas throughout, and those
into blocks that start at multiples of the block size; so a block has the same bounds on all replicas. Where retention
has removed a replica's beginning, the others are still compared; what only one replica holds is not compared.

Blocks are read with ``pread`` into one small buffer that stays in the processor's cache. A mapping would be faster, but
a bad sector would then kill the process (SIGBUS) instead of being reported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from dledger_spark.audit.replica import Replica

BLOCK_BYTES: Final = 4 * 1024 * 1024
SPLIT_BYTES: Final = 256 * 1024 * 1024
"""How much a task digests if the number of concurrent tasks is unknown."""
SPLIT_BYTES_MAX: Final = 1024 * 1024 * 1024
TASKS_PER_SLOT: Final = 3
"""Starting a task costs as much as digesting 100 MiB, but fewer, larger tasks would leave processors idle at the end.
"""
_BUFFER_BYTES: Final = 512 * 1024


class Held(NamedTuple):
    """A range of positions, within one segment, held by the same replicas."""

    start: int
    stop: int
    replicas: tuple[str, ...]


class Stretch(NamedTuple):
    """Consecutive blocks of one replica in one segment file: ``start`` to ``stop`` (exclusive) are log positions."""

    replica: str
    path: str
    base: int
    start: int
    stop: int


class ReplicaDigest(NamedTuple):
    """The CRC32C of a replica's part of one block. ``size`` is smaller than the block if the file ends before it.

    ``error`` says why it could not be read; otherwise empty.
    """

    replica: str
    position: int
    size: int
    crc32c: int
    error: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """The ranges that an audit compares, and the bytes it cannot compare because only one replica has them."""

    ranges: tuple[Held, ...]
    alone_bytes: int

    @property
    def compared_bytes(self) -> int:
        """The length of the log that at least two replicas hold."""
        return sum(one.stop - one.start for one in self.ranges)

    @property
    def held_bytes(self) -> int:
        """The bytes to read, of all replicas together."""
        return sum((one.stop - one.start) * len(one.replicas) for one in self.ranges)


def coverage(begins: Sequence[tuple[str, int]], end_position: int, segment_bytes: int) -> Coverage:
    """The ranges of replicas (name, start position) up to ``end_position``, split where they change and at segments."""
    first = min((begin for _, begin in begins), default=end_position)
    segments = range(first - first % segment_bytes + segment_bytes, end_position, segment_bytes)
    cuts = sorted({begin for _, begin in begins if begin < end_position} | set(segments) | {end_position})
    ranges: list[Held] = []
    alone = 0
    for start, stop in pairwise(cuts):
        holders = tuple(name for name, begin in begins if begin <= start)
        if len(holders) > 1:
            ranges.append(Held(start, stop, holders))
        else:
            alone += stop - start
    return Coverage(tuple(ranges), alone)


def block_bounds(start: int, stop: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """The blocks from ``start`` to ``stop``: (position, end), each within one multiple of ``block_bytes``."""
    while start < stop:
        end = min(start - start % block_bytes + block_bytes, stop)
        yield start, end
        start = end


def split(start: int, stop: int, block_bytes: int, split_bytes: int) -> Iterator[tuple[int, int]]:
    """Split ``start`` to ``stop`` into equal parts of about ``split_bytes``, at least a block, cut between blocks."""
    first, end = start // block_bytes, -(-stop // block_bytes)
    parts = max(1, min(round((stop - start) / split_bytes), end - first))
    for part in range(parts):
        low, high = (first + (end - first) * one // parts for one in (part, part + 1))
        yield max(start, low * block_bytes), min(stop, high * block_bytes)


def split_bytes_for(covered: Coverage, slots: int) -> int:
    """How much each task should digest if ``slots`` tasks run at once."""
    return min(max(SPLIT_BYTES, covered.held_bytes // (slots * TASKS_PER_SLOT)), SPLIT_BYTES_MAX)


def plan(covered: Coverage, replicas: Sequence[Replica], block_bytes: int, split_bytes: int) -> list[Stretch]:
    """The stretches to digest, as tasks of up to ``split_bytes``."""
    by_name = {one.name: one for one in replicas}
    return [
        Stretch(name, str(path), int(path.name), start, stop)
        for held in covered.ranges
        for start, stop in split(held.start, held.stop, block_bytes, split_bytes)
        for name in held.replicas
        for path in (by_name[name].segment_of(start),)
    ]


def digest(stretch: Stretch, block_bytes: int) -> Iterator[ReplicaDigest]:
    """The digest of each block. File errors are returned in the digests, not raised."""
    try:
        fd = os.open(stretch.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        for position, _ in block_bounds(stretch.start, stretch.stop, block_bytes):
            yield ReplicaDigest(stretch.replica, position, 0, 0, _reason(error, stretch.path))
        return
    buffer = bytearray(_BUFFER_BYTES)
    try:
        for position, end in block_bounds(stretch.start, stretch.stop, block_bytes):
            yield _digest(fd, buffer, stretch, position, end)
    finally:
        os.close(fd)


def _digest(fd: int, buffer: bytearray, stretch: Stretch, position: int, end: int) -> ReplicaDigest:
    crc, at, stop = 0, position - stretch.base, end - stretch.base
    with memoryview(buffer) as view:
        try:
            while at < stop:
                count = os.preadv(fd, [view[: min(len(buffer), stop - at)]], at)
                if not count:
                    break
                crc = crc32c(view[:count], crc)
                at += count
        except OSError as error:
            return ReplicaDigest(stretch.replica, position, 0, 0, _reason(error, stretch.path))
    return ReplicaDigest(stretch.replica, position, at + stretch.base - position, crc, "")


def _reason(error: OSError, path: str) -> str:
    if isinstance(error, FileNotFoundError):
        return f"the segment {Path(path).name} is missing"
    return f"{path} cannot be read: {error.strerror or error}"


def differ(digests: Sequence[ReplicaDigest]) -> bool:
    """Whether one block's digests differ, or one of them could not be computed."""
    return len({one[2:] for one in digests}) > 1 or any(one.error for one in digests)
