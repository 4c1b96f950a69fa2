"""What the parts of a node tell each other; none of these nodes is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dledger.config import Member, ServerConfig, StoreConfig
from dledger.core.member_state import Leader
from dledger.core.messages import VoteRequest
from dledger.core.ports import PreparedAppend
from dledger.errors import CorruptLogError, DLedgerError
from dledger.monitoring import SILENT, AppendDone, ConditionKind, Instruments
from dledger.records import ENTRY_HEADER_BYTES
from dledger.server import DLedgerServer
from dledger.types import NO_ENTRY, AppendedBatch, HardState, LogIndex, Magic, NodeId, Standing, Term
from dledger_cli.local.group import free_ports
from tests.support.cluster import Outcome
from tests.support.damage import turn


@contextmanager
def a_member(
    path: Path, members: int, *, auto_repair: bool = True, instruments: Instruments = SILENT
) -> Iterator[DLedgerServer]:
    """One of a group's members, with its log open."""
    store = StoreConfig(path, segment_bytes=1 << 16, index_segment_bytes=1 << 14, auto_repair=auto_repair)
    group = tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(free_ports(members)))
    made = DLedgerServer(
        ServerConfig(node_id=NodeId("n0"), members=group, client_port=0, store=store), instruments=instruments
    )
    try:
        yield made
    finally:
        made.stop(graceful=False)


@pytest.mark.parametrize(
    ("members", "auto_repair", "stops"),
    [(1, True, True), (3, False, True), (3, True, False)],
    ids=["alone", "not allowed to repair", "repaired from a peer"],
)
def test_damage_that_no_peer_will_mend_stops_the_node_whose_core_meets_it(
    tmp_path: Path, members: int, auto_repair: bool, stops: bool
) -> None:
    """A part that can never go on would else leave a node that answers and does nothing."""
    with a_member(tmp_path, members, auto_repair=auto_repair) as node:
        damage = CorruptLogError(node.log.data_directories[0] / f"{0:020d}", 100, "it is wrong", "advice", 7)

        node._driver.call(lambda _now_ms: node._node.state.outbox.damage.append(damage))

        assert node.fatal is (damage if stops else None)
        assert node.conditions.holds(ConditionKind.DAMAGED) is not stops


@pytest.mark.parametrize(("members", "majority"), [(3, 2), (5, 3)])
def test_a_majority_of_all_members_fences_one_that_differs(tmp_path: Path, members: int, majority: int) -> None:
    """It counts among those that differ from it, so in a group of three both others must; one fewer fences nobody."""
    own, others = {LogIndex(7): 1}, {LogIndex(7): 2}
    with a_member(tmp_path, members) as node:
        node._watch._judge(own, {NodeId(f"n{i}"): others for i in range(1, majority)})
        fenced_by_fewer = node.fenced

        node._watch._judge(own, {NodeId(f"n{i}"): others for i in range(1, majority + 1)})

        assert fenced_by_fewer == ""
        assert node.fenced.startswith(f"{majority} members hold a different entry 7")
        assert node.conditions.holds(ConditionKind.FENCED)


def test_damage_that_a_read_meets_wakes_the_thread_that_repairs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without scrubbing it would sleep until it next compares logs with the peers."""
    with a_member(tmp_path, 3) as node:
        woken: list[None] = []
        monkeypatch.setattr(node._scrub, "wake", lambda: woken.append(None))
        node.log.append_as_leader(Term(1), [b"body"])
        turn(node.log.data_directories[0] / f"{0:020d}", ENTRY_HEADER_BYTES)

        with pytest.raises(CorruptLogError):
            node.read(LogIndex(0), LogIndex(0), 1000)

        assert woken == [None]


class Timing(Instruments):
    """Keeps what the appends that it times are answered with."""

    def __init__(self) -> None:
        self.answers: list[AppendedBatch | DLedgerError] = []

    def timed(self, done: AppendDone) -> AppendDone:
        def note(result: AppendedBatch | DLedgerError) -> None:
            self.answers.append(result)
            done(result)

        return note


class Message(PreparedAppend):
    """A batch that nobody asks for here."""

    def bodies(self, _term: Term, _stored: int = 0) -> list[bytes]:
        raise AssertionError("this node does not lead")

    def placed(self, _batch: AppendedBatch | None) -> None:
        raise AssertionError("this node does not lead")


def test_every_append_is_timed_until_its_answer(tmp_path: Path) -> None:
    """A broker's too: its latencies and refusals are in the metrics of its node."""
    timing = Timing()
    with a_member(tmp_path, 3, instruments=timing) as node:
        appended, sent = Outcome[AppendedBatch](), Outcome[AppendedBatch]()

        node.submit_append([b"body"], appended)
        node.submit_prepared(Message(), sent)

        assert timing.answers == [appended.error, sent.error]


def test_a_follower_that_may_ask_for_votes_is_no_second_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One asks again whether this member leads, with the same countersign; to the other one leadership is transferred.

    Another process (``duplicate_member``) has another countersign.
    """
    with a_member(tmp_path, 3) as node:
        told: list[NodeId] = []
        monkeypatch.setattr(node._member_watch, "asked_for_vote", lambda peer, _contact_ms: told.append(peer))
        state = node._node.state
        state.save_hard_state(HardState(Term(0), standing=Standing.FULL))
        state.become_candidate(0, pre_vote=False)
        state.become_leader(node.log.append_as_leader(state.term, [b""], Magic.NOOP).last_index, 0)
        leader = state.role
        assert isinstance(leader, Leader)
        leader.countersigns[NodeId("n1")] = 7

        for countersign in (7, 8):
            request = VoteRequest(Term(2), NO_ENTRY, pre_vote=True, countersign=countersign)
            node._peer_messages._note_vote_request(NodeId("n1"), request)
        node._peer_messages._note_vote_request(
            NodeId("n1"), VoteRequest(Term(2), NO_ENTRY, transfer=True, countersign=9)
        )

    assert told == [NodeId("n1")]
