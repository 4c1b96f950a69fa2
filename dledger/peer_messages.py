"""Messages that a node's peers send: each is given to the core, under the node's lock; runs are verified before.

The threads of the transport call it. Messages to peers go the other way: from the core's outbox to the transport.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from dledger.clock import Clock
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
from dledger.errors import InvalidRequestError, NodeBusyError
from dledger.group_members import MemberWatch
from dledger.runtime.driver import NodeDriver
from dledger.runtime.events import PushTimes
from dledger.store.file_store import FileStore
from dledger.types import NodeId, Term

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
        self._log = log
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
            checked = self._log.check_run(message.run)
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
