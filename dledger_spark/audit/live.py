"""Audits running nodes: each digests its own disk, and log data are transferred only where digests differ.

Blocks are cut at multiples of the block size, regardless of segments. A node whose log starts inside a block has no
digest of the whole block: such a block is compared only among nodes with the same start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dledger.client import DLedgerClient
from dledger.errors import CorruptLogError, DLedgerError
from dledger.monitoring import ConditionKind
from dledger.store.format import HEADER, EntryHeader, parse_segment_name, segment_name
from dledger.types import NodeId
from dledger.values import MIB
from dledger_spark.audit.difference import BlockDivergence, DifferenceKind, diverge
from dledger_spark.audit.replica import Coverage, ReplicaDigest, Stretch, block_bounds, coverage, split
from dledger_spark.errors import PipelineError
from dledger_spark.options import ReadOptions

if TYPE_CHECKING:
    from dledger.monitoring import Condition
    from dledger.rpc.ports import NodeStatus
    from dledger.types import LogChunk

SPLIT_BYTES: Final = 1024 * MIB
"""How much one task requests from one node."""
_NO_SEGMENTS: Final = 1 << 60
"""Larger than any log: blanks, which depend on the segment size, are not sent."""
_OF_LOGS: Final = frozenset(
    {ConditionKind.DAMAGED, ConditionKind.REPAIRING, ConditionKind.DIVERGED, ConditionKind.FENCED}
)
_ENTRIES_BEFORE: Final = 2
"""How many entries before a block are fetched: the one that extends into it, and the one that seeds its chain."""


@dataclass(frozen=True, slots=True)
class LiveMember:
    """A member that responded: its address and what it has."""

    name: str
    address: str
    begin_index: int
    begin_position: int
    committed_index: int
    committed_position: int
    conditions: tuple[Condition, ...] = ()
    """Those of its log, as the node reports them."""


@dataclass(frozen=True, slots=True)
class Group:
    """The responding nodes of a group, by name, and a sentence for each of the others."""

    nodes: tuple[LiveMember, ...]
    silent: tuple[str, ...]


def connected(options: ReadOptions) -> DLedgerClient:
    """A client for the group, which the caller closes."""
    return DLedgerClient(
        options.servers,
        group=options.group,
        timeout_s=options.fetch_timeout_ms / 1000,
        security=options.security.client(),
    )


def look(client: DLedgerClient) -> Group:
    """Request the state of all members.

    Raises ``UnavailableError`` if nobody responds, ``PipelineError`` if only one does.
    """
    nodes: list[LiveMember] = []
    silent: list[str] = []
    statuses = client.members_status()
    addresses = _addresses([one for one in statuses.values() if not isinstance(one, DLedgerError)])
    for name, status in sorted(statuses.items()):
        if isinstance(status, DLedgerError):
            silent.append(f"{name} does not answer and was not audited: {status}")
            continue
        nodes.append(
            LiveMember(
                str(name),
                addresses[str(name)],
                int(status.begin_index),
                int(status.begin_position),
                int(status.committed_index),
                int(status.committed_position),
                _of_its_log(status),
            )
        )
    if len(nodes) < 2:
        raise PipelineError(
            f"an audit compares at least two nodes, but only {len(nodes)} answered: " + "; ".join(silent)
        )
    return Group(tuple(nodes), tuple(silent))


def said(client: DLedgerClient, group: Group) -> tuple[str, ...]:
    """Problems that the nodes report about their logs, at the first look or now: digests do not show these.

    Each is told once, in its newest words.
    """
    now = client.members_status()
    newest = {
        (node.name, one.kind, one.subject): one.message
        for node in group.nodes
        for one in (*node.conditions, *_of_its_log(now.get(NodeId(node.name))))
    }
    return tuple(f"{name} reports: {kind}: {message}" for (name, kind, _), message in newest.items())


def _of_its_log(status: NodeStatus | DLedgerError | None) -> tuple[Condition, ...]:
    if status is None or isinstance(status, DLedgerError):
        return ()
    return tuple(one for one in status.conditions if one.kind in _OF_LOGS)


def _addresses(statuses: Sequence[NodeStatus]) -> dict[str, str]:
    return {
        str(member.node_id): member.client_address
        for status in statuses
        for member in status.members
        if member.client_address
    }


def live_coverage(nodes: Sequence[LiveMember], end_position: int, block_bytes: int) -> Coverage:
    """The comparable part, block by block."""
    begins = [one.begin_position for one in nodes]
    return coverage(
        [(one.name, _first_block(one.begin_position, begins, block_bytes)) for one in nodes], end_position, _NO_SEGMENTS
    )


def _first_block(begin: int, begins: Sequence[int], block_bytes: int) -> int:
    """The start of a node's comparable digests: its own start, unless others have more of that block."""
    base = begin - begin % block_bytes
    alone = all(one == begin or one >= base + block_bytes for one in begins)
    return begin if begin == base or alone else base + block_bytes


def live_plan(covered: Coverage, nodes: Sequence[LiveMember], block_bytes: int) -> list[Stretch]:
    """The stretches to request, and from which node; ``path`` is an address."""
    addresses = {one.name: one.address for one in nodes}
    return [
        Stretch(name, addresses[name], 0, start, stop)
        for held in covered.ranges
        for start, stop in split(held.start, held.stop, block_bytes, SPLIT_BYTES)
        for name in held.replicas
    ]


def live_digest(client: DLedgerClient, stretch: Stretch, block_bytes: int) -> Iterator[ReplicaDigest]:
    """A node's digests; for those it does not deliver, an error."""
    position = stretch.start
    try:
        for one in client.block_digests(stretch.start, stretch.stop, block_bytes=block_bytes, address=stretch.path):
            yield ReplicaDigest(stretch.replica, one.position, one.size, one.crc32c, "")
            position = one.position + one.size
    except DLedgerError as error:
        for missing, _ in block_bounds(position, stretch.stop, block_bytes):
            yield ReplicaDigest(stretch.replica, missing, 0, 0, f"{stretch.replica} cannot digest its log: {error}")


def live_chain_crc(client: DLedgerClient, nodes: Sequence[LiveMember], index: int) -> int | None:
    """The chain CRC of an entry that all nodes have; None if they differ, which the digests describe better."""
    found: set[int] = set()
    for node in nodes:
        with suppress(DLedgerError):  # its log is unreadable, or it is gone: the digests report that, too
            for chunk in client.fetch_log(index, index + 1, address=node.address):
                found.add(EntryHeader(*HEADER.unpack_from(chunk.data)).chain_crc)
    return found.pop() if len(found) == 1 else None


class RunningNodes:
    """Reads entries of running nodes, which may repair themselves meanwhile; implements ``BlockReader``."""

    def __init__(self, client: DLedgerClient, nodes: Sequence[LiveMember], block_bytes: int) -> None:
        self._client = client
        self._nodes = {one.name: one for one in nodes}
        self._block_bytes = block_bytes
        self._segments: dict[int, str] = {}

    def segment_of(self, position: int) -> str:
        """The segment's name, known only for positions of differences found; nodes do not tell others."""
        return self._segments.get(position, "")

    def divergence(self, block: int, end: int, names: Sequence[str]) -> BlockDivergence | None:
        """See ``BlockReader``. If all entries are equal but the block still differs, a blank differs."""
        chunks: dict[str, list[LogChunk]] = {}
        broken: dict[str, CorruptLogError] = {}
        first, following = self._entries(block, end, names)
        for name in names:
            try:
                chunks[name] = list(self._client.fetch_log(first, following, address=self._nodes[name].address))
            except CorruptLogError as error:
                broken[name] = error
        if broken:
            return self._broken(broken, list(chunks))
        found_one = self._compare(chunks)
        if found_one is not None or not self._still_differs(block, end, names):
            return found_one
        detail = "the entries of the block are equal, so a blank differs: audit the directories to find out which"
        return BlockDivergence(DifferenceKind.BLANK, block, block, following - 1, -1, "blank", {}, (), detail)

    def _still_differs(self, block: int, end: int, names: Sequence[str]) -> bool:
        """Whether new digests of the block still differ: a node may have repaired it before it was read."""
        client, nodes, block_bytes = self._client, self._nodes, self._block_bytes
        digests = {
            tuple(
                (one.position, one.size, one.crc32c)
                for one in client.block_digests(block, end, block_bytes=block_bytes, address=nodes[name].address)
            )
            for name in names
        }
        return len(digests) > 1

    def _broken(self, broken: Mapping[str, CorruptLogError], sound: Sequence[str]) -> BlockDivergence:
        """Nodes do not send damaged entries, only their positions: reports the first one, identified by a sound node.

        The others are reported with it.
        """
        places = {name: error.offset + (parse_segment_name(error.path.name) or 0) for name, error in broken.items()}
        position = min(places.values())
        first = next(name for name, place in places.items() if place == position)
        self._segments[position] = broken[first].path.name
        index, term = self._entry_at(position, sound)
        evidence = "; ".join(f"{name}: {error}" for name, error in broken.items())
        values = dict.fromkeys(broken, "damaged")
        return BlockDivergence(
            DifferenceKind.ENTRY, position, position, index, term, "", values, tuple(broken), evidence
        )

    def _entry_at(self, position: int, names: Sequence[str]) -> tuple[int, int]:
        """Index and term of the entry starting there, from the first node that knows it; -1 if none does."""
        for name in names:
            address = self._nodes[name].address
            with suppress(DLedgerError):
                (place,) = self._client.locate(positions=(position,), address=address).places
                for chunk in self._client.fetch_log(place.index, place.index + 1, address=address):
                    header = EntryHeader(*HEADER.unpack_from(chunk.data))
                    if header.position == position:
                        return header.index, header.term
        return -1, -1

    def _entries(self, block: int, end: int, names: Sequence[str]) -> tuple[int, int]:
        """The entries that overlap a block, and some before, by the first node that knows them."""
        failure: DLedgerError | None = None
        begin = max(self._nodes[name].begin_index for name in names)
        for name in names:
            try:
                places = self._client.locate(positions=(block, end), address=self._nodes[name].address).places
            except DLedgerError as error:
                failure = error
                continue
            return max(begin, places[0].index - _ENTRIES_BEFORE), places[1].index
        raise failure or PipelineError(f"cannot tell which entries lie between {block} and {end}")

    def _compare(self, chunks: Mapping[str, Sequence[LogChunk]]) -> BlockDivergence | None:
        """The first difference between the nodes' copies of the same entries, segment by segment."""
        bases = sorted({one.segment_base for some in chunks.values() for one in some})
        for base in bases:
            parts = {name: [one for one in some if one.segment_base == base] for name, some in chunks.items()}
            start = min(one[0].position for one in parts.values() if one)
            tails = {name: b"".join(one.data for one in some) for name, some in parts.items()}
            found = diverge(tails, int(start), _NO_SEGMENTS, None)
            if found is not None:
                self._segments[found.position] = segment_name(base)
                return found
        return None
