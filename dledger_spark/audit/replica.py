"""A node's directory as evidence for an audit; any part of it may be damaged.

Opening a store refuses damage, but an audit has to report it. So damage inside a replica's log raises no error here: a
missing segment is absent from ``segments``, an unreadable checkpoint is a ``problem``, and reads return what exists.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger.errors import ConfigError, CorruptLogError
from dledger.layout import BLANK_MAGIC, ENTRY_HEADER_BYTES, INDEX_UNIT_BYTES
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
