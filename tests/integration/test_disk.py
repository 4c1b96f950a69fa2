"""What disks do: fill up, fail, stall, lose bytes, lose everything; and two processes that want the same one."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import pytest

from dledger.errors import DiskFullError, DLedgerError
from dledger.types import NodeId, Role
from dledger_cli.local.group import LocalGroupError, free_ports
from tests.integration.harness import N0, STEADY, Group
from tests.integration.tracing import traced
from tests.support.damage import turn
from tests.support.history import AppendOp, Outcome
from tests.support.small_disk import enlarge, small_disk
from tests.support.waiting import wait_until
from tests.support.workload import linearizable_read

MIB = 1 << 20
DISK_MIB = 8
LOOK_OFTEN = {"clean_interval_ms": "100"}
"""Otherwise the defaults: nothing is removed to make room, and a full disk stays full until somebody acts."""
OBSERVED_S = 3.0
"""How long a thing that must never happen is watched not to happen: three election timeouts."""


def append_until_refused(group: Group, limit: int = 200) -> DLedgerError:
    """Append 100 KiB at a time until that fails for good; gives the error."""
    with closing(group.client(timeout_s=10.0)) as client:
        for number in range(limit):
            value = b"fill-%d " % number + b"." * (100 << 10)
            began = time.monotonic()
            try:
                index = client.append(value).index
            except DLedgerError as error:
                group.history.record(AppendOp(value, began, time.monotonic(), Outcome(error.outcome), error=str(error)))
                return error
            group.history.record(AppendOp(value, began, time.monotonic(), Outcome.ACKED, index))
    raise AssertionError(f"{limit} appends fit into the small disks")


def test_full_disks_refuse_appends_and_recover_without_a_restart(make_group: Callable[..., Group]) -> None:
    """All disks are full: DISK_FULL, but reads and the leadership go on; space returns, appends do (trap 10)."""
    group = make_group(settings=LOOK_OFTEN)
    with ExitStack() as disks:
        for node in group.nodes:
            disks.enter_context(small_disk(group.store_dir(node), DISK_MIB))
        disks.callback(group.hard_kill)
        group.start_all()
        group.leader()

        error = append_until_refused(group)
        leader = group.leader()
        with closing(group.client()) as client:
            read = linearizable_read(client, 0)
        for node in group.nodes:
            enlarge(group.store_dir(node), 4 * DISK_MIB)
        group.wait_for(lambda all_: not any(one.disk_full for one in all_.values()), "nobody's disk is full")
        group.append(20)

        assert isinstance(error, DiskFullError), error
        assert read is not None, f"{leader} answers no reads"
        group.verify()


def test_leader_with_a_full_disk_hands_over(make_group: Callable[..., Group]) -> None:
    """Only the leader's disk is full: another leads and appends go on; with space, it catches up."""
    group = make_group(settings={**LOOK_OFTEN, "preferred_leaders": "n0"})
    with small_disk(group.store_dir(N0), DISK_MIB), ExitStack() as running:
        running.callback(group.hard_kill)
        group.start_all()
        group.wait_for(lambda all_: all_[N0].role is Role.LEADER, "n0 leads")

        with group.workload(value_bytes=20_000) as load:
            group.wait_for(lambda all_: N0 in all_ and all_[N0].disk_full, "n0's disk is full", 40)
            group.leader(other_than=N0)
            load.history.wait_for_acks(100)
        enlarge(group.store_dir(N0), 400)
        group.wait_for(lambda all_: all_[N0].role is Role.LEADER and not all_[N0].disk_full, "n0 leads again")

        group.verify()


def run_second(group: Group, node: NodeId) -> subprocess.CompletedProcess[str]:
    """Start another process for the same node and directory, at other ports, and wait for its end."""
    words = group.command(node)
    peer, client = (str(port) for port in free_ports(2))
    own = group.nodes[node]
    words[words.index("-p") + 1] = group.members_of(node).replace(f":{own.peer_port}", f":{peer}")
    words[words.index("--client-port") + 1] = client
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_second_process_on_one_directory_is_refused(steady: Group) -> None:
    """flock: the second one ends with a message that says why; the first one notices nothing (trap 15)."""
    steady.append(10)
    term = steady.term()

    second = run_second(steady, N0)

    assert second.returncode not in (0, 70)
    assert "Traceback" not in second.stderr
    assert str(steady.store_dir(N0)) in second.stderr
    assert "process" in second.stderr
    steady.append(10)
    assert steady.term() == term
    steady.verify()


# --- damage ----------------------------------------------------------------------------------------------------------


def start_damaged(group: Group, node: NodeId) -> str:
    """Start a node that is expected to refuse; gives what it says."""
    said = len(group.logs(node))
    with pytest.raises(LocalGroupError, match="exited with code"):
        group.start(node, extra=["--set", "auto_repair=false"])
    return group.logs(node)[said:]


def test_damage_in_the_middle_is_refused_and_repaired_from_peers(group: Group) -> None:
    """Flushed bytes that are wrong: never cut silently (trap 6). ``--repair`` fetches them again.

    So it is without ``auto_repair``; with it the member starts, puts the damage aside and fetches what it lacks.
    """
    group.append(3000, size=1000)
    victim = group.followers(group.leader())[0]
    damaged = group.segments(victim)[1]
    group.kill(victim)
    turn(damaged, 500_000)

    words = start_damaged(group, victim)
    kept = damaged.stat().st_size
    group.start(victim, extra=["--repair"])
    group.append(10)

    assert str(damaged) in words
    assert "offset" in words
    assert "--repair" in words
    assert "Traceback" not in words
    assert kept == 1 * MIB, "the refused bytes are left as they were"
    group.verify()


def assert_no_leader_for(group: Group, seconds: float) -> None:
    """Watch that nobody leads, for that long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        leaders = [node for node, one in group.statuses().items() if one.role is Role.LEADER]
        assert not leaders, f"{leaders} lead without a quorum that may vote"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["damaged", "wiped"])
def test_node_without_its_entries_does_not_vote_before_it_has_caught_up(group: Group, loss: str) -> None:
    """Its vote could elect a leader that lacks what it had acknowledged (trap 30): so with another node down, wait."""
    group.append(2000, size=1000)
    group.wait_converged()
    leader = group.leader()
    victim, other = group.followers(leader)
    group.kill(victim)
    group.append(100)
    group.kill(leader)
    if loss == "wiped":
        shutil.rmtree(group.store_dir(victim))
    else:
        turn(group.segments(victim)[0], 500_000)

    group.start(victim, extra=["--repair"])
    assert_no_leader_for(group, OBSERVED_S)
    assert not group.status(victim).voter
    assert group.status(other).committed_index >= 0
    group.start(leader)
    group.leader()
    group.append(10)

    group.verify()
    assert group.status(victim).voter


def test_two_lost_disks_do_not_begin_anew_while_the_third_has_everything(group: Group) -> None:
    """Two empty nodes are a quorum, but not of a new group: nobody may lead before a person has decided."""
    group.append(100)
    statuses = group.wait_converged()
    leader = group.leader()
    lost = group.followers(leader)
    for node in lost:
        group.kill(node)
        shutil.rmtree(group.store_dir(node))
    group.wait_deposed(leader)

    group.start(lost[0])
    group.start(lost[1])
    assert_no_leader_for(group, OBSERVED_S)

    assert group.status(leader).committed_index == statuses[leader].committed_index


def test_repair_of_a_sound_node_changes_nothing(group: Group) -> None:
    """``--repair`` left in a start script must not empty anybody, least of all everybody."""
    group.append(300)
    before = group.verify()
    for node in group.nodes:
        group.kill(node)

    for node in group.nodes:
        group.start(node, extra=["--repair"])

    after = group.verify()
    assert {index: after[index] for index in before} == before


def test_wiped_node_is_filled_again(group: Group) -> None:
    """A lost disk is replaced by an empty one, under load: everything is fetched, and the node may vote again."""
    with group.workload() as load:
        load.history.wait_for_acks(300)
        victim = group.followers(group.leader())[0]
        group.kill(victim)
        shutil.rmtree(group.store_dir(victim))
        group.start(victim)
        load.history.wait_for_acks(100)
        group.wait_for(lambda all_: all_[victim].voter, "the node may vote again")

    group.verify()


def test_torn_tail_is_cut_and_the_node_rejoins(group: Group) -> None:
    """Half a record behind the flushed end was never acknowledged: cut it, say so, go on."""
    group.append(100)
    end = group.wait_converged()[N0].end_position
    group.kill(N0)
    segment = group.segments(N0)[0]
    content = segment.read_bytes()
    with segment.open("r+b") as stream:
        stream.seek(end)
        stream.write(content[:70])

    group.start(N0)
    group.append(10)

    assert "cut_at=None" not in group.logs(N0).splitlines()[-1]
    group.verify()


def test_follower_behind_an_expired_head_is_installed_again(make_group: Callable[..., Group]) -> None:
    """What a dead follower lacks has expired: it starts over at the leader's begin (trap 12, rocketmq #1778)."""
    group = make_group(
        settings={
            "segment_bytes": "128k",
            "index_segment_bytes": "8k",
            "retention_hours": "0",
            "disk_check_ratio": "0.0000001",
            "follower_keep_bytes": "200k",
            "clean_interval_ms": "50",
        }
    )
    group.start_all()
    group.append(200, size=1000)
    victim = group.followers(group.leader())[0]
    behind = group.status(victim).end_index
    group.kill(victim)
    leader = group.leader()
    group.append(2000, size=1000)
    group.wait_for(lambda all_: all_[leader].begin_index > behind + 1, "the head expires")

    group.start(victim)
    group.append(10)
    statuses = group.wait_converged()

    assert statuses[victim].begin_index > behind
    wait_until(lambda: len({one.begin_position for one in group.told_by().values()}) == 1, "all expire alike")
    group.verify()


# --- failing and stalling flushes ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("role", ["leader", "follower"])
def test_failed_flush_ends_the_node(group: Group, role: str) -> None:
    """After EIO a page may look clean without being stored: stop, never acknowledge, never retry (trap 3)."""
    with group.workload() as load:
        load.history.wait_for_acks(50)
        leader = group.leader()
        victim = leader if role == "leader" else group.followers(leader)[0]
        group.allowed_to_fail.add(victim)

        with traced(group.pid(victim), "fdatasync:error=EIO"):
            code = group.wait_exit(victim)
        load.history.wait_for_acks(100)
        group.start(victim)
        load.history.wait_for_acks(50)

    assert code == 70
    group.verify()


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("role", ["leader", "follower"])
def test_stalled_flush_costs_no_election(make_group: Callable[..., Group], role: str) -> None:
    """fdatasync that takes 6 s holds neither the GIL nor the node's lock, so heartbeats go on (trap 5).

    The time-outs are long because a busy machine, with a tracer on the node, is late for short ones by itself.
    """
    group = make_group(settings=STEADY)
    group.start_all()
    with group.workload() as load:
        load.history.wait_for_acks(50)
        leader, term = group.leader(), group.term()
        victim = leader if role == "leader" else group.followers(leader)[0]

        with traced(group.pid(victim), "fdatasync:delay_enter=6000000") as trace:
            wait_until(lambda: trace.count("fdatasync") >= 2, "two stalled flushes")
            load.history.wait_for_acks(50)
            assert group.term() == term
        load.history.wait_for_acks(50)

    group.verify()
    assert group.term() == term
