"""What readers know of a running group's log: a port, so that they are tested without a network.

Nothing here is ever beyond what is committed.
"""

from __future__ import annotations

from dataclasses import dataclass


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
