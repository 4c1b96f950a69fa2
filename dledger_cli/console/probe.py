"""Polls one node, over the same kind of connections as other commands.

Responses of the log service and of the broker service become the same ``NodeSummary``; a plain broker, which has no
group, gets its own kind of lane whose positions are bytes of its log instead of entries.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

from dledger.errors import DLedgerError, InvalidRequestError
from dledger.types import Role
from dledger_cli.member_view import catch_up_of, find_peer, intent_text
from rocketstore.client import RequestNotKnownError

if TYPE_CHECKING:
    from dledger.client.blocking import DLedgerClient
    from dledger.monitoring import Condition
    from dledger.rpc.ports import MemberStatus, NodeStatus
    from rocketstore.client import Admin, BrokerStatus
    from rocketstore.client.aio.routes import RoutedBroker

FIGURE_MAX: Final = 1e15
Unit = Literal["entries", "bytes"]


class NodeState(StrEnum):
    """The state shown in a lane; ``UNKNOWN`` only until the first response or failure."""

    LEADER = "leader"
    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    PLAIN = "plain"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


_STATES = {Role.LEADER: NodeState.LEADER, Role.FOLLOWER: NodeState.FOLLOWER, Role.CANDIDATE: NodeState.CANDIDATE}


@dataclass(frozen=True, slots=True)
class MembershipSummary:
    """A member's part in its group, and if the leader tells it, how far it is."""

    node: str
    role: str
    """``voter`` or ``learner``."""
    peer_address: str
    intent: str
    """The intent for a learner, in words; empty: none."""
    health: str = ""
    percent: int = -1
    """How much of the leader's log a learner has; -1: unknown."""
    rate: int = 0
    """Bytes per second."""
    ready: bool = False
    """Whether a learner could become a voter now."""


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One response: indexes are inclusive, as ``dledger status`` shows them."""

    node_id: str
    group: str
    state: NodeState
    term: int
    members: tuple[tuple[str, str], ...]
    """Node ids and client addresses; an address is empty until that node answered."""
    begin: int
    end: int
    committed: int
    flushed: int
    end_position: int
    unit: Unit = "entries"
    voter: bool = True
    disk_full: bool = False
    flush_mode: str = "sync"
    pending: int = 0
    version: str = ""
    lags: tuple[tuple[str, int], ...] = ()
    """Leader only: how many entries each follower is behind."""
    conditions: tuple[Condition, ...] = ()
    role_age_ms: int = -1
    """For how long it has had this state in this term, as it says itself; -1: it does not tell."""
    configuration: int = -1
    """The entry that says who the members are; -1: the settings do."""
    memberships: tuple[MembershipSummary, ...] = ()


@dataclass(frozen=True, slots=True)
class BrokerSummary:
    """The additional figures of a broker."""

    cluster: str
    broker_name: str
    role: str
    put_tps: float
    get_tps: float
    behind_bytes: int
    disk_ratio: float
    boot_ms: int
    replication: str = ""
    """How it stands as a classic master or slave, in words; empty if there is nothing to say."""


def summary_of_node(status: NodeStatus) -> NodeSummary:
    """Facts from the log service's response."""
    return NodeSummary(
        node_id=status.node_id,
        group=status.group,
        state=_STATES[status.role],
        term=status.term,
        members=tuple((member.node_id, member.client_address) for member in status.members),
        begin=status.begin_index,
        end=status.end_index,
        committed=status.committed_index,
        flushed=status.flushed_index,
        end_position=status.end_position,
        voter=status.voter,
        disk_full=status.disk_full,
        flush_mode=status.flush_mode,
        pending=status.pending_entries,
        version=status.version,
        lags=tuple((peer.node_id, peer.lag_entries) for peer in status.peers),
        conditions=status.conditions,
        role_age_ms=status.role_age_ms,
        configuration=status.configuration_index,
        memberships=tuple(_membership(status, one) for one in status.members),
    )


def _membership(status: NodeStatus, member: MemberStatus) -> MembershipSummary:
    peer = find_peer(status, member.node_id)
    known = MembershipSummary(member.node_id, member.role.name.lower(), member.peer_address, intent_text(member))
    if peer is None:
        return known
    percent = catch_up_of(status, member.node_id).percent
    return replace(known, health=peer.health, percent=percent, rate=peer.rate, ready=not peer.not_ready)


def summary_of_plain_broker(status: BrokerStatus, named: RoutedBroker) -> NodeSummary:
    """Facts of a broker without a group, which has no log service: positions are bytes."""
    told = status.runtime
    end = told.end or 0
    written = end if told.written is None else told.written
    return NodeSummary(
        node_id=named.name or status.address,
        group=named.cluster,
        state=NodeState.PLAIN,
        term=0,
        members=(),
        begin=told.begin or 0,
        end=written,
        committed=end,
        flushed=end,
        end_position=written,
        unit="bytes",
        version=told.release or told.version,
        conditions=told.problems,
    )


def figure(told: float) -> float:
    """A figure that a broker tells, as JSON can tell it to pages: it knows neither NaN nor infinity."""
    return min(max(told, 0.0), FIGURE_MAX) if not math.isnan(told) else 0.0


def broker_summary_of(status: BrokerStatus, named: RoutedBroker) -> BrokerSummary:
    """The additional figures of either kind of broker. ``named``: the brokers that it belongs to."""
    told = status.runtime
    return BrokerSummary(
        cluster=named.cluster,
        broker_name=named.name,
        role=told.store_role,
        put_tps=figure(told.put_tps or 0.0),
        get_tps=figure(told.get_tps or 0.0),
        behind_bytes=told.dispatch_behind or 0,
        disk_ratio=_number(status.table.get("commitLogDiskRatio", "")),
        boot_ms=int(_number(status.table.get("bootTimestamp", ""))),
        replication="" if told.ha is None else told.ha.words,
    )


def _number(text: str) -> float:
    """A figure that a broker tells as a text; 0 for what is no number."""
    try:
        return figure(float(text))
    except ValueError:
        return 0.0


BROKER_TIMEOUT_S: Final = 1.0
BROKER_INTERVAL_S: Final = 2.0
"""How often a broker that has a log is asked for its own figures, which are over ten seconds anyway."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A node's status, and how long the request took; -1 for the first one, which includes connecting."""

    summary: NodeSummary
    broker: BrokerSummary | None
    latency_ms: float


@dataclass(frozen=True, slots=True)
class _Known:
    """A broker's own figures, the role and term in which it told them, and when it was asked."""

    summary: BrokerSummary | None
    role: tuple[NodeState, int]
    asked_s: float


class GroupProbe:
    """Polls nodes; detects whether an address is a log node, a broker of a group or a plain broker.

    Thread-safe; ``close`` closes both clients.
    """

    def __init__(self, client: DLedgerClient, admin: Admin) -> None:
        self._client = client
        self._admin = admin
        self._named: RoutedBroker | None = None  # of all brokers here, once known
        self._connected: set[str] = set()  # set.add and discard are atomic
        self._no_broker: set[str] = set()
        self._broker_facts: dict[str, _Known] = {}  # so is setting an item
        self._plain: set[str] = set()

    def ask(self, address: str, timeout_s: float) -> Answer:
        """The status of the node at ``address``: a timed metadata request, then the broker's status.

        Raises ``DLedgerError`` if there is no response in time.
        """
        if address in self._plain:
            return self._ask_plain(address)
        started = time.perf_counter()
        try:
            status = self._client.metadata(address, timeout_s=timeout_s)
        except InvalidRequestError:  # it has no log service
            return self._ask_plain(address)
        except DLedgerError:
            self._no_broker.discard(address)  # another server may be there after a restart
            self._broker_facts.pop(address, None)
            self._connected.discard(address)
            raise
        latency_ms = self._latency_ms(address, started)
        summary = summary_of_node(status)
        return Answer(summary, self._ask_broker(address, summary), latency_ms)

    def _latency_ms(self, address: str, started: float) -> float:
        if address not in self._connected:
            self._connected.add(address)
            return -1.0
        return (time.perf_counter() - started) * 1000

    def close(self) -> None:
        """Calls in progress fail."""
        self._client.close()
        self._admin.close()

    def _ask_broker(self, address: str, summary: NodeSummary) -> BrokerSummary | None:
        """Its own figures: now and then, and as soon as its role in the group has changed."""
        if address in self._no_broker:
            return None
        known = self._broker_facts.get(address)
        role = summary.state, summary.term
        if known is not None and known.role == role and time.monotonic() - known.asked_s < BROKER_INTERVAL_S:
            return known.summary
        asked_s, told = time.monotonic(), None
        try:
            status = self._admin.status(address)
            told = broker_summary_of(status, self._name())
        except RequestNotKnownError:
            self._no_broker.add(address)
        except DLedgerError:  # it is starting or stopping: the log service's status is enough
            return None
        self._broker_facts[address] = _Known(told, role, asked_s)
        return told

    def _ask_plain(self, address: str) -> Answer:
        started = time.perf_counter()
        try:
            status = self._admin.status(address)
            named = self._name()
        except DLedgerError:
            self._plain.discard(address)
            self._connected.discard(address)
            raise
        latency_ms = self._latency_ms(address, started)
        if status.runtime.role:  # its log service is not up yet
            self._plain.discard(address)
            raise InvalidRequestError(f"{address} is a broker of a group, but its log does not answer")
        self._plain.add(address)
        return Answer(summary_of_plain_broker(status, named), broker_summary_of(status, named), latency_ms)

    def _name(self) -> RoutedBroker:
        """The name and the cluster of the brokers."""
        if self._named is None:
            (self._named,) = self._admin.brokers()
        return self._named
