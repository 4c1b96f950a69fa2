"""Tens of thousands of operations under faults of every kind, and one log that explains what each client was told.

The history is kept beside the group's files as JSON lines, for other checkers; ours is itself checked with good and bad
histories in ``tests/unit/support/test_history.py``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from dledger.client import member_change
from dledger.errors import DLedgerError
from dledger.types import MemberRole, NodeId, Role
from tests.integration import tracing
from tests.integration.conftest import Adopt
from tests.integration.harness import Group, ProxiedGroup
from tests.integration.test_nemesis import FAULTS as NETWORK_FAULTS
from tests.integration.test_nemesis import SERVICE_TIMEOUT_S, Fault
from tests.support import power
from tests.support.power import LoopDisk
from tests.support.waiting import wait_until
from tests.support.workload import Workload

OPERATIONS = 50_000
OPERATIONS_SOAK = int(os.environ.get("OPERATIONS", "1000000"))
UNDER_A_FAULT = 100
"""Acknowledgements while a fault lasts: the service must return, slow as it may be."""
ROUND = 2_000
"""Acknowledgements between one fault and the next."""
ROUND_TIMEOUT_S = 90.0
DISK_MIB = 256
SLOW_US = 300_000


def hand_over(group: ProxiedGroup, chance: random.Random) -> Callable[[], None]:
    """The leadership goes to somebody, if the leader agrees."""
    target = chance.choice(group.followers(group.leader()))
    with suppress(DLedgerError), group.client() as client:
        client.transfer_leadership(target)
    return lambda: None


def full_disk(group: ProxiedGroup, chance: random.Random) -> Callable[[], None]:
    """Somebody else's file takes all the room that one member has."""
    node = chance.choice(sorted(group.nodes))
    ballast = group.store_dir(node) / "ballast"
    with ballast.open("wb") as file, suppress(OSError):
        while room := os.statvfs(ballast).f_bavail:
            os.posix_fallocate(file.fileno(), file.tell(), max(1, room // 2) * 4096)
            file.seek(0, os.SEEK_END)
    return ballast.unlink


def slow_disk(group: ProxiedGroup, chance: random.Random) -> Callable[[], None]:
    """Each flush of one member takes as long as two heartbeats and more."""
    stack = ExitStack()
    stack.enter_context(
        tracing.traced(group.pid(chance.choice(sorted(group.nodes))), f"fdatasync:delay_enter={SLOW_US}")
    )
    return stack.close


def power_cut(group: ProxiedGroup, chance: random.Random, disks: dict[str, LoopDisk]) -> Callable[[], None]:
    """One member's machine goes, and comes back with what its disk has."""
    node = chance.choice(sorted(group.nodes))
    disks[node].cut()
    group.kill(node)
    disks[node].restore()
    return group.start_all


@pytest.mark.slow
@pytest.mark.parametrize("operations", [OPERATIONS, pytest.param(OPERATIONS_SOAK, marks=pytest.mark.soak)])
def test_one_log_explains_all_that_clients_were_told(adopt: Adopt, tmp_path: Path, operations: int) -> None:
    """Appends and linearizable reads, of clients that try again and clients that do not, in real time."""
    power.need_loop_disks(tmp_path)
    tracing.need_strace()
    chance = random.Random(operations)
    with ExitStack() as stack:
        group = adopt(ProxiedGroup(tmp_path / "group", size=5, settings={"retention_hours": "9999"}))
        group.allowed_to_fail = set(group.nodes)
        disks: dict[str, LoopDisk] = {}
        mib = DISK_MIB * operations // OPERATIONS
        for node in group.nodes:
            disks[node] = LoopDisk(tmp_path / f"{node}.img", group.store_dir(node), mib=mib)
            stack.callback(disks[node].close)
        stack.callback(group.hard_kill)
        faults: list[Fault] = [*NETWORK_FAULTS, hand_over, full_disk, slow_disk]
        faults.append(lambda one, dice: power_cut(one, dice, disks))
        group.start_all()
        group.leader()
        load = Workload(group.addresses, group.history, singles=2, pipelines=4, readers=2, pace_s=0.001)
        with load:
            while len(group.history.appends) + len(group.history.reads) < operations:
                undo = chance.choice(faults)(group, chance)
                try:
                    load.history.wait_for_acks(UNDER_A_FAULT, SERVICE_TIMEOUT_S)
                finally:
                    undo()
                load.history.wait_for_acks(ROUND, ROUND_TIMEOUT_S)

        group.verify()
        assert (group.directory / "history.jsonl").stat().st_size


def test_changes_of_the_members_are_invisible_to_clients(adopt: Adopt, tmp_path: Path) -> None:
    """Configurations overlap (M1), a learner does not count (M4), and a leader that leaves hands over first (D6).

    Clients know the first three addresses alone. Members that were removed, and one that is frozen while it is, go on
    running meanwhile: none of them may tell a reader that what is there is not.
    """
    group = adopt(Group(tmp_path / "group"))
    group.start_all()
    load = Workload(group.addresses, group.history, singles=2, readers=3, pace_s=0.002)

    def change(kind: str, node: NodeId, *, replaces: str = "") -> None:
        address = group.peer_address(node, group.nodes[node]) if kind == "add" else ""
        with closing(group.client(timeout_s=SERVICE_TIMEOUT_S)) as admin:
            admin.change_members(member_change(kind, node, address, replaces=replaces))

    with load:
        added = group.join().node_id
        change("add", added)
        group.kill(dead := group.leader())  # whoever leads next promotes it
        until_voters(group, "n0", "n1", "n2", added)
        load.history.wait_for_acks(UNDER_A_FAULT, SERVICE_TIMEOUT_S)

        change("add", group.join().node_id, replaces=dead)
        until_voters(group, *(group.nodes.keys() - {dead}))
        load.history.wait_for_acks(UNDER_A_FAULT, SERVICE_TIMEOUT_S)

        change("remove", removed := group.leader())
        load.history.wait_for_acks(UNDER_A_FAULT, SERVICE_TIMEOUT_S)

        group.pause(frozen := group.leader())
        load.history.wait_for_acks(UNDER_A_FAULT, SERVICE_TIMEOUT_S)
        change("remove", frozen)
        group.resume(frozen)
        load.history.wait_for_acks(UNDER_A_FAULT, SERVICE_TIMEOUT_S)
        until_voters(group, *(group.nodes.keys() - {dead, removed, frozen}))

    for gone in (dead, removed, frozen):
        if gone != dead:
            group.kill(gone)
        del group.nodes[gone]
    group.verify()


def until_voters(group: Group, *wanted: str) -> None:
    """Return when exactly these vote, by the word of one that leads."""

    def as_wanted() -> bool:
        leading = [one for one in group.statuses().values() if one.role is Role.LEADER]
        found = [{one.node_id for one in status.members if one.role is MemberRole.VOTER} for status in leading]
        return set(wanted) in found

    wait_until(as_wanted, f"{wanted} vote", ROUND_TIMEOUT_S)
