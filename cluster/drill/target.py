"""The operations a drill needs of a group of brokers, wherever they run."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol

from dledger.client.security import ClientSecurity
from dledger.types import NodeId

SMALL_FILES: Final = {
    "mappedFileSizeCommitLog": str(4 << 20),
    "index_segment_bytes": str(1 << 20),
    "mappedFileSizeConsumeQueue": "40000",
    "maxHashSlotNum": "5000",
    "maxIndexNum": "20000",
    "cleanFileForciblyEnable": "false",
    "fileReservedTime": "72",
    "diskMaxUsedSpaceRatio": "97",
    "diskSpaceCleanForciblyRatio": "98",
    "diskSpaceWarningLevelRatio": "99",
}
"""Settings of every broker: files fit on small disks, nothing is removed before it is read back, and a host's disk that
is rather full (by default 90 %) stops no drill; one filled on purpose is full to the last byte.
"""
SECURITY: Final = ClientSecurity(insecure=True)
"""For a drill's clients: containers have their own addresses, but on networks inside this host."""
SMALL_DISK_MIB: Final = 96
"""Size of each broker's disk if one is to be filled."""


class Direction(StrEnum):
    """Which packets of an isolated node are dropped."""

    OUT = "out"
    """Packets it sends."""
    IN = "in"
    """Packets sent to it."""


class DrillError(Exception):
    """Raised when a group does not do what a drill requires: the drill has failed, whatever became of the messages."""


class NotPossibleError(Exception):
    """Raised when something is not possible here; says why, and what would help."""


class DrillTarget(Protocol):
    """A group of brokers that faults can be injected into. Used by one thread at a time."""

    @property
    def kind(self) -> str:
        """``containers`` or ``processes``."""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The members, in order."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences of this kind of group that affect the result."""

    def address(self, node: NodeId) -> str:
        """The address (``host:port``) at which clients on this host reach a broker."""

    def start(self) -> None:
        """Start all nodes; returns when all serve. Raises ``NotPossibleError``."""

    def close(self) -> None:
        """Stop and remove everything. Idempotent."""

    def kill(self, *nodes: NodeId) -> None:
        """SIGKILL, to all at once."""

    def stop(self, node: NodeId) -> None:
        """SIGTERM, and wait until it has exited."""

    def restart(self, *nodes: NodeId) -> None:
        """Start nodes that were killed or stopped, all at once; they may still be recovering when this returns."""

    def pause(self, node: NodeId) -> None:
        """Freeze it, with all its connections open."""

    def resume(self, node: NodeId) -> None:
        """Continue it."""

    def disconnect(self, node: NodeId) -> None:
        """Drop all packets from and to it."""

    def reconnect(self, node: NodeId) -> None:
        """Undo ``disconnect``."""

    def isolate(self, node: NodeId, direction: Direction) -> None:
        """Drop packets between it and the other members in one direction; clients still reach it."""

    def rejoin(self, node: NodeId) -> None:
        """Undo ``isolate``."""

    def fill_disk(self, node: NodeId) -> None:
        """Fill the disk of its data to the last byte."""

    def free_disk(self, node: NodeId) -> None:
        """Undo ``fill_disk``."""

    def empty_volume(self, node: NodeId) -> None:
        """Empty the volume of a killed or stopped node, as if its disk were new."""

    def log_of(self, node: NodeId) -> str:
        """The end of its output."""
