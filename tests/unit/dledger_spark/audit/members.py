"""Small replicas on the disk, and ways to damage one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from dledger.store.durable_state import create_checkpoint, read_checkpoint
from dledger.store.format import HEADER, EntryHeader
from dledger.types import Boundary, LogIndex, Position, Term
from dledger_spark.audit.difference import Directories, Finding, examine
from dledger_spark.audit.replica import (
    Replica,
    ReplicaDigest,
    Stretch,
    block_bounds,
    common_end,
    coverage,
    differ,
    digest,
    open_replicas,
)
from tests.unit.dledger.store.support import SEGMENT_BYTES, UnsyncedFs, fill, open_store, small_config

ENTRIES = 100
BLOCK_BYTES = 512


def make_group(root: Path, size: int = 2, entries: int = ENTRIES, entry_bytes: int = 100) -> list[Path]:
    """Directories of members that hold the same log of two terms, all of it committed."""
    store = open_store(small_config(root))
    fill(store, entries // 2, size=entry_bytes)
    fill(store, entries - entries // 2, size=entry_bytes, term=3)
    store.set_committed(store.last.index)
    source = store.directory
    store.close()
    nodes = [source]
    for number in range(1, size):
        nodes.append(root / f"dledger-n{number}")
        shutil.copytree(source, nodes[-1])
        identity = json.loads((source / "identity").read_text())
        (nodes[-1] / "identity").write_text(json.dumps(identity | {"node_id": f"n{number}"}))
    return nodes


def segment(node: Path, number: int) -> Path:
    """A segment's file."""
    return node / "data" / f"{number * SEGMENT_BYTES:020d}"


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit."""
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), offset)


def header(node: Path, index: int) -> EntryHeader:
    """An entry's header, by walking the files."""
    for path in sorted((node / "data").iterdir()):
        data, at = path.read_bytes(), 0
        while data[at : at + 4] in (b"\0\0\0\1", b"\0\0\0\2"):
            found = EntryHeader(*HEADER.unpack_from(data, at))
            if found.index == index:
                return found
            at += found.size
    raise AssertionError(f"{node} has no entry {index}")


def flip_in_entry(node: Path, index: int, offset: int, bit: int = 0) -> int:
    """Flip a bit of an entry, ``offset`` bytes behind its begin; gives the byte's position."""
    position = header(node, index).position + offset
    flip(segment(node, position // SEGMENT_BYTES), position % SEGMENT_BYTES, bit)
    return position


def forget_before(node: Path, number: int) -> None:
    """Remove all segments before ``number``, as retention does, and record where the log begins."""
    base = number * SEGMENT_BYTES
    at_base = EntryHeader(*HEADER.unpack_from(segment(node, number).read_bytes()))
    last = header(node, at_base.index - 1)
    for one in range(number):
        segment(node, one).unlink()
    path = node / "checkpoint"
    begin = Boundary(LogIndex(last.index), Term(last.term), Position(base), last.chain_crc)
    old = read_checkpoint(path)
    path.unlink()
    create_checkpoint(UnsyncedFs(), path, type(old)(old.flushed, old.indexed, old.committed, begin, True))


def digests_of(replicas: list[Replica], end: int, block_bytes: int = BLOCK_BYTES) -> dict[int, list[ReplicaDigest]]:
    """All digests by block, as the job's tasks make them."""
    begins = [(one.name, int(one.begin.position)) for one in replicas]
    by_name = {one.name: one for one in replicas}
    found: dict[int, list[ReplicaDigest]] = {}
    for held in coverage(begins, end, SEGMENT_BYTES).ranges:
        for name in held.replicas:
            path = by_name[name].segment_of(held.start)
            base = held.start - held.start % SEGMENT_BYTES
            for one in digest(Stretch(name, str(path), base, held.start, held.stop), block_bytes):
                found.setdefault(one.position, []).append(one)
    return found


def audit(nodes: list[Path], block_bytes: int = BLOCK_BYTES) -> list[Finding]:
    """What the job finds, without Spark."""
    replicas = open_replicas(nodes)
    end = common_end(replicas)
    assert end is not None
    digests = digests_of(replicas, end.position, block_bytes)
    differing = [
        (position, next(stop for _, stop in block_bounds(position, end.position, block_bytes)), one)
        for position, one in sorted(digests.items())
        if differ(one)
    ]
    reader = Directories({one.name: one for one in replicas}, end.position)
    return examine(differing, reader)
