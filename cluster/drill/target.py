"""What a drill needs of a group of brokers, wherever they run."""

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
"""Every broker's settings: files that fit on small disks, nothing is removed that is to be read back, and a host's disk
that is rather full (by default 90 %) stops no drill; one that is filled on purpose is full to the last byte."""
SECURITY: Final = ClientSecurity(insecure=True)
"""Of a drill's clients: containers have addresses of their own, but on networks that end on this host."""
SMALL_DISK_MIB: Final = 96
"""Of each broker, if a disk is to be filled."""


class Direction(StrEnum):
    """Which packets of an isolated node are dropped."""

    OUT = "out"
    """Those that it sends."""
    IN = "in"
    """Those that are sent to it."""


class DrillError(Exception):
    """Raised when a group does not do what a drill needs; the drill has failed, whatever the messages say."""


class NotPossibleError(Exception):
    """Raised when something cannot be done here at all; says why, and what would help."""


class DrillTarget(Protocol):
    """A group of brokers that can be hurt. Used by one thread at a time."""

    @property
    def kind(self) -> str:
        """``containers`` or ``processes``."""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The members, in order."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What people must know to read the result: what this kind of group does otherwise."""

    def address(self, node: NodeId) -> str:
        """Where clients on this host reach a broker (``host:port``)."""

    def start(self) -> None:
        """Start all nodes; returns when all serve. Raises ``NotPossibleError``."""

    def close(self) -> None:
        """End and remove everything. Idempotent."""

    def kill(self, *nodes: NodeId) -> None:
        """SIGKILL, to all at once."""

    def stop(self, node: NodeId) -> None:
        """SIGTERM, and wait until it has ended."""

    def restart(self, *nodes: NodeId) -> None:
        """Start nodes that were killed or stopped, all at once; they may still be recovering when this returns."""

    def pause(self, node: NodeId) -> None:
        """It stands still, with all its connections open."""

    def resume(self, node: NodeId) -> None:
        """It goes on."""

    def disconnect(self, node: NodeId) -> None:
        """No packet reaches or leaves it any more."""

    def reconnect(self, node: NodeId) -> None:
        """They do again."""

    def isolate(self, node: NodeId, direction: Direction) -> None:
        """Packets between it and the other members are dropped in one direction; clients still reach it."""

    def rejoin(self, node: NodeId) -> None:
        """None is dropped any more."""

    def fill_disk(self, node: NodeId) -> None:
        """Not a byte is free on the disk of its data."""

    def free_disk(self, node: NodeId) -> None:
        """There is room again."""

    def empty_volume(self, node: NodeId) -> None:
        """A killed or stopped node's data are gone, as with a new disk."""

    def log_of(self, node: NodeId) -> str:
        """The end of what it printed."""
