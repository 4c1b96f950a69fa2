"""A stopped broker's topics, groups, consumer offsets and progress of delayed delivery: its snapshot, and what the
committed log says since.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError, DLedgerError
from rocketstore.export.source import read_at
from rocketstore.state.applier import BrokerSnapshot, StateApplier
from rocketstore.state.files import stored_state
from rocketstore.state.tables import Tables
from rocketstore.types import GetMessageStatus, GetResult, RecordHead
from rocketstore.verification.verify import LogPart

_NOT_ALL: Final = (
    "changes of topics, groups or offsets are missing in this member's directory. Export another member, or start the "
    "group, wait until it has a master, and stop it again"
)


class StateRecords:
    """The messages of the state topic in a log, as an applier reads them."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._positions = array("q")
        self._sizes = array("l")
        self._parts: list[LogPart] = []
        self.next_offset = 0
        """The topic's next queue offset, which may be beyond the last one here: messages expire."""

    def add_part(self, part: LogPart) -> None:
        """Records added from now on are in this part of the log."""
        self._parts.append(part)

    def add(self, head: RecordHead) -> None:
        """The next one in the log."""
        if head.queue_offset < self.next_offset:
            return  # repeated: it has no place in the queue
        self._numbers.append(head.queue_offset)
        self._positions.append(head.offset)
        self._sizes.append(head.size)
        self.next_offset = head.queue_offset + 1

    @property
    def numbers_known(self) -> bool:
        """Whether it would be known that there were messages which are gone: the queue's end tells."""
        return True

    def min_offset(self, _topic: str, _queue_id: int) -> int:
        """The first one's queue offset."""
        return self._numbers[0] if self._numbers else self.next_offset

    def max_offset(self, _topic: str, _queue_id: int) -> int:
        """The next one's queue offset."""
        return self.next_offset

    def get(self, topic: str, queue_id: int, offset: int, *, max_count: int) -> GetResult:
        """Some from a queue offset on. Raises ``OSError``."""
        least, most = self.min_offset(topic, queue_id), self.next_offset
        at = bisect_left(self._numbers, offset)
        if offset < least or at == len(self._numbers):
            status = GetMessageStatus.OFFSET_TOO_SMALL if offset < least else GetMessageStatus.OFFSET_OVERFLOW_ONE
            return GetResult(status, max(offset, least), least, most)
        end = min(at + max_count, len(self._numbers))
        records = tuple(map(self._record, self._positions[at:end], self._sizes[at:end]))
        return GetResult(GetMessageStatus.FOUND, self._numbers[end - 1] + 1, least, most, records)

    def _record(self, position: int, size: int) -> bytes:
        part = next(part for part in self._parts if position < part.end)
        base = position - position % part.segment_bytes
        return read_at(part.segments[base], position - base, size)


def tables_of(config_dir: Path, records: StateRecords, end_of: Callable[[str, int], int]) -> Tables:
    """The tables at the end of the log; ``end_of`` tells where queues end, beyond which no offset may lie.

    Raises ``CorruptLogError``, ``DLedgerError`` if changes are missing or of a newer version.
    """
    snapshot, _ = stored_state(config_dir, has_log=records.next_offset > 0)
    applier = StateApplier(records)
    applier.restore(snapshot or BrokerSnapshot())
    while applier.step():
        pass
    if applier.blocked:
        raise DLedgerError(applier.blocked)
    if applier.next_offset < records.next_offset or not applier.is_complete:
        raise CorruptLogError(config_dir, 0, _NOT_ALL, "")
    applier.forget_what_is_not_there(end_of)
    return applier.tables
