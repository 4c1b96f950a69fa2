"""What can be told of a node when somebody looks: more than its status, and nothing that costs it while nobody does."""

from __future__ import annotations

from dataclasses import dataclass

from dledger.rpc.ports import NodeStatus, PeerStatus
from dledger.types import NodeId, Position


@dataclass(frozen=True, slots=True)
class PeerMeasurements:
    """One follower as its leader sees it; ``lag_bytes`` are log bytes that it does not hold for sure."""

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
    """How often it asked whether it would be elected, since it started; ``elections``: how often it campaigned."""
    elections: int
    dropped_messages: dict[NodeId, int]
    """How many found no way to each peer, since it started."""
    producers: int
    """How many it remembers as leader; ``repeated_entries``: how many of their entries came again since it started."""
    repeated_entries: int
    disk_used_ratio: float
    """Of the fuller one of the disks that new segments need; -1 before it was looked at."""
