"""What the simulator found, each as the smallest story that shows it."""

from __future__ import annotations

from random import Random

from dledger.config import Member, ServerConfig
from dledger.core.node import Node
from dledger.types import HardState, NodeId, Role, Term
from tests.sim.sim_log import SimLog


def node_of(size: int, log: SimLog, hard_state: HardState, *, now_ms: int = 0) -> Node:
    """Member n0 of a group."""
    members = tuple(Member(NodeId(f"n{number}"), "sim", 1 + number) for number in range(size))
    config = ServerConfig(node_id=NodeId("n0"), members=members)
    return Node(config, log=log, hard_state=hard_state, random=Random(1), boot_id=1, now_ms=now_ms)


def test_restart_with_a_log_ahead_of_the_hard_state_adopts_its_term() -> None:
    """An entry of term 5 may be durable before the term is (seed 39): no entry is newer than its holder's term."""
    log = SimLog(1 << 20)
    log.append_as_leader(Term(5), [b"one"])
    log.flush()

    state = node_of(3, log, HardState(Term(4), NodeId("n2"), voter=True)).state

    assert state.hard_state == HardState(Term(5), None, voter=True)
    assert state.hard_state_version == 1, "the driver must save it before anything leaves"


def test_single_member_with_a_full_disk_campaigns_at_election_pace() -> None:
    """A single member whose disk is full must not start a new term, and sync it, at every wake-up (seed 187)."""
    log = SimLog(1 << 20)
    log.disk_full = True
    node = node_of(1, log, HardState(voter=True), now_ms=10)

    due_ms = node.elector.step(10)
    for _ in range(100):
        node.elector.step(11)

    assert node.state.term == 1
    assert due_ms is not None
    assert due_ms >= 10 + node.state.election.election_timeout_ms_min
    log.disk_full = False
    node.elector.step(due_ms)
    assert node.state.role_name is Role.LEADER
