"""Topics and consumer groups of the brokers, refreshed every few seconds while a page is open.

A round costs one request per queue, so it has a budget: if there are more queues, each round covers some of them in
turn, and each topic records when it was refreshed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from cluster.console.sampler import JOIN_TIMEOUT_S, wall_ms
from dledger.errors import DLedgerError
from rocketstore.client.errors import NotFoundError
from rocketstore.message.checks import NO_SEND_TOPICS

if TYPE_CHECKING:
    from rocketstore.client import Admin, QueueRange, TopicInfo

INTERVAL_S: Final = 3.0
ROUND_REQUESTS_MAX: Final = 64
TOPICS_MAX: Final = 500
GROUPS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class TopicRow:
    """One topic; ``messages`` and the fields after it are None until it was refreshed."""

    name: str
    write_queues: int
    read_queues: int
    permission: int
    system: bool
    messages: int | None = None
    end: int | None = None
    newest_ms: int | None = None
    seen_ms: int = 0


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One consumer group: its topics, and its total lag."""

    name: str
    topics: tuple[str, ...]
    lag: int | None
    seen_ms: int


class Catalog:
    """Thread-safe. ``on_change`` is called on the catalog's thread when something changed."""

    def __init__(
        self,
        admin: Admin,
        applies: Callable[[], bool],
        on_change: Callable[[], None] = lambda: None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._admin = admin
        self._applies = applies
        self._interval_s = interval_s
        self._changed = threading.Condition()  # guards the fields below
        self._watched = False
        self._stopping = False
        self._nudged = False
        self._topics: dict[str, TopicRow] = {}
        self._groups: dict[str, GroupRow] = {}
        self._totals = {"topics": 0, "groups": 0}
        self._error = ""
        self._loaded = False
        self._thread = threading.Thread(target=self._run, name="dledger-console-catalog", daemon=True)
        self._on_change = on_change

    def start(self) -> None:
        """Start the thread."""
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

    def snapshot(self) -> dict[str, object]:
        """The last results."""
        with self._changed:
            return {
                "loaded": self._loaded,
                "error": self._error,
                "totals": dict(self._totals),
                "topics": [asdict(self._topics[name]) for name in sorted(self._topics)],
                "groups": [asdict(self._groups[name]) for name in sorted(self._groups)],
            }

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._stopping)
                if self._stopping:
                    return
            if self._applies():
                self.look()
            with self._changed:
                pause_s = self._interval_s if self._loaded else 0.5
                self._changed.wait_for(lambda: self._stopping or self._nudged, pause_s)
                self._nudged = False

    def look(self) -> None:
        """Run one round."""
        before = self.snapshot()
        try:
            self._look()
            error = ""
        except DLedgerError as failure:
            error = str(failure)
        with self._changed:
            self._error = error
            self._loaded = self._loaded or not error
        if not self._stopping and _without_times(self.snapshot()) != _without_times(before):
            self._on_change()

    def _look(self) -> None:
        found = self._admin.topics()
        topics = found[:TOPICS_MAX]
        rows: dict[str, TopicRow] = {}
        ranges: dict[str, list[QueueRange]] = {}
        budget = ROUND_REQUESTS_MAX
        for topic in sorted(topics, key=self._when_seen):
            row = self._topics.get(topic.name)
            system = topic.name in NO_SEND_TOPICS
            queues = max(topic.read_queues, topic.write_queues)
            if not system and (queues <= budget or budget == ROUND_REQUESTS_MAX):
                budget -= min(queues, budget)
                try:
                    looked = [
                        self._admin.queue_range(topic.name, one) for one in range(min(queues, ROUND_REQUESTS_MAX))
                    ]
                except NotFoundError:  # deleted in the meantime
                    continue
                ranges[topic.name] = looked
                rows[topic.name] = _topic_row(topic, looked)
            else:
                rows[topic.name] = TopicRow(
                    topic.name,
                    topic.write_queues,
                    topic.read_queues,
                    topic.permission,
                    system,
                    *((row.messages, row.end, row.newest_ms, row.seen_ms) if row else ()),
                )
        names = self._admin.groups()
        groups = self._look_at_groups(names[:GROUPS_MAX], ranges)
        with self._changed:
            self._topics, self._groups = rows, groups
            self._totals = {"topics": len(found), "groups": len(names)}

    def _look_at_groups(self, names: list[str], ranges: dict[str, list[QueueRange]]) -> dict[str, GroupRow]:
        found: dict[str, GroupRow] = {}
        oldest = sorted(names, key=lambda name: self._groups[name].seen_ms if name in self._groups else 0)
        looked_at = set(oldest[:ROUND_REQUESTS_MAX])
        for name in names:
            old = self._groups.get(name)
            if name not in looked_at and old is not None:
                found[name] = old
                continue
            committed = self._admin.offsets(name)
            topics = tuple(sorted({topic for topic, _ in committed}))
            if all(topic in ranges for topic in topics):
                lag = sum(
                    max(one.max_offset - max(committed.get((topic, one.queue_id), -1), one.min_offset, 0), 0)
                    for topic in topics
                    for one in ranges[topic]
                )
                found[name] = GroupRow(name, topics, lag, wall_ms())
            else:
                found[name] = GroupRow(name, topics, old.lag if old else None, wall_ms())
        return found

    def _when_seen(self, topic: TopicInfo) -> int:
        row = self._topics.get(topic.name)
        return row.seen_ms if row is not None else 0


def _topic_row(topic: TopicInfo, ranges: list[QueueRange]) -> TopicRow:
    return TopicRow(
        topic.name,
        topic.write_queues,
        topic.read_queues,
        topic.permission,
        system=False,
        messages=sum(max(one.max_offset - max(one.min_offset, 0), 0) for one in ranges),
        end=sum(max(one.max_offset, 0) for one in ranges),
        newest_ms=max((one.last_update_ms for one in ranges), default=-1),
        seen_ms=wall_ms(),
    )


def _without_times(snapshot: dict[str, object]) -> list[object]:
    rows: list[object] = [snapshot["loaded"], snapshot["error"], snapshot["totals"]]
    for name in ("topics", "groups"):
        some = snapshot[name]
        rows += [{key: value for key, value in row.items() if key != "seen_ms"} for row in some]  # type: ignore[attr-defined]  # a list of dicts, as just made
    return rows
