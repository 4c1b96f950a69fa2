"""What readers know of a running group's log: a port, so that they are tested without a network.

Nothing here is ever beyond what is committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dledger.types import LogChunk


@dataclass(frozen=True, slots=True)
class CommittedRange:
    """What a node holds that can never be lost: the entries from ``begin_index`` up to ``end_index`` (exclusive)."""

    cluster: str
    group: str
    begin_index: int
    end_index: int
    holds_messages: bool = False
    """Whether the node is a broker: its entries hold RocketMQ's messages."""


class TrimmedError(Exception):
    """Raised for entries that are no longer kept; ``begin_index`` is the first one that is."""

    def __init__(self, begin_index: int) -> None:
        super().__init__(begin_index)
        self.begin_index = begin_index


class EntryPlaces(Protocol):
    """Where entries are. Both raise ``TrimmedError``."""

    def positions_of(self, indexes: Sequence[int]) -> list[int]:
        """Where these entries begin, in bytes of the log; the committed end for the index after the last one."""

    def indexes_at(self, positions: Sequence[int]) -> list[int]:
        """The first committed entries that begin at or after these positions."""


class GroupLog(EntryPlaces, Protocol):
    """One group's log, over whichever of its nodes may be asked. Every call has a deadline; errors are DLedgerError."""

    def committed(self) -> CommittedRange:
        """What is committed now."""

    def confirmed_end(self) -> int | None:
        """As ``committed().end_index``, of a leader that has made sure that it is one: nothing was ever beyond it.

        None while no leader is that sure.
        """

    def chunks(self, first: int, end: int) -> Iterator[LogChunk]:
        """The entries from ``first`` up to ``end`` (exclusive), all of them, as stored. Raises ``TrimmedError``."""

    def index_at(self, time_ms: int) -> int:
        """The first committed entry stored at this time or later, or the committed end."""

    def publish(self, consumer_group: str, index: int) -> None:
        """Make what is before ``index`` the consumer group's progress, in the queues of the topics that are read."""
