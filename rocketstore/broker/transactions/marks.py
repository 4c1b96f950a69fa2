"""From where the next master reads: the offsets at which open halves begin, and the ops that concern them.

They are consumer offsets of a group of the broker's own. All ops so far concern halves so far. A mark keeps both ends:
once every half before it has ended, no op before it is needed.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from rocketstore.state.broker_state import BrokerState
from rocketstore.types import HALF_TOPIC, OP_TOPIC, PutResult

GROUP: Final = "CID_RMQ_SYS_TRANS"
"""Whose consumer offsets they are."""
PROGRESS_MS: Final = 1000
RETRY_MS: Final = 100
IDLE_MS: Final = 10_000
MARKS_MAX: Final = 1024


class Marks:
    """Owned by the thread of transactions."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._marks: deque[tuple[int, int]] = deque()  # next offsets of halves and ops at the same time
        self._noted = (-1, -1)
        self._noting = False
        self._due_ms = 0
        self.op_next = 0
        """The next op."""

    def note(self, now_ms: int, oldest: int, half_next: int) -> int:
        """Pass on where open halves begin, if it is time; returns when to do so again."""
        if now_ms < self._due_ms or self._noting:
            return max(self._due_ms, now_ms + RETRY_MS)
        self._due_ms = now_ms + PROGRESS_MS
        marks = self._marks
        if not marks or marks[-1] != (half_next, self.op_next):
            marks.append((half_next, self.op_next))
        if len(marks) > MARKS_MAX:
            self._marks = marks = deque(one for at, one in enumerate(marks) if at % 2 == 0)
        op = self._noted[1]
        while marks and marks[0][0] <= oldest:
            op = max(op, marks.popleft()[1])
        found = (oldest, op)
        if found == self._noted:
            return now_ms + IDLE_MS
        offsets = [(topic, 0, offset) for topic, offset in ((HALF_TOPIC, oldest), (OP_TOPIC, op)) if offset > 0]
        if not offsets:
            self._noted = found
            return now_ms + IDLE_MS
        self._noting = True

        def done(result: PutResult) -> None:
            if result.outcome == "stored":
                self._noted = found
            self._noting = False

        self._state.commit_own_offsets(GROUP, offsets, done)
        return self._due_ms
