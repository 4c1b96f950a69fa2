"""Replicates to one follower: find where the logs agree, drop what conflicts, then stream the rest.

COMPARE finds the last common entry, going back a whole term per answer (§5.3's optimisation). TRUNCATE is sent only if
the follower holds more, and the follower itself decides whether its next entry really conflicts. APPEND pipelines runs
within a bounded window; each of them has a deadline, after which the dispatcher compares again, so that no lost request
or answer can stop replication for good (dledger #331). INSTALL restarts a follower that needs entries which have
expired here.

``epoch`` numbers the dispatcher's attempts; an answer to an earlier attempt changes no state. Watermarks are taken from
every answer of the current term and the follower's current process (``boot_id``): entries once durable stay durable.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Final

from dledger.config import FlushMode, ReplicationConfig
from dledger.core.member_state import Leader, MemberState
from dledger.core.messages import (
    LoadRun,
    Message,
    PushCommit,
    PushCompare,
    PushInstall,
    PushKind,
    PushResponse,
    PushTruncate,
    Wake,
)
from dledger.errors import CorruptLogError, ResponseCode
from dledger.records import record
from dledger.types import NO_ENTRY, NO_INDEX, NO_TERM, Configuration, EntryId, LogIndex, NodeId, Position, Term
from dledger.values import MIB

RECENT_BYTES: Final = 32 * MIB
"""Entries further behind the end probably have to be read from the disk."""


class DispatcherState(StrEnum):
    """The dispatcher's activity; ``IDLE`` unless the member leads."""

    IDLE = "IDLE"
    COMPARE = "COMPARE"
    TRUNCATE = "TRUNCATE"
    APPEND = "APPEND"
    INSTALL = "INSTALL"


@record(frozen=True, slots=True)
class _InFlight:
    last_index: LogIndex
    due_ms: int


class EntryDispatcher:
    """Brings one peer's log up to the leader's. ``step`` runs on its own thread, ``on_...`` on the transport's."""

    def __init__(self, state: MemberState, peer: NodeId, config: ReplicationConfig) -> None:
        self._state = state
        self.peer = peer
        self._config = config
        self.state = DispatcherState.IDLE
        self.next_index = LogIndex(0)
        self._term = NO_TERM
        self._epoch = 0
        self._boot_id: int | None = None
        self._boot_epoch = 0
        """The first attempt that only the follower's current process can have seen."""
        self._agreed = False
        """Whether the follower's current process has found an entry of this log in its own."""
        self._in_flight: deque[_InFlight] = deque()
        self._live_from = LogIndex(0)
        """The first entry written while this attempt was streaming: its pages are in memory."""
        self._answer_due_ms: int | None = None
        """While a COMPARE, TRUNCATE or INSTALL is in flight: when to give up on its answer."""
        self._pause_until_ms = 0
        self._pause_wanted = False
        """Whether the stream broke: the next step pauses before it retries."""
        self._commit_sent = NO_INDEX
        self._commit_due_ms: int | None = None
        self._commit_answer_due_ms: int | None = None
        """While a COMMIT is in flight: when to consider it lost."""
        self.commit_told = NO_INDEX
        """The commit index that the follower's current process knows."""
        self._ended = False

    def begin_after(self, epoch: int) -> None:
        """Number its attempts after those of an earlier one for the same peer."""
        self._epoch = epoch

    def end(self) -> None:
        """The peer is no member any more: its worker may call once more, but sends nothing."""
        self._ended = True

    @property
    def in_flight(self) -> int:
        """Pushes sent and not answered."""
        return len(self._in_flight)

    @property
    def epoch(self) -> int:
        """The number of the current attempt; answers to earlier ones no longer decide anything."""
        return self._epoch

    # -- sending -------------------------------------------------------------------------------------------------

    def step(self, now_ms: int) -> int | None:
        """Send what may be sent; returns when an answer is overdue or a commit index should be sent.

        Claims about this log are verified first: damage here is reported, and nothing is sent that depends on it.
        """
        try:
            return self._step(now_ms)
        except CorruptLogError as damage:
            return self._wait_for_repair(damage, now_ms)

    def _wait_for_repair(self, damage: CorruptLogError, now_ms: int) -> int:
        self._state.outbox.damage.append(damage)
        self._restart(pause_until_ms=now_ms + self._config.retry_interval_ms)
        return self._pause_until_ms

    def _step(self, now_ms: int) -> int | None:
        state = self._state
        if self._ended or not isinstance(state.role, Leader):
            self.state = DispatcherState.IDLE
            self._term = NO_TERM
            self._in_flight.clear()
            return None
        if self._term != state.term:
            self._begin_term(now_ms)
        if self._pause_wanted:
            self._pause_wanted = False
            self._pause_until_ms = now_ms + self._config.retry_interval_ms
        if now_ms < self._pause_until_ms:
            return self._pause_until_ms
        if self.state is DispatcherState.APPEND:
            # A follower with a full disk gets one push per attempt, to find out when it has room again.
            has_room = not state.role.disk_full[self.peer]
            return self._append(now_ms, window=self._config.inflight_pushes_max if has_room else 1)
        if self._answer_due_ms is not None and now_ms < self._answer_due_ms:
            return self._answer_due_ms
        return self._compare(now_ms)

    def _begin_term(self, now_ms: int) -> None:
        self._term = self._state.term
        self._boot_id = None
        self._boot_epoch = 0
        self._agreed = False
        self.commit_told = NO_INDEX
        self._pause_until_ms = now_ms
        self._pause_wanted = False
        self.next_index = LogIndex(self._state.log.last.index + 1)
        self._restart()

    def _restart(self, *, pause_until_ms: int | None = None) -> None:
        """Start a new attempt: compare at ``next_index - 1``."""
        self._epoch += 1
        self.state = DispatcherState.COMPARE
        self._in_flight.clear()
        self._answer_due_ms = None
        self._commit_sent = NO_INDEX
        self._commit_due_ms = None
        self._commit_answer_due_ms = None
        if pause_until_ms is not None:
            self._pause_until_ms = pause_until_ms
        self._state.outbox.wake |= Wake.DISPATCHERS

    def _compare(self, now_ms: int) -> int:
        log = self._state.log
        previous = LogIndex(self.next_index - 1)
        self._epoch += 1
        if previous < log.begin.index:
            return self._install(now_ms)
        self.state = DispatcherState.COMPARE
        entry = EntryId(log.term_at(previous), previous)
        flushed_only = self._state.flush_mode is FlushMode.SYNC
        chain_crc = log.chain_crc_at(previous)
        compare = PushCompare(self._term, self._epoch, entry, chain_crc, flushed_only, self._known_configuration())
        return self._ask(compare, now_ms)

    def _install(self, now_ms: int) -> int:
        self.state = DispatcherState.INSTALL
        begin = self._state.log.begin
        message = PushInstall(
            self._term,
            self._epoch,
            EntryId(begin.term, begin.index),
            begin.chain_crc,
            Position(begin.position),
            self._known_configuration(),
        )
        return self._ask(message, now_ms)

    def _known_configuration(self) -> Configuration | None:
        """The newest explicit one that is known to be committed: the follower may use it before it holds it (M10)."""
        committed = self._state.membership.committed
        return None if committed.index == NO_INDEX else committed

    def _ask(self, message: Message, now_ms: int) -> int:
        """Send a message whose answer decides the next step."""
        self._answer_due_ms = now_ms + self._config.push_timeout_ms
        self._send(message)
        return self._answer_due_ms

    def _append(self, now_ms: int, *, window: int) -> int | None:
        log = self._state.log
        if self._in_flight and self._in_flight[0].due_ms <= now_ms:
            self._restart()
            return self._compare(now_ms)
        if self.next_index <= log.begin.index:
            self._restart()
            return self._compare(now_ms)
        last = self._last_to_send()
        while self.next_index <= last and len(self._in_flight) < window:
            run_last = min(last, log.slice_run(self.next_index, self._config.push_bytes_max))
            cold = self.next_index < self._live_from or (run_last < last and self._is_far_behind())
            self._send(LoadRun(self._term, self._epoch, self._state.commit_index, self.next_index, run_last, cold))
            self._commit_sent = self._state.commit_index
            self._commit_answer_due_ms = None
            self._in_flight.append(_InFlight(run_last, now_ms + self._config.push_timeout_ms))
            self.next_index = LogIndex(run_last + 1)
        commit_due = self._push_commit(now_ms)
        append_due = self._in_flight[0].due_ms if self._in_flight else None
        if commit_due is None or append_due is None:
            return append_due if commit_due is None else commit_due
        return min(commit_due, append_due)

    def _last_to_send(self) -> LogIndex:
        """The entries that a demotion or removal withholds from its subject, and that no learner gets (M9)."""
        state = self._state
        last = state.log.last.index
        if self.peer in state.learners:
            last = state.commit_index
        return min(last, state.withheld.get(self.peer, last)) if state.withheld else last

    def _is_far_behind(self) -> bool:
        """Whether the next run was written so long ago that its pages may have left memory."""
        log = self._state.log
        return log.positions(self.next_index, self.next_index)[0] < log.end_position - RECENT_BYTES

    def _push_commit(self, now_ms: int) -> int | None:
        """Send the commit index to an idle follower, after giving the next append a chance to carry it."""
        if self._commit_answer_due_ms is not None:
            if now_ms < self._commit_answer_due_ms:
                return self._commit_answer_due_ms
            self._commit_answer_due_ms = None
            self._commit_sent = NO_INDEX
        if self._commit_sent >= self._state.commit_index:
            self._commit_due_ms = None
            # Pushes in flight will soon be committed: checking then by itself saves the thread a wake-up per commit.
            return now_ms + self._config.commit_push_delay_ms if self._in_flight else None
        if self._commit_due_ms is None:
            self._commit_due_ms = now_ms + self._config.commit_push_delay_ms
        if now_ms < self._commit_due_ms:
            return self._commit_due_ms
        self._commit_sent = self._state.commit_index
        self._commit_due_ms = None
        self._commit_answer_due_ms = now_ms + self._config.push_timeout_ms
        self._send(PushCommit(self._term, self._epoch, self._commit_sent))
        return self._commit_answer_due_ms

    def _send(self, message: Message) -> None:
        self._state.outbox.messages.append((self.peer, message))

    # -- answers -------------------------------------------------------------------------------------------------

    def on_connection_lost(self) -> None:
        """The stream broke, and pushes in flight may be lost: compare again, after a pause."""
        nothing_sent = self.state is DispatcherState.COMPARE and self._answer_due_ms is None
        if self.state is not DispatcherState.IDLE and not nothing_sent:
            self._pause_wanted = True
            self._restart()

    def on_response(self, response: PushResponse, now_ms: int) -> None:
        """Take an answer of the follower, in whatever order and however late it arrives."""
        state = self._state
        if response.term > state.term:
            state.become_follower(response.term, None, now_ms)
            return
        leader = state.role
        if not isinstance(leader, Leader) or response.term != state.term or self._term != state.term:
            return
        leader.contact_ms[self.peer] = now_ms
        if not self._is_same_process(leader, response):
            return
        if response.kind is PushKind.COMPARE and response.epoch == self._epoch:  # asked after all its earlier answers
            self._doubt_if_less(leader, response, leader.match[self.peer])
        if response.flushed_index > state.log.last.index:
            self._ignore_longer_history(response, now_ms)
            return
        self._note_agreement(leader, response)
        if self._agreed:
            self._raise_watermark(leader, response)
        if response.epoch != self._epoch:
            return
        try:
            if response.code is ResponseCode.SUCCESS:
                self._on_success(response)
            else:
                self._on_refusal(leader, response, now_ms)
        except CorruptLogError as damage:
            self._wait_for_repair(damage, now_ms)
        commit_planned = self._commit_due_ms is not None or self._commit_sent >= state.commit_index
        idle = self.next_index > state.log.last.index and commit_planned
        if self.state is not DispatcherState.APPEND or not idle:
            state.outbox.wake |= Wake.DISPATCHERS

    def _is_same_process(self, leader: Leader, response: PushResponse) -> bool:
        """Whether the answer is of the follower's known process; a new one makes its watermark void.

        A restarted follower may have lost what its earlier process had acknowledged. Late answers of the earlier
        process may still arrive, even after those of the new one; they belong to attempts from before the change was
        noticed and are ignored.
        """
        if self._boot_id is None:
            self._boot_id = leader.boot_ids[self.peer] = response.boot_id
            self._doubt_if_less(leader, response, NO_INDEX)
        elif self._boot_id != response.boot_id:
            self._agreed = False
            said, leader.match[self.peer] = leader.match[self.peer], NO_INDEX
            leader.counts[self.peer] = False
            self._boot_id = leader.boot_ids[self.peer] = response.boot_id
            self._doubt_if_less(leader, response, said)
            self._restart()
            self._boot_epoch = self._epoch
            return False
        return response.epoch >= self._boot_epoch

    def _note_agreement(self, leader: Leader, response: PushResponse) -> None:
        """A follower's watermarks count only once the logs were compared and found equal.

        Before that, its watermark is its own commit index, which is a prefix of this log only if both have the same
        history.
        """
        if response.code is ResponseCode.SUCCESS and response.kind is not PushKind.INSTALL:
            self._agreed = True
        elif response.code is ResponseCode.OTHER_HISTORY:
            self._agreed = leader.counts[self.peer] = False
            leader.match[self.peer] = NO_INDEX

    def _ignore_longer_history(self, response: PushResponse, now_ms: int) -> None:
        """Do not act on the claim of a follower that it matches more entries than this log has.

        1. With ``flush_mode=async`` a power cut takes committed entries from a quorum, but not from this follower.
        2. The others elect a leader without them. The follower reports its commit index, which is beyond that log.
        3. Were that fatal here, one member's message would stop the leader, and then every other one.

        So it is compared again after a pause; it refuses whatever contradicts its committed entries.
        """
        if response.epoch == self._epoch:
            self._restart(pause_until_ms=now_ms + self._config.retry_interval_ms)

    def _doubt_if_less(self, leader: Leader, response: PushResponse, said: LogIndex) -> None:
        """Doubt a process that holds less than its peer ``said``, or than is remembered of it: it has lost entries.

        It does not know that, so heartbeats tell it, and until it has heard so it counts for nothing.
        """
        log = self._state.log
        remembered = self._state.remembered.get(self.peer, NO_ENTRY)
        try:
            kept = log.begin.index <= remembered.index <= log.last.index
            if kept and log.term_at(remembered.index) == remembered.term:
                said = max(said, remembered.index)
        except CorruptLogError as damage:  # of this log: the answer is judged without it
            self._state.outbox.damage.append(damage)
        if response.standing.counts and response.end_index < said:
            self._doubt(leader, response.boot_id)

    def _doubt(self, leader: Leader, boot_id: int) -> None:
        leader.doubted[self.peer] = boot_id
        leader.counts[self.peer] = False
        leader.match[self.peer] = NO_INDEX

    def _raise_watermark(self, leader: Leader, response: PushResponse) -> None:
        flushed = response.flushed_index
        if leader.doubted.get(self.peer, 0) != response.boot_id:
            leader.doubted.pop(self.peer, None)
            counts = response.standing.counts
            if counts and not leader.counts[self.peer] and self._state.remembers(leader, self.peer, response.boot_id):
                leader.counts[self.peer] = True
                self._state.outbox.wake |= Wake.QUORUM_ACK
        if flushed > leader.match[self.peer]:
            leader.match[self.peer] = flushed
            if flushed > self._state.commit_index:
                self._state.outbox.wake |= Wake.QUORUM_ACK
            if leader.transferring:
                self._state.outbox.wake |= Wake.ELECTOR

    def _on_success(self, response: PushResponse) -> None:
        match (self.state, response.kind):
            case (DispatcherState.COMPARE, PushKind.COMPARE):
                # The answer is about the entry compared; `verified_index` may be higher (committed entries).
                self._enter_append_or_truncate(response)
            case (DispatcherState.TRUNCATE, PushKind.TRUNCATE):
                self._enter_append()
            case (DispatcherState.INSTALL, PushKind.INSTALL):
                self.next_index = LogIndex(min(response.verified_index, self._state.log.last.index) + 1)
                self._restart()
            case (DispatcherState.APPEND, PushKind.APPEND):
                while self._in_flight and self._in_flight[0].last_index <= response.verified_index:
                    self._in_flight.popleft()
                if not self._in_flight and self._commit_answer_due_ms is None:
                    self.commit_told = self._commit_sent
            case (DispatcherState.APPEND, PushKind.COMMIT):
                self._commit_answer_due_ms = None
                self.commit_told = self._commit_sent
                if self._commit_sent < self._state.commit_index:  # it advanced meanwhile, and that step sent nothing
                    self._state.outbox.wake |= Wake.DISPATCHERS
            case _:
                pass

    def _enter_append_or_truncate(self, response: PushResponse) -> None:
        log = self._state.log
        last = log.last.index
        self.next_index = LogIndex(min(max(self.next_index, response.verified_index + 1), last + 1))
        if self.next_index <= log.begin.index:  # expired while the answer was on its way
            self._restart()
            return
        if response.end_index < self.next_index or self.next_index > last:
            self._enter_append()
            return
        self._epoch += 1
        self.state = DispatcherState.TRUNCATE
        conflict = EntryId(log.term_at(self.next_index), self.next_index)
        self._send(PushTruncate(self._term, self._epoch, conflict, log.chain_crc_at(self.next_index)))
        # The answer is awaited until the deadline of the COMPARE that led here; then a new attempt starts.

    def _enter_append(self) -> None:
        self._epoch += 1
        self.state = DispatcherState.APPEND
        self._live_from = LogIndex(self._state.log.last.index + 1)
        self._answer_due_ms = None
        self._in_flight.clear()

    def _on_refusal(self, leader: Leader, response: PushResponse, now_ms: int) -> None:
        match response.code:
            case ResponseCode.INCONSISTENT_STATE if response.kind is PushKind.COMPARE:
                self.next_index = self._agreement_guess(response)
                self._restart()
            case ResponseCode.INCONSISTENT_STATE:
                self.next_index = LogIndex(min(response.end_index, self._state.log.last.index) + 1)
                self._restart()
            case ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN:
                self.next_index = LogIndex(min(response.conflict.index, self._state.log.last.index) + 1)
                self._restart(pause_until_ms=now_ms + self._config.retry_interval_ms)
            case ResponseCode.EXPIRED_TERM:
                pass  # a late answer to an earlier term's push that happens to have the same epoch
            case _:
                if response.code is ResponseCode.DISK_FULL:  # heartbeats report the end of this condition
                    leader.disk_full[self.peer] = True
                held = max(response.verified_index, leader.match[self.peer])
                if held != NO_INDEX:  # a full queue, for example, says nothing about the log
                    self.next_index = LogIndex(min(self.next_index, held + 1))
                self._restart(pause_until_ms=now_ms + self._config.retry_interval_ms)

    def _agreement_guess(self, response: PushResponse) -> LogIndex:
        """Where to compare next after a refusal, plus one (§5.3; the whole conflicting term is skipped at once)."""
        log = self._state.log
        compared = self.next_index - 1
        if response.conflict == NO_ENTRY:
            return LogIndex(min(response.end_index, compared - 1) + 1)
        theirs: Term = response.conflict.term
        if compared >= log.begin.index and log.term_at(LogIndex(compared)) > theirs:
            last_not_later = log.first_index_of_term(Term(theirs + 1)) - 1
            if last_not_later >= log.begin.index and log.term_at(LogIndex(last_not_later)) == theirs:
                return LogIndex(min(last_not_later, compared - 1) + 1)
        return LogIndex(min(response.conflict.index - 1, compared - 1) + 1)
