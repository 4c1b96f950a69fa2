"""The leader's bookkeeping of what a quorum holds: moves the commit index, then answers those who wait.

Watermarks are durable indexes. Only an entry of the leader's own term is ever committed by counting; earlier ones come
with it (§5.4.2). Success is told from the commit index of an unchanged term, never from "it was replicated".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dledger.config import ReplicationConfig
from dledger.core.member_state import Leader, MemberState
from dledger.core.outbox import Wake, hint
from dledger.core.ports import PreparedAppend
from dledger.errors import (
    DiskFullError,
    DLedgerError,
    EntryTooLargeError,
    InvalidRequestError,
    LeaderTransferringError,
    NotLeaderError,
    PendingFullError,
    QuorumAckTimeoutError,
    TermChangedError,
)
from dledger.types import AppendedBatch, Body, ProducerBatch

AppendDone = Callable[[AppendedBatch | DLedgerError], None]
SequenceDone = Callable[[int | DLedgerError], None]


@dataclass(frozen=True, slots=True)
class _PendingAppend:
    batch: AppendedBatch
    size_bytes: int
    due_ms: int
    done: AppendDone


class QuorumAckChecker:
    """Takes appends on the leader and completes each exactly once. ``step`` runs on the quorum-ack thread."""

    def __init__(self, state: MemberState, config: ReplicationConfig) -> None:
        self._state = state
        self._config = config
        self._pending: deque[_PendingAppend] = deque()
        self.pending_entries = 0
        self.pending_bytes = 0

    def append(
        self, bodies: Sequence[Body], now_ms: int, done: AppendDone, producer: ProducerBatch | None = None
    ) -> AppendedBatch | None:
        """Append a batch as leader; ``done`` hears of a quorum, a refusal (nothing applied) or an unknown outcome.

        Gives the batch where it was written, None after a refusal.
        """
        refusal = self._refuse(bodies) if producer is None else InvalidRequestError("producers are not served yet")
        if refusal is None:
            try:
                batch = self._state.log.append_as_leader(self._state.term, bodies)
            except (DiskFullError, EntryTooLargeError, InvalidRequestError) as error:
                refusal = error
        if refusal is not None:
            self._finish(done, refusal)
            return None
        size = sum(map(len, bodies))
        self._pending.append(_PendingAppend(batch, size, now_ms + self._config.ack_timeout_ms, done))
        self.pending_entries += len(bodies)
        self.pending_bytes += size
        self._state.outbox.wake |= Wake.FLUSH | Wake.DISPATCHERS
        if self._state.quorum == 1 or len(self._pending) == 1:
            self._state.outbox.wake |= Wake.QUORUM_ACK  # the worker learns the first deadline
        return batch

    def append_prepared(
        self, prepared: PreparedAppend, now_ms: int, done: AppendDone, producer: ProducerBatch | None = None
    ) -> None:
        """Ask ``prepared`` for a batch, only as leader, and append it."""
        state = self._state
        if not isinstance(state.role, Leader):
            self.append((), now_ms, done)
            return
        if producer is not None:
            self._finish(done, InvalidRequestError("producers are not served yet"))
            return
        bodies = prepared.bodies(state.term)
        if isinstance(bodies, DLedgerError):
            self._finish(done, bodies)
            return
        batch = None
        try:
            batch = self.append(bodies, now_ms, done)
        finally:
            prepared.placed(batch)

    def producer_sequence(self, name: str, now_ms: int, done: SequenceDone) -> None:  # noqa: ARG002  # not served yet
        """The number of the next entry of producer ``name``, once all that it counts is committed."""
        self._state.outbox.completions.append(lambda: done(InvalidRequestError("producers are not served yet")))

    def _refuse(self, bodies: Sequence[Body]) -> DLedgerError | None:
        state = self._state
        leader = state.role
        if not isinstance(leader, Leader):
            return NotLeaderError("this node does not lead; append to the leader", leader=hint(state.leader_id))
        if leader.transferring:
            return LeaderTransferringError("leadership is being handed over; repeat shortly")
        config = self._config
        if self.pending_entries and (
            self.pending_entries + len(bodies) > config.pending_entries_max
            or self.pending_bytes + sum(map(len, bodies)) > config.pending_bytes_max
        ):
            return PendingFullError(
                f"{self.pending_entries} entries ({self.pending_bytes} bytes) wait for a quorum already; the limits "
                f"are {config.pending_entries_max} entries and {config.pending_bytes_max} bytes: slow down and repeat"
            )
        return None

    def step(self, now_ms: int) -> int | None:
        """Commit what a quorum holds, complete what is committed, give up what is overdue."""
        self._advance_commit()
        pending = self._pending
        state = self._state
        leads = isinstance(state.role, Leader)
        while pending:
            head = pending[0]
            if not leads or head.batch.term != state.term:
                self._pop(TermChangedError("leadership was lost; the entry may or may not survive"))
            elif head.batch.last_index <= state.commit_index:
                self._pop(head.batch)
            elif head.due_ms <= now_ms:
                self._pop(
                    QuorumAckTimeoutError(f"no quorum within {self._config.ack_timeout_ms} ms; it may still come")
                )
            else:
                return head.due_ms
        return None

    def abandon(self, error: DLedgerError) -> None:
        """The node stops: whoever still waits for a quorum gets ``error``, whose outcome is unknown."""
        while self._pending:
            self._pop(error)

    def _advance_commit(self) -> None:
        state = self._state
        leader = state.role
        if not isinstance(leader, Leader):
            return
        watermarks = sorted([state.durable_index, *leader.match.values()], reverse=True)
        held = watermarks[state.quorum - 1]
        if held > state.commit_index and state.log.term_at(held) == state.term:
            state.advance_commit(held)
            state.outbox.wake |= Wake.DISPATCHERS
            if leader.reads_waiting:
                state.outbox.wake |= Wake.ELECTOR

    def _pop(self, result: AppendedBatch | DLedgerError) -> None:
        pending = self._pending.popleft()
        self.pending_entries -= len(pending.batch.positions)
        self.pending_bytes -= pending.size_bytes
        self._finish(pending.done, result)

    def _finish(self, done: AppendDone, result: AppendedBatch | DLedgerError) -> None:
        self._state.outbox.completions.append(lambda: done(result))
