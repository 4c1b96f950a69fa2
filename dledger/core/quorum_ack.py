"""The leader's tracking of what a quorum holds: advances the commit index, then completes waiting appends.

Watermarks are durable indexes. Only an entry of the leader's own term is ever committed by counting; earlier ones are
committed with it (§5.4.2). Success follows from the commit index of an unchanged term, never from "it was replicated".

``ReadIndexQueue`` holds linearizable reads, which write nothing (dissertation §6.4): ReadIndex, batched over heartbeat
rounds. A read records the commit index on arrival and waits until a heartbeat round that *began after its arrival* has
been answered by a quorum. A new leader first waits for the no-op of its term, since before that it does not know which
earlier entries are committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dledger.config import ReplicationConfig
from dledger.core.failure_detection import full_members
from dledger.core.member_state import Leader, MemberState
from dledger.core.messages import Wake, hint
from dledger.core.noop_payload import TIME_STEP_MS, encode_registration, encode_time
from dledger.core.noops import Noops
from dledger.core.ports import PreparedAppend
from dledger.core.producers import BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, KnownProducer, Plan, ProducerTable
from dledger.errors import (
    CorruptLogError,
    DiskFullError,
    DLedgerError,
    EntryTooLargeError,
    InvalidRequestError,
    LeaderTransferringError,
    NotLeaderError,
    OutOfOrderSequenceError,
    PendingFullError,
    QuorumAckTimeoutError,
    TermChangedError,
    TooManyProducersError,
    UnknownProducerError,
)
from dledger.records import record
from dledger.types import NO_INDEX, NO_TERM, AppendedBatch, Body, LogIndex, NodeId, ProducerBatch, StoredRun, Term

ReadDone = Callable[[LogIndex | DLedgerError], None]


@dataclass(frozen=True, slots=True)
class _PendingRead:
    term: Term
    round: int
    index: LogIndex
    due_ms: int
    done: ReadDone


class ReadIndexQueue:
    """Reads that wait for their round. ``round`` is the number of the last heartbeat round sent."""

    def __init__(self, state: MemberState, *, timeout_ms: int, pending_max: int) -> None:
        self._state = state
        self._timeout_ms = timeout_ms
        self._pending_max = pending_max
        self._pending: deque[_PendingRead] = deque()
        self._answered: dict[NodeId, int] = {}
        self._round_wanted = False
        self.round = 0

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, now_ms: int, done: ReadDone, *, at_least: LogIndex = NO_INDEX) -> None:
        """Queue a read; ``done`` gets the index that the reader must see, or ``NotLeaderError`` and the like.

        ``at_least``: an entry that must be committed, too.
        """
        state = self._state
        leader = state.role
        if not isinstance(leader, Leader):
            self._finish(
                done, NotLeaderError("this node is not the leader: ask the leader", leader=hint(state.leader_id))
            )
            return
        if len(self._pending) >= self._pending_max:
            self._finish(done, PendingFullError(f"{self._pending_max} reads are already waiting: retry shortly"))
            return
        index = max(state.commit_index, leader.noop_index, at_least)
        self._pending.append(_PendingRead(state.term, self.round + 1, index, now_ms + self._timeout_ms, done))
        self._round_wanted = leader.reads_waiting = True
        state.outbox.wake |= Wake.ELECTOR

    def begin_round(self) -> int:
        """Start a heartbeat round; returns its number."""
        self.round += 1
        self._round_wanted = False
        return self.round

    @property
    def wants_round(self) -> bool:
        """Whether a read waits for a round that has not begun."""
        return self._round_wanted

    def on_answer(self, peer: NodeId, round_number: int) -> None:
        """``peer`` has answered a round (numbers never repeat, so a late answer confirms only older reads)."""
        self._answered[peer] = max(self._answered.get(peer, 0), round_number)
        if self._pending:
            self._state.outbox.wake |= Wake.ELECTOR

    def step(self, now_ms: int) -> int | None:
        """Finish the reads that can be finished; returns the time of the next timeout."""
        pending = self._pending
        if not pending:
            return None
        state = self._state
        leader = state.role
        leads = isinstance(leader, Leader)
        while pending and not (leads and pending[0].term == state.term):
            error = NotLeaderError("leadership lost before it could be confirmed", leader=hint(state.leader_id))
            self._finish(pending.popleft().done, error)
        confirmed = self.confirmed_round
        while pending and pending[0].round <= confirmed and pending[0].index <= state.commit_index:
            read = pending.popleft()
            self._finish(read.done, read.index)
        while pending and pending[0].due_ms <= now_ms:
            self._finish(pending.popleft().done, QuorumAckTimeoutError("leadership not confirmed by a quorum in time"))
        if isinstance(leader, Leader):
            leader.reads_waiting = bool(pending)
        return pending[0].due_ms if pending else None

    def abandon(self, error: DLedgerError) -> None:
        """The node stops: waiting reads fail with ``error``."""
        while self._pending:
            self._finish(self._pending.popleft().done, error)

    @property
    def confirmed_round(self) -> int:
        """The last round that a quorum has answered."""
        state = self._state
        answers = sorted((self._answered.get(peer, 0) for peer in state.voting_peers), reverse=True)
        return self.round if state.quorum == 1 else answers[state.quorum - 2]

    def _finish(self, done: ReadDone, result: LogIndex | DLedgerError) -> None:
        self._state.outbox.completions.append(partial(done, result))


AppendDone = Callable[[AppendedBatch | DLedgerError], None]
SequenceDone = Callable[[int | DLedgerError], None]


@record(frozen=True, slots=True)
class _PendingAppend:
    batch: AppendedBatch
    needed_index: LogIndex
    """The index that must be committed: of the batch, and of its entries stored earlier."""
    entries: int
    size_bytes: int
    due_ms: int
    done: AppendDone


class QuorumAckChecker:
    """Takes appends on the leader and completes each exactly once. ``step`` runs on the quorum-ack thread."""

    def __init__(self, state: MemberState, reads: ReadIndexQueue, noops: Noops, config: ReplicationConfig) -> None:
        self._state = state
        self._reads = reads
        self._noops = noops
        self._config = config
        self._pending: deque[_PendingAppend] = deque()
        self.pending_entries = 0
        self.pending_bytes = 0
        self.duplicates = 0
        """Repeated entries, answered with the place of the first."""
        self._recorded: tuple[Term, int] = (NO_TERM, 0)
        """The term in which this leader last recorded its clock for a state machine, and that time."""

    # -- accepting appends ---------------------------------------------------------------------------------------

    def append(
        self, bodies: Sequence[Body], now_ms: int, done: AppendDone, producer: ProducerBatch | None = None
    ) -> AppendedBatch | None:
        """Append a batch as leader; ``done`` gets the success, a refusal (nothing applied) or an unknown outcome.

        With ``producer``, entries that the log already holds are not appended again; success then means that a quorum
        holds those, too. Returns the batch as written, None after a refusal and when there was nothing new.
        """
        size = sum(map(len, bodies))
        if producer is None:
            refusal = self._refuse(len(bodies), size)
            if refusal is not None:
                self._finish(done, refusal)
                return None
            return self._append(bodies, size, now_ms, done)
        plan = self._plan(producer, len(bodies), size, now_ms, done)
        if plan is None:
            return None
        if plan.stored:
            bodies = bodies[plan.stored :]
            size = sum(map(len, bodies))
        return self._append(bodies, size, now_ms, done, producer.producer, plan)

    def append_prepared(
        self, prepared: PreparedAppend, now_ms: int, done: AppendDone, producer: ProducerBatch | None = None
    ) -> None:
        """Ask ``prepared`` for a batch, only as leader, and append it.

        With ``producer``, only for the entries that the log does not hold yet, and not at all if it holds them all.
        """
        state = self._state
        if not isinstance(state.role, Leader):
            self._finish(done, self._not_leader())
            return
        if producer is None:
            plan, name, bodies = None, "", prepared.bodies(state.term)
        else:
            plan, name = self._plan(producer, producer.count, 0, now_ms, done), producer.producer
            if plan is None:
                return
            bodies = prepared.bodies(state.term, plan.stored)
        if isinstance(bodies, DLedgerError):
            self._finish(done, bodies)
            return
        batch, size = None, sum(map(len, bodies))
        try:
            refusal = self._refuse(len(bodies), size)  # again: the size was not known before
            if refusal is None:
                batch = self._append(bodies, size, now_ms, done, name, plan)
            else:
                self._finish(done, refusal)
        finally:
            prepared.placed(batch)

    def _plan(self, producer: ProducerBatch, count: int, size: int, now_ms: int, done: AppendDone) -> Plan | None:
        """The part of a producer's batch to append; None if there is none, and ``done`` has been called or will be."""
        refusal = self._refuse(count, size)
        leader = self._state.role
        if refusal is None and isinstance(leader, Leader):
            plan = leader.producers.plan(producer, count)
            if isinstance(plan, OutOfOrderSequenceError | UnknownProducerError):
                self._refuse_if_leading(plan, now_ms, done)
                return None
            if isinstance(plan, DLedgerError):
                refusal = plan
            elif not 0 < count == plan.stored:
                return plan
            else:
                self._wait_for_stored(leader.producers, plan, now_ms, done)
                return None
        if refusal is not None:
            self._finish(done, refusal)
        return None

    def _refuse_if_leading(self, refusal: DLedgerError, now_ms: int, done: AppendDone) -> None:
        """Refuse as unknown or out of order once it is certain that this member leads.

        A leader that was frozen, and replaced meanwhile, does not know the entries appended since, and a client told
        that it is unknown restarts under a new name: it would store the entries twice.
        """

        def confirmed(result: LogIndex | DLedgerError) -> None:
            if not isinstance(result, DLedgerError):
                done(refusal)
            elif result.outcome == "unknown":  # of the read; this append has certainly written nothing
                why = "cannot confirm that this node still leads, and nothing was appended: retry"
                done(NotLeaderError(f"{why} ({result})", leader=hint(self._state.leader_id)))
            else:
                done(result)

        self._reads.submit(now_ms, confirmed)

    def _append(
        self,
        bodies: Sequence[Body],
        size: int,
        now_ms: int,
        done: AppendDone,
        producer: str = "",
        plan: Plan | None = None,
    ) -> AppendedBatch | None:
        """Write a batch that is not refused."""
        written = self._write(bodies, now_ms, producer, plan)
        if isinstance(written, DLedgerError):
            self._finish(done, written)
            return None
        count = len(bodies)
        due_ms = now_ms + self._config.ack_timeout_ms
        self._pending.append(_PendingAppend(written, written.last_index, count, size, due_ms, done))
        self.pending_entries += count
        self.pending_bytes += size
        state = self._state
        state.outbox.wake |= Wake.FLUSH | Wake.DISPATCHERS
        if state.quorum == 1 or len(self._pending) == 1:
            state.outbox.wake |= Wake.QUORUM_ACK  # the worker must learn the first deadline
        leader = state.role
        if isinstance(leader, Leader) and leader.producers.is_due(written.last_index, state.log.end_position, now_ms):
            self.write_snapshot(now_ms)
        return written

    def _write(self, bodies: Sequence[Body], now_ms: int, name: str, plan: Plan | None) -> AppendedBatch | DLedgerError:
        state, leader = self._state, self._state.role
        try:
            if state.machine is not None:
                self._record_time(state.machine.wall_ms(), bodies)
            if plan is None or not isinstance(leader, Leader):
                return state.log.append_as_leader(state.term, bodies)
            if plan.producer is None:  # a refused batch must not leave a registration behind
                state.log.check_append(bodies)
            producer = plan.producer or self._register(leader.producers, name, now_ms)
            if isinstance(producer, DLedgerError):
                return producer
            batch = state.log.append_as_leader(state.term, bodies, channel=producer.slot)
        except DiskFullError as error:
            return self._disk_full(error)
        except (EntryTooLargeError, InvalidRequestError) as error:
            return error
        leader.producers.note(producer, batch.first_index, len(bodies), now_ms)
        return replace(batch, duplicates=self._located(leader.producers, plan, now_ms)) if plan.stored else batch

    def _record_time(self, time_ms: int, bodies: Sequence[Body]) -> None:
        """Tell the state machines what time it is, if the log does not say so yet."""
        state = self._state
        term, recorded_ms = self._recorded
        if term == state.term and time_ms < recorded_ms + TIME_STEP_MS:
            return
        state.log.check_append(bodies)  # a refused batch must not leave it behind
        self._noops.append(state.log, state.term, encode_time(time_ms))
        state.outbox.wake |= Wake.FLUSH | Wake.DISPATCHERS
        self._recorded = state.term, time_ms

    def _disk_full(self, error: DiskFullError) -> DLedgerError:
        """To be repeated if the others have room: the elector hands over to one of them."""
        state, leader = self._state, self._state.role
        if not state.voting_peers or not isinstance(leader, Leader) or full_members(state, leader):
            return error
        state.outbox.wake |= Wake.ELECTOR
        return LeaderTransferringError(f"{error}; leadership moves to a member whose disk has room: retry shortly")

    def _register(self, producers: ProducerTable, name: str, now_ms: int) -> KnownProducer | TooManyProducersError:
        log = self._state.log
        registration = producers.registration(name, self._noops.room, now_ms)
        if isinstance(registration, TooManyProducersError):
            return registration
        noop = self._noops.append(log, self._state.term, encode_registration(registration))
        self._state.outbox.wake |= Wake.FLUSH | Wake.DISPATCHERS  # even if there is no room for the entries after it
        return producers.register(registration, noop.first_index, log.end_position, now_ms)

    def _wait_for_stored(self, producers: ProducerTable, plan: Plan, now_ms: int, done: AppendDone) -> None:
        """All entries are in the log; give the original answer once a quorum has them under this leader."""
        state = self._state
        batch = AppendedBatch(state.term, LogIndex(0), NO_INDEX, (), self._located(producers, plan, now_ms))
        due_ms = now_ms + self._config.ack_timeout_ms
        self._pending.append(_PendingAppend(batch, plan.stored_index, plan.stored, 0, due_ms, done))
        self.pending_entries += plan.stored
        state.outbox.wake |= Wake.QUORUM_ACK

    def _located(self, producers: ProducerTable, plan: Plan, now_ms: int) -> tuple[StoredRun, ...]:
        """The places of the stored entries, as far as the log still has them."""
        self.duplicates += plan.stored
        if plan.producer is not None:
            producers.touch(plan.producer, now_ms)
        return tuple(map(self._locate, plan.duplicates))

    def _locate(self, run: StoredRun) -> StoredRun:
        log = self._state.log
        if run.first_index <= max(log.begin.index, 0):
            return run
        last_index = LogIndex(run.first_index + run.count - 1)
        try:
            return replace(run, term=log.term_at(run.first_index), positions=log.positions(run.first_index, last_index))
        except CorruptLogError as damage:
            self._state.outbox.damage.append(damage)
            return run

    def write_snapshot(self, now_ms: int) -> None:
        """As leader, write a snapshot of the producer table; not if the disk is full, when nothing is written."""
        state, leader = self._state, self._state.role
        if not isinstance(leader, Leader) or state.log.disk_full or full_members(state, leader):
            return
        payload = leader.producers.snapshot(self._noops.room, now_ms)
        try:
            noop = self._noops.append(state.log, state.term, payload)
        except DiskFullError:
            return
        leader.producers.written(noop.last_index, state.log.end_position, now_ms)
        state.outbox.wake |= Wake.FLUSH | Wake.DISPATCHERS

    def _refuse(self, count: int, size: int) -> DLedgerError | None:
        leader = self._state.role
        if not isinstance(leader, Leader):
            return self._not_leader()
        if refusal := _refuse_size(count, size):
            return refusal
        if leader.transferring:
            return LeaderTransferringError("leadership is being transferred: retry shortly")
        if full := full_members(self._state, leader):
            return DiskFullError(
                f"nothing was appended: the disks of {', '.join(full)} are full, and without them there is no quorum"
            )
        return self._refuse_more(count, size)

    def _refuse_more(self, count: int, size: int) -> PendingFullError | None:
        config = self._config
        if self.pending_entries and (
            self.pending_entries + count > config.pending_entries_max
            or self.pending_bytes + size > config.pending_bytes_max
        ):
            return PendingFullError(
                f"{self.pending_entries} entries ({self.pending_bytes} bytes) are already waiting for a quorum; the "
                f"limits are {config.pending_entries_max} entries and {config.pending_bytes_max} bytes: slow down and "
                "retry (pending_entries_max)"
            )
        return None

    def _not_leader(self) -> NotLeaderError:
        state = self._state
        why = "this node is not the leader: append to the leader"
        if state.leader_id is None and state.log.disk_full:
            why = "this node knows no leader and cannot lead because its disk is full: free space on the members' disks"
        return NotLeaderError(why, leader=hint(state.leader_id))

    # -- completing appends --------------------------------------------------------------------------------------

    def step(self, now_ms: int) -> int | None:
        """Commit what a quorum holds, complete what is committed, give up what is overdue."""
        self._advance_commit()
        pending = self._pending
        state = self._state
        leads = isinstance(state.role, Leader)
        while pending:
            head = pending[0]
            if not leads or head.batch.term != state.term:
                self._pop(TermChangedError("leadership lost: the entry may or may not survive"))
            elif head.needed_index <= state.commit_index:
                self._pop(head.batch)
            elif head.due_ms <= now_ms:
                self._pop(
                    QuorumAckTimeoutError(
                        f"no quorum within {self._config.ack_timeout_ms} ms; the entry may still be committed"
                    )
                )
            else:
                return head.due_ms
        return None

    def abandon(self, error: DLedgerError) -> None:
        """The node stops: waiting appends fail with ``error``, whose outcome is unknown."""
        while self._pending:
            self._pop(error)

    def _advance_commit(self) -> None:
        state = self._state
        leader = state.role
        if not isinstance(leader, Leader):
            return
        match, counts = leader.match, leader.counts
        counted = [match[peer] if counts[peer] else NO_INDEX for peer in state.voting_peers]
        watermarks = sorted([state.durable_index, *counted], reverse=True)
        leader.held = held = watermarks[state.quorum - 1]
        if not state.membership.is_committed:
            held = self._held_during_change(leader, held)
        if held > state.commit_index and held >= leader.noop_index:  # an entry of its own term
            state.advance_commit(held)
            state.outbox.wake |= Wake.DISPATCHERS
            if leader.reads_waiting:
                state.outbox.wake |= Wake.ELECTOR

    def _held_during_change(self, leader: Leader, held: LogIndex) -> LogIndex:
        """The committed index while the configuration in force may still be lost (M2).

        Entries before it are by majorities of its voters and of those before. It is itself, and all before it, once a
        majority of its own voters holds it; and if it has a new one, also a majority of those before: they elect nobody
        without it then, even if one of the others has lost its disk.
        """
        membership = self._state.membership
        before, first = membership.previous_voters, membership.current.index
        held_before = self._held_by(leader, before) if before else first
        grows = not membership.voters.issubset(before)
        if held >= first and (held_before >= first or not grows):
            return held
        return min(held, held_before, LogIndex(first - 1))

    def _held_by(self, leader: Leader, voters: Sequence[NodeId]) -> LogIndex:
        """The last entry that a majority of these holds."""
        state, match, counts = self._state, leader.match, leader.counts
        own = {state.node_id: state.durable_index}
        known = [own[one] if one in own else match[one] if counts[one] else NO_INDEX for one in voters]
        return sorted(known, reverse=True)[len(voters) // 2]

    def _pop(self, result: AppendedBatch | DLedgerError) -> None:
        pending = self._pending.popleft()
        self.pending_entries -= pending.entries
        self.pending_bytes -= pending.size_bytes
        self._finish(pending.done, result)

    def _finish(self, done: AppendDone, result: AppendedBatch | DLedgerError) -> None:
        self._state.outbox.completions.append(partial(done, result))


def _refuse_size(count: int, size: int) -> InvalidRequestError | None:
    if count > BATCH_ENTRIES_MAX or (size > BATCH_BYTES_MAX and count > 1):
        return InvalidRequestError(
            f"a batch of {count} entries and {size} bytes is too large: a batch holds at most {BATCH_ENTRIES_MAX} "
            f"entries and {BATCH_BYTES_MAX} bytes"
        )
    return None
