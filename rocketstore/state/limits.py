"""Limits on topics, queues, groups and offsets, checked by the master before a change is written.

Applying a change never refuses: all members must behave alike, whatever their limits. So changes that are written and
not yet applied are counted here, too, until they are answered.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dledger.conditions import ConditionKind, Conditions
from dledger.errors import InvalidRequestError
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.state.changes import CommitOffsets, TopicConfig
from rocketstore.state.publisher import StateDone
from rocketstore.state.tables import Tables
from rocketstore.types import PutResult

AUTOMATIC_PERCENT: Final = 90
"""The share of all queues available to topics created by sends."""
_TOLD_MS: Final = 60_000
_DELETE_GROUPS: Final = "delete groups (dledger consumer delete) or raise the setting"


@dataclass(frozen=True, slots=True)
class StateLimits:
    """The limits; existing objects beyond them stay."""

    queues_max: int = 16_384
    groups_max: int = 10_000
    offsets_max: int = 500_000


class LimitChecks:
    """The checks of one master. Each ``take`` raises ``LimitReachedError``, or returns a ``done`` to call with the
    result.

    Thread-safe; the caller guards the tables.
    """

    def __init__(self, limits: StateLimits, conditions: Conditions) -> None:
        self._limits = limits
        self._conditions = conditions
        self._lock = threading.Lock()  # guards changes in progress; acquired after the applier's
        self._queues: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()
        self._offsets = 0

    def take_queues(
        self, tables: Tables, topic: TopicConfig, stored: Iterable[tuple[str, int]], done: StateDone, *, automatic: bool
    ) -> StateDone:
        """Before a topic is created or changed. ``stored`` are the queues that have files, including those of deleted
        topics.
        """
        old = tables.topics.get(topic.name)
        more = topic.queues - (old.queues if old is not None else 0)
        if more <= 0:
            return done
        most = self._limits.queues_max
        allowed = most * AUTOMATIC_PERCENT // 100 if automatic else most
        with self._lock:
            under_way = sum(count for name, count in self._queues.items() if name != topic.name)
            self._queues[topic.name] += more

        def answered(result: PutResult) -> None:
            self._forget_queues(topic.name, more)
            done(result)

        deleted = sum(name not in tables.topics and name not in NO_SEND_TOPICS for name, _ in stored)
        if tables.queue_count + under_way + more > allowed:
            self._forget_queues(topic.name, more)
            why = f"the topics have {tables.queue_count} queues, and at most {most} are allowed (queues_max)"
            if automatic and allowed < most:
                why += f", of which {most - allowed} are reserved for topics created by an administrator"
            raise self._reached("queues_max", f"{why}: delete topics or raise the setting")
        if deleted + tables.queue_count + under_way + more > 2 * most:
            self._forget_queues(topic.name, more)
            why = f"queues of deleted topics, {deleted} now, count until their files are removed"
            raise self._reached("queues_max", f"{why}: wait, or raise queues_max, which limits them separately")
        return answered

    def _forget_queues(self, topic: str, count: int) -> None:
        with self._lock:
            self._queues[topic] -= count
            if self._queues[topic] <= 0:
                del self._queues[topic]

    def take_offsets(self, tables: Tables, change: CommitOffsets, done: StateDone) -> StateDone:
        """Before offsets are committed."""
        group, limits = change.group, self._limits
        more = tables.new_offsets(change)
        is_new = group not in tables.groups
        if not more and not is_new:
            return done
        with self._lock:
            groups = len(tables.groups) + len(self._groups.keys() - {group})
            offsets = tables.offset_count + self._offsets
            if is_new and groups >= limits.groups_max:
                why = f"there are {groups} consumer groups, the limit (groups_max)"
                raise self._reached("groups_max", f"{why}: {_DELETE_GROUPS}")
            if offsets + more > limits.offsets_max:
                why = f"{offsets} group offsets are stored, and at most {limits.offsets_max} are allowed (offsets_max)"
                raise self._reached("offsets_max", f"{why}: {_DELETE_GROUPS}")
            self._offsets += more
            self._groups[group] += is_new

        def answered(result: PutResult) -> None:
            with self._lock:
                self._offsets -= more
                self._groups[group] -= is_new
                if self._groups[group] <= 0:
                    del self._groups[group]
            done(result)

        return answered

    def _reached(self, setting: str, why: str) -> LimitReachedError:
        self._conditions.set(ConditionKind.AT_LIMIT, why, subject=setting, for_ms=_TOLD_MS)
        return LimitReachedError(why)


class LimitReachedError(InvalidRequestError):
    """Raised when the maximum number of topics, groups or offsets is reached."""
