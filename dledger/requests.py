"""Requests to one node: of clients of its log, and of its peers. Each is given to the core, under the node's lock.

Clients' requests come from the threads of the servers, their answers from any thread.

Runs of entries that peers push are verified before, outside the lock. The threads of the transport call ``receive``.
Messages to peers go the other way: from the core's outbox to the transport.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.core.member_state import Leader
from dledger.core.messages import (
    CheckedAppend,
    Envelope,
    HeartbeatRequest,
    HeartbeatResponse,
    Message,
    PushAppend,
    PushResponse,
    VoteRequest,
    VoteResponse,
)
from dledger.core.node import Node
from dledger.core.ports import PreparedAppend
from dledger.errors import (
    DLedgerError,
    InvalidRequestError,
    LeaderHint,
    MemberRemovedError,
    NodeBusyError,
    NoStateMachineError,
    NotLeaderError,
    RequestTimeoutError,
)
from dledger.group_members import MemberWatch, removal_index
from dledger.monitoring import Instruments
from dledger.runtime.driver import NodeDriver
from dledger.runtime.events import PushTimes
from dledger.statemachine.host import MachineHost
from dledger.statemachine.snapshots import SnapshotMeta
from dledger.store.file_store import FileStore
from dledger.types import (
    NO_INDEX,
    AppendedBatch,
    Body,
    Configuration,
    LogIndex,
    MemberChange,
    NodeId,
    ProducerBatch,
    QueryAnswer,
    SnapshotState,
    Term,
)

_Result = TypeVar("_Result")
_ISOLATED_PUSH_BYTES: Final = 16 * 1024
_ISOLATED_PUSH_PAUSE_MS: Final = 1


class PeerMessages:
    """Implements ``rpc.ports.Receiver``."""

    def __init__(
        self,
        node: Node,
        log: FileStore,
        driver: NodeDriver,
        clock: Clock,
        member_watch: MemberWatch,
        push_times: PushTimes | None,
        patience_s: float | None,
    ) -> None:
        """``patience_s``: how long what can do without the node's lock waits for it; None: any time."""
        self._node = node
        self.log: Final = log
        self._driver = driver
        self._clock = clock
        self._member_watch = member_watch
        self._push_times = push_times
        self._patience_s = patience_s
        self._last_push_ms = 0

    def request(self, envelope: Envelope, patience_s: float | None = None) -> Envelope:
        message = envelope.message
        if not isinstance(message, VoteRequest | HeartbeatRequest):
            raise InvalidRequestError(f"{type(message).__name__} is not a request")
        if isinstance(message, VoteRequest):
            self._note_vote_request(envelope.sender, message)
        answer: VoteResponse | HeartbeatResponse = self._driver.call(
            lambda now_ms: self._node.answer(envelope.sender, message, now_ms), patience_s=patience_s
        )
        return replace(envelope, sender=envelope.target, target=envelope.sender, message=answer)

    def _note_vote_request(self, sender: NodeId, request: VoteRequest) -> None:
        """Tell who asks for votes although it is led; not a follower that asks again whether this member leads, nor one
        that leadership is transferred to.
        """

        def contact_ms(node: Node) -> int | None:
            leader = node.state.role
            if not isinstance(leader, Leader) or request.transfer:
                return None
            if request.countersign == leader.countersigns.get(sender):
                return None
            heard_ms = leader.contact_ms.get(sender)
            return None if heard_ms is None else self._clock.monotonic_ms() - heard_ms

        if (ago_ms := self._driver.look(contact_ms)) is not None:
            self._member_watch.asked_for_vote(sender, ago_ms)

    def receive(self, envelope: Envelope, patience_s: float | None = None) -> None:
        """Take any other message; a run is verified first, outside the lock."""
        message: Message = envelope.message
        flush_here = False
        if self._push_times is not None and isinstance(message, PushResponse):
            self._push_times.answered(envelope.sender, message)
        if isinstance(message, PushAppend):
            checked = self.log.check_run(message.run)
            flush_here = self._is_isolated(len(message.run.data))
            message = CheckedAppend(message.term, message.epoch, message.commit_index, checked)
        receive = partial(self._node.receive, envelope.sender, message, connection=envelope.connection)
        self._driver.call(receive, flush_here=flush_here, patience_s=patience_s)

    def _is_isolated(self, size: int) -> bool:
        """Whether a push stands alone: then gathering gains nothing, and passing it to another thread costs time."""
        now_ms = self._clock.monotonic_ms()
        pause_ms, self._last_push_ms = now_ms - self._last_push_ms, now_ms
        return size <= _ISOLATED_PUSH_BYTES and pause_ms >= _ISOLATED_PUSH_PAUSE_MS

    def connection_lost(self, peer: NodeId) -> None:
        """The push connection to ``peer`` broke."""
        if self._push_times is not None:
            self._push_times.lost(peer)
        self._driver.call(lambda _now_ms: self._node.connection_lost(peer))

    def follows(self, peer: NodeId) -> Term | None:
        try:
            return self._driver.look(lambda node: node.follows(peer), patience_s=self._patience_s)
        except NodeBusyError:
            return None

    def leader_lost(self, peer: NodeId, term: Term, *, gone: bool) -> None:
        with suppress(NodeBusyError):  # then its silence tells
            self._driver.call(
                lambda now_ms: self._node.leader_lost(peer, term, now_ms, gone=gone), patience_s=self._patience_s
            )


class ClientRequests:
    """The requests of ``rpc.ports.LogNode`` that the core or the state machine answers; a node's server is one."""

    _config: ServerConfig
    _node: Node
    _driver: NodeDriver
    _instruments: Instruments
    _machine: MachineHost | None
    _leader_hint: Callable[[NodeId | None], LeaderHint | None]
    """From the id in an error to the address at which clients find the leader."""

    def submit_append(
        self,
        bodies: Sequence[Body],
        done: Callable[[AppendedBatch | DLedgerError], None],
        producer: ProducerBatch | None = None,
    ) -> None:
        append = partial(self._node.quorum_ack.append, bodies, producer=producer)
        self._submit(append, self._instruments.timed(done))

    def submit_prepared(
        self,
        prepared: PreparedAppend,
        done: Callable[[AppendedBatch | DLedgerError], None],
        producer: ProducerBatch | None = None,
    ) -> None:
        """Append a batch made by ``prepared`` under the node's lock; otherwise like ``submit_append``.

        ``producer`` must give the number of entries (``ProducerBatch.count``).
        """
        append = partial(self._node.quorum_ack.append_prepared, prepared, producer=producer)
        self._submit(append, self._instruments.timed(done))

    def submit_commands(
        self,
        commands: Sequence[Body],
        done: Callable[[tuple[bytes, ...] | DLedgerError], None],
        producer: ProducerBatch | None = None,
    ) -> None:
        if (machine := self._machine) is None:
            done(self._no_machine())
            return
        machine.submit_commands(commands, done, producer, self.submit_prepared)

    def submit_query(
        self,
        request: bytes,
        done: Callable[[QueryAnswer | DLedgerError], None],
        *,
        linearizable: bool = True,
        after: LogIndex = NO_INDEX,
        wait_ms: int = 0,
    ) -> None:
        if (machine := self._machine) is None:
            done(self._no_machine())
            return
        if not linearizable:
            machine.query(request, LogIndex(after + 1) if wait_ms else NO_INDEX, wait_ms, done, even_if_late=True)
            return
        timeout_ms = self._config.replication.ack_timeout_ms

        def confirmed(index: LogIndex | DLedgerError) -> None:
            if isinstance(index, DLedgerError):
                done(index)
            else:
                machine.query(request, index, timeout_ms, done, even_if_late=False)

        self.submit_read_index(confirmed)

    def submit_snapshot(self, done: Callable[[SnapshotState | DLedgerError], None]) -> None:
        if (machine := self._machine) is None:
            done(self._no_machine())
            return

        def saved(result: SnapshotMeta | DLedgerError) -> None:
            done(result if isinstance(result, DLedgerError) else SnapshotState(result.index, result.size))

        machine.request_snapshot(saved)

    def _no_machine(self) -> NoStateMachineError:
        return NoStateMachineError(
            f"the log of group {self._config.group!r} has no state machine on {self._config.node_id}: append and read "
            "entries, or start its nodes with a state machine"
        )

    def submit_producer(self, name: str, done: Callable[[int | DLedgerError], None]) -> None:
        self._submit(partial(self._node.producer_sequence, name), done)

    def submit_read_index(self, done: Callable[[LogIndex | DLedgerError], None]) -> None:
        self._submit(self._node.reads.submit, done)

    def submit_transfer(self, target: NodeId | None, done: Callable[[LeaderHint | DLedgerError], None]) -> None:
        self._submit(partial(self._node.elector.transfer, target), done)

    def submit_member_change(self, change: MemberChange, done: Callable[[Configuration | DLedgerError], None]) -> None:
        def answer(result: Configuration | DLedgerError) -> None:
            self._instruments.members_changed(change.kind, result if isinstance(result, DLedgerError) else None)
            done(result)

        self._submit(partial(self._node.changes.submit, change), answer)

    def change_members(self, change: MemberChange, timeout_s: float) -> Configuration:
        """Change the members, and wait for the new configuration to be committed.

        Raises ``DLedgerError``; the outcome is unknown if there is no answer within ``timeout_s``.
        """
        answers: queue.SimpleQueue[Configuration | DLedgerError] = queue.SimpleQueue()
        self.submit_member_change(change, answers.put)
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RequestTimeoutError(f"the change was not committed within {timeout_s:g} s") from None
        if isinstance(answer, DLedgerError):
            raise answer
        return answer

    def _submit(
        self,
        action: Callable[..., object],
        done: Callable[[_Result | DLedgerError], None],
    ) -> None:
        """Run the core's ``action(now_ms, done=...)``.

        The core's leader hints, which contain ids only, are completed with client addresses. ``done`` is called once: a
        node that fails while it carries out a request refuses it, and answers it again when it stops.
        """
        left = [done]

        def answer(result: _Result | DLedgerError) -> None:
            try:
                done = left.pop()
            except IndexError:
                return
            if isinstance(result, DLedgerError) and result.leader is not None:
                result.leader = self._leader_hint(result.leader.node_id)
            elif isinstance(result, NotLeaderError) and (removed := self.removed):
                done(MemberRemovedError(f"{removed}: ask another member. To join again, it must be added anew"))
                return
            done(result)

        try:
            self._driver.call(partial(action, done=answer))
        except DLedgerError as error:
            answer(error)

    @property
    def removed(self) -> str:
        """Why this node is no member of its group any more; empty if it is, or was never one."""
        state = self._node.state
        committed, has_standing = state.membership.committed, state.has_standing
        at = removal_index(self._config.node_id, committed, state.removed_at, has_standing=has_standing)
        return "" if at == NO_INDEX else f"{self._config.node_id} was removed from the group (configuration {at})"
