"""The follower's side of replication: orders, checks and applies its leader's pushes.

Pushes are queued on arrival and judged when they are executed, under the lock: a push of a deposed leader, of another
term or of an earlier attempt must not touch the log. Nothing at or below the commit index is ever removed. Only durable
entries are acknowledged; the flusher's ``on_flushed`` releases the answers. ``leader_check`` decides whose pushes are
accepted at all.

A push that contradicts this log is no reason to stop, nor to drop anything: a mismatch first makes the member verify
its own record. If that is damaged, the damage is reported (``Outbox.damage``) and the push refused; if it is intact,
the push is refused (``OTHER_HISTORY``), and this log stays as it is.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import replace
from typing import assert_never

from dledger.config import FlushMode, ReplicationConfig
from dledger.core.log_matching import LeaderCheck
from dledger.core.member_state import Follower, Leader, MemberState
from dledger.core.membership import decode_configuration
from dledger.core.messages import (
    CheckedAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushKind,
    PushResponse,
    PushTruncate,
    ReceivedPush,
    SnapshotFetch,
    VoteResponse,
    Wake,
)
from dledger.errors import CorruptLogError, DiskFullError, MisplacedRunError, ResponseCode, invariant
from dledger.records import ENTRY_HEADER_BYTES, record
from dledger.types import (
    NO_ENTRY,
    NO_INDEX,
    NO_TERM,
    Boundary,
    CheckedRun,
    Configuration,
    EntryId,
    LogIndex,
    NodeId,
    Position,
    Term,
)


@record(frozen=True, slots=True)
class _Deferred:
    """An answer that may be sent once change number ``sequence`` of the store is durable."""

    sequence: int
    epoch: int
    kind: PushKind


class _OtherHistoryError(Exception):
    """Raised when a push contradicts an entry that is verified here."""


class EntryHandler:
    """Takes pushes (``on_push``, transport threads), executes them (``step``, its thread), answers after flushes."""

    def __init__(self, state: MemberState, config: ReplicationConfig, segment_bytes: int = sys.maxsize) -> None:
        self._state = state
        self._config = config
        self._segment_bytes = segment_bytes
        self._queue: deque[tuple[NodeId, ReceivedPush, int]] = deque()
        self.leader_check = LeaderCheck(state)
        self._connection = 0
        self._session: tuple[Term, NodeId | None] = (NO_TERM, None)
        self._leader_epoch = 0
        self._deferred: deque[_Deferred] = deque()
        self._ack_due = False
        self._acknowledged_index = NO_INDEX
        self._flushed_only = True
        """Whether the current leader counts only flushed entries, according to its COMPARE."""
        self._agreed = False
        """Whether this log was compared with the current leader's and found equal up to ``verified_index``."""
        self.verified_index: LogIndex = state.commit_index
        """The last entry known to be equal to the current leader's."""

    # -- arrival -------------------------------------------------------------------------------------------------

    def on_push(self, sender: NodeId, push: ReceivedPush, connection: int = 0) -> None:
        """Queue a push; a full queue refuses it, which makes the leader compare again later."""
        if len(self._queue) >= self._config.handler_queue_pushes_max:
            self._answer_to(sender, push.epoch, _kind_of(push), ResponseCode.PUSH_REQUEST_IS_FULL)
            return
        self._queue.append((sender, push, connection))
        self._state.outbox.wake |= Wake.HANDLER

    def on_vote_response(self, sender: NodeId, answer: VoteResponse) -> None:
        """Take the answer to the question about a push held back."""
        released = self.leader_check.on_answer(sender, answer)
        if released is not None:
            self._queue.append((sender, *released))
            self._state.outbox.wake |= Wake.HANDLER

    def step(self, now_ms: int) -> int | None:
        """Execute the next queued push; due again at once while more wait."""
        self.take_standing_if_due()
        if not self._queue:
            return None
        sender, push, connection = self._queue.popleft()
        self._execute(sender, push, connection, now_ms)
        return now_ms if self._queue else None

    # -- execution -----------------------------------------------------------------------------------------------

    def _execute(self, sender: NodeId, push: ReceivedPush, connection: int, now_ms: int) -> None:
        state = self._state
        over = push.term < state.term or (push.term == state.term and state.leader_id not in (None, sender))
        if not over and not self.leader_check.is_known(sender, push.term):
            self.leader_check.hold(sender, push, connection)
            return
        if over or not state.follow(sender, push.term, now_ms):
            self._answer_to(sender, push.epoch, _kind_of(push), ResponseCode.EXPIRED_TERM)
            return
        if self._session != (state.term, sender):
            self._begin_session(sender)
            self._connection = connection
        if connection != self._connection:
            if connection < self._connection:
                return  # from a connection that this sender has replaced
            # Epochs are the leader's own count of attempts: those of another connection cannot be compared with them.
            self._connection, self._leader_epoch = connection, 0
        if push.epoch < self._leader_epoch:
            return  # an attempt that the leader itself has given up
        self._leader_epoch = push.epoch
        try:
            self._apply(push)
        except _OtherHistoryError:
            self.leader_check.ask(sender)  # if it states the same when asked, it is this member that is fenced
            self._answer(push.epoch, _kind_of(push), ResponseCode.OTHER_HISTORY)
        except CorruptLogError as damage:
            state.outbox.damage.append(damage)
            self._answer(push.epoch, _kind_of(push), ResponseCode.DISK_ERROR)

    def _apply(self, push: ReceivedPush) -> None:
        match push:
            case PushCompare():
                self._compare(push)
            case PushTruncate():
                self._truncate(push)
            case CheckedAppend():
                self._append(push)
            case PushCommit(commit_index=commit_index):
                self._commit(commit_index)
                self._answer(push.epoch, PushKind.COMMIT, ResponseCode.SUCCESS)
            case PushInstall():
                self._install(push)
            case _:
                assert_never(push)

    def _begin_session(self, leader: NodeId) -> None:
        """Reset for a new leader or term: only committed entries are known to be in its log (§5.4)."""
        self._session = (self._state.term, leader)
        self._leader_epoch = 0
        self._deferred.clear()
        self._ack_due = False
        self._acknowledged_index = NO_INDEX
        self._agreed = False
        self._flushed_only = True
        self.verified_index = self._state.commit_index

    def _compare(self, push: PushCompare) -> None:
        log = self._state.log
        asked = push.previous
        self._flushed_only = push.flushed_only
        if asked.index > log.last.index:
            self._answer(push.epoch, PushKind.COMPARE, ResponseCode.INCONSISTENT_STATE)
        elif asked.index < log.begin.index:
            begin = EntryId(log.begin.term, log.begin.index)
            self._answer(push.epoch, PushKind.COMPARE, ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN, begin)
        elif log.term_at(asked.index) != asked.term:
            self._require_uncommitted(asked.index)
            own = log.term_at(asked.index)
            first = max(log.first_index_of_term(own), LogIndex(self._state.commit_index + 1))
            self._answer(push.epoch, PushKind.COMPARE, ResponseCode.INCONSISTENT_STATE, EntryId(own, first))
        else:
            self._require_same_chain(asked.index, push.previous_chain_crc)
            self._agreed = True
            self.verified_index = max(self.verified_index, asked.index)
            self._answer(push.epoch, PushKind.COMPARE, ResponseCode.SUCCESS)
        if push.configuration is not None:  # and the two histories do not differ
            # A member that lost its memory must not stand for election as of the old ones on its way (M10).
            self._state.install(push.configuration)

    def _truncate(self, push: PushTruncate) -> None:
        log = self._state.log
        first = push.conflict.index
        if first > self.verified_index + 1 or first <= log.begin.index:
            self._answer(push.epoch, PushKind.TRUNCATE, ResponseCode.INCONSISTENT_STATE)
            return
        if first <= log.last.index and log.term_at(first) != push.conflict.term:
            if first <= self.verified_index:
                raise _OtherHistoryError
            self._require_uncommitted(first)
            log.truncate(first)
            self._state.truncated(first)
        elif first <= log.last.index:
            self._require_same_chain(first, push.chain_crc)
        self._answer_when_durable(push.epoch, PushKind.TRUNCATE)

    def _append(self, push: CheckedAppend) -> None:
        checked = push.run
        if checked.last.term > push.term or not self._continues_log(checked):
            self._answer(push.epoch, PushKind.APPEND, ResponseCode.INCONSISTENT_STATE)
            return
        log = self._state.log
        if checked.run.first_index == 0 and log.last.index == NO_INDEX:
            self._begin_at(checked.run.position)
        configurations = _configurations(checked, log.last.index) if checked.noops else ()
        try:
            if checked.last.index > log.last.index:
                log.append_run(checked, LogIndex(log.last.index + 1))
        except DiskFullError:
            self._answer(push.epoch, PushKind.APPEND, ResponseCode.DISK_FULL)
            return
        except MisplacedRunError:  # the entries follow, but not at this position: the leader's fault, not this disk's
            self._answer(push.epoch, PushKind.APPEND, ResponseCode.INCONSISTENT_STATE)
            return
        for configuration in configurations:
            self._state.adopt(configuration)
        self._agreed = True
        self.verified_index = max(self.verified_index, checked.last.index)
        self._commit(push.commit_index)
        self._ack_due = True
        self._state.outbox.wake |= Wake.FLUSH
        self._acknowledge()

    def _begin_at(self, position: Position) -> None:
        """Let this empty log begin where its leader's does, whose log continues an older one.

        The old files have expired by now, or the handshake would have kept the two apart.
        """
        log = self._state.log
        if log.end_position == 0 < position and position % self._segment_bytes == 0:
            log.reset(Boundary(NO_INDEX, NO_TERM, position, 0))

    def _continues_log(self, checked: CheckedRun) -> bool:
        """Whether the run equals the log where they overlap, or directly follows it.

        Equal terms at one index mean equal logs up to it (log matching, §5.3), so checking the last common index is
        enough; the chain CRC must agree too, or the replicas have diverged.
        """
        log = self._state.log
        run = checked.run
        common = LogIndex(min(checked.last.index, log.last.index))
        if run.previous.index > log.last.index:
            return False
        if common < log.begin.index:
            return checked.last.index <= log.begin.index
        if common >= run.first_index:
            term, chain_crc = checked.term_of(common), checked.chain_crc_of(common)
        else:
            term, chain_crc = run.previous.term, run.previous_chain_crc
        if log.term_at(common) != term:
            self._require_uncommitted(common)
            return False
        self._require_same_chain(common, chain_crc)
        return True

    def _install(self, push: PushInstall) -> None:
        state = self._state
        log = state.log
        before = push.before_begin
        if before.index < 0 or not 0 <= before.term <= push.term or push.position < 0:
            self._answer(push.epoch, PushKind.INSTALL, ResponseCode.INCONSISTENT_STATE)
            return
        # Entries committed here count as held even if they have expired here: this log may begin after the leader's.
        held = before.index <= state.commit_index or (
            before.index <= log.last.index and log.term_at(before.index) == before.term
        )
        if not held:
            leader, confirmed = self._session[1], self.leader_check.judge(push)
            if confirmed is None and leader is not None:
                self.leader_check.hold(leader, push, self._connection)
                return
            if not confirmed or leader is None:  # the leader's log begins elsewhere, now or always: it answers where
                self._answer(push.epoch, PushKind.INSTALL, ResponseCode.INCONSISTENT_STATE)
                return
            if state.machine is not None:
                self._await_snapshot(leader, push)
                return
            try:
                log.reset(Boundary(before.index, before.term, push.position, push.chain_crc), push.configuration)
            except DiskFullError:
                self._answer(push.epoch, PushKind.INSTALL, ResponseCode.DISK_FULL)
                return
            state.truncated(LogIndex(0))
            if push.configuration is not None:
                state.install(push.configuration)  # M10
            state.advance_commit(before.index)
        self.verified_index = max(self.verified_index, before.index)
        self._answer_when_durable(push.epoch, PushKind.INSTALL)

    def _await_snapshot(self, leader: NodeId, push: PushInstall) -> None:
        """The state machine needs the entries that a new begin would skip: the log stays until it has a snapshot.

        The leader repeats its push, until it finds the log where it can be continued (S8).
        """
        if push.configuration is not None:
            self._state.install(push.configuration)  # M10
        self._state.outbox.fetch_snapshot = SnapshotFetch(leader, push.before_begin.index)
        self._answer(push.epoch, PushKind.INSTALL, ResponseCode.FALL_BEHIND_TOO_MUCH)

    def adopt_snapshot(self, at: Boundary, configuration: Configuration | None) -> bool:
        """The state machine has loaded a snapshot of entry ``at`` and ``configuration``: let the log go on from there.

        Its entries are committed. Returns False if that must be tried again: there is no room, or the log is damaged
        and being repaired.
        """
        state = self._state
        log = state.log
        if at.index <= state.commit_index:
            return True
        try:
            held = log.begin.index <= at.index <= log.last.index and (
                (log.term_at(at.index), log.chain_crc_at(at.index)) == (at.term, at.chain_crc)
            )
        except CorruptLogError as damage:
            state.outbox.damage.append(damage)
            return False
        if not held:
            invariant(not isinstance(state.role, Leader), "a leader's log holds all that is committed", at=at)
            committed = state.membership.committed
            if configuration is None or committed.index > configuration.index:
                configuration = None if committed.index == NO_INDEX else committed
            try:
                log.reset(at, configuration)
            except DiskFullError:
                return False
            state.truncated(LogIndex(0))
            if configuration is not None:
                state.install(configuration)  # M10
            self.verified_index = at.index
            state.outbox.wake |= Wake.FLUSH
        state.advance_commit(at.index)
        self.verified_index = max(self.verified_index, at.index)
        return True

    def _commit(self, leader_commit: LogIndex) -> None:
        """Commit what the leader has committed, as far as it is verified here."""
        self._state.advance_commit(LogIndex(min(leader_commit, self.verified_index)))
        self.take_standing_if_due()

    def take_standing_if_due(self) -> None:
        """Take standing once everything that the leader required is verified and durable here.

        Between this member's committed entries and that point may lie entries that an earlier life of it acknowledged,
        and its vote could elect a member that lacks them.
        """
        state = self._state
        readmission = state.readmission
        if readmission is None or state.leader_id is None or not state.whole or state.fenced:
            return
        equal = self._agreed and self._is_in_session()
        durable = min(state.log.flushed.index, self.verified_index) if equal else NO_INDEX
        if durable < readmission.index:
            return
        state.readmission = None
        state.take_standing(state.readmission_standing)
        if self._is_in_session():  # acknowledgements count from now on: repeat the last one
            self._answer(self._leader_epoch, PushKind.APPEND, ResponseCode.SUCCESS)

    def _require_uncommitted(self, index: LogIndex) -> None:
        """Raise if a conflicting entry, verified by now (``term_at``), is committed: the leader has another history."""
        if index <= self._state.commit_index:
            raise _OtherHistoryError

    def _require_same_chain(self, index: LogIndex, chain_crc: int) -> None:
        if self._state.log.chain_crc_at(index) != chain_crc:
            raise _OtherHistoryError

    # -- answers -------------------------------------------------------------------------------------------------

    def on_flushed(self) -> None:
        """The store became more durable: send the answers that waited for it."""
        sequence = self._state.log.flushed.sequence
        while self._deferred and self._deferred[0].sequence <= sequence:
            deferred = self._deferred.popleft()
            self._answer(deferred.epoch, deferred.kind, ResponseCode.SUCCESS)
        self._acknowledge()
        self.take_standing_if_due()

    def _acknowledge(self) -> None:
        """Send one answer for all appends that have become durable since the last one (or need not be)."""
        if not self._ack_due or not self._is_in_session():
            return
        flushed = self._flushed_index()
        if flushed >= self.verified_index:
            self._ack_due = False
        elif flushed <= self._acknowledged_index:
            return
        self._acknowledged_index = flushed
        self._answer(self._leader_epoch, PushKind.APPEND, ResponseCode.SUCCESS)

    def _answer_when_durable(self, epoch: int, kind: PushKind) -> None:
        """Answer a change of the log once no crash can undo it, whatever the flush mode."""
        state = self._state
        if state.log.flushed.sequence >= state.log.write_sequence:
            self._answer(epoch, kind, ResponseCode.SUCCESS)
            return
        self._deferred.append(_Deferred(state.log.write_sequence, epoch, kind))
        state.outbox.wake |= Wake.FLUSH

    def _flushed_index(self) -> LogIndex:
        if self._state.flush_mode is FlushMode.ASYNC and not self._flushed_only:
            verified = self.verified_index
            return verified if self._state.unflushed is None else self._state.surely_kept(verified)
        return LogIndex(min(self._state.log.flushed.index, self.verified_index))

    def _is_in_session(self) -> bool:
        state = self._state
        role = state.role
        return isinstance(role, Follower) and role.leader is not None and self._session == (state.term, role.leader)

    def _answer(self, epoch: int, kind: PushKind, code: ResponseCode, conflict: EntryId = NO_ENTRY) -> None:
        leader = self._session[1]
        if leader is not None and self._is_in_session():
            self._respond(leader, epoch, kind, code, conflict, self.verified_index, self._flushed_index())

    def _answer_to(self, sender: NodeId, epoch: int, kind: PushKind, code: ResponseCode) -> None:
        """Answer outside a session: without watermarks, which are for the current leader only."""
        self._respond(sender, epoch, kind, code, NO_ENTRY, NO_INDEX, NO_INDEX)

    def _respond(
        self,
        target: NodeId,
        epoch: int,
        kind: PushKind,
        code: ResponseCode,
        conflict: EntryId,
        verified: LogIndex,
        flushed: LogIndex,
    ) -> None:
        state = self._state
        response = PushResponse(
            term=state.term,
            epoch=epoch,
            kind=kind,
            code=code,
            verified_index=verified,
            flushed_index=flushed,
            end_index=state.log.last.index,
            conflict=conflict,
            boot_id=state.boot_id,
            standing=state.standing,
        )
        state.outbox.messages.append((target, response))


def _configurations(checked: CheckedRun, held: LogIndex) -> tuple[Configuration, ...]:
    """The configurations in those entries of a run that follow ``held``.

    Raises ``UnreadablePayloadError`` for one of a later version of this program: a node that cannot know the members
    must not take part.
    """
    found = []
    for index in checked.noops:
        if index > held:
            end = checked.offset_of(LogIndex(index + 1)) if index < checked.last.index else len(checked.run.data)
            body = checked.run.data[checked.offset_of(index) + ENTRY_HEADER_BYTES : end]
            configuration = decode_configuration(body)
            if configuration is not None:
                found.append(replace(configuration, index=index, term=checked.term_of(index)))
    return tuple(found)


def _kind_of(push: ReceivedPush) -> PushKind:
    match push:
        case PushCompare():
            return PushKind.COMPARE
        case PushTruncate():
            return PushKind.TRUNCATE
        case CheckedAppend():
            return PushKind.APPEND
        case PushCommit():
            return PushKind.COMMIT
        case PushInstall():
            return PushKind.INSTALL
        case _:
            assert_never(push)
