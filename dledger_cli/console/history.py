"""The console's memory of a group: last responses, roles over time, series for the charts, events.

Everything is bounded. Changes are numbered, so that a page is sent only those it does not have. Times are milliseconds
since 1970 on the console's clock. A node says for how long it has had its role; the other times, and those of nodes
that do not say it, are when the console *saw* a change: up to one sampling interval late.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, TypeVar

from dledger.monitoring import Condition, ConditionKind
from dledger_cli.console.probe import Answer, BrokerSummary, MembershipSummary, NodeState, NodeSummary

NODES_MAX: Final = 32
CHANGES_MAX: Final = 400
"""Per node."""
EVENTS_MAX: Final = 200
POINTS_MAX: Final = 1800
"""Half an hour at one point per second."""
POINT_MS: Final = 1000
SILENT_MS: Final = 1500
"""A node that has not responded for this long is unreachable; one that refuses connections is so at once."""
TEXT_MAX: Final = 300
_CONDITION_WORDS: Final[Mapping[str, tuple[str, str]]] = {
    ConditionKind.NO_STANDING: ("has no standing", "has standing again"),
    ConditionKind.DISK_FULL: ("has a full disk", "has room on its disk again"),
    ConditionKind.REMOVED_EARLY: ("has removed unexpired entries", "has removed none for an hour"),
    ConditionKind.OTHER_OLD_LOG: ("has another old log than its peer", "has the same old log as its peer again"),
    ConditionKind.STUCK_LEADER: ("is a stuck leader", "is no longer a stuck leader"),
    ConditionKind.NOT_REPLICATING: ("does not replicate", "replicates again"),
    ConditionKind.REMOVED: ("is removed from the group", "is no longer removed"),
    ConditionKind.MEMBER_GONE: ("has lost a member", "has the member again"),
    ConditionKind.DUPLICATE_MEMBER: ("has a member twice", "has the member once"),
    ConditionKind.GROUP_FAILED: ("has a failed group in its process", "has no failed group in its process"),
    ConditionKind.CHANGE_STUCK: ("has a stuck change of members", "has finished the change of members"),
    ConditionKind.PEERS_DIFFER: ("has settings that name other members", "has settings that name the members"),
    ConditionKind.AT_LIMIT: ("is at a limit", "is no longer at a limit"),
}
ALIVE: Final = (NodeState.LEADER, NodeState.FOLLOWER, NodeState.CANDIDATE, NodeState.PLAIN)


@dataclass(frozen=True, slots=True)
class Change:
    """The state of a node from ``at_ms`` on."""

    number: int
    node: str
    at_ms: int
    state: NodeState
    term: int


@dataclass(frozen=True, slots=True)
class ConsoleEvent:
    """An event for the user. ``gap_ms``: how long no leader was seen before this one; -1 if unknown."""

    number: int
    at_ms: int
    kind: str
    node: str
    term: int
    text: str
    gap_ms: int = -1


@dataclass(frozen=True, slots=True)
class Point:
    """One second of the charts; a rate is None if unknown."""

    number: int
    at_ms: int
    entries_per_s: float | None
    bytes_per_s: float | None
    puts_per_s: float | None
    gets_per_s: float | None
    latency_ms: dict[str, float]


_Numbered = TypeVar("_Numbered", Change, ConsoleEvent, Point)


@dataclass(slots=True)
class _NodeHistory:
    """One node. ``summary`` is kept when it stops responding, so that the last known positions stay on the page."""

    node: str
    address: str
    state: NodeState = NodeState.UNKNOWN
    since_ms: int = 0
    answered_ms: int = 0
    silent_since_ms: int = 0
    latency_ms: float = -1.0
    error: str = ""
    summary: NodeSummary | None = None
    broker: BrokerSummary | None = None
    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))


@dataclass(frozen=True, slots=True)
class _Mark:
    """The group's positions at some time, to calculate rates from."""

    at_ms: int
    end: int
    position: int


class History:
    """Thread-safe. ``on_change`` is called outside the lock, on the thread that reported the change."""

    def __init__(self, addresses: Sequence[str], on_change: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()  # guards all fields
        self._given = tuple(dict.fromkeys(addresses))[:NODES_MAX]
        self._nodes: dict[str, _NodeHistory] = {}  # by node id
        self._strangers: dict[str, _NodeHistory] = {}  # given addresses at which no node has answered yet
        self._node_at: dict[str, str] = {}
        self._number = 0
        self._events: deque[ConsoleEvent] = deque(maxlen=EVENTS_MAX)
        self._points: deque[Point] = deque(maxlen=POINTS_MAX)
        self._mark: _Mark | None = None
        self._leader = ""
        self._leader_term = 0
        self._leader_since_ms = 0
        self._leader_began = False
        """Whether the current leader's start was seen; otherwise it may have led for a long time."""
        self._seen_without_leader = False
        self._leader_seen_ms = 0
        self._lost_ms = 0
        self._memberships: dict[str, MembershipSummary] = {}  # by node id; empty until a node of a group responded
        self._configuration = 0, -2
        """The term of the leader that told them, and the configuration's index."""
        self._on_change = on_change
        for address in self._given:
            self._strangers[address] = _NodeHistory(address, address)

    # --- what the sampler brings -------------------------------------------------------------------------------------

    def answered(self, address: str, answer: Answer, now_ms: int) -> None:
        """Record a response of the node at ``address``."""
        summary = answer.summary
        with self._lock:
            known = self._node_of(address, summary)
            if known is None:
                return
            changed = self._compare_conditions(known, summary, now_ms)
            known.summary, known.broker, known.latency_ms = summary, answer.broker, answer.latency_ms
            known.answered_ms, known.silent_since_ms, known.error = now_ms, 0, ""
            changed |= self._enter(known, summary.state, summary.term, now_ms, summary.role_age_ms)
            changed |= self._see_members(summary, now_ms)
            changed |= self._meet(summary)
            changed |= self._see_leader(now_ms)
            self._measure(now_ms)
        if changed:
            self._on_change()

    def failed(self, address: str, error: Exception, now_ms: int, *, silent: bool) -> None:
        """Record that the node at ``address`` did not respond; ``silent``: it timed out, like a paused or slow one."""
        with self._lock:
            known = self._nodes.get(self._node_at.get(address, "")) or self._strangers.get(address)
            if known is None or known.address != address:
                return
            known.silent_since_ms = known.silent_since_ms or known.answered_ms or now_ms
            reason = str(error).removeprefix(f"{address} is unreachable: ")  # it stands beside its address
            known.error = reason[:TEXT_MAX]
            if silent and known.state is not NodeState.UNKNOWN and now_ms - known.silent_since_ms < SILENT_MS:
                return
            term = known.summary.term if known.summary is not None else 0
            changed = self._enter(known, NodeState.UNREACHABLE, term, now_ms)
            changed |= self._see_leader(now_ms)
            self._measure(now_ms)
        if changed:
            self._on_change()

    def tell(self, kind: str, node: str, text: str, now_ms: int) -> None:
        """Add an event about something the console did or noticed."""
        with self._lock:
            self._add_event(kind, node, 0, text, now_ms)
        self._on_change()

    # --- what it is asked --------------------------------------------------------------------------------------------

    def addresses(self) -> tuple[str, ...]:
        """All addresses to poll: given ones, and those of members that were not reached at a given one."""
        with self._lock:
            return tuple(
                dict.fromkeys((*self._given, *(known.address for known in self._nodes.values() if known.address)))
            )

    @property
    def group(self) -> str:
        """The group's name; empty until a node responded."""
        with self._lock:
            return next((known.summary.group for known in self._nodes.values() if known.summary is not None), "")

    @property
    def kind(self) -> str:
        """``log``, ``brokers``, ``broker`` (a plain one), or ``unknown`` until a node responded."""
        with self._lock:
            return self._kind()

    def unsettled(self, now_ms: int) -> bool:
        """Whether to poll more often, because there is no leader or there was none a moment ago."""
        with self._lock:
            if self._kind() in ("unknown", "broker"):
                return False
            return (not self._leader and now_ms - self._lost_ms < 15_000) or now_ms - self._leader_since_ms < 1000

    def snapshot(self, now_ms: int) -> dict[str, object]:
        """The whole state, for a new page."""
        with self._lock:
            return {
                **self._present(now_ms),
                "changes": [_change(one) for known in self._all_nodes() for one in known.changes],
                "events": [asdict(one) for one in self._events],
                "points": [asdict(one) for one in self._points],
                "number": self._number,
            }

    def update(self, after: int, now_ms: int) -> dict[str, object]:
        """The current state, and changes after number ``after``."""
        with self._lock:
            return {
                **self._present(now_ms),
                "changes": [_change(one) for known in self._all_nodes() for one in _behind(known.changes, after)],
                "events": [asdict(one) for one in _behind(self._events, after)],
                "points": [asdict(one) for one in _behind(self._points, after)],
                "number": self._number,
            }

    # --- under the lock ----------------------------------------------------------------------------------------------

    def _node_of(self, address: str, summary: NodeSummary) -> _NodeHistory | None:
        """The history of the node that answered at ``address``; None if it is of another group, or beyond the limit."""
        group = next(
            (known.summary.group for known in self._nodes.values() if known.summary is not None), summary.group
        )
        known = self._nodes.get(summary.node_id)
        if summary.group != group or (known is None and len(self._nodes) >= NODES_MAX):
            stranger = self._strangers.get(address)
            if stranger is not None:
                stranger.error = f"{summary.node_id} of group {summary.group} answers here, not a node of {group}"[
                    :TEXT_MAX
                ]
                stranger.state = NodeState.UNREACHABLE
            return None
        self._strangers.pop(address, None)
        if known is None:
            known = self._nodes[summary.node_id] = _NodeHistory(summary.node_id, address)
        elif known.address != address and (known.state not in ALIVE or self._is_better(address, known.address)):
            known.address = address
        self._node_at[address] = summary.node_id
        return known

    def _is_better(self, address: str, than: str) -> bool:
        return address in self._given and than not in self._given

    def _see_members(self, summary: NodeSummary, now_ms: int) -> bool:
        """Take over who the members are, from a leader or from a node that knows newer ones; add events for changes."""
        term, index = self._configuration
        leads = summary.state is NodeState.LEADER and summary.term >= term
        if not summary.memberships or not (leads or summary.configuration > index):
            return False
        before, after = self._memberships, {one.node: one for one in summary.memberships}
        self._configuration = max(term, summary.term if leads else 0), summary.configuration
        self._memberships = after
        if not before:
            return True
        for node in sorted(before.keys() | after.keys()):
            if (text := _member_sentence(node, before.get(node), after.get(node))) is not None:
                self._add_event("members", node, summary.term, text, now_ms)
        return before.keys() != after.keys()

    def _meet(self, summary: NodeSummary) -> bool:
        """Create nodes for members never polled; given addresses without a response may be theirs."""
        met = False
        for node, address in summary.members:
            if self._is_removed(node):  # it does not know yet
                continue
            known = self._nodes.get(node)
            if known is None and len(self._nodes) < NODES_MAX:
                known = self._nodes[node] = _NodeHistory(node, address)
                met = True
            if known is not None and known.summary is None and address:
                known.address = address
                self._node_at[address] = node
            self._strangers.pop(address, None)
        return met

    def _enter(self, known: _NodeHistory, state: NodeState, term: int, now_ms: int, age_ms: int = -1) -> bool:
        """``age_ms``: for how long the node says that it has been so; -1: it does not say."""
        last = known.changes[-1] if known.changes else None
        if last is not None and last.state is state and last.term == term:
            return False
        before, known.state = known.state, state
        at_ms = now_ms
        if age_ms >= 0 and before is not NodeState.UNREACHABLE:  # what it was in the meantime, only the console saw
            at_ms = max(now_ms - age_ms, last.at_ms if last is not None else 0)
        if before is not state:
            known.since_ms = at_ms
        self._number += 1
        known.changes.append(Change(self._number, known.node, at_ms, state, term))
        if (text := _sentence(known.node, before, state, term)) is not None:
            self._add_event(state, known.node, term, text, now_ms)
        return True

    def _compare_conditions(self, known: _NodeHistory, summary: NodeSummary, now_ms: int) -> bool:
        """Add an event for each condition that began or ended since the node's last response."""
        before = {} if known.summary is None else {(one.kind, one.subject): one for one in known.summary.conditions}
        now = {(one.kind, one.subject): one for one in summary.conditions}
        for key, one in now.items():
            if key not in before:
                text = f"{known.node} {_told(one)[0]}: {one.message}"
                self._add_event("condition", known.node, summary.term, text, now_ms)
        for key, one in before.items():
            if key not in now:
                text = f"{known.node} {_told(one)[1]}"
                self._add_event("condition-over", known.node, summary.term, text, now_ms)
        return before.keys() != now.keys()

    def _see_leader(self, now_ms: int) -> bool:
        leaders = [
            (known.summary.term, known.answered_ms, known.node)
            for known in self._nodes.values()
            if known.summary is not None and known.state is NodeState.LEADER
        ]
        if not leaders:
            states = {known.state for known in self._nodes.values()}
            self._seen_without_leader |= bool(states.intersection(ALIVE)) and NodeState.UNKNOWN not in states
            lost, self._leader = bool(self._leader), ""
            self._lost_ms = now_ms if lost else self._lost_ms
            return lost
        term, seen_ms, node = max(leaders)  # an old leader that has not noticed yet does not count
        if (node, term) == (self._leader, self._leader_term):
            self._leader_seen_ms = seen_ms
            return False
        summary = self._nodes[node].summary
        age_ms = -1 if summary is None else summary.role_age_ms
        since_ms = max(seen_ms - max(age_ms, 0), 0)
        is_new = since_ms > self._leader_seen_ms  # otherwise it was out of sight, and has led all the time
        gap_ms = (since_ms if is_new else seen_ms) - self._leader_seen_ms if self._leader_seen_ms else -1
        self._leader_began = age_ms >= 0 or self._seen_without_leader or self._leader_seen_ms > 0
        self._leader, self._leader_term = node, term
        self._leader_since_ms, self._leader_seen_ms = since_ms, seen_ms
        text = f"{node} leads in term {term}" if self._leader_began else f"{node} already led in term {term}"
        self._add_event("leader", node, term, text, since_ms if age_ms >= 0 and is_new else now_ms, gap_ms)
        return True

    def _add_event(self, kind: str, node: str, term: int, text: str, now_ms: int, gap_ms: int = -1) -> None:
        self._number += 1
        self._events.append(ConsoleEvent(self._number, now_ms, kind, node, term, text[:TEXT_MAX], gap_ms))

    def _measure(self, now_ms: int) -> None:
        """Add a point when one is due. Rates are those of the most advanced node, whichever member leads."""
        last_ms = self._points[-1].at_ms if self._points else 0
        if now_ms - last_ms < POINT_MS or all(known.summary is None for known in self._nodes.values()):
            return
        alive = [
            (known, known.summary)
            for known in self._nodes.values()
            if known.summary is not None and known.state in ALIVE
        ]
        entries = position = None
        if alive:
            known, summary = max(alive, key=lambda one: (one[1].committed, one[0].answered_ms))
            mark = _Mark(known.answered_ms, summary.committed, summary.end_position)
            entries, position = _rates(self._mark, mark)
            entries = None if summary.unit == "bytes" else entries
            self._mark = mark if self._mark is None or mark.at_ms > self._mark.at_ms else self._mark
        serving = next((known.broker for known, _ in alive if known.broker and self._serves(known)), None)
        latencies = {known.node: round(known.latency_ms, 3) for known, _ in alive if known.latency_ms >= 0}
        puts = round(serving.put_tps, 2) if serving else None
        gets = round(serving.get_tps, 2) if serving else None
        self._number += 1
        self._points.append(Point(self._number, now_ms, entries, position, puts, gets, latencies))

    def _serves(self, known: _NodeHistory) -> bool:
        return known.state is NodeState.PLAIN or known.node == self._leader

    def _is_removed(self, node: str) -> bool:
        return bool(self._memberships) and node not in self._memberships

    def _all_nodes(self) -> list[_NodeHistory]:
        """All but those of removed members that are not heard from any more."""
        nodes = (self._nodes[node] for node in sorted(self._nodes))
        found = [one for one in nodes if one.state in ALIVE or not self._is_removed(one.node)]
        if any(known.summary is None for known in found):  # an unresponsive address may be that member's
            return found
        return [*found, *self._strangers.values()]

    def _kind(self) -> str:
        nodes = [known for known in self._nodes.values() if known.summary is not None]
        if not nodes:
            return "unknown"
        if any(known.state is NodeState.PLAIN or (known.summary and known.summary.unit == "bytes") for known in nodes):
            return "broker"
        return "brokers" if any(known.broker is not None for known in nodes) else "log"

    def _present(self, now_ms: int) -> dict[str, object]:
        nodes = self._all_nodes()
        leader = next((known.summary for known in nodes if known.summary and known.node == self._leader), None)
        if leader is not None:
            end, lags = leader.end, dict(leader.lags)
        else:
            end, lags = max((known.summary.end for known in nodes if known.summary), default=-1), {}
        some = next((known.summary for known in nodes if known.summary is not None), None)
        broker = next((known.broker for known in nodes if known.broker is not None), None)
        committed = max(
            (known.summary.committed for known in nodes if known.summary and known.state in ALIVE), default=-1
        )
        return {
            "now_ms": now_ms,
            "group": {
                "name": some.group if some else "",
                "cluster": broker.cluster if broker else "",
                "kind": self._kind(),
                "leader": self._leader,
                "term": self._leader_term if self._leader else max((_term(known) for known in nodes), default=0),
                "leader_since_ms": self._leader_since_ms if self._leader else 0,
                "leader_began": self._leader_began,
                "lost_ms": 0 if self._leader else self._lost_ms,
                "end": end,
                "committed": committed,
                "unit": some.unit if some else "entries",
                "configuration": self._configuration[1],
                "voters": [one.node for one in self._memberships.values() if one.role == "voter"],
            },
            "nodes": [self._node_json(known, end, lags.get(known.node)) for known in nodes],
        }

    def _node_json(self, known: _NodeHistory, end: int, lag: int | None) -> dict[str, object]:
        member = self._memberships.get(known.node)
        belonging = {"member": None if member is None else asdict(member), "removed": self._is_removed(known.node)}
        return {**_node_json(known, end, lag), **belonging}


def _member_sentence(node: str, before: MembershipSummary | None, after: MembershipSummary | None) -> str | None:
    """The event text of a change of the members."""
    if after is None:
        return f"{node} was removed from the group"
    if before is None:
        return f"{node} was added as a {after.role}" + (f": {after.intent}" if after.intent else "")
    if before.role != after.role:
        return f"{node} is a {after.role} now"
    return f"{node} is at {after.peer_address} now" if before.peer_address != after.peer_address else None


def _term(known: _NodeHistory) -> int:
    return known.summary.term if known.summary is not None else 0


def _sentence(node: str, before: NodeState, state: NodeState, term: int) -> str | None:
    """The event text of a known's change; ``_see_leader``, which knows the whole group, reports new leaders."""
    match state:
        case NodeState.UNREACHABLE:
            return f"{node} does not answer" if before is NodeState.UNKNOWN else f"{node} stopped answering"
        case NodeState.CANDIDATE:
            return f"{node} is a candidate (term {term})" if before is not state else None
        case NodeState.FOLLOWER if before is NodeState.LEADER:
            return f"{node} stepped down and follows"
        case NodeState.FOLLOWER | NodeState.LEADER | NodeState.PLAIN if before is NodeState.UNREACHABLE:
            return f"{node} answers again"
        case _:
            return None


def _told(condition: Condition) -> tuple[str, str]:
    """The words about a node when the condition begins, and when it is over.

    The end of the subject is the most informative part: a file's name.
    """
    words = condition.kind.replace("_", " ")
    begins, ends = _CONDITION_WORDS.get(condition.kind, (f"is {words}", f"is no longer {words}"))
    subject = f" ({condition.subject[-80:]})" if condition.subject else ""
    return f"{begins}{subject}", f"{ends}{subject}"


def _rates(before: _Mark | None, now: _Mark) -> tuple[float | None, float | None]:
    if before is None or now.at_ms - before.at_ms < POINT_MS / 4:
        return None, None
    seconds = (now.at_ms - before.at_ms) / 1000
    if now.end < before.end or now.position < before.position:  # a restarted node has yet to learn what is committed
        return None, None
    return round((now.end - before.end) / seconds, 2), round((now.position - before.position) / seconds, 1)


def _behind(items: deque[_Numbered], after: int) -> list[_Numbered]:
    """The items numbered above ``after``; there are few, so search from the end."""
    found: list[_Numbered] = []
    for one in reversed(items):
        if one.number <= after:
            break
        found.append(one)
    return found[::-1]


def _change(change: Change) -> list[object]:
    return [change.number, change.node, change.at_ms, change.state, change.term]


def _node_json(known: _NodeHistory, end: int, lag: int | None) -> dict[str, object]:
    """``lag``: as counted by the leader, which does not know the position of a node it has not heard from yet."""
    summary = known.summary
    return {
        "node": known.node,
        "address": known.address,
        "state": known.state,
        "since_ms": known.since_ms,
        "answered_ms": known.answered_ms,
        "error": known.error,
        "latency_ms": round(known.latency_ms, 3),
        "term": _term(known),
        "facts": None
        if summary is None
        else {
            "begin": summary.begin,
            "end": summary.end,
            "committed": summary.committed,
            "flushed": summary.flushed,
            "lag": max(0, min(end - summary.end, end if lag is None else lag)),
            "end_position": summary.end_position,
            "voter": summary.voter,
            "role_told": summary.role_age_ms >= 0,
            "disk_full": summary.disk_full,
            "flush_mode": summary.flush_mode,
            "pending": summary.pending,
            "version": summary.version,
            "conditions": [asdict(one) for one in summary.conditions],
        },
        "broker": None if known.broker is None else asdict(known.broker),
    }
