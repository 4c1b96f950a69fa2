"""Auditing nodes that run: what is damaged, what mends itself meanwhile, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dledger.client import DLedgerClient
from dledger.errors import CorruptLogError
from dledger.monitoring import ConditionKind
from dledger.records import ENTRY_HEADER_BYTES
from dledger.types import LogIndex
from dledger_spark.audit.difference import DifferenceKind, Finding, examine
from dledger_spark.audit.live import Group, RunningNodes, live_digest, look, said
from dledger_spark.audit.replica import ReplicaDigest, Stretch, block_bounds, differ
from tests.support.damage import turn
from tests.support.running_group import RunningGroup
from tests.support.waiting import wait_until

SEGMENT_BYTES = 64 * 1024
BLOCK_BYTES = 8 * 1024
DAMAGED = 100
"""An entry of the second segment."""

Blocks = list[tuple[int, int, list[ReplicaDigest]]]


@dataclass
class Audited:
    """A group whose members mend nothing until they are told to, and a client."""

    group: RunningGroup
    client: DLedgerClient

    def place(self, index: int) -> int:
        """Where an entry begins."""
        return self.group.nodes[0].log.positions(LogIndex(index), LogIndex(index))[0]

    def turn(self, number: int, position: int) -> None:
        """Turn a bit of a member."""
        turn(self.group.segment(number, position // SEGMENT_BYTES), position % SEGMENT_BYTES)

    def digested(self, group: Group) -> Blocks:
        """Blocks that differ."""
        end = min(one.committed_position for one in group.nodes)
        found: dict[int, list[ReplicaDigest]] = {}
        for node in group.nodes:
            for one in live_digest(self.client, Stretch(node.name, node.address, 0, 0, end), BLOCK_BYTES):
                found.setdefault(one.position, []).append(one)
        return [(at, stop, found[at]) for at, stop in block_bounds(0, end, BLOCK_BYTES) if differ(found[at])]

    def examined(self, blocks: Blocks) -> list[Finding]:
        """What the blocks are found to differ in now."""
        return examine(blocks, RunningNodes(self.client, look(self.client).nodes, BLOCK_BYTES))


@pytest.fixture
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    """Three members with several small segments."""
    path = tmp_path_factory.mktemp("audited")
    group = RunningGroup(path, segment_bytes=SEGMENT_BYTES, scrub_bytes_per_s=0, auto_repair=False)
    try:
        group.append(300, 1000)
        group.wait_converged()
        with DLedgerClient([str(node.client_address) for node in group.nodes], timeout_s=60) as client:
            yield Audited(group, client)
    finally:
        group.stop()


@pytest.mark.parametrize("at", [20, ENTRY_HEADER_BYTES + 500], ids=["header", "body"])
def test_damage_that_stays_is_named_by_the_member_that_has_it(audited: Audited, at: int) -> None:
    """Entry and place, though nothing damaged is sent; the others tell which entry should be there."""
    position = audited.place(DAMAGED)
    audited.turn(1, position + at)
    blocks = audited.digested(look(audited.client))

    (found,) = audited.examined(blocks)

    assert (found.kind, found.replicas, found.index) == (DifferenceKind.ENTRY, ("n1",), DAMAGED)
    assert (found.position, found.segment) == (position, f"{SEGMENT_BYTES:020d}")
    assert found.term == audited.group.nodes[0].log.term_at(LogIndex(DAMAGED))
    assert "damaged at offset" in found.detail


def test_damage_that_is_mended_meanwhile_is_no_blank(audited: Audited) -> None:
    """Digests differ, entries no longer do: who differed is told, and that it must have repaired itself."""
    audited.turn(1, audited.place(DAMAGED) + 60)
    audited.turn(1, audited.place(DAMAGED + 20) + 60)
    blocks = audited.digested(look(audited.client))
    audited.turn(1, audited.place(DAMAGED) + 60)
    audited.turn(1, audited.place(DAMAGED + 20) + 60)

    (found,) = audited.examined(blocks)

    assert len(blocks) == 2
    assert (found.kind, found.replicas, found.block) == (DifferenceKind.GONE, ("n1",), blocks[0][0])
    assert "n1 differed in the block at" in found.sentence()
    assert "damaged-N" in found.sentence()


def test_a_blank_that_differs_still_differs(audited: Audited) -> None:
    """Of blanks nothing is sent: the digests, made once more, tell them from what was mended."""
    audited.turn(2, 2 * SEGMENT_BYTES - 5)

    (found,) = audited.examined(audited.digested(look(audited.client)))

    assert found.kind is DifferenceKind.BLANK


def test_what_a_member_says_of_itself_is_told(audited: Audited) -> None:
    """It knows of damage that it met, before or after it was looked at; and of its repair."""
    before = look(audited.client)
    assert said(audited.client, before) == ()
    audited.turn(1, audited.place(DAMAGED) + 60)
    with pytest.raises(CorruptLogError):
        audited.group.nodes[1].read(LogIndex(DAMAGED), LogIndex(DAMAGED), 1 << 20)
    wait_until(lambda: audited.group.nodes[1].conditions.holds(ConditionKind.DAMAGED), "it knows")

    (told,) = said(audited.client, before)
    (told_again,) = said(audited.client, look(audited.client))

    assert told.startswith("n1 reports: damaged: damaged at offset")
    assert told_again.startswith("n1 reports: damaged: damaged at offset")
