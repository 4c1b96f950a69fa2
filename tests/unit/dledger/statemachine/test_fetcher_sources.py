"""From whom a snapshot is fetched, and which ones are believed (S8, S10); the members are made up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from crc32c import crc32c

from dledger.clock import Clock
from dledger.core.messages import SnapshotFetch
from dledger.errors import UnavailableError
from dledger.monitoring import ConditionKind, Conditions
from dledger.rpc.peers.codec import SnapshotRequest
from dledger.rpc.peers.exchanges import PeerSnapshotClient
from dledger.runtime.threads import Supervisor
from dledger.statemachine import fetching
from dledger.statemachine.fetching import SnapshotFetcher
from dledger.statemachine.snapshots import (
    PRODUCERS_FILE,
    STATE_FILE,
    SnapshotFile,
    SnapshotMeta,
    SnapshotStore,
    encode_meta,
)
from dledger.store.file_store import FileStore
from dledger.store.fs import FileSystem
from dledger.types import GENESIS, NO_INDEX, Boundary, LogIndex, NodeId, Position, Term
from tests.support.cluster import N1, N2
from tests.support.waiting import wait_until

STATE = b"the state"
CRC = 77


def snapshot(index: int, chain_crc: int = CRC, state: bytes = STATE) -> SnapshotMeta:
    files = {STATE_FILE: SnapshotFile(len(state), crc32c(state)), PRODUCERS_FILE: SnapshotFile(0, 0)}
    return SnapshotMeta(Boundary(LogIndex(index), Term(1), Position(4000), chain_crc), None, 0, 1, files)


@dataclass
class Transfer:
    """What another member sends."""

    description: bytes
    state: bytes
    breaks_at: int

    def pieces(self, _file: str, offset: int, length: int) -> Iterator[bytes]:
        for start in range(offset, length, 4):
            if start >= self.breaks_at:
                raise UnavailableError("the connection is lost")
            yield self.state[start : start + 4]


@dataclass
class Members:
    """The other members' snapshots and chains; in the place of ``PeerSnapshotClient``."""

    snapshots: dict[NodeId, SnapshotMeta] = field(default_factory=dict)
    states: dict[NodeId, bytes] = field(default_factory=dict)
    breaks_at: dict[NodeId, int] = field(default_factory=dict)
    """The bytes of a file after which a connection is lost."""
    breaks_once: dict[NodeId, int] = field(default_factory=dict)
    """The same of the next connection alone."""
    verifies_for_long: bool = False
    """Whether an answer to who doubts a snapshot comes too late."""
    crcs: dict[LogIndex, int] = field(default_factory=dict)
    """Of the leader's log."""
    peers: tuple[NodeId, ...] = (N1, N2)
    asked: list[tuple[NodeId, SnapshotRequest]] = field(default_factory=list)

    @contextmanager
    def transfer(self, peer: NodeId, request: SnapshotRequest) -> Iterator[Transfer]:
        self.asked.append((peer, request))
        if peer not in self.snapshots:
            raise UnavailableError(f"{peer} is down")
        if self.verifies_for_long and request.doubted != NO_INDEX:
            raise UnavailableError(f"{peer} did not answer in time")
        state, breaks_at = self.states.get(peer, STATE), self.breaks_at.get(peer, len(STATE))
        breaks_at = self.breaks_once.pop(peer, breaks_at)
        yield Transfer(encode_meta(self.snapshots[peer]), state, breaks_at)

    def chain_crc(self, _peer: NodeId, index: LogIndex) -> int | None:
        return self.crcs.get(index)

    def close(self) -> None:
        pass


@dataclass
class Log:
    """This member's own."""

    begin: Boundary = GENESIS
    committed_index: LogIndex = NO_INDEX
    crc: int = 0

    def chain_crc_at(self, _index: LogIndex) -> int:
        return self.crc


@dataclass
class Machine:
    """Takes over what was fetched."""

    format: int = 1
    applied_index: LogIndex = NO_INDEX
    adopted: list[int] = field(default_factory=list)
    has_room: bool = True
    """Whether the log can be reset."""

    def adopt(self, meta: SnapshotMeta, ended: Callable[[bool], None]) -> None:
        self.adopted.append(meta.index)
        self.applied_index = meta.index
        ended(self.has_room)


@dataclass
class World:
    members: Members
    machine: Machine
    log: Log
    store: SnapshotStore
    conditions: Conditions
    fetcher: SnapshotFetcher
    leader: NodeId | None = N1
    learner: bool = False

    def fails(self, words: str) -> None:
        """The fetch ends with such an error, and nothing is left of it."""
        wait_until(lambda: self.conditions.holds(ConditionKind.SNAPSHOT_FAILED), "it has failed")
        assert words in "".join(one.message for one in self.conditions.now())
        assert self.machine.adopted == []
        assert self.store.newest is None


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock, failed = Clock(), threading.Event()
    conditions, supervisor = Conditions("n0", clock), Supervisor(lambda _error: failed.set())
    members, machine, log, store = Members(), Machine(), Log(), SnapshotStore(FileSystem(), tmp_path)
    made = World(members, machine, log, store, conditions, cast(SnapshotFetcher, None))
    made.fetcher = SnapshotFetcher(
        "n0",
        machine,
        store,
        cast(FileStore, log),
        cast(PeerSnapshotClient, members),
        clock,
        supervisor,
        conditions,
        leader=lambda: made.leader,
        is_learner=lambda: made.learner,
        fenced=lambda: None,
    )
    made.fetcher.start()
    yield made
    made.fetcher.stop(60)
    assert not failed.is_set()


def test_the_leaders_snapshot_is_believed(world: World) -> None:
    """The leader was proven to lead; nobody else is asked."""
    world.members.snapshots = {N1: snapshot(9), N2: snapshot(9)}
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: world.machine.adopted == [9], "it is adopted")
    assert [peer for peer, _ in world.members.asked] == [N1]


@pytest.mark.parametrize("crcs", [{}, {LogIndex(9): 5}], ids=["unknown", "another"])
def test_another_members_snapshot_needs_the_leaders_chain(world: World, crcs: dict[LogIndex, int]) -> None:
    """S10: before anything of it is fetched."""
    world.members.snapshots, world.members.crcs = {N2: snapshot(9)}, crcs
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    world.fails("cannot be shown to be of the leader's history")
    assert world.fetcher.bytes_received == 0


@pytest.mark.parametrize("leader", [None, N2], ids=["nobody", "another"])
def test_a_former_leaders_word_is_no_proof(world: World, leader: NodeId | None) -> None:
    """Who leads now has not asked yet."""
    world.members.snapshots, world.leader = {N1: snapshot(9)}, leader
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    world.fails("cannot be shown to be of the leader's history")


def test_the_next_leaders_wish_replaces_a_former_ones(world: World) -> None:
    """Its log may begin earlier, and its word counts."""
    world.members.snapshots, world.leader = {N2: snapshot(9)}, N2
    world.fetcher.want(SnapshotFetch(N1, LogIndex(50)))
    wait_until(lambda: world.conditions.holds(ConditionKind.SNAPSHOT_FAILED), "it has failed")
    world.fetcher.want(SnapshotFetch(N2, LogIndex(5)))
    wait_until(lambda: world.machine.adopted == [9], "it is adopted")
    assert not world.conditions.holds(ConditionKind.SNAPSHOT_FAILED)


def test_a_wish_ends_when_the_log_gave_what_was_lacking(world: World) -> None:
    """The next leader's may reach back further; nothing is fetched any more, and nothing is told."""
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: world.conditions.holds(ConditionKind.SNAPSHOT_FAILED), "it has failed")
    world.machine.applied_index = world.log.committed_index = LogIndex(7)
    wait_until(lambda: not world.conditions.holds(ConditionKind.SNAPSHOT_FAILED), "it is over")
    assert world.machine.adopted == []


def test_a_log_that_could_not_be_reset_is_when_the_leader_asks_again(world: World) -> None:
    """S8: what is loaded already is not fetched again, and the log does not stay behind it."""
    world.members.snapshots = {N1: snapshot(9)}
    world.machine.has_room = False
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: world.machine.adopted == [9], "it is loaded")
    world.machine.has_room = True

    def repeated() -> bool:
        world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
        return len(world.machine.adopted) > 1

    wait_until(repeated, "it is adopted again")
    assert len(world.members.asked) == 1


def test_a_wish_that_comes_when_the_one_before_is_over_is_carried_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another leader made it while the thread saw that the former one's needs nothing."""
    world.members.snapshots, world.leader = {N2: snapshot(9)}, N2
    world.machine.applied_index = world.log.committed_index = LogIndex(7)
    clear, wishes = world.conditions.clear, [SnapshotFetch(N2, LogIndex(9))]

    def cleared(kind: ConditionKind, subject: str = "") -> None:
        clear(kind, subject)
        if wishes:
            world.fetcher.want(wishes.pop())

    monkeypatch.setattr(world.conditions, "clear", cleared)
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: world.machine.adopted == [9], "it is adopted")


def test_what_one_member_began_is_not_continued_with_another_ones_snapshot_of_the_same_entry(world: World) -> None:
    """State machines need not write the same bytes: both would count as damaged."""
    other = STATE.upper()
    world.members.snapshots = {N1: snapshot(9), N2: snapshot(9, state=other)}
    world.members.states, world.members.breaks_at = {N2: other}, {N1: 4}
    world.members.crcs = {LogIndex(9): CRC}
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: world.machine.adopted == [9], "it is adopted")
    assert [peer for peer, _ in world.members.asked] == [N1, N1, N2]
    newest = world.store.newest
    assert newest is not None
    with world.store.reader(newest) as reader:
        assert reader.read_all() == other


def test_while_the_leader_is_away_another_member_gives_what_its_chain_confirms(world: World) -> None:
    """S8, S10: the leader's chain, asked apart."""
    world.members.snapshots, world.members.crcs = {N2: snapshot(9)}, {LogIndex(9): CRC}
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: world.machine.adopted == [9], "it is adopted")


def test_the_own_committed_log_is_proof_enough(world: World) -> None:
    """Also on a leader, whose own machine lacks what its log no longer has."""
    world.members.snapshots, world.leader = {N2: snapshot(9)}, None
    world.log.committed_index, world.log.crc = LogIndex(20), CRC
    world.fetcher.want_at_least(LogIndex(5))
    wait_until(lambda: world.machine.adopted == [9], "it is adopted")


def test_a_snapshot_that_the_own_committed_log_contradicts_is_not_fetched(world: World) -> None:
    """Whoever sends it."""
    world.members.snapshots = {N1: snapshot(9)}
    world.log.committed_index, world.log.crc = LogIndex(20), CRC + 1
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    world.fails("cannot be shown to be of the leader's history")


def test_a_learner_spares_the_leader(world: World) -> None:
    """S8."""
    world.members.snapshots, world.members.crcs = {N1: snapshot(9), N2: snapshot(9)}, {LogIndex(9): CRC}
    world.learner = True
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: world.machine.adopted == [9], "it is adopted")
    assert [peer for peer, _ in world.members.asked] == [N2]


def test_what_arrives_damaged_counts_nowhere_and_is_doubted(world: World) -> None:
    """The next request says so, and the sender looks at its own."""
    world.members.snapshots, world.members.states = {N1: snapshot(9)}, {N1: b"tHe state"}
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    world.fails("differs from its checksums")
    world.members.states = {}
    wait_until(lambda: world.machine.adopted == [9], "it is adopted")
    doubted = [request.doubted for peer, request in world.members.asked if peer == N1]
    assert doubted[:2] == [NO_INDEX, 9]
    assert not world.conditions.holds(ConditionKind.SNAPSHOT_FAILED)


def test_a_doubt_is_told_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender reads all of a large snapshot before it answers, which takes longer than anybody waits; told again
    each time, it would do nothing else, and never send it.
    """
    monkeypatch.setattr(fetching, "RETRY_MS", 10)
    world.members.snapshots, world.members.states = {N1: snapshot(9)}, {N1: b"tHe state"}
    world.members.verifies_for_long = True
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: any(request.doubted == 9 for _, request in world.members.asked), "it is doubted")
    world.members.states = {}
    wait_until(lambda: world.machine.adopted == [9], "it is adopted")


def test_a_transfer_that_breaks_goes_on_with_the_same_member(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """S8: another one has another snapshot, of which what has arrived is no part. Only who is away is passed over."""
    monkeypatch.setattr(fetching, "RETRY_MS", 10)
    world.members.snapshots = {N1: snapshot(9), N2: snapshot(12)}
    world.members.crcs, world.members.breaks_once = {LogIndex(12): CRC}, {N1: 4}
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: bool(world.machine.adopted), "one is adopted")

    assert world.machine.adopted == [9]
    assert world.fetcher.bytes_received == len(STATE)


@pytest.mark.parametrize("learner", [False, True])
def test_what_has_arrived_decides_whom_to_ask_first(
    world: World, monkeypatch: pytest.MonkeyPatch, learner: bool
) -> None:
    """S8: also if it is of a member that is asked last otherwise; that one is away by now, so another one is asked."""
    monkeypatch.setattr(fetching, "RETRY_MS", 10)
    first, second = (N1, N2) if learner else (N2, N1)
    world.learner, world.members.crcs = learner, {LogIndex(9): CRC, LogIndex(12): CRC}
    world.members.snapshots, world.members.breaks_at = {first: snapshot(9)}, {first: 4}
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: world.fetcher.bytes_received > 0, "something has arrived")
    world.members.snapshots = {second: snapshot(12)}
    wait_until(lambda: world.machine.adopted == [12], "the other one's is adopted")
    began = next(number for number, (peer, _) in enumerate(world.members.asked) if peer == first)
    assert world.members.asked[began + 1][0] == first


def test_a_snapshot_that_is_too_old_is_not_fetched(world: World) -> None:
    """It would not connect to the leader's log."""
    world.members.snapshots = {N1: snapshot(4)}
    world.fetcher.want(SnapshotFetch(N1, LogIndex(5)))
    wait_until(lambda: world.conditions.holds(ConditionKind.SNAPSHOT_FAILED), "it has failed")
    assert world.fetcher.bytes_received == 0
    assert world.machine.adopted == []
