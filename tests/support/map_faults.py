"""A group of ``dledger kv`` under faults, and the verdict on what its clients were told."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from dledger.client import ReadMode, member_change
from dledger.errors import DLedgerError
from dledger.types import MemberRole, NodeId, Role
from tests.integration.harness import Group
from tests.support.map_history import MapHistory, check
from tests.support.map_load import MapLoad
from tests.support.waiting import wait_until

SNAPSHOT_ENTRIES: Final = 500
CLIENTS: Final = 6
UNDER_A_FAULT: Final = 60
"""Operations that must succeed while a fault lasts."""
SERVICE_TIMEOUT_S: Final = 90.0


class MapGroup(Group):
    """Nodes of ``dledger kv``, which save their state often."""

    def __init__(self, directory: Path, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(directory, settings={"snapshot_entries": str(SNAPSHOT_ENTRIES), **(settings or {})})
        self.told = MapHistory()

    def command(self, node: NodeId) -> list[str]:
        """The command line of a node of the map."""
        words = super().command(node)
        at = words.index("serve")
        return [*words[:at], "kv", *words[at:]]

    def load(self) -> MapLoad:
        """Clients of all nodes, recorded in ``told``."""
        return MapLoad(self.addresses, self.told, clients=CLIENTS)

    def go_on(self, count: int = UNDER_A_FAULT) -> None:
        """Return once so many more operations have succeeded."""
        self.told.wait_for_more(count, SERVICE_TIMEOUT_S)

    def change(self, kind: str, node: NodeId) -> None:
        """Add or remove a member, and wait until it votes, or is none."""
        address = self.peer_address(node, self.nodes[node]) if kind == "add" else ""
        with closing(self.client(timeout_s=SERVICE_TIMEOUT_S)) as admin:
            admin.change_members(member_change(kind, node, address))
        wait_until(lambda: (node in self.voters()) == (kind == "add"), f"{kind} {node}", SERVICE_TIMEOUT_S)

    def voters(self) -> set[str]:
        """By the word of a leader."""
        leading = [one for one in self.statuses().values() if one.role is Role.LEADER]
        return {one.node_id for status in leading for one in status.members if one.role is MemberRole.VOTER}

    def check(self) -> None:
        """The verdict: one order explains all answers, and all members have the state that results from it."""
        complaints = check(self.told.changes, self.told.looks)
        assert not complaints, "the history is not linearizable:\n" + "\n".join(complaints)
        self.wait_converged()
        states: dict[NodeId, dict[str, bytes]] = {}
        with closing(self.client(timeout_s=30)) as client:
            end = client.query(b'{"op": "get", "key": "", "prefix": true}')
            for node, one in self.nodes.items():
                self.wait_for(
                    lambda all_, node=node: (all_[node].applied_index or 0) >= end.applied_index,  # type: ignore[misc]
                    f"{node} has applied all",
                )
                own = client.query(
                    b'{"op": "get", "key": "", "prefix": true}', mode=ReadMode.COMMITTED, address=one.client_address
                )
                assert json.loads(own.result) == json.loads(end.result), f"the state of {node} differs"
                index = client.create_snapshot(one.client_address).index
                directory = self.store_dir(node) / "snapshots" / f"{index:020d}"
                states[node] = {
                    str(index): b"",
                    **{name: (directory / name).read_bytes() for name in ("state", "producers")},
                }
        first = next(iter(states.values()))
        assert all(one == first for one in states.values()), "the members' snapshots differ"


def kill_leader(group: MapGroup, _chance: random.Random) -> None:
    """It starts again from its snapshot and its log."""
    group.kill(dead := group.leader())
    group.go_on()
    group.start(dead)


def kill_all(group: MapGroup, _chance: random.Random) -> None:
    """Nobody remembers what is not on the disk."""
    for node in group.nodes:
        group.kill(node)
    group.start_all()
    group.go_on()


def pause_leader(group: MapGroup, _chance: random.Random) -> None:
    """It wakes up as a leader of the past: it must not answer from its state."""
    group.pause(frozen := group.leader())
    try:
        group.go_on()
    finally:
        group.resume(frozen)
    group.go_on()


def hand_over(group: MapGroup, chance: random.Random) -> None:
    """The leadership goes to somebody, if the leader agrees."""
    target = chance.choice(group.followers(group.leader()))
    with suppress(DLedgerError), closing(group.client()) as client:
        client.transfer_leadership(target)
    group.go_on()


def snapshots(group: MapGroup, chance: random.Random) -> None:
    """One member saves its state on demand, and dies."""
    node = chance.choice(sorted(group.nodes))
    with closing(group.client(timeout_s=SERVICE_TIMEOUT_S)) as client:
        client.create_snapshot(group.nodes[node].client_address)
    group.kill(node)
    group.go_on()
    group.start(node)


def wipe(group: MapGroup, chance: random.Random) -> None:
    """A member loses its disk, and gets everything from the others."""
    node = chance.choice(group.followers(group.leader()))
    group.kill(node)
    shutil.rmtree(group.store_dir(node))
    group.start(node)
    group.wait_for(lambda all_: node in all_ and all_[node].voter, f"{node} has standing", SERVICE_TIMEOUT_S)
    group.go_on()


def replace_member(group: MapGroup, chance: random.Random) -> None:
    """A member joins, and another leaves, perhaps the leader."""
    joined = group.join().node_id
    group.change("add", joined)
    group.go_on()
    gone = chance.choice(sorted(group.nodes.keys() - {joined}))
    group.change("remove", gone)
    group.go_on()
    group.kill(gone)
    del group.nodes[gone]


FAULTS: Final[list[Callable[[MapGroup, random.Random], None]]] = [
    kill_leader,
    pause_leader,
    hand_over,
    snapshots,
    wipe,
    kill_all,
]
