"""The driver keeps the order of effects: hard state first, then messages, then completions."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from dledger.clock import Clock
from dledger.config import ElectionConfig, FlushMode, ServerConfig, StoreConfig, parse_members
from dledger.core.dispatcher import EntryDispatcher
from dledger.core.messages import (
    HeartbeatRequest,
    LoadRun,
    Message,
    PushAppend,
    PushCommit,
    PushCompare,
    RoleChange,
    VoteRequest,
    VoteResponse,
)
from dledger.core.node import Node
from dledger.core.standing import MemberRun
from dledger.errors import CorruptLogError, DiskError, DLedgerError, NodeBusyError, ShutdownError
from dledger.runtime.driver import Effects, NodeDriver
from dledger.runtime.threads import NodeFailedError, Supervisor, TaskThread
from dledger.types import AppendedBatch, EntryRun, FlushMark, HardState, LogIndex, NodeId, Role, Standing, Term
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_until

SOLO = "n0-127.0.0.1:20911"
TRIO = "n0-127.0.0.1:20911;n1-127.0.0.1:20912;n2-127.0.0.1:20913"


class _HardStates:
    """Records what was saved; ``fail`` makes the next save raise."""

    def __init__(self, events: list[object]) -> None:
        self.events = events
        self.fail = False
        self.saved = HardState(standing=Standing.FULL)

    def save(self, state: HardState) -> None:
        if self.fail:
            raise DiskError("the vote could not be written")
        self.events.append(state)
        self.saved = state


class _Bench:
    """One node with its driver; messages and saves go into one list of events."""

    def __init__(
        self,
        members: str = TRIO,
        hard_state: HardState | None = None,
        prepare: Callable[[MemoryStore], object] = MemoryStore.flush,
        store: StoreConfig | None = None,
        on_damage: Callable[[CorruptLogError], None] | None = None,
        patience_s: float | None = None,
    ) -> None:
        election = ElectionConfig(heartbeat_interval_ms=10, election_timeout_ms_min=30, election_timeout_ms_max=60)
        self.config = ServerConfig(
            node_id=NodeId("n0"), members=parse_members(members), election=election, store=store or StoreConfig()
        )
        self.events: list[object] = []
        self.failures: list[BaseException] = []
        self.log = MemoryStore()
        prepare(self.log)
        self.hard_states = _HardStates(self.events)
        self.supervisor = Supervisor(self.failures.append)
        clock = Clock()
        self.timers = TaskThread("timers", clock, self.supervisor)
        self.node = Node(
            self.config,
            log=self.log,
            hard_state=hard_state or HardState(standing=Standing.FULL),
            random=random.Random(1),
            run=MemberRun(1, countersign=4711),
            now_ms=clock.monotonic_ms(),
        )
        self.roles: list[RoleChange] = []
        self.publish: Callable[[RoleChange], None] = self.roles.append
        self.send: Callable[[NodeId, Message], None] = lambda target, message: self.events.append((target, message))
        self.driver = NodeDriver(
            self.config,
            self.node,
            self.log,
            clock,
            self.supervisor,
            Effects(
                save=lambda state: self.hard_states.save(state),
                send=lambda target, message: self.send(target, message),
                role_change=lambda change: self.publish(change),
                commit=lambda _index: None,
                damage=on_damage or self.supervisor.report,
                fenced=self.events.append,
                flushed=lambda: None,
                members=lambda membership, spoken_with: self.events.append((membership, spoken_with)),
            ),
            self.timers,
            patience_s,
        )

    def start(self) -> None:
        """Start its threads; ``stop`` them."""
        self.driver.start()
        self.timers.start()

    def stop(self) -> None:
        self.driver.stop()
        assert self.timers.stop(60)


def test_a_new_term_is_durable_before_its_vote_requests_leave() -> None:
    """Votes and terms survive a crash because they are saved before anybody hears of them (Raft figure 2)."""
    bench = _Bench()

    bench.driver.call(lambda now: bench.node.state.become_candidate(now, pre_vote=False))
    bench.driver.call(
        lambda _now: bench.node.state.outbox.messages.append((NodeId("n1"), VoteRequest(Term(1), bench.log.last)))
    )

    saved, sent = bench.events
    assert saved == HardState(Term(1), NodeId("n0"), standing=Standing.FULL)
    assert isinstance(sent, tuple)


def test_a_vote_is_durable_before_its_answer_is_given() -> None:
    """A vote in a term that is known already changes nothing but the vote; it is saved all the same (trap 1)."""
    bench = _Bench(hard_state=HardState(Term(1), standing=Standing.FULL))
    request = VoteRequest(Term(1), bench.log.last)

    answer = bench.driver.call(lambda now: bench.node.answer(NodeId("n1"), request, now))

    assert isinstance(answer, VoteResponse)
    assert answer.granted
    assert bench.events == [HardState(Term(1), NodeId("n1"), standing=Standing.FULL)]


def test_a_term_taken_from_the_log_at_start_is_saved_before_anything_leaves() -> None:
    """A log ahead of the hard state raises the term while the node is built, before there is a driver."""
    bench = _Bench(SOLO, prepare=lambda log: log.append_as_leader(Term(7), [b"one"]))

    bench.driver.call(lambda _now: None)

    assert bench.events == [HardState(Term(7), standing=Standing.FULL)]


def test_nothing_leaves_when_the_hard_state_cannot_be_saved() -> None:
    """A failed save of the vote silences the node (reliability trap 1)."""
    bench = _Bench()
    bench.hard_states.fail = True

    def campaign(now: int) -> None:
        bench.node.state.become_candidate(now, pre_vote=False)
        bench.node.state.outbox.messages.append((NodeId("n1"), VoteRequest(Term(1), bench.log.last)))

    with pytest.raises(NodeFailedError):
        bench.driver.call(campaign)

    assert bench.events == []
    assert isinstance(bench.supervisor.fatal, DiskError)


def test_whoever_must_know_is_told_that_the_member_is_fenced_once_that_is_durable() -> None:
    """Before whatever was asked meanwhile is answered; a fenced member that says nothing is taken for a slow one."""
    bench = _Bench()

    def fence(now: int) -> None:
        bench.node.state.fence("2 members hold a different entry 7", now)
        bench.node.state.outbox.completions.append(lambda: bench.events.append("answered"))

    bench.driver.call(fence)

    saved, *told = bench.events
    assert isinstance(saved, HardState)
    assert saved.fenced
    assert told == ["2 members hold a different entry 7", "answered"]


def test_a_role_is_published_once_its_term_is_durable() -> None:
    """A leader that the application has heard of must not be forgotten by a crash (``dledger.core.messages``)."""
    bench = _Bench()
    bench.publish = bench.events.append

    bench.driver.call(lambda now: bench.node.state.become_candidate(now, pre_vote=False))

    saved, change = bench.events
    assert saved == HardState(Term(1), NodeId("n0"), standing=Standing.FULL)
    assert isinstance(change, RoleChange)
    assert change.role is Role.CANDIDATE


def test_roles_are_published_in_order_whichever_thread_does_it() -> None:
    """One publishes while another changes the role again: the second one's change is left to the first one."""
    bench = _Bench()
    publishing, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def slow(change: RoleChange) -> None:
        publishing.set()
        assert go_on.wait(60)
        seen.append(change.term)

    bench.publish = slow

    def campaign() -> None:
        bench.driver.call(lambda now: bench.node.state.become_candidate(now, pre_vote=False))

    first = threading.Thread(target=campaign)
    first.start()
    assert publishing.wait(60)
    campaign()
    go_on.set()
    first.join(60)

    assert seen == [1, 2]


def test_a_later_message_waits_for_an_earlier_unsaved_hard_state() -> None:
    """Two threads: the second one's message depends on the first one's vote and must not overtake its save."""
    bench = _Bench()
    saving, go_on = threading.Event(), threading.Event()
    plain_save = bench.hard_states.save

    def slow_save(state: HardState) -> None:
        saving.set()
        assert go_on.wait(60)
        plain_save(state)

    bench.hard_states.save = slow_save  # type: ignore[method-assign]  # a slower disk
    compare = PushCompare(Term(1), 1, bench.log.last, 0)
    first = threading.Thread(
        target=bench.driver.call, args=(lambda now: bench.node.state.become_candidate(now, pre_vote=False),)
    )
    second = threading.Thread(
        target=bench.driver.call,
        args=(lambda _now: bench.node.state.outbox.messages.append((NodeId("n1"), compare)),),
    )

    first.start()
    assert saving.wait(60)
    second.start()
    second.join(0.05)
    sent_before_save = list(bench.events)
    go_on.set()
    first.join(60)
    second.join(60)

    assert sent_before_save == []
    assert bench.events == [HardState(Term(1), NodeId("n0"), standing=Standing.FULL), (NodeId("n1"), compare)]


@pytest.mark.parametrize("is_push", [True, False])
def test_who_sends_for_another_thread_waits_for_its_hard_state(*, is_push: bool) -> None:
    """A thread that is at sending takes what others queue, whose save may be under way: that message waits for it."""
    bench = _Bench()
    message: Message = PushCompare(Term(1), 1, bench.log.last, 0) if is_push else VoteRequest(Term(1), bench.log.last)
    sending, saving, go_on, sent = (threading.Event() for _ in range(4))
    plain_save = bench.hard_states.save

    def slow_save(state: HardState) -> None:
        saving.set()
        assert sent.wait(60)
        plain_save(state)

    def slow_send(target: NodeId, message: Message) -> None:
        bench.events.append((target, message))
        sending.set()
        assert go_on.wait(60)

    def queue(now: int | None = None) -> None:
        if now is not None:
            bench.node.state.become_candidate(now, pre_vote=False)
        bench.node.state.outbox.messages.append((NodeId("n1"), message))

    bench.send = slow_send
    bench.hard_states.save = slow_save  # type: ignore[method-assign]  # a slower disk
    first = threading.Thread(target=bench.driver.call, args=(lambda _now: queue(),))
    second = threading.Thread(target=bench.driver.call, args=(queue,))
    first.start()
    assert sending.wait(60)
    second.start()
    assert saving.wait(60)
    go_on.set()
    first.join(0.1)
    sent.set()
    first.join(60)
    second.join(60)

    saved = HardState(Term(1), NodeId("n0"), standing=Standing.FULL)
    assert bench.events == [(NodeId("n1"), message), saved, (NodeId("n1"), message)]


def test_a_single_member_elects_itself_and_acknowledges_after_its_flush() -> None:
    """Group of one: quorum is itself, and only durable entries count (design decision 4)."""
    bench = _Bench(SOLO)
    bench.start()
    wait_until(lambda: bench.node.state.role_name is Role.LEADER, "leadership")
    results: list[AppendedBatch | DLedgerError] = []
    flushed_when_done: list[int] = []

    def done(result: AppendedBatch | DLedgerError) -> None:
        flushed_when_done.append(bench.log.flushed.index)
        results.append(result)

    bench.driver.call(lambda now: bench.node.quorum_ack.append([b"one", b"two"], now, done))
    wait_until(lambda: bool(results), "an acknowledgement")
    bench.stop()

    assert isinstance(results[0], AppendedBatch)
    assert (results[0].first_index, results[0].last_index) == (1, 2)
    assert flushed_when_done[0] >= 2
    assert bench.failures == []
    assert [change.role for change in bench.roles][-1] is Role.LEADER


def test_a_flush_by_whoever_owns_the_log_counts_as_the_nodes_own() -> None:
    """An application may flush between the append and the flusher's turn: a new leader's no-op is still committed.

    Nobody waits for it with a deadline, so nothing else would ever look at it again.
    """
    bench = _Bench(SOLO)  # its workers are not started: each step is taken here
    wait_until(
        lambda: bench.driver.call(bench.node.elector.step) is None or bench.node.state.role_name is Role.LEADER,
        "leadership",
    )
    assert (bench.log.last.index, bench.node.state.commit_index) == (0, -1)

    bench.log.flush()
    bench.driver._flusher.flush()  # the flusher's turn: nothing is left to flush

    assert bench.node.state.commit_index == 0


def _leading_async(flush_interval_ms: int) -> tuple[_Bench, list[int]]:
    """A group of one whose workers are not started, with flush_mode=async; also what each flush reached."""
    bench = _Bench(SOLO, store=StoreConfig(flush_mode=FlushMode.ASYNC, flush_interval_ms=flush_interval_ms))
    wait_until(
        lambda: bench.driver.call(bench.node.elector.step) is None or bench.node.state.role_name is Role.LEADER,
        "leadership",
    )
    flushes: list[int] = []
    plain_flush = bench.log.flush

    def flush() -> FlushMark:
        flushes.append(bench.log.last.index)
        return plain_flush()

    bench.log.flush = flush  # type: ignore[method-assign]  # counts them
    return bench, flushes


def test_asynchronous_flushing_flushes_once_per_period_however_much_is_appended() -> None:
    """``flush_interval_ms`` is a period: a flush per append would cost what async is there to save."""
    bench, flushes = _leading_async(flush_interval_ms=3_600_000)
    due_ms = bench.driver._flusher.flush_in_time()  # its turn after the no-op: at once, for nothing was written before
    results: list[AppendedBatch | DLedgerError] = []

    for _ in range(3):
        bench.driver.call(lambda now: bench.node.quorum_ack.append([b"x"], now, results.append))
        assert bench.driver._flusher.flush_in_time() == due_ms

    assert len(results) == 3
    assert all(isinstance(result, AppendedBatch) for result in results)
    assert flushes == [0]


def test_asynchronous_flushing_reaches_everything_and_then_sleeps() -> None:
    """What was written in a period is flushed at its end; an idle node wakes nobody."""
    bench, flushes = _leading_async(flush_interval_ms=1)
    bench.driver._flusher.flush_in_time()
    bench.driver.call(lambda now: bench.node.quorum_ack.append([b"x", b"y"], now, lambda _result: None))

    wait_until(lambda: bench.driver._flusher.flush_in_time() is None, "the end of the last period")

    assert flushes == [0, 2]
    assert bench.log.flushed.index == 2


def test_asynchronous_flushing_sees_a_write_that_comes_while_it_goes_to_sleep() -> None:
    """A write between the look that found nothing and the sleep wakes nobody: a second look must see it."""
    bench, flushes = _leading_async(flush_interval_ms=1)
    wait_until(lambda: bench.driver._flusher.flush_in_time() is None, "the end of the no-op's period")
    bench.driver._flusher._planned = True  # as it is until the flusher's next look
    look = bench.driver._flusher._is_wanted
    looks: list[bool] = []

    def look_just_before_a_write() -> bool:
        looks.append(look())
        if len(looks) == 1:
            bench.driver.call(lambda now: bench.node.quorum_ack.append([b"x"], now, lambda _result: None))
        return looks[-1]

    bench.driver._flusher._is_wanted = look_just_before_a_write  # type: ignore[method-assign]  # the writer's moment

    assert bench.driver._flusher.flush_in_time() is not None
    assert (looks, flushes) == ([False, True], [0, 1])


def test_asynchronous_flushing_is_woken_by_a_write_after_a_pause() -> None:
    """Each append of a quiet node is flushed, however often the flusher has gone to sleep before."""
    bench, flushes = _leading_async(flush_interval_ms=1)
    bench.start()
    for index in range(1, 200):
        bench.driver.call(lambda now: bench.node.quorum_ack.append([b"x"], now, lambda _result: None))
        wait_until(lambda last=index: bench.log.flushed.index == last, "the flush of the last append")  # type: ignore[misc]
    bench.stop()

    assert flushes[-1] == 199
    assert bench.failures == []


def test_runs_are_read_outside_the_lock_and_dropped_when_their_term_is_over() -> None:
    """Bytes read after the term ended may be another leader's: they must not be sent as ours."""
    bench = _Bench()
    node = bench.node

    def lead(now: int) -> None:
        node.state.become_candidate(now, pre_vote=False)
        batch = bench.log.append_as_leader(node.state.term, [b"x"])
        node.state.become_leader(batch.first_index, now)

    bench.driver.call(lead)
    plain_read = bench.log.read_run
    deposed = replace(node.state.hard_state, term=Term(9), vote=None)

    def read_while_deposed(first: object, last: object, *, verified: bool) -> object:
        run = plain_read(first, last, verified=verified)  # type: ignore[arg-type]  # passed through
        node.state.save_hard_state(deposed)
        return run

    bench.driver.call(lambda now: node.dispatchers[NodeId("n1")].step(now))
    term = node.state.term
    load = LoadRun(term, 1, bench.log.committed_index, bench.log.last.index, bench.log.last.index)
    bench.driver.call(lambda _now: node.state.outbox.messages.append((NodeId("n1"), load)))
    sent = [event for event in bench.events if isinstance(event, tuple) and isinstance(event[1], PushAppend)]
    assert len(sent) == 1

    bench.log.read_run = read_while_deposed  # type: ignore[assignment, method-assign]  # the term ends meanwhile
    bench.driver.call(lambda _now: node.state.outbox.messages.append((NodeId("n1"), load)))

    sent = [event for event in bench.events if isinstance(event, tuple) and isinstance(event[1], PushAppend)]
    assert len(sent) == 1


def test_damage_of_the_own_log_stops_the_node_unless_somebody_repairs_it() -> None:
    """Neither a part that meets it nor a run that cannot be read may go on as if nothing were wrong."""
    told: list[CorruptLogError] = []
    bench, repaired = _Bench(), _Bench(on_damage=told.append)
    damage = CorruptLogError(Path("data"), 7, "bodyCrc of entry 0 does not match its body", "Repair it", 0)
    for one in (bench, repaired):
        load = _lead(one)

        def damaged(first: LogIndex, last: LogIndex, *, verified: bool) -> EntryRun:
            raise damage

        one.log.read_run = damaged  # type: ignore[assignment, method-assign]  # the disk
        with suppress(NodeFailedError):
            one.driver.call(
                lambda _now, node=one.node, load=load: node.state.outbox.messages.append(  # type: ignore[misc]
                    (NodeId("n1"), replace(load, cold=False))
                )
            )
        one.node.state.outbox.damage.append(damage)
        with suppress(NodeFailedError):
            one.driver.call(lambda _now: None)

    assert bench.supervisor.fatal is damage
    assert repaired.supervisor.fatal is None
    assert told == [damage, damage]


def _lead(bench: _Bench) -> LoadRun:
    """Make the bench's node lead and give the order to read its first entry, as for a follower that comes back."""
    node = bench.node

    def lead(now: int) -> None:
        node.state.become_candidate(now, pre_vote=False)
        batch = bench.log.append_as_leader(node.state.term, [b"old"])
        node.state.become_leader(batch.first_index, now)

    bench.driver.call(lead)
    first = bench.log.last.index
    epoch = bench.node.dispatchers[NodeId("n1")].epoch
    return LoadRun(node.state.term, epoch, bench.log.committed_index, first, first, cold=True)


def _say(bench: _Bench, target: str, *messages: Message) -> None:
    def say(_now: int) -> None:
        bench.node.state.outbox.messages += [(NodeId(target), message) for message in messages]

    bench.driver.call(say)


def test_a_disk_that_hangs_for_one_follower_holds_up_nobody_else() -> None:
    """What a returning follower lacks is read on its own dispatcher's thread: not the event loop's, nor the elector's.

    Whoever brings events goes on: the other follower gets its pushes, and the one that is read for its heartbeats.
    """
    bench = _Bench()
    load = _lead(bench)
    plain_read, reading, go_on, readers = bench.log.read_run, threading.Event(), threading.Event(), []

    def hang(first: LogIndex, last: LogIndex, *, verified: bool) -> EntryRun:
        readers.append(threading.current_thread().name)
        reading.set()
        assert go_on.wait(60)
        return plain_read(first, last, verified=verified)

    bench.log.read_run = hang  # type: ignore[assignment, method-assign]  # the disk
    reader = bench.driver._peers[NodeId("n1")].part.worker
    reader.start()
    try:
        commit, compare = PushCommit(load.term, load.epoch, LogIndex(-1)), PushCompare(load.term, 9, bench.log.last, 0)
        heartbeat = HeartbeatRequest(load.term)
        _say(bench, "n1", load, commit)
        assert reading.wait(60)
        bench.events.clear()

        _say(bench, "n2", compare)
        _say(bench, "n1", heartbeat)
        meanwhile = list(bench.events)
        go_on.set()
        wait_until(lambda: len(bench.events) == 4, "the rest to be sent")
    finally:
        go_on.set()
        bench.stop()

    assert meanwhile == [(NodeId("n2"), compare), (NodeId("n1"), heartbeat)]
    assert readers == ["dledger-dispatcher-n1-n0"]
    assert isinstance(bench.events[2], tuple)
    assert isinstance(bench.events[2][1], PushAppend)
    assert bench.events[3] == (NodeId("n1"), commit)


def test_what_waits_for_a_disk_that_hangs_is_bounded() -> None:
    """More than a window of pushes is not kept: the dispatcher hears that some are lost, and compares again."""
    bench = _Bench()
    load = _lead(bench)
    _say(bench, "n1", load)  # its reader has not been started: the disk hangs

    for _ in range(1000):
        _say(bench, "n1", PushCommit(load.term, load.epoch, LogIndex(-1)))
    before = bench.node.dispatchers[NodeId("n1")].epoch
    waiting = len(bench.driver._peers[NodeId("n1")].pushes.effects)
    bench.driver._read_for(NodeId("n1"))  # it answers after all

    assert waiting <= 2 * bench.config.replication.inflight_pushes_max + 16
    assert bench.node.dispatchers[NodeId("n1")].epoch > before


def _set_peers(bench: _Bench, *peers: str) -> None:
    """As the core does it when another configuration is in force."""
    node, known = bench.node, bench.node.dispatchers
    for gone in set(known) - set(peers):
        del known[gone]
    for one in map(NodeId, peers):
        if one not in known:
            known[one] = EntryDispatcher(node.state, one, bench.config.replication)
    node.state.outbox.membership = node.state.membership.copy()


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("dledger-dispatcher-")}


def test_a_member_that_comes_gets_what_it_needs_and_one_that_goes_leaves_nothing() -> None:
    """In the step that brings the change: its messages are sent, after whoever must know of the members was told (M2).

    What still comes for a member that is gone, or for a sender that never was one, is sent all the same: answers and
    questions (M7).
    """
    bench = _Bench()
    bench.start()
    try:
        commit, beat = PushCommit(Term(1), 1, LogIndex(-1)), HeartbeatRequest(Term(1))
        bench.driver.call(lambda _now: _set_peers(bench, "n1", "n3"))
        told = bench.events[-1]
        assert isinstance(told, tuple)
        assert told[1] == {"n1", "n3"}
        wait_until(lambda: _threads() == {"dledger-dispatcher-n1-n0", "dledger-dispatcher-n3-n0"}, "the threads")
        bench.events.clear()

        def add_and_say(_now: int) -> None:
            _set_peers(bench, "n3", "n4")
            bench.node.state.outbox.messages += [(NodeId("n4"), commit), (NodeId("n4"), beat), (NodeId("n1"), beat)]

        bench.driver.call(add_and_say)

        _, *sent = bench.events
        assert sorted(sent, key=str) == [(NodeId("n1"), beat), (NodeId("n4"), beat), (NodeId("n4"), commit)]
        wait_until(lambda: _threads() == {"dledger-dispatcher-n3-n0", "dledger-dispatcher-n4-n0"}, "the threads")
    finally:
        bench.stop()
    assert _threads() == set()
    assert bench.failures == []


def test_a_member_may_go_while_its_thread_reads_for_it_and_come_back() -> None:
    """Nothing is joined under the lock: that thread may wait for it, or for the disk. The new life has a new one."""
    bench = _Bench()
    load = _lead(bench)
    plain_read, reading, go_on = bench.log.read_run, threading.Event(), threading.Event()

    def hang(first: LogIndex, last: LogIndex, *, verified: bool) -> EntryRun:
        reading.set()
        assert go_on.wait(60)
        return plain_read(first, last, verified=verified)

    bench.log.read_run = hang  # type: ignore[assignment, method-assign]  # the disk
    bench.start()
    try:
        _say(bench, "n1", load)
        assert reading.wait(60)
        old = bench.driver._peers[NodeId("n1")].part.worker

        def go_and_come_back(_now: int) -> None:  # as in one run of entries
            _set_peers(bench, "n2")
            _set_peers(bench, "n1", "n2")

        bench.driver.call(go_and_come_back)

        new = bench.driver._peers[NodeId("n1")].part.worker
        assert (old.is_alive, new.is_alive, new is old) == (True, True, False)
        bench.events.clear()
        compare = PushCompare(load.term, 9, bench.log.last, 0)
        _say(bench, "n1", compare)
        assert (NodeId("n1"), compare) in bench.events
        bench.driver.call(lambda _now: _set_peers(bench, "n1", "n2", "n3"))
        assert old in bench.driver._workers()  # which ``stop`` joins
        go_on.set()
        wait_until(lambda: not old.is_alive, "the old thread's end")
    finally:
        go_on.set()
        bench.stop()
    assert bench.failures == []


def test_calls_after_stop_and_after_a_failure_are_refused() -> None:
    """A stopped or failed node acknowledges nothing more."""
    stopped, failed = _Bench(), _Bench()
    stopped.driver.stop()
    failed.supervisor.report(DiskError("flush failed"))

    with pytest.raises(ShutdownError) as at_stop:
        stopped.driver.call(lambda _now: None)
    with pytest.raises(NodeFailedError) as after_failure:
        failed.driver.call(lambda _now: None)

    assert [at_stop.value.outcome, after_failure.value.outcome] == ["not_applied"] * 2


def test_a_call_that_fails_half_way_has_an_unknown_outcome() -> None:
    """What it did before the failure may survive."""
    bench = _Bench()

    def break_down(_now: int) -> None:
        raise DiskError("write failed")

    with pytest.raises(NodeFailedError) as caught:
        bench.driver.call(break_down)

    assert caught.value.outcome == "unknown"


def test_a_refusal_met_while_carrying_out_does_not_deny_what_was_done() -> None:
    """A completion that calls a node which stops meanwhile is refused; the call that completed it was applied."""
    bench = _Bench()

    def stop_and_call_again() -> None:
        bench.stop()
        bench.driver.call(lambda _now: None)

    with pytest.raises(ShutdownError) as caught:
        bench.driver.call(lambda _now: bench.node.state.outbox.completions.append(stop_and_call_again))

    assert caught.value.outcome == "unknown"


def test_a_failed_flush_stops_the_node_without_an_acknowledgement() -> None:
    """A failed flush poisons the node; it is never retried (reliability trap 3)."""
    bench = _Bench(SOLO)
    bench.start()
    wait_until(lambda: bench.log.flushed.index >= 0, "the no-op to be flushed")

    def broken() -> None:
        raise DiskError("flush failed")

    bench.log.flush = broken  # type: ignore[assignment, method-assign]  # the disk dies
    results: list[AppendedBatch | DLedgerError] = []
    bench.driver.call(lambda now: bench.node.quorum_ack.append([b"lost"], now, results.append))
    wait_until(lambda: bool(bench.failures), "the failure to be reported")
    bench.stop()

    assert not any(isinstance(result, AppendedBatch) for result in results)
    assert isinstance(bench.failures[0], DiskError)


# --- threads that other groups need, too ------------------------------------------------------------------------------

IN_A_HURRY: Final = 0.01


def test_a_thread_in_a_hurry_does_not_wait_for_the_lock() -> None:
    """Whoever holds it may wait for a disk that hangs; what was not done is done later, or repeated by its sender."""
    bench, done = _Bench(patience_s=IN_A_HURRY), list[object]()
    with bench.driver._lock:
        with pytest.raises(NodeBusyError, match="the lock of node n0 is not free"):
            bench.driver.call(done.append, patience_s=IN_A_HURRY)
        with pytest.raises(NodeBusyError, match="the lock of node n0 is not free"):
            bench.driver.look(done.append, patience_s=IN_A_HURRY)
    assert done == []


def _campaign(bench: _Bench) -> None:
    """As a timer would."""

    def begin(now_ms: int) -> None:
        bench.node.state.become_candidate(now_ms, pre_vote=False)
        bench.node.state.outbox.messages.append((NodeId("n1"), VoteRequest(Term(1), bench.log.last)))
        bench.node.state.outbox.completions.append(lambda: bench.events.append("completed"))

    with pytest.raises(NodeBusyError, match="must be saved"):
        bench.driver.call(begin, patience_s=IN_A_HURRY)


def test_a_thread_in_a_hurry_leaves_a_vote_to_the_saver_and_it_is_durable_before_anybody_hears_of_it() -> None:
    """On the saver's thread, too (Raft figure 2); a call of somebody with time may save it before."""
    bench = _Bench(patience_s=IN_A_HURRY)
    _campaign(bench)
    assert bench.events == []

    bench.driver.start()
    try:
        wait_until(lambda: "completed" in bench.events, "it is carried out")
    finally:
        bench.driver.stop()

    saved, sent, _ = bench.events
    assert isinstance(saved, HardState)
    assert isinstance(sent, tuple)


def test_a_thread_in_a_hurry_does_nothing_while_a_vote_is_being_saved() -> None:
    """So that one that cannot be saved is followed by no more of them."""
    bench, done = _Bench(patience_s=IN_A_HURRY), list[int]()
    _campaign(bench)

    with pytest.raises(NodeBusyError, match="is being saved"):
        bench.driver.call(done.append, patience_s=IN_A_HURRY)
    assert done == []
    assert bench.driver.call(lambda _now_ms: 7) == 7  # others have time
    assert isinstance(bench.events[0], HardState)


def test_a_stop_carries_out_what_was_left_to_the_saver() -> None:
    """Somebody may wait for it."""
    bench = _Bench(patience_s=IN_A_HURRY)
    _campaign(bench)

    bench.driver.stop()

    assert bench.events[-1] == "completed"
