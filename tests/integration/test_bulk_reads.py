"""Large reads of a real group: from any member, while it appends, loses its leader and removes old segments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import pairwise

import pytest

from dledger.client import DLedgerClient, ReadFrom
from dledger.errors import IndexBeforeBeginError
from dledger.store.format import Follow, ScanWindow, scan_records
from dledger.types import LogChunk, NodeId
from tests.integration.harness import Group


class Walk:
    """Checks chunks as they come: every CRC, the chain, and that each entry comes once and in order."""

    def __init__(self) -> None:
        self.follow = Follow(-1, -1, 0)
        self.position = 0

    def take(self, chunk: LogChunk) -> None:
        window = ScanWindow(memoryview(chunk.data), chunk.position, 0, len(chunk.data))
        scan = scan_records(window, self.follow)
        assert (scan.end_offset, scan.count) == (len(chunk.data), chunk.count), scan.reason
        assert chunk.first_index == self.follow.index + 1
        self.follow, self.position = scan.follow, chunk.position + len(chunk.data)


def test_a_killed_leader_costs_a_reader_nothing(group: Group) -> None:
    """Under load: what is read is the one committed log, chained from its first entry to its end, byte for byte."""
    group.append(2000, size=1000)
    with group.workload() as load, closing(group.client(timeout_s=60.0)) as client:
        load.history.wait_for_acks(50)
        leader = group.leader()
        end = client.metadata(group.nodes[leader].client_address).committed_index + 1
        walk = Walk()
        for number, chunk in enumerate(client.fetch_log(0, end, chunk_bytes=16 * 1024, read_from=ReadFrom.ANY)):
            walk.take(chunk)
            if number == 20:
                group.kill(leader)
        assert walk.follow.index == end - 1

        group.start(leader)
        for chunk in client.fetch_log(end, read_from=ReadFrom.ANY):
            walk.take(chunk)
        assert walk.follow.index > end
    group.verify()


def test_members_have_the_same_digests(group: Group) -> None:
    """Up to what all have committed; a flipped bit on one disk differs in its block and in no other."""
    group.append(3000, size=1000)
    statuses = group.wait_converged()
    end = min(one.committed_position for one in statuses.values())
    assert end > 2 << 20
    with closing(group.client()) as client:
        before = {node: digests(group, client, node, end) for node in group.nodes}
        first, *others = before.values()
        assert all(other == first for other in others)
        assert [one[0] for one in first] == list(range(0, end, 64 * 1024))
        assert sum(one[1] for one in first) == end

        victim = next(iter(group.nodes))
        position = 1_500_000
        with group.segments(victim)[1].open("r+b") as file:
            file.seek(position - (1 << 20))
            byte = file.read(1)[0]
            file.seek(position - (1 << 20))
            file.write(bytes([byte ^ 1]))

        after = digests(group, client, victim, end)
        differing = [one for one, (left, right) in enumerate(zip(first, after, strict=True)) if left != right]
        assert differing == [position // (64 * 1024)]


def digests(group: Group, client: DLedgerClient, node: NodeId, end: int) -> list[tuple[int, int, int, int, int]]:
    """Of one member."""
    address = group.nodes[node].client_address
    return [
        (one.position, one.size, one.crc32c, one.last_index, one.chain_crc)
        for one in client.block_digests(0, end, block_bytes=64 * 1024, address=address)
    ]


def test_what_retention_has_removed_is_said_and_the_rest_is_read(make_group: Callable[..., Group]) -> None:
    """The error names the lost range; from the new begin on there is no gap."""
    every_hour = ";".join(map(str, range(24)))
    group = make_group(settings={"retention_hours": "0", "delete_hour": every_hour, "clean_interval_ms": "100"})
    group.start_all()
    group.leader()
    group.append(4000, size=1000)
    segment = 1 << 20
    group.wait_for(
        lambda all_: all(one.begin_position == one.end_position // segment * segment > 0 for one in all_.values()),
        "all segments but the last are removed",
    )
    with closing(group.client()) as client:
        with pytest.raises(IndexBeforeBeginError, match="entries 0 to"):
            next(client.fetch_log(0))
        begin = client.locate().range.begin
        chunks = list(client.fetch_log(begin.index))

    assert (chunks[0].first_index, chunks[0].position) == (begin.index, begin.position)
    assert all(before.end_index == after.first_index for before, after in pairwise(chunks))
