"""A node's directory as evidence for an audit; any part of it may be damaged.

Opening a store refuses damage, but an audit has to report it. So damage inside a replica's log raises no error here: a
missing segment is absent from ``segments``, an unreadable checkpoint is a ``problem``, and reads return what exists.

Bytes to digest are selected on each replica, and digested: the bulk of an audit, done in parallel. The common range is
cut into *stretches*, each within one segment and held by the same replicas throughout, and those into blocks that start
at multiples of the block size; so a block has the same bounds on all replicas. Where retention has removed a replica's
beginning, the others are still compared; what only one replica holds is not compared.

Blocks are read with ``pread`` into one small buffer that stays in the processor's cache. A mapping would be faster, but
a bad sector would then kill the process (SIGBUS) instead of being reported.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from dledger.errors import ConfigError, CorruptLogError
from dledger.records import BLANK_MAGIC, ENTRY_HEADER_BYTES, INDEX_UNIT_BYTES
from dledger.store.durable_state import read_checkpoint
from dledger.store.format import BLANK, HEADER, UNIT, EntryHeader, IndexUnit, segment_name
from dledger.store.identity import StoreIdentity, read_identity
from dledger.store.mmap_file import list_segments
from dledger.types import GENESIS, Boundary, LogIndex, Magic, Position, Term

_MAGICS: Final = frozenset(int(magic) for magic in Magic)
_CHECKPOINT: Final = "checkpoint"


@dataclass(frozen=True, slots=True)
class Replica:
    """One member's log on disk. ``begin`` precedes its first kept entry; ``committed`` is an index or None.

    ``segments`` are the existing ones, by start position. ``problem`` describes what is wrong with the other files;
    otherwise empty.
    """

    name: str
    directory: Path
    segments: dict[int, Path]
    segment_bytes: int
    index_segment_bytes: int
    begin: Boundary
    committed: int | None
    problem: str = ""

    def segment_of(self, position: int) -> Path:
        """The path of the segment that should contain ``position``."""
        base = position - position % self.segment_bytes
        return self.segments.get(base, self.directory / "data" / segment_name(base))

    def read(self, position: int, size: int) -> bytes:
        """The existing bytes from ``position`` on, within one segment; fewer at its end. Raises ``OSError``."""
        at = position % self.segment_bytes
        fd = os.open(self.segment_of(position), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, min(size, self.segment_bytes - at), at)
        finally:
            os.close(fd)

    def header_at(self, position: int) -> EntryHeader | None:
        """The entry header at ``position``, if it is plausible there."""
        try:
            stored = self.read(position, ENTRY_HEADER_BYTES)
        except OSError:
            return None
        if len(stored) < ENTRY_HEADER_BYTES:
            return None
        header = EntryHeader(*HEADER.unpack(stored))
        fits = header.size == header.body_length + ENTRY_HEADER_BYTES and header.body_length >= 0
        return header if fits and header.magic in _MAGICS and header.position == position else None

    def entry(self, index: int) -> EntryHeader | None:
        """The header of an entry, found through the index files; None unless index and data agree."""
        at = index * INDEX_UNIT_BYTES
        base = at - at % self.index_segment_bytes
        try:
            with (self.directory / "index" / segment_name(base)).open("rb") as file:
                stored = os.pread(file.fileno(), INDEX_UNIT_BYTES, at - base)
        except OSError:
            return None
        if len(stored) < INDEX_UNIT_BYTES:
            return None
        unit = IndexUnit(*UNIT.unpack(stored))
        header = self.header_at(unit.position) if unit.index == index and unit.position >= 0 else None
        return header if header is not None and header.index == index and header.size == unit.size else None


def open_replicas(directories: Sequence[Path]) -> list[Replica]:
    """The replicas in these directories, each a node's or its broker's, under distinct names.

    Raises ``ConfigError`` if there are fewer than two, or if they are not nodes of one group; ``CorruptLogError`` if an
    identity is unreadable.
    """
    nodes = [node_directory(path) for path in directories]
    problems = [f"{path} is given twice" for path, count in Counter(nodes).items() if count > 1]
    if len(nodes) < 2:
        problems.append("an audit compares replicas: name at least two directories")
    identities = [_identity_of(node) for node in nodes]
    problems += _strangers(nodes, identities)
    if problems:
        raise ConfigError(problems)
    ids = Counter(identity.node_id for identity in identities)
    names = [
        identity.node_id if ids[identity.node_id] == 1 else str(node)
        for node, identity in zip(nodes, identities, strict=True)
    ]
    return [_open(node, identity, name) for node, identity, name in zip(nodes, identities, names, strict=True)]


def node_directory(path: Path) -> Path:
    """The node's directory: ``path``, or the only ``dledger-…`` in it. Raises ``ConfigError``."""
    if (path / "data").is_dir():
        return path.resolve()
    inside = sorted(one for one in path.glob("dledger-*") if (one / "data").is_dir()) if path.is_dir() else []
    if len(inside) == 1:
        return inside[0].resolve()
    if inside:
        raise ConfigError([f"{path} holds {len(inside)} nodes: name one of them, such as {inside[0]}"])
    if (path / "commitlog").is_dir():
        raise ConfigError([f"{path} holds the log of a plain broker, which has no replicas to compare it with"])
    raise ConfigError([f"{path} is not a node's directory: it has no data directory, nor does a dledger-… in it"])


def _identity_of(node: Path) -> StoreIdentity:
    identity = read_identity(node)
    if identity is None:
        raise ConfigError([f"{node} has no identity file: no node has ever opened it"])
    return identity


def _strangers(nodes: Sequence[Path], identities: Sequence[StoreIdentity]) -> list[str]:
    """Sentences about directories of other groups than the first one's."""
    first = identities[0] if identities else None
    return [
        f"{node} has {field} {getattr(identity, field)!r}, {nodes[0]} has {getattr(first, field)!r}: "
        "only replicas of one group can be compared"
        for node, identity in zip(nodes[1:], identities[1:], strict=True)
        for field in ("cluster_id", "group", "segment_bytes")
        if getattr(identity, field) != getattr(first, field)
    ]


def _open(node: Path, identity: StoreIdentity, name: str) -> Replica:
    found = list_segments([node / "data"], identity.segment_bytes)
    segments = {one.base: one.path for one in found.segments}
    begin, committed, problem = GENESIS, None, ""
    try:
        checkpoint = read_checkpoint(node / _CHECKPOINT)
        begin, committed = checkpoint.begin, int(checkpoint.committed)
    except (CorruptLogError, OSError) as error:
        problem = str(error)
        begin = _guessed_begin(segments)
    return Replica(
        name, node, segments, identity.segment_bytes, identity.index_segment_bytes, begin, committed, problem
    )


def _guessed_begin(segments: dict[int, Path]) -> Boundary:
    """Without a checkpoint, a log starts with its first segment."""
    first = min(segments, default=0)
    return Boundary(LogIndex(-1), Term(0), Position(first), 0)


@dataclass(frozen=True, slots=True)
class CommonEnd:
    """The end of what all replicas know to be committed: the last such entry, its end, and its chain CRC.

    ``bounded_by`` is the replica with the lowest commit index. ``position`` is exclusive, ``chain_crc`` None if
    unknown.
    """

    index: int
    position: int
    chain_crc: int | None
    bounded_by: str


def common_end(replicas: Sequence[Replica]) -> CommonEnd | None:
    """The lowest commit index of all replicas and its position, from any index or log that has it; None if none does.

    Replicas without a readable checkpoint are ignored.
    """
    known = [replica for replica in replicas if replica.committed is not None]
    if not known:
        return None
    lowest = min(known, key=lambda replica: replica.committed or 0)
    index = lowest.committed or 0
    if index < 0 or any(replica.begin.index >= index for replica in known):
        return None
    for find in (Replica.entry, walk_to):
        for replica in replicas:
            header = find(replica, index)
            if header is not None:
                return CommonEnd(index, header.position + header.size, header.chain_crc, lowest.name)
    return None


def walk_to(replica: Replica, index: int) -> EntryHeader | None:
    """The header of an entry, found by walking from header to header; None if damage prevents that."""
    position = int(replica.begin.position)
    while position >= 0:
        found = _walk(replica, position, lambda header: header.index == index)
        if isinstance(found, EntryHeader):
            return found
        position = found
    return None


def seek(replica: Replica, start: int, position: int) -> int:
    """The start of the last entry or blank at or before ``position``, walking from the entry at ``start``.

    ``start`` itself if damage prevents that.
    """
    found = _walk(replica, start, lambda header: header.position + header.size > position)
    return found.position if isinstance(found, EntryHeader) else start


def _walk(replica: Replica, position: int, wanted: Callable[[EntryHeader], bool]) -> EntryHeader | int:
    """The first wanted entry of a segment from ``position`` on; otherwise where the next one starts, or -1."""
    path = replica.segments.get(position - position % replica.segment_bytes)
    if path is None:
        return -1
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _walk_mapped(mapped, position, replica.segment_bytes, wanted)
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return -1


def _walk_mapped(
    mapped: mmap.mmap, position: int, segment_bytes: int, wanted: Callable[[EntryHeader], bool]
) -> EntryHeader | int:
    at = position % segment_bytes
    while at + ENTRY_HEADER_BYTES <= len(mapped):
        header = EntryHeader(*HEADER.unpack_from(mapped, at))
        if header.magic not in _MAGICS:
            break
        if header.position != position or header.size < ENTRY_HEADER_BYTES:
            return -1
        if wanted(header):
            return header
        at += header.size
        position += header.size
    if at + BLANK.size <= len(mapped) and BLANK.unpack_from(mapped, at) == (BLANK_MAGIC, segment_bytes - at):
        return position - at + segment_bytes
    return -1


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
