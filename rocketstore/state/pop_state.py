"""The pop tables among the replicated ones: what the leader's engine looks at, and how it writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from dledger.access.rules import RETRY_PREFIX
from rocketstore.pop.operations import PopRules
from rocketstore.pop.tables import LeaseWindow, PopPlace, PopRow
from rocketstore.state.applier import StateApplier
from rocketstore.state.changes import Change, CommitOffsets, PopRows, QueueOffset
from rocketstore.state.limits import LimitChecks
from rocketstore.state.publisher import StateDone
from rocketstore.types import PutMessageStatus, PutResult

_MADE = PutResult(PutMessageStatus.PUT_OK)


class PopState:
    """A ``rocketstore.pop.operations.PopView``. Thread-safe: each look at one dictionary needs no lock, since windows
    are never changed in place. ``change`` writes a change.
    """

    def __init__(self, applier: StateApplier, limits: LimitChecks, change: Callable[[Change, StateDone], None]) -> None:
        self._applier = applier
        self._limits = limits
        self._change = change

    def pop_window(self, place: PopPlace) -> LeaseWindow | None:
        """The window of a queue."""
        return self._applier.tables.pop.windows.get(place)

    def pop_epoch(self) -> int:
        """The highest generation there ever was."""
        return self._applier.tables.pop.epoch

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        """A group's offset in a queue; -1: it has none."""
        return self._applier.tables.groups.get(group, {}).get((topic, queue_id), -1)

    def pop_rules(self, group: str) -> PopRules:
        """A group's settings; a group without retry queues tries nothing again."""
        config = self._applier.tables.group_configs.get(group)
        if config is None:
            return PopRules()
        retries = max(config.retry_times_max, 0) if config.retry_queues else 0
        return PopRules(config.ordered, retries + 1)

    def parked_of(self, group: str) -> int:
        """How many messages of a group are invisible for long: its offsets have passed them (P11)."""
        with self._applier.lock:
            return self._applier.tables.pop.parked_of(group)

    def has_windows(self, group: str) -> bool:
        """Whether the group has consumed by pop, and its offsets were not all reset since."""
        with self._applier.lock:
            return any(place.group == group for place in self._applier.tables.pop.windows)

    def retry_topics(self, group: str) -> list[str]:
        """The topics for what the group gets again, one for each topic that it has consumed by pop."""
        with self._applier.lock:
            topics = {place.topic for place in self._applier.tables.pop.windows if place.group == group}
        return sorted(one for one in topics if one.startswith(RETRY_PREFIX) and one != f"{RETRY_PREFIX}{group}")

    @contextmanager
    def room(self, group: str, queues: Collection[tuple[str, int]]) -> Iterator[None]:
        """Take room for the group, and its offsets in these queues, while their windows are made.

        Raises ``LimitReachedError``.
        """
        change = CommitOffsets(group, tuple(QueueOffset(*one, 0) for one in queues))
        with self._applier.lock:
            made = self._limits.take_offsets(self._applier.tables, change, lambda _result: None)
        try:
            yield
        finally:
            made(_MADE)

    def write(self, rows: Iterable[PopRow], done: StateDone) -> None:
        """Write one tick; ``done`` once it is stored and applied here. One that a later leader has, or nobody, is told
        with outcome ``unknown``.
        """
        self._change(PopRows(tuple(rows)), done)
