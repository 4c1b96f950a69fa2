"""Changes of a running group's members: what its clients notice, and how fast a new member catches up."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Final, Self

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.processes import ChildError
from benchmarks.registry import Scenario, load, logs
from benchmarks.scenarios.restart import LoggedNode
from benchmarks.store_access import GROUP, NODE_ID
from benchmarks.targets import NO_CHANGE, WIPED_MEMBER
from dledger.client import DLedgerClient, member_change
from dledger.types import LogIndex, MemberRole, NodeId
from dledger_cli.local.group import LocalGroup, LocalNode, wait_until

BODY_BYTES: Final = 1024
BATCH: Final = 100
RATE: Final = 20_000
"""Entries offered per second while members come and go."""
WAIT_S: Final = 600.0
GAP: Final = "members_gap"
TRANSFER_GAP: Final = "members_transfer_gap"
CATCH_UP: Final = "members_catch_up"


class SteadyLoad:
    """Numbered entries at a steady rate, on a thread of its own, until ``stop``."""

    def __init__(self, client: DLedgerClient) -> None:
        self._client = client
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="members-load")
        self._acknowledged_at = [time.perf_counter()]
        self._error: BaseException | None = None
        self.count = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it. Raises the error of an append that failed."""
        self._stopped.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def longest_gap(self, since: float, until: float) -> float:
        """The longest time without an acknowledgement between two moments, in seconds."""
        moments = [since, *(at for at in tuple(self._acknowledged_at) if since < at < until), until]
        return max(after - before for before, after in itertools.pairwise(moments))

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            while not self._stopped.is_set():
                self._client.append_many([b"%0*d" % (BODY_BYTES, self.count + one) for one in range(BATCH)])
                self.count += BATCH
                self._acknowledged_at.append(time.perf_counter())
                self._stopped.wait(max(0.0, began + self.count / RATE - time.perf_counter()))
        except BaseException as error:  # noqa: BLE001  # told by stop
            self._error = error


def measure_gaps(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """3 → 5 → 3 under load; two of the first three leave, the leader last."""
    with ExitStack() as stack:
        group = stack.enter_context(LocalGroup(context.directory / "group-members"))
        admin = stack.enter_context(closing(group.client()))
        leader = group.leader()
        with closing(group.client()) as client, SteadyLoad(client) as load:
            time.sleep(context.settings.warmup_seconds)
            alone = time.perf_counter()
            time.sleep(context.settings.seconds)
            began = time.perf_counter()
            newcomers = [_add(admin, group.join()) for _ in range(2)]
            other = next(one for one in group.nodes if one != leader and one not in newcomers)
            admin.change_members(member_change("remove", other))
            removing = time.perf_counter()
            admin.change_members(member_change("remove", leader), timeout_s=30.0)
            time.sleep(1.0)
            ended = time.perf_counter()
            load.stop()
            before = load.longest_gap(alone, began)
            usual, transfer = load.longest_gap(began, removing), load.longest_gap(removing, ended)
            _check_stored(admin, load.count)
        context.say(f"  {load.count:,} entries, each stored once and in order; {ended - began:.1f} s for four changes")
    if GAP in names:
        yield Figure(GAP, usual * 1000, "ms", NO_CHANGE, before * 1000)
    if TRANSFER_GAP in names:
        yield Figure(TRANSFER_GAP, transfer * 1000, "ms", NO_CHANGE, before * 1000)


def measure_catch_up(context: Context, _: frozenset[str]) -> Iterator[Figure]:
    """Replace a lost member, until the new one votes; beside a voter whose disk is wiped, until it is in sync."""
    log_bytes = int(context.settings.log_gib * (1 << 30))
    with ExitStack() as stack:
        directory = context.directory / "group-replace"
        LoggedNode(directory, log_bytes, stack)
        group = stack.enter_context(LocalGroup(directory, size=1, name=GROUP))
        admin = stack.enter_context(closing(group.client(timeout_s=30.0)))
        group.leader()
        second, third = (_add(admin, group.join()) for _ in range(2))
        group.kill(third)
        shutil.rmtree(group.store_dir(third))  # its machine is lost, and what that has in memory with it
        fourth = group.join()
        began = time.perf_counter()
        admin.change_members(member_change("add", fourth.node_id, _address(fourth), replaces=third))
        _wait_for_voters(admin, {NODE_ID, second, fourth.node_id})
        replaced = log_bytes / (time.perf_counter() - began) / 1e6
        group.stop(second)
        shutil.rmtree(group.store_dir(second))
        group.start(second)
        began = time.perf_counter()  # the other one was running already
        _wait_until_in_sync(admin, second)
        wiped = log_bytes / (time.perf_counter() - began) / 1e6
    yield Figure(CATCH_UP, replaced, "MB/s", WIPED_MEMBER, wiped)


def _address(node: LocalNode) -> str:
    return f"127.0.0.1:{node.peer_port}"


def _add(admin: DLedgerClient, node: LocalNode) -> NodeId:
    """Add a node and wait until it votes."""
    admin.change_members(member_change("add", node.node_id, _address(node)))
    wait_until(lambda: node.node_id in _voters(admin), WAIT_S, f"{node.node_id} does not vote")
    return node.node_id


def _voters(admin: DLedgerClient) -> set[NodeId]:
    return {one.node_id for one in admin.leader_status().members if one.role is MemberRole.VOTER}


def _wait_for_voters(admin: DLedgerClient, wanted: set[NodeId]) -> None:
    wait_until(lambda: _voters(admin) == wanted, WAIT_S, f"the voters are not {', '.join(sorted(wanted))}")


def _wait_until_in_sync(admin: DLedgerClient, node: NodeId) -> None:
    wait_until(
        lambda: any(one.node_id == node and one.health == "in sync" for one in admin.leader_status().peers),
        WAIT_S,
        f"{node} does not catch up",
    )


def _check_stored(admin: DLedgerClient, count: int) -> None:
    """Each numbered entry once, in order. Raises ``ChildError``."""
    status, wanted = admin.leader_status(), 0
    index = max(status.begin_index, LogIndex(0))
    while index <= status.committed_index and (found := admin.read(index)):
        for entry in found:
            if len(entry.body) == BODY_BYTES:
                if int(entry.body) != wanted:
                    raise ChildError(f"entry {entry.index} has number {int(entry.body)} instead of {wanted}")
                wanted += 1
        index = LogIndex(found[-1].index + 1)
    if wanted != count:
        raise ChildError(f"{count} entries were acknowledged, and {wanted} are stored")


GAPS: Final = Scenario("3 to 5 to 3 members under load", (GAP, TRANSFER_GAP), measure_gaps, load(5, 0.05))
CATCHING_UP: Final = Scenario("a lost member is replaced", (CATCH_UP,), measure_catch_up, logs(5))
