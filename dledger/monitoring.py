"""A node's or a broker's present problems, as named conditions that begin and end, and its measuring points.

One ``Conditions`` per node; a replicated broker shares its node's. The code that notices a problem sets a condition,
and clears it once it is over. ``dledger status``, the metric ``dledger_condition``, its alerts and the console's events
show the conditions; nothing is decided by them. Thread-safe and cheap enough for hot paths, also under the node's lock.
The core imports no threads, so it informs its driver instead (by its state, or by a ``RoleReason``).

``Instruments`` are the measuring points of the hot paths: one call per batch, push or flush, never one per entry. They
do nothing; ``dledger_cli.metrics`` overrides them. Calls come from any thread, also under the node's lock or the
store's flush lock, so they must be quick, must not block and must not raise. Figures that can be read from a node's
state on demand (indexes, lags, pending entries) come from ``DLedgerServer.measure`` instead.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from dledger.clock import Clock
from dledger.errors import DLedgerError
from dledger.log_output import speaks_for
from dledger.records import record
from dledger.types import AppendedBatch, ChangeKind, NodeId

_log = logging.getLogger("dledger")

CONDITIONS_MAX: Final = 64
"""The limit of simultaneous conditions of a node; further ones are only logged."""
TEXT_MAX: Final = 500
REMOVED_EARLY_TOLD_MS: Final = 3_600_000
LIMIT_TOLD_MS: Final = 60_000
"""How long a limit counts as reached after it refused something."""
_SETTING: Final = re.compile(r"\(([a-z]+_[a-z_]+)[,)]")


class ConditionKind(StrEnum):
    """The kinds of problems. Values are on the wire, in the metric's label and in log lines."""

    NO_STANDING = "no_standing"
    """Its vote and its acknowledgements do not count: its memory is new, or in doubt."""
    FENCED = "fenced"
    """It does not serve: its history is not the group's."""
    DIVERGED = "diverged"
    """A digest of its committed log differs from its leader's."""
    DAMAGED = "damaged"
    """Stored bytes are damaged, or a file is missing. The subject is the file."""
    REPAIRING = "repairing"
    """It fetches from its peers what was damaged, missing or outdated."""
    STUCK_LEADER = "stuck_leader"
    """It leads, or did a moment ago, without making progress."""
    DISK_FULL = "disk_full"
    """It accepts no entries for lack of space."""
    REMOVED_EARLY = "removed_early"
    """It removed entries or messages before they had expired, because its disk was filling and its settings ask for
    that (``force_clean``, ``cleanFileForciblyEnable``). Holds for an hour after the last time."""
    MISNUMBERED = "misnumbered"
    """Messages got queue offsets that had been given out before, so they cannot be read from their queue, which is the
    subject. Holds until the broker is started again."""
    OTHER_OLD_LOG = "other_old_log"
    """It does not talk to a peer, which is the subject: the old logs that their own continue differ."""
    NOT_REPLICATING = "not_replicating"
    """Master and slave, of classic replication: a slave does not get its master's log, or a master lacks slaves. The
    subject is the other side."""
    SUPERSEDED = "superseded"
    """A plain master that came back: another broker has become master of its log meanwhile. It takes no messages."""
    DIFFERENT_SUBSCRIPTIONS = "different_subscriptions"
    """Consumers of one group, which is the subject, subscribe to different topics, or to different messages of one, so
    each misses those in the queues of the others. Holds for 90 s after the last heartbeat that showed it."""
    SHARED_CLIENT_ID = "shared_client_id"
    """Two consumers of one group, which is the subject, have the same client id, so they read some queues twice and
    others not at all. Holds as long."""
    CLOCK = "clock"
    """The clock was set (subject ``jump``, for an hour), or the newest message is from the future (``ahead``)."""
    REMOVED = "removed"
    """It is no member of its group any more: it serves what it has, and takes part in nothing."""
    MEMBER_GONE = "member_gone"
    """The leader has not heard from a member, which is the subject, for ten minutes."""
    DUPLICATE_MEMBER = "duplicate_member"
    """Two processes have the id of one member, which is the subject. Holds for a minute after the last sign of it."""
    GROUP_FAILED = "group_failed"
    """The member of another group of this process, which is the subject, has failed and stopped. Holds until the
    process is started again."""
    CHANGE_STUCK = "change_stuck"
    """It leads, and a change of the members has not been committed for ten seconds."""
    PEERS_DIFFER = "peers_differ"
    """Its settings name other members than the group has. That does no harm while some of them are right."""
    TIMED_MESSAGES = "timed_messages"
    """Messages that wait for a time of their own take up more than a fifth of a broker's log."""
    SNAPSHOT_FAILED = "snapshot_failed"
    """A snapshot of its state machine was not written, or (subject ``snapshot``) not fetched; it is tried again."""
    SNAPSHOT_OVERDUE = "snapshot_overdue"
    """For a minute and more, expired entries have stayed because no snapshot includes them."""
    APPLIER_WAITING = "applier_waiting"
    """Its state machine does not get on: the log lacks the next entry, or has it damaged."""
    AT_LIMIT = "at_limit"
    """A bounded resource has reached its limit, and requests are refused for it. The subject is the resource."""


@record(frozen=True, slots=True)
class Condition:
    """One present problem, since ``since_ms`` (Unix time).

    ``kind`` is a ``ConditionKind``, or a later version's word in another node's report. ``subject`` distinguishes
    conditions of one kind: a file, a resource, a peer.
    """

    kind: str
    message: str
    since_ms: int
    subject: str = ""


@dataclass(slots=True)
class _Held:
    condition: Condition
    until_ms: int | None  # monotonic


class Conditions:
    """The conditions of the node (or plain broker) called ``name``."""

    def __init__(self, name: str, clock: Clock | None = None, group: str = "") -> None:
        """``group``: whose log lines begin and end of conditions are, whichever thread notices them."""
        self._name = name
        self._group = group
        self._clock: Clock = clock or Clock()
        self._lock = threading.Lock()  # guards _held and _left_out; a leaf: nothing is called while it is held
        self._held: dict[tuple[str, str], _Held] = {}
        self._left_out = False

    def set(self, kind: ConditionKind, message: str, *, subject: str = "", for_ms: int | None = None) -> None:
        """Begin a condition, or continue it with a new message.

        ``for_ms``: it ends by itself unless it is set again within that time (for limits, which are never cleared).
        """
        until_ms = None if for_ms is None else self._clock.monotonic_ms() + for_ms
        message, key = _text(message), (kind.value, _text(subject))
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                if held.condition.message != message:
                    held.condition = replace(held.condition, message=message)
                held.until_ms = until_ms
                return
            if len(self._held) >= CONDITIONS_MAX:
                left_out, self._left_out = self._left_out, True
                if left_out:
                    return
            else:
                condition = Condition(kind.value, message, self._clock.wall_ms(), key[1])
                self._held[key] = _Held(condition, until_ms)
        self._say(kind, key[1], message, began=True)

    def limit(self, why: str) -> None:
        """Record that something was refused because a bounded resource is at its limit.

        ``why`` is the refusal's text; the resource is the setting that it names last in parentheses.
        """
        named = _SETTING.findall(why)
        self.set(ConditionKind.AT_LIMIT, why, subject=named[-1] if named else "requests", for_ms=LIMIT_TOLD_MS)

    def clear(self, kind: ConditionKind, subject: str = "") -> None:
        """End a condition; does nothing if it does not hold."""
        key = (kind.value, _text(subject))
        if key not in self._held:  # one dict lookup: clearing what does not hold costs nothing
            return
        with self._lock:
            held = self._held.pop(key, None)
            self._left_out = False
        if held is not None:
            self._over(held)

    def holds(self, kind: ConditionKind, subject: str | None = None) -> bool:
        """Whether one of this kind holds (``subject`` None: any)."""
        return any(one.kind == kind and subject in (None, one.subject) for one in self.now())

    def now(self) -> tuple[Condition, ...]:
        """The present conditions, oldest first; ends the expired ones."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            over = [key for key, held in self._held.items() if held.until_ms is not None and held.until_ms <= now_ms]
            ended = [self._held.pop(key) for key in over]
            found = tuple(held.condition for held in self._held.values())
        for held in ended:
            self._over(held)
        return found

    def _over(self, held: _Held) -> None:
        condition = held.condition
        lasted_s = max(0, self._clock.wall_ms() - condition.since_ms) / 1000
        message = f"over after {lasted_s:.1f} s ({condition.message})"
        self._say(ConditionKind(condition.kind), condition.subject, message, began=False)

    def _say(self, kind: ConditionKind, subject: str, message: str, *, began: bool) -> None:
        extra = {"event": "condition", "condition": kind.value, "subject": subject, "began": began}
        about = f" {subject}" if subject else ""
        level = logging.WARNING if began else logging.INFO
        with speaks_for(self._group):
            _log.log(level, "%s: %s%s: %s", self._name, kind.value, about, message, extra=extra)


def _text(given: str) -> str:
    """Bounded, and valid UTF-8 whatever a file is called."""
    return given[:TEXT_MAX].encode("utf-8", "replace").decode()


AppendDone = Callable[[AppendedBatch | DLedgerError], None]


class Instruments:
    """Ignores every measurement."""

    def wrote(self, entries: int, size_bytes: int, *, as_leader: bool) -> None:
        """A batch is in the log, not yet flushed: the leader's own, or a run that a follower took from its leader."""

    def timed(self, done: AppendDone) -> AppendDone:
        """Wrap the completion of a leader's append, to measure its duration and result."""
        return done

    def push_acknowledged(self, peer: NodeId, entries: int, size_bytes: int, took_s: float) -> None:
        """``peer`` acknowledged a push (durably, unless it flushes asynchronously) after this time."""

    def members_changed(self, kind: ChangeKind, error: DLedgerError | None) -> None:
        """A request to change the members was carried out, or refused."""

    def flushed(self, size_bytes: int, took_s: float) -> None:
        """Written bytes have become durable."""


SILENT: Final = Instruments()
"""For nodes without measurements."""
