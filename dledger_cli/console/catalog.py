"""Topics and consumer groups of the brokers, looked at every few seconds while a page is open.

The cost of a round is limited: all names are listed, but only for some of them figures are asked. Those that pages
show come first, the others in turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from dledger.errors import DLedgerError
from dledger_cli.console.listing import LIST_MAX, LookOrder, SortedBy, SortedLists, Wanted
from dledger_cli.console.sampler import JOIN_TIMEOUT_S, wall_ms
from rocketstore.message.checks import is_internal

if TYPE_CHECKING:
    from rocketstore.client import Admin, QueueProgress, QueueRange, TopicInfo

INTERVAL_S: Final = 3.0
FILL_INTERVAL_S: Final = 1.0
"""While there are some of which no figures are known yet."""
NAMES_PER_S: Final = 500
"""Names are listed as often as that is one list of so many per second: rarely, if there are very many."""
ROUND_QUEUES: Final = 512
"""Queues looked at in one round for the list of topics, and as many for the lag of groups."""
ROUND_GROUPS: Final = 64
TOPICS_NAMED_MAX: Final = 16
"""Topics named in the row of one group."""
SHOWN_S: Final = 10.0
"""How long what a page asked for counts as shown."""
_SHOWN_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class TopicRow:
    """One topic; ``messages``, ``end`` and ``newest_ms`` are None until it was looked at."""

    name: str
    write_queues: int
    read_queues: int
    permission: int
    internal: bool
    message_type: str = ""
    retention: str = ""
    messages: int | None = None
    end: int | None = None
    newest_ms: int | None = None
    seen_ms: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One consumer group. None until it was looked at: the first of its topics, how many it has, and its total lag."""

    name: str
    topics: tuple[str, ...] | None = None
    all_topics: int | None = None
    lag: int | None = None
    seen_ms: int = field(default=0, compare=False)

    @property
    def internal(self) -> bool:
        return False


TOPIC_SORTS: Final[Mapping[str, SortedBy[TopicRow]]] = {
    "name": lambda row: row.name,
    "queues": lambda row: row.write_queues,
    "messages": lambda row: row.messages,
    "newest": lambda row: row.newest_ms,
    "permission": lambda row: row.permission,
}
GROUP_SORTS: Final[Mapping[str, SortedBy[GroupRow]]] = {
    "name": lambda row: row.name,
    "topics": lambda row: row.all_topics,
    "lag": lambda row: row.lag,
}


class Catalog:
    """Thread-safe. ``on_change`` is called on the catalog's thread when something changed."""

    def __init__(
        self,
        admin: Admin,
        applies: Callable[[], bool],
        on_change: Callable[[], None] = lambda: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admin = admin
        self._applies = applies
        self._clock_s = clock_s
        self._changed = threading.Condition()  # guards the fields below
        self._watched = False
        self._stopping = False
        self._nudged = False
        self._topics: dict[str, TopicRow] = {}
        self._groups: dict[str, GroupRow] = {}
        self._sorted_topics = SortedLists(TOPIC_SORTS)
        self._sorted_groups = SortedLists(GROUP_SORTS)
        self._left_out = {"topics": 0, "groups": 0}
        self._shown_topics: dict[str, float] = {}
        self._shown_groups: dict[str, float] = {}
        self._error = ""
        self._loaded = False
        self._version = 0
        self._seen_ms = 0
        # Used by the catalog's thread only.
        self._list_at_s = 0.0
        self._topic_order = LookOrder(lambda name: _queues(self._topics[name]))
        self._group_order = LookOrder()
        self._late_groups: list[str] = []
        self._thread = threading.Thread(target=self._run, name="dledger-console-catalog", daemon=True)
        self._on_change = on_change

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop; a request in progress fails."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._admin.close()
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)

    def watch(self, *, watched: bool) -> None:
        """Set whether a page is open; otherwise nothing is requested."""
        with self._changed:
            self._watched = watched
            self._changed.notify_all()

    def nudge(self) -> None:
        """Look again soon: something was changed."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    # --- what pages are told -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """Whether there are lists, of how many, and how old they are; ``version`` grows with every change of them."""
        with self._changed:
            return {
                "loaded": self._loaded,
                "error": self._error,
                "seen_ms": self._seen_ms,
                "version": self._version,
                "totals": {
                    "topics": len(self._topics) + self._left_out["topics"],
                    "groups": len(self._groups) + self._left_out["groups"],
                },
            }

    def topics(self, wanted: Wanted) -> dict[str, object]:
        """A page of the topics."""
        with self._changed:
            rows, about = self._topics, self._about("topics", self._topics.values())
            version = self._version
        listed = self._sorted_topics.page(version, rows.values(), wanted)
        self._note(self._shown_topics, [one.name for one in listed.rows])
        return {**about, **listed.told()}

    def groups(self, wanted: Wanted) -> dict[str, object]:
        """A page of the groups."""
        with self._changed:
            rows, about = self._groups, self._about("groups", self._groups.values())
            version = self._version
        listed = self._sorted_groups.page(version, rows.values(), wanted)
        self._note(self._shown_groups, [one.name for one in listed.rows])
        return {**about, **listed.told()}

    def _about(self, kind: str, rows: Iterable[TopicRow | GroupRow]) -> dict[str, object]:
        """The state of a list of one kind: ``unseen`` have no figures yet, ``left_out`` are not in it."""
        return {
            "loaded": self._loaded,
            "version": self._version,
            "unseen": sum(one.seen_ms == 0 for one in rows),
            "left_out": self._left_out[kind],
        }

    def _note(self, shown: dict[str, float], names: Iterable[str]) -> None:
        now = self._clock_s()
        with self._changed:
            for name in names:
                shown.pop(name, None)
                shown[name] = now
            for name in tuple(shown)[: max(0, len(shown) - _SHOWN_MAX)]:
                del shown[name]

    # --- the catalog's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._stopping)
                if self._stopping:
                    return
                if self._nudged:
                    self._nudged, self._list_at_s = False, 0.0
            if self._applies():
                self.look()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._nudged, self._pause_s())

    def _pause_s(self) -> float:
        if not self._loaded:
            return 0.5
        unseen = any(one.seen_ms == 0 for rows in (self._topics, self._groups) for one in rows.values())
        return FILL_INTERVAL_S if unseen and not self._error else INTERVAL_S

    def look(self) -> None:
        """Run one round."""
        try:
            if self._clock_s() >= self._list_at_s:
                self._look_at_names()
                self._list_at_s = self._clock_s() + max(INTERVAL_S - FILL_INTERVAL_S, len(self._topics) / NAMES_PER_S)
            self._look_at_figures()
        except DLedgerError as failure:
            if not self._stopping:
                self._tell(error=str(failure))
        else:
            self._tell(error="")

    def _tell(self, *, error: str, changed: bool = False) -> None:
        with self._changed:
            if not error:
                self._seen_ms = wall_ms()
            if not changed and error == self._error:
                return
            self._error = error
            self._version += 1
        self._on_change()

    def _look_at_names(self) -> None:
        found, names = self._admin.topics(), [one.name for one in self._admin.groups()]
        topics = {one.name: _topic_row(one, self._topics.get(one.name)) for one in found[:LIST_MAX]}
        groups = {name: self._groups.get(name) or GroupRow(name) for name in names[:LIST_MAX]}
        left_out = {"topics": len(found) - len(topics), "groups": len(names) - len(groups)}
        with self._changed:
            changed = not self._loaded or (topics, groups, left_out) != (self._topics, self._groups, self._left_out)
            self._topics, self._groups, self._left_out, self._loaded = topics, groups, left_out, True
        self._topic_order.renew(topics)
        self._group_order.renew(groups)
        if changed:
            self._tell(error="", changed=True)

    def _look_at_figures(self) -> None:
        topics, groups = self._due()
        progress = self._admin.progress_of(groups)
        more, self._late_groups = self._topics_of(groups, progress, topics)
        ranges = self._admin.topic_ranges([*topics, *more])
        now_ms = wall_ms()
        fresh_topics = {
            name: _looked_at(self._topics[name], ranges.get(name), now_ms)
            for name in (*topics, *more)
            if name in self._topics
        }
        fresh_groups = {
            name: _group_row(self._groups[name], progress.get(name, []), ranges, self._topics.keys(), now_ms)
            for name in groups
            if name not in self._late_groups
        }
        changed = any(self._topics[name] != row for name, row in fresh_topics.items())
        changed |= any(self._groups[name] != row for name, row in fresh_groups.items())
        with self._changed:
            self._topics, self._groups = self._topics | fresh_topics, self._groups | fresh_groups
        if changed:
            self._tell(error="", changed=True)

    def _due(self) -> tuple[list[str], list[str]]:
        """The topics and groups whose figures this round looks at."""
        since = self._clock_s() - SHOWN_S
        with self._changed:
            for shown in (self._shown_topics, self._shown_groups):
                for name in [name for name, at in shown.items() if at < since]:
                    del shown[name]
            topics = [name for name in self._shown_topics if name in self._topics]
            groups = [name for name in self._shown_groups if name in self._groups]
            topics.sort(key=lambda name: self._topics[name].seen_ms)
            groups.sort(key=lambda name: self._groups[name].seen_ms)
        groups = [*self._late_groups, *groups]
        return self._topic_order.take(topics, ROUND_QUEUES), self._group_order.take(groups, ROUND_GROUPS)

    def _topics_of(
        self, groups: list[str], progress: Mapping[str, Sequence[QueueProgress]], looked_at: list[str]
    ) -> tuple[list[str], list[str]]:
        """Topics needed for the lag of these groups as far as the budget goes, and the groups that must wait.

        The first group has its topics, whatever they cost.
        """
        more: dict[str, None] = {}
        late: list[str] = []
        have = set(looked_at)
        budget = ROUND_QUEUES
        for place, group in enumerate(groups):
            consumed = {one.queue.topic for one in progress.get(group, ())}
            topics = (consumed & self._topics.keys()) - have - more.keys()
            cost = sum(_queues(self._topics[one]) for one in topics)
            if cost > budget and place > 0:
                late.append(group)
                continue
            budget -= cost
            more |= dict.fromkeys(sorted(topics))
        return list(more), late


def _queues(row: TopicRow) -> int:
    return max(row.read_queues, row.write_queues, 1)


def _topic_row(topic: TopicInfo, old: TopicRow | None) -> TopicRow:
    """With the figures of the last time."""
    queues = topic.write_queues, topic.read_queues, topic.permission
    told = topic.message_type, topic.retention
    if old is None:
        return TopicRow(topic.name, *queues, is_internal(topic.name), *told)
    if (old.write_queues, old.read_queues, old.permission, old.message_type, old.retention) == (*queues, *told):
        return old
    return replace(
        old,
        write_queues=topic.write_queues,
        read_queues=topic.read_queues,
        permission=topic.permission,
        message_type=topic.message_type,
        retention=topic.retention,
    )


def _looked_at(row: TopicRow, ranges: list[QueueRange] | None, now_ms: int) -> TopicRow:
    """``ranges`` None: it was deleted in the meantime, or may not be read."""
    if ranges is None:
        return replace(row, messages=None, end=None, newest_ms=None, seen_ms=now_ms)
    return replace(
        row,
        messages=sum(max(one.max_offset - one.min_offset, 0) for one in ranges),
        end=sum(one.max_offset for one in ranges),
        newest_ms=max((one.last_update_ms for one in ranges), default=0) or -1,
        seen_ms=now_ms,
    )


def _group_row(
    row: GroupRow,
    progress: Sequence[QueueProgress],
    ranges: Mapping[str, list[QueueRange]],
    there: Collection[str],
    now_ms: int,
) -> GroupRow:
    """The lag is unknown if a topic that is ``there`` may not be read."""
    committed = {one.queue: one.committed for one in progress}
    topics = tuple(sorted({queue.topic for queue in committed}))
    if any(topic not in ranges and topic in there for topic in topics):
        return GroupRow(row.name, topics[:TOPICS_NAMED_MAX], len(topics), None, now_ms)
    lag = sum(
        max(one.max_offset - max(committed.get(one.queue, 0), one.min_offset), 0)
        for topic in topics
        for one in ranges.get(topic, ())
    )
    return GroupRow(row.name, topics[:TOPICS_NAMED_MAX], len(topics), lag, now_ms)
