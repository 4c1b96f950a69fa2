"""The plain commit log's table of numbered messages, in memory: the counterpart of a group's producer table.

A plain broker forgets its producers when it ends: a producer that continues afterwards is refused as unknown, and the
outcome of its last unanswered messages stays unknown. While the broker runs, nothing is stored twice.

The table counts the log's numbered messages as a group's counts entries; their positions are remembered per put.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from sys import maxsize
from typing import Final

from dledger.config import ReplicationConfig
from dledger.core.producers import KnownProducer, Plan, ProducerTable
from dledger.errors import DLedgerError
from dledger.records import record
from dledger.types import LogIndex, ProducerBatch, StoredRun

PUTS_REMEMBERED: Final = 8192
"""The total for all producers; older puts are known to be stored, but not where."""


@record(frozen=True, slots=True)
class StoredStretch:
    """Messages of a producer that were already stored: ``count`` of them, starting ``skipped`` records after
    ``offset``.

    ``offset`` is the start of the first record of their put; None if it is no longer remembered.
    """

    offset: int | None
    skipped: int
    count: int


class NumberedPuts:
    """Used under the put lock."""

    def __init__(self, *, puts_remembered: int = PUTS_REMEMBERED) -> None:
        self._table = ProducerTable(ReplicationConfig())
        self._count = 1  # of all numbered messages; index 0 means "not remembered"
        self._firsts: deque[int] = deque(maxlen=puts_remembered)  # per put: the count at its first message
        self._offsets: deque[int] = deque(maxlen=puts_remembered)  # per put: the offset of its first message

    def plan(self, batch: ProducerBatch, now_ms: int) -> Plan | DLedgerError:
        """The part of a batch to store, or why there is none; marks its producer as active."""
        plan = self._table.plan(batch, batch.count)
        if isinstance(plan, Plan) and plan.producer is not None:
            self._table.touch(plan.producer, now_ms)
        return plan

    def places(self, plan: Plan) -> list[StoredStretch]:
        """The positions of messages that need not be stored again."""
        return [stretch for run in plan.duplicates for stretch in self._stretches(run)]

    def _stretches(self, run: StoredRun) -> list[StoredStretch]:
        if not run.first_index:
            return [StoredStretch(None, 0, run.count)]
        found: list[StoredStretch] = []
        first, end = int(run.first_index), run.first_index + run.count
        while first < end:
            put = bisect_right(self._firsts, first) - 1
            following = self._firsts[put + 1] if put + 1 < len(self._firsts) else self._count
            count = min(end, following) - first
            offset = self._offsets[put] if put >= 0 else None
            found.append(StoredStretch(offset, 0 if put < 0 else first - self._firsts[put], count))
            first += count
        return found

    def admit(self, plan: Plan, name: str, now_ms: int) -> KnownProducer | DLedgerError:
        """The producer of the planned batch, which is remembered from now on; or the error if there is no room."""
        if plan.producer is not None:
            return plan.producer
        registration = self._table.registration(name, maxsize, now_ms)
        if isinstance(registration, DLedgerError):
            return registration
        return self._table.register(registration, LogIndex(self._count), 0, now_ms)

    def note(self, producer: KnownProducer, offset: int, count: int, now_ms: int) -> None:
        """One put, starting at ``offset``, stored ``count`` new messages of the producer."""
        self._firsts.append(self._count)
        self._offsets.append(offset)
        self._table.note(producer, self._count, count, now_ms)
        self._count += count

    def ask(self, name: str, now_ms: int) -> int:
        """The producer's next sequence number; 0 if it is unknown."""
        return self._table.ask(name, now_ms)
