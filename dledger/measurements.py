"""A node's figures on demand: more than its status, at no cost unless requested."""

from __future__ import annotations

from dataclasses import dataclass

from dledger.rpc.ports import NodeStatus, PeerStatus
from dledger.types import NodeId, Position


@dataclass(frozen=True, slots=True)
class PeerMeasurements:
    """One follower as its leader sees it; ``lag_bytes`` are log bytes that it is not known to hold."""

    status: PeerStatus
    lag_bytes: int


@dataclass(frozen=True, slots=True)
class NodeMeasurements:
    """One node at one moment. ``peers`` is empty unless it leads."""

    status: NodeStatus
    peers: tuple[PeerMeasurements, ...]
    pending_bytes: int
    committed_position: Position
    flushed_position: Position
    pre_votes: int
    """Pre-votes since it started; ``elections``: its campaigns."""
    elections: int
    dropped_messages: dict[NodeId, int]
    """Undeliverable messages per peer since it started."""
    producers: int
    """Producers remembered as leader; ``repeated_entries``: their entries received again since it started."""
    repeated_entries: int
    disk_used_ratio: float
    """Of the fuller one of the disks that new segments need; -1 before the first measurement."""
    forced_segments: int
    """Segments removed before they had expired, since it started."""
    apply_s: float = 0.0
    """The time its state machine has spent in applying since it started."""
    snapshot_s: float = 0.0
    """How long its last snapshot took to write."""
