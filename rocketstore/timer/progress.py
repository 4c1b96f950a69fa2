"""How far timed messages have been delivered: three numbers that describe everything a leader has done. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocketstore.timer.entries import Entries


class TimedProgress(NamedTuple):
    """Settled (delivered, recalled, dropped) are entries due by ``due_ms`` whose queue offset is below ``offset``, and
    those due one millisecond later whose queue offset is below ``part``.

    No number ever becomes smaller, but ``part``, when ``due_ms`` grows. So a message that is stored when its time has
    passed is not settled: its queue offset is ``offset`` or more.
    """

    due_ms: int = 0
    offset: int = 0
    part: int = 0

    def settles(self, due_ms: int, queue_offset: int) -> bool:
        """Whether an entry is settled."""
        return (due_ms <= self.due_ms and queue_offset < self.offset) or (
            due_ms == self.due_ms + 1 and queue_offset < self.part
        )

    def settled(self, entries: Entries) -> NDArray[np.bool_]:
        """Which entries are settled."""
        due, offset = entries["due_ms"], entries["queue_offset"]
        passed: NDArray[np.bool_] = (due <= self.due_ms) & (offset < self.offset)
        at_the_edge: NDArray[np.bool_] = (due == self.due_ms + 1) & (offset < self.part)
        return passed | at_the_edge

    def includes(self, other: TimedProgress) -> bool:
        """Whether everything that ``other`` settles is settled, as of one leader's later progress."""
        return (
            self.due_ms >= other.due_ms
            and self.offset >= other.offset
            and (self.due_ms > other.due_ms or self.part >= other.part)
        )


NOTHING_DELIVERED: Final = TimedProgress()
