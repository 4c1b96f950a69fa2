"""A running group's log as readers see it: a port, so that they can be tested without a network.

It only contains committed entries.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommittedRange:
    """A node's committed entries from ``begin_index`` up to ``end_index`` (exclusive)."""

    cluster: str
    group: str
    begin_index: int
    end_index: int
    holds_messages: bool = False
    """Whether the node is a broker, whose entries hold RocketMQ's messages."""


class TrimmedError(Exception):
    """Raised for entries that are no longer kept; ``begin_index`` is the first kept one."""

    def __init__(self, begin_index: int) -> None:
        super().__init__(begin_index)
        self.begin_index = begin_index
