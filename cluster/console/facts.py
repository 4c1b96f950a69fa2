"""A node's status in the console's terms. Pure data.

Responses of the log service and of the broker service become the same ``NodeFacts``; a plain broker, which has no
group, gets its own kind of lane whose positions are bytes of its log instead of entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

from dledger.types import Role
from rocketstore.remoting.bodies.ha import HaFacts

if TYPE_CHECKING:
    from dledger.conditions import Condition
    from dledger.rpc.ports import NodeStatus
    from rocketstore.client.admin import BrokerStatus

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
class NodeFacts:
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


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """Additional facts of a broker."""

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


def facts_of_node(status: NodeStatus) -> NodeFacts:
    """Facts from the log service's response."""
    return NodeFacts(
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
    )


def facts_of_plain_broker(status: BrokerStatus) -> NodeFacts:
    """Facts of a broker without a group, which has no log service: positions are bytes."""
    return NodeFacts(
        node_id=status.broker_name or status.address,
        group=status.cluster,
        state=NodeState.PLAIN,
        term=0,
        members=(),
        begin=status.min_offset,
        end=status.end_offset,
        committed=status.max_offset,
        flushed=status.max_offset,
        end_position=status.end_offset,
        unit="bytes",
        version=status.version,
        conditions=status.conditions,
    )


def figure(told: float) -> float:
    """A figure that a broker tells, as JSON can tell it to pages: it knows neither NaN nor infinity."""
    return min(max(told, 0.0), FIGURE_MAX) if not math.isnan(told) else 0.0


def broker_facts_of(status: BrokerStatus) -> BrokerFacts:
    """The additional facts of either kind of broker."""
    ha = HaFacts.of(status.runtime)
    return BrokerFacts(
        cluster=status.cluster,
        broker_name=status.broker_name,
        role=status.role,
        put_tps=figure(status.put_tps),
        get_tps=figure(status.get_tps),
        behind_bytes=status.dispatch_behind_bytes,
        disk_ratio=figure(status.disk_ratio),
        boot_ms=status.boot_ms,
        replication="" if ha is None else ha.words,
    )
