"""Which numbered messages the plain commit log has stored, in memory: what ``dledger`` keeps of a group's producers.

A broker on its own forgets its producers when it ends: one that goes on afterwards is refused as unknown, and what it
does not know of its last messages stays unknown. As long as the broker runs, nothing is stored twice.

The table counts the log's numbered messages as a group's counts entries; where they are is remembered put by put.
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
"""Of all producers together; what is older is known to be stored, but not where."""


@record(frozen=True, slots=True)
class StoredStretch:
    """Messages of a producer that were stored before: ``count`` of them, ``skipped`` records behind ``offset``.

    ``offset`` is where the first record of their put begins; None if that is not remembered.
    """

    offset: int | None
    skipped: int
    count: int


class NumberedPuts:
    """Under the put lock."""

    def __init__(self, *, puts_remembered: int = PUTS_REMEMBERED) -> None:
        self._table = ProducerTable(ReplicationConfig())
        self._count = 1  # of all numbered messages; an index of 0 means "not remembered"
        self._firsts: deque[int] = deque(maxlen=puts_remembered)  # by put: its first message's count
        self._offsets: deque[int] = deque(maxlen=puts_remembered)  # and where that is

    def plan(self, batch: ProducerBatch, now_ms: int) -> Plan | DLedgerError:
        """What to store of a batch, or why nothing; its producer is active."""
        plan = self._table.plan(batch, batch.count)
        if isinstance(plan, Plan) and plan.producer is not None:
            self._table.touch(plan.producer, now_ms)
        return plan

    def places(self, plan: Plan) -> list[StoredStretch]:
        """Where the messages are that need not be stored again."""
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
        """The producer of the planned batch, which is remembered from now on; or why it cannot be."""
        if plan.producer is not None:
            return plan.producer
        registration = self._table.registration(name, maxsize, now_ms)
        if isinstance(registration, DLedgerError):
            return registration
        return self._table.register(registration, LogIndex(self._count), 0, now_ms)

    def note(self, producer: KnownProducer, offset: int, count: int, now_ms: int) -> None:
        """``count`` new messages of the producer were stored by one put, which begins at ``offset``."""
        self._firsts.append(self._count)
        self._offsets.append(offset)
        self._table.note(producer, self._count, count, now_ms)
        self._count += count

    def ask(self, name: str, now_ms: int) -> int:
        """The number of the producer's next message, for the producer itself; 0 if it is not known."""
        return self._table.ask(name, now_ms)
