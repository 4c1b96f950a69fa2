"""Processes with a state machine: one that was down until the log it needs had gone catches up by a snapshot."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from dledger.client import DLedgerClient
from dledger.rpc.clients.codec import ReadMode
from dledger.types import NodeId
from tests.integration.conftest import Adopt
from tests.integration.harness import SMALL_SEGMENTS, STEADY, WatchedGroup
from tests.support.waiting import wait_until

VALUE = "x" * 90_000
SETTINGS = {
    **SMALL_SEGMENTS,
    **STEADY,
    "retention_hours": "0",
    "delete_hour": ",".join(str(hour) for hour in range(24)),
    "clean_interval_ms": "100",
    "follower_keep_bytes": "0",
}


class MapGroup(WatchedGroup):
    """Nodes of ``dledger kv serve``."""

    def command(self, node: NodeId) -> list[str]:
        words = super().command(node)
        at = words.index("serve")
        words[at : at + 3] = ["kv", "serve"]  # without the group's name, which is the default one
        return words


def put(client: DLedgerClient, count: int, *, round_: int) -> None:
    """Some values of 90 KB, always under the same keys, and one short one."""
    for number in range(count):
        change = {"op": "put", "key": f"k{number % 20}", "value": VALUE, "ttl_ms": 0}
        assert "revision" in json.loads(client.command(json.dumps(change).encode()))
    change = {"op": "put", "key": "round", "value": str(round_), "ttl_ms": 0}
    client.command(json.dumps(change).encode())


def round_at(client: DLedgerClient, address: str) -> str:
    """The short value, as one node has it."""
    question = {"op": "get", "key": "round", "prefix": False}
    answer = client.query(json.dumps(question).encode(), mode=ReadMode.COMMITTED, address=address)
    items = json.loads(answer.result)["items"]
    return str(items[0]["value"]) if items else ""


def begins_after(group: MapGroup, nodes: tuple[NodeId, ...], index: int) -> bool:
    """Whether the logs of these nodes begin after an entry."""
    statuses = group.told_by(*nodes)
    return all(statuses[node].begin_index > index for node in nodes)


def test_a_killed_follower_catches_up_by_a_snapshot_without_an_election(adopt: Adopt, tmp_path: Path) -> None:
    """S8: from the leader's snapshot on; a second time, when it has an older one; and it may be killed again."""
    group = adopt(MapGroup(tmp_path / "group", settings=SETTINGS))
    group.start_all()
    leader = group.leader(timeout_s=60)
    late, other = group.followers(leader)
    address = group.nodes[late].client_address
    with group.client(timeout_s=60) as client:
        put(client, 5, round_=0)
        for round_ in (1, 2):
            group.kill(late)
            before = group.status(leader).end_index
            put(client, 50, round_=round_)
            for node in (leader, other):
                client.create_snapshot(group.nodes[node].client_address)
            wait_until(partial(begins_after, group, (leader, other), before), "the log that it needs has gone")
            term = group.status(leader).term

            group.start(late)
            group.wait_for(
                lambda all_: late in all_ and all_[late].applied_index == all_[leader].committed_index,
                "it has applied everything",
            )

            status = group.status(late)
            assert status.begin_index > before
            assert (status.term, group.status(leader).term) == (term, term)
            assert round_at(client, address) == str(round_)
