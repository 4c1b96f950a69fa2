"""A node's events for its application, for people and for figures.

Users of the library are notified of role changes in order, on an own thread, outside every lock.

A node's log has one line per event, with the same facts as fields. The fields are attributes of the log record
(``extra``), so that a formatter can write them as JSON: ``event`` names the kind of line; none of them is secret.

``PushTimes`` measures the time from a push to its acknowledgement. One answer may acknowledge several pushes, so each
push is remembered until an index at or above its last one is acknowledged. Pushes on a broken connection are forgotten.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from dledger.core.membership import Membership
from dledger.core.messages import PushAppend, PushKind, PushResponse, RoleChange, RoleReason
from dledger.errors import ResponseCode
from dledger.monitoring import Instruments
from dledger.runtime.threads import Supervisor
from dledger.types import NO_INDEX, ClusterMember, Configuration, LogIndex, MemberRole, NodeId, Term
from dledger.values import address_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

JOIN_TIMEOUT_S = 10.0


class RoleChangeHandler(Protocol):
    """Follows a member's role, for example a broker that becomes master with it.

    All methods run on the role-change thread, one after the other. A handler may take its time: changes queue up (at
    most one per term and kind, so they stay few) and arrive in order. An exception stops the node.
    """

    def startup(self) -> None:
        """The node has started; no change has been reported yet."""

    def role_changed(self, change: RoleChange) -> None:
        """The member's role, term or known leader is now as ``change`` says."""

    def shutdown(self) -> None:
        """The node is stopping; no further change follows."""


class RoleChangeNotifier:
    """Queues changes and passes them to the handlers."""

    def __init__(self, node_name: str, supervisor: Supervisor) -> None:
        self._queue: queue.SimpleQueue[RoleChange | None] = queue.SimpleQueue()
        self._handlers: tuple[RoleChangeHandler, ...] = ()
        self._listeners_lock = threading.Lock()  # guards the replacement of _listeners
        self._listeners: tuple[Callable[[RoleChange], None], ...] = ()
        self._thread = supervisor.thread(f"dledger-role-change-{node_name}", self._run)

    def add_handler(self, handler: RoleChangeHandler) -> None:
        """Register a handler; only before ``start``."""
        self._handlers = (*self._handlers, handler)

    def publish(self, change: RoleChange) -> None:
        """Queue a change; never blocks."""
        self._queue.put(change)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Deliver queued changes, call ``shutdown`` on the handlers, end the thread. Idempotent.

        A handler may stop the node, too: then the thread ends by itself, once that handler has returned.
        """
        self._queue.put(None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def listen(self, listener: Callable[[RoleChange], None]) -> Callable[[], None]:
        """Call ``listener`` for every change from now on, until the returned function is called."""
        with self._listeners_lock:
            self._listeners = (*self._listeners, listener)

        def cancel() -> None:
            with self._listeners_lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        return cancel

    def _run(self) -> None:
        for handler in self._handlers:
            handler.startup()
        while (change := self._queue.get()) is not None:
            for handler in self._handlers:
                handler.role_changed(change)
            for listener in self._listeners:
                listener(change)
        for handler in self._handlers:
            handler.shutdown()


_log = logging.getLogger("dledger")


class NodeLines:
    def __init__(self, name: str) -> None:
        self._name = name
        self._members = Configuration(), Configuration()

    def members_are(self, membership: Membership) -> None:
        """Those at the start."""
        self._members = membership.committed, membership.current

    def recovered(self, report: DataclassInstance) -> None:
        """Log the result of opening the log."""
        fields: dict[str, Any] = asdict(report)  # Any: numbers, texts and paths
        _log.info("%s: %s", self._name, report, extra={"event": "recovery", **fields})

    def members_changed(self, membership: Membership) -> None:
        """Log a configuration that was adopted, committed or reverted, with what became different."""
        before, after = self._members, (membership.committed, membership.current)
        self._members = after
        (old_committed, old), (committed, new) = before, after
        if new.index > old.index:
            self._tell_members("adopted", old, new)
        elif new.index < old.index:
            self._tell_members("reverted", old, new)
        if committed.index > old_committed.index:
            self._tell_members("committed", old_committed, committed)

    def _tell_members(self, what: str, old: Configuration, new: Configuration) -> None:
        which = "as configured" if new.index == NO_INDEX else f"of entry {new.index}, term {new.term}"
        change = difference_text(old, new)
        extra = {"event": "members", "change": what, "index": new.index, "term": new.term, "difference": change}
        text = "%s: members %s: %s, %s (%s)"
        _log.info(text, self._name, what, members_text(new), which, change, extra=extra)

    def role_changed(self, change: RoleChange) -> None:
        """Log a change of role, term or leader, and its reason."""
        leader, reason = change.leader or "unknown", change.reason or "unknown"
        extra = {"event": "role_change", "role": change.role, "term": change.term, "leader": leader, "reason": reason}
        text = "%s is %s in term %d, leader %s: %s"
        _log.info(text, self._name, change.role, change.term, leader, reason, extra=extra)
        if change.reason is RoleReason.UNREADABLE_PRODUCERS:
            text = "%s cannot lead: its log contains producer state from a later version. Run that version here"
            _log.error(text, self._name, extra=extra)


def member_text(member: ClusterMember) -> str:
    """``n4``, ``n4 (learner)`` or ``n4 (learner, replaces n3)``."""
    words = ["learner"] if member.role is MemberRole.LEARNER else []
    if member.replaces:
        words.append(f"replaces {member.replaces}")
    elif member.promote:
        words.append("becomes a voter")
    return f"{member.node_id} ({', '.join(words)})" if words else member.node_id


def members_text(configuration: Configuration) -> str:
    """All of them; ``nobody`` if there are none."""
    return ", ".join(map(member_text, configuration.members)) or "nobody"


def difference_text(old: Configuration, new: Configuration) -> str:
    """The difference: ``+n4 (learner), -n3``."""
    found: list[str] = []
    for one in new.members:
        before = old.find(one.node_id)
        if before is None:
            found.append(f"+{member_text(one)}")
        elif before.role is not one.role:
            found.append(f"{one.node_id}: {before.role.name.lower()} → {one.role.name.lower()}")
        elif (before.host, before.port) != (one.host, one.port):
            found.append(f"{one.node_id} at {address_text(one.host, one.port)}")
        elif member_text(before) != member_text(one):
            found.append(member_text(one))
        elif before.uid != one.uid:
            found.append(f"{one.node_id} with a new memory")
    found += [f"-{one.node_id}" for one in old.members if new.find(one.node_id) is None]
    return ", ".join(found) or "the same members"


def peers_setting(configuration: Configuration) -> str:
    """These members as the setting ``dLegerPeers`` names them."""
    return ";".join(f"{one.node_id}-{address_text(one.host, one.port)}" for one in configuration.members)


REMEMBERED_MAX: Final = 256
"""Pushes per peer; more than any window, so that only pushes that will not be answered are dropped."""


@dataclass(frozen=True, slots=True)
class _Sent:
    term: Term
    last_index: LogIndex
    entries: int
    size_bytes: int
    at_s: float


class PushTimes:
    """The times of one leader. ``sent`` and ``answered`` of a peer may run at once, each on one thread at a time."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._sent: dict[NodeId, deque[_Sent]] = {}

    def sent(self, peer: NodeId, push: PushAppend) -> None:
        """Record a push being sent."""
        run = push.run
        entries = run.last_index - run.first_index + 1
        waiting = self._sent.get(peer)
        if waiting is None:
            waiting = self._sent.setdefault(peer, deque(maxlen=REMEMBERED_MAX))
        waiting.append(_Sent(push.term, run.last_index, entries, len(run.data), time.monotonic()))

    def answered(self, peer: NodeId, answer: PushResponse) -> None:
        """Record a follower's answer."""
        if answer.kind is not PushKind.APPEND or answer.code is not ResponseCode.SUCCESS:
            return
        waiting = self._sent.get(peer)
        while waiting and waiting[0].last_index <= answer.flushed_index:
            push = waiting.popleft()
            if push.term == answer.term:
                took_s = time.monotonic() - push.at_s
                self._instruments.push_acknowledged(peer, push.entries, push.size_bytes, took_s)

    def lost(self, peer: NodeId) -> None:
        """The connection broke: forget the pushes in flight."""
        self._sent.pop(peer, None)
