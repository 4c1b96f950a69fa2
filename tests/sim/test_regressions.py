"""What the simulator found, each as the smallest story that shows it."""

from __future__ import annotations

from random import Random

from dledger.config import Member, ServerConfig
from dledger.core.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    PushCompare,
    PushInstall,
    PushKind,
    PushResponse,
    VoteResponse,
)
from dledger.core.node import Node
from dledger.core.standing import MemberRun
from dledger.errors import ResponseCode
from dledger.types import NO_ENTRY, NO_INDEX, EntryId, HardState, LogIndex, NodeId, Position, Role, Standing, Term
from tests.sim.sim_log import SimLog


def node_of(size: int, log: SimLog, hard_state: HardState, *, now_ms: int = 0) -> Node:
    """Member n0 of a group."""
    members = tuple(Member(NodeId(f"n{number}"), "127.0.0.1", 1 + number) for number in range(size))
    config = ServerConfig(node_id=NodeId("n0"), members=members)
    return Node(config, log=log, hard_state=hard_state, random=Random(1), run=MemberRun(1, 4711), now_ms=now_ms)


def test_restart_with_a_log_ahead_of_the_hard_state_adopts_its_term() -> None:
    """An entry of term 5 may be durable before the term is (seed 39): no entry is newer than its holder's term."""
    log = SimLog(1 << 20)
    log.append_as_leader(Term(5), [b"one"])
    log.flush()

    state = node_of(3, log, HardState(Term(4), NodeId("n2"), standing=Standing.FULL)).state

    assert state.hard_state == HardState(Term(5), None, standing=Standing.FULL)
    assert state.hard_state_version == 1, "the driver must save it before anything leaves"


def test_single_member_with_a_full_disk_campaigns_at_election_pace() -> None:
    """A single member whose disk is full must not start a new term, and sync it, at every wake-up (seed 187)."""
    log = SimLog(1 << 20)
    log.disk_full = True
    node = node_of(1, log, HardState(standing=Standing.FULL), now_ms=10)

    due_ms = node.elector.step(10)
    for _ in range(100):
        node.elector.step(11)

    assert node.state.term <= 1
    assert due_ms is not None
    assert due_ms >= 10 + node.state.election.election_timeout_ms_min
    log.disk_full = False
    node.elector.step(due_ms)
    assert node.state.role_name is Role.LEADER


def test_heartbeat_of_an_earlier_term_confirms_no_read() -> None:
    """A late heartbeat of the leader's former process must not count for a round of its present one (seed 272)."""
    node = node_of(3, SimLog(1 << 20), HardState(Term(15), standing=Standing.FULL))
    node.answer(NodeId("n1"), HeartbeatRequest(Term(15), read_sequence=3), 0)

    late = node.answer(NodeId("n1"), HeartbeatRequest(Term(14), read_sequence=65), 1)

    assert late == HeartbeatResponse(Term(15), read_sequence=0, boot_id=node.state.boot_id)


def test_install_of_what_is_committed_here_changes_nothing() -> None:
    """A leader that keeps more of the log than this member may install an older begin point (seed 60)."""
    log = SimLog(1 << 20)
    log.append_as_leader(Term(1), [b"%d" % number for number in range(20)])
    log.flush()
    log.set_committed(LogIndex(15))
    chain_crc = log.chain_crc_at(LogIndex(4))
    log.drop_before(LogIndex(10))
    node = node_of(3, log, HardState(Term(2), standing=Standing.FULL))
    push = PushInstall(Term(2), 1, EntryId(Term(1), LogIndex(4)), chain_crc, Position(0))

    node.receive(NodeId("n1"), push, 0)
    node.handler.step(0)
    leads = VoteResponse(Term(2), granted=False, pre_vote=True, leads=True)
    node.handler.on_vote_response(NodeId("n1"), leads)
    node.handler.step(0)

    (_, answer) = node.state.outbox.messages[-1]
    assert isinstance(answer, PushResponse)
    assert (answer.kind, answer.code, answer.verified_index) == (PushKind.INSTALL, ResponseCode.SUCCESS, 15)
    assert (log.begin.index, log.last.index) == (9, 19)


def test_refusal_without_watermark_does_not_rewind_the_dispatcher() -> None:
    """A late answer to an earlier term, or of a full queue, tells nothing about the follower's log (seed 60)."""
    log = SimLog(1 << 20)
    log.append_as_leader(Term(1), [b"one", b"two", b"three"])
    node = node_of(3, log, HardState(Term(1), standing=Standing.FULL))
    node.state.become_candidate(0, pre_vote=False)
    node.state.become_leader(log.append_as_leader(Term(2), [b""]).first_index, 0)
    dispatcher = node.dispatchers[NodeId("n1")]

    for epoch, code in enumerate((ResponseCode.EXPIRED_TERM, ResponseCode.PUSH_REQUEST_IS_FULL)):
        dispatcher.step(1000 * epoch)
        sent = [message for target, message in node.state.outbox.take().messages if target == "n1"]
        compare = sent[-1]
        assert isinstance(compare, PushCompare)
        refusal = PushResponse(
            Term(2), compare.epoch, PushKind.COMPARE, code, NO_INDEX, NO_INDEX, LogIndex(3), NO_ENTRY, boot_id=7
        )
        node.receive(NodeId("n1"), refusal, 1000 * epoch)

        assert dispatcher.next_index == 4
