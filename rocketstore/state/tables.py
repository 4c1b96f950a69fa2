"""The tables of broker state. Pure: every node applies the same changes in the same order and has the same tables.

**Deleted topics.** Their queues' files stay until retention removes them, and their numbering continues: if nodes
removed queues at different times, the next master could count from 0 while another node still has the old units, takes
the new ones for repeats and loses them. ``begins`` hides the queue's earlier messages: it is where a topic of the same
name created later starts. ``waits`` does the same for messages that are not in its queues yet: delayed ones and those
of open transactions.

Not thread-safe; ``BrokerState`` guards them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, assert_never

from rocketstore.pop.tables import ROWS_MAX, PopPlace, PopTables
from rocketstore.state.attributes import TopicRequestMode
from rocketstore.state.changes import (
    OFFSETS_MAX,
    Change,
    CommitOffsets,
    DeleteGroup,
    DeleteTopic,
    ExpireMessages,
    GroupConfig,
    PopRows,
    PutGroup,
    PutTopic,
    QueueOffset,
    SetDelayOffsets,
    SetRequestMode,
    SetTimedProgress,
    TopicConfig,
)
from rocketstore.timer.hours import NOTHING_DELIVERED, TimedProgress
from rocketstore.types import SCHEDULE_TOPIC, TIMED_TOPIC

_ROWS_AT_ONCE: Final = min(32, ROWS_MAX)
"""In a full state, of which a message has about 128 KiB: a window has 1.5 KiB if it is a busy one."""


class Tables:
    """Topics, groups with their consumer offsets, and delay progress."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self.topics: dict[str, TopicConfig] = {}
        self.groups: dict[str, dict[tuple[str, int], int]] = {}
        """Each group's offsets; to be changed as ``_own`` returns them."""
        self._shared: set[str] = set()
        """Groups whose offsets another copy may hold, too."""
        self.group_configs: dict[str, GroupConfig] = {}
        """Of groups whose settings were set."""
        self.delay_offsets: dict[int, int] = {}
        self.timed = NOTHING_DELIVERED
        """How far timed messages have been delivered."""
        self.begins: dict[str, dict[int, int]] = {}
        """Of topics that were once deleted, or have their own retention: queue id to the first offset that can be read.
        """
        self.waits: dict[str, dict[tuple[str, int], int]] = {}
        """The same names: (topic, queue id) of the broker's own queues to the first offset there of which a message may
        be for a topic of this name again.
        """
        self.pop = PopTables()
        """Messages that groups were given singly; a window's commit is the group's offset there."""
        self.request_modes: dict[tuple[str, str], TopicRequestMode] = {}
        """By topic and group."""
        self.topic_changes = 0
        """How often a topic was put or deleted: anyone who shows them need not look at all of them again and again."""
        self.queue_count = 0
        """Queues of all topics."""
        self.offset_count = 0
        """Offsets of all groups."""
        for change in changes:
            self.apply(change)

    def apply(self, change: Change) -> None:  # noqa: C901  # one case per change
        """Apply one change. Never fails: whether a change is allowed was decided before it was written."""
        match change:
            case PutTopic(topic):
                old = self.topics.get(topic.name)
                self.queue_count += topic.queues - (old.queues if old is not None else 0)
                self.topics[topic.name] = topic
                self.topic_changes += 1
            case DeleteTopic(name, ends, waits):
                self._delete_topic(name, ends, waits)
                self.topic_changes += 1
            case ExpireMessages(name, begins):
                if name in self.topics:
                    self._raise_begins(name, begins)
            case PutGroup(config):
                self.groups.setdefault(config.name, {})
                self.group_configs[config.name] = config
            case CommitOffsets(group, offsets, reset):
                self._commit(group, offsets, reset)
            case DeleteGroup(group):
                self.pop.delete_group(group)
                self.offset_count -= len(self.groups.pop(group, ()))
                self.group_configs.pop(group, None)
                self._forget_modes(lambda one: one.group == group)
            case SetRequestMode(one):
                self.request_modes[one.topic, one.group] = one
            case SetDelayOffsets(delays):
                self.delay_offsets.update(delays)
            case PopRows(rows, epoch):
                for row in rows:
                    noted, key = self.groups.get(row.place.group, {}), (row.place.topic, row.place.queue_id)
                    offset = self.pop.apply(row, noted.get(key))
                    if offset is not None:
                        self.offset_count += key not in noted
                        self._own(row.place.group)[key] = offset
                self.pop.epoch = max(self.pop.epoch, epoch)
            case SetTimedProgress(progress):
                if progress.includes(self.timed):
                    self.timed = progress
            case _:
                assert_never(change)

    def mirror(self, changes: Iterable[Change]) -> Tables:
        """Tables with the topics and the groups' settings that ``changes`` say, and only those.

        Offsets and delay progress are those of either, whichever is further: what a slave is told may be old.
        """
        made = Tables(changes)
        for group, noted in self.groups.items():
            made.apply(CommitOffsets(group, tuple(QueueOffset(*key, offset) for key, offset in noted.items())))
        for level, offset in self.delay_offsets.items():
            made.delay_offsets[level] = max(offset, made.delay_offsets.get(level, 0))
        if self.timed.includes(made.timed):
            made.timed = self.timed
        made.begins = {name: dict(begins) for name, begins in self.begins.items()}
        made.waits = {name: dict(waits) for name, waits in self.waits.items()}
        for place, window in self.pop.windows.items():
            if made.groups.get(place.group, {}).get((place.topic, place.queue_id)) == window.commit:
                made.pop.windows[place] = window
        made.pop.epoch = self.pop.epoch
        made.request_modes = dict(self.request_modes)
        made.topic_changes = self.topic_changes + (made.topics != self.topics)
        return made

    def changes_nothing(self, change: CommitOffsets) -> bool:
        """Whether a commit that is not a reset only repeats current offsets."""
        noted = self.groups.get(change.group)
        if noted is None or change.reset:
            return False
        return all(noted.get((topic, queue_id), -1) >= offset for topic, queue_id, offset in change.offsets)

    def new_offsets(self, change: CommitOffsets) -> int:
        """How many offsets a commit adds."""
        noted = self.groups.get(change.group, {})
        return len({(topic, queue_id) for topic, queue_id, _ in change.offsets} - noted.keys())

    def copy(self) -> Tables:
        """A fast copy, because the tables are locked meanwhile: offsets, of which there may be millions, are shared
        until either side changes those of a group.
        """
        made = Tables()
        made.topics = dict(self.topics)
        made.groups, made._shared = dict(self.groups), set(self.groups)
        self._shared = set(self.groups)
        made.group_configs = dict(self.group_configs)
        made.delay_offsets = dict(self.delay_offsets)
        made.timed = self.timed
        made.begins = {name: dict(begins) for name, begins in self.begins.items()}
        made.waits = {name: dict(waits) for name, waits in self.waits.items()}
        made.pop = self.pop.copy()
        made.request_modes = dict(self.request_modes)
        made.topic_changes = self.topic_changes
        made.queue_count, made.offset_count = self.queue_count, self.offset_count
        return made

    def _own(self, group: str) -> dict[tuple[str, int], int]:
        """A group's offsets, new ones if it has none, which no other copy of the tables holds."""
        noted = self.groups.setdefault(group, {})
        if group in self._shared:
            self._shared.remove(group)
            noted = self.groups[group] = dict(noted)
        return noted

    def as_changes(self) -> Iterator[Change]:
        """The changes that turn empty tables into these."""
        for name in {**self.begins, **self.waits}:
            waits = tuple(QueueOffset(*place, end) for place, end in self.waits.get(name, {}).items())
            yield DeleteTopic(name, tuple(self.begins.get(name, {}).items()), waits)
        for topic in self.topics.values():
            yield PutTopic(topic)
        for group, noted in self.groups.items():
            offsets = [QueueOffset(topic, queue_id, offset) for (topic, queue_id), offset in noted.items()]
            for start in range(0, max(len(offsets), 1), OFFSETS_MAX):
                yield CommitOffsets(group, tuple(offsets[start : start + OFFSETS_MAX]))
        for config in self.group_configs.values():
            yield PutGroup(config)
        if self.delay_offsets:
            yield SetDelayOffsets(tuple(self.delay_offsets.items()))
        rows = self.pop.as_rows()
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            yield PopRows(tuple(rows[start : start + _ROWS_AT_ONCE]))
        if self.pop.epoch:
            yield PopRows((), self.pop.epoch)
        if self.timed != NOTHING_DELIVERED:
            yield SetTimedProgress(self.timed)
        yield from map(SetRequestMode, self.request_modes.values())

    def forget_begins(self, is_past: Callable[[str, int, int], bool]) -> None:
        """Remove begins of queues that start there anyway because earlier messages have expired."""
        for name, begins in list(self.begins.items()):
            kept = {queue_id: begin for queue_id, begin in begins.items() if not is_past(name, queue_id, begin)}
            if kept:
                self.begins[name] = kept
            else:
                del self.begins[name]

    def forget_waits(self, is_past: Callable[[str, int, int], bool]) -> None:
        """Remove what waits no longer: it was delivered, or it has expired."""
        for name, waits in list(self.waits.items()):
            kept = {place: end for place, end in waits.items() if not is_past(*place, end)}
            if kept:
                self.waits[name] = kept
            else:
                del self.waits[name]

    def place_for(self, name: str, queue_id: int, waited: QueueOffset) -> int | None:
        """The queue of topic ``name`` for a message that waited at ``waited`` to get to ``queue_id``; None if the topic
        was deleted meanwhile.

        Queues that a topic has no more are read by nobody, so it then gets to one of the others.
        """
        topic, waits = self.topics.get(name), self.waits.get(name, {})
        if waited.offset < waits.get((waited.topic, waited.queue_id), 0):
            return None
        if topic is None:
            return None if waits or name in self.begins else queue_id
        return queue_id if queue_id < topic.queues else queue_id % min(topic.read_queues, topic.write_queues)

    def put_back(self, end_of: Callable[[str, int], int]) -> list[str]:
        """Lower offsets beyond the end of their queue to that end; returns what was lowered, for people."""
        found: list[str] = []
        due_ms, offset, part = self.timed
        if max(offset, part) > (end := end_of(TIMED_TOPIC, 0)):
            self.timed = TimedProgress(due_ms, min(offset, end), min(part, end))
            found.append(f"timed messages from {end} on are not delivered")
        for group, noted in self.groups.items():
            for (topic, queue_id), offset in tuple(noted.items()):
                if offset > (end := end_of(topic, queue_id)):
                    self._own(group)[topic, queue_id] = end
                    found.append(f"group {group} in {topic} queue {queue_id} continues at {end}, not at {offset}")
        self.pop.put_back(end_of)
        for level, offset in self.delay_offsets.items():
            if offset > (end := end_of(SCHEDULE_TOPIC, level - 1)):
                self.delay_offsets[level] = end
                found.append(f"delay level {level} continues at {end}, not at {offset}")
        for topic, begins in self.begins.items():
            for queue_id, begin in begins.items():
                if begin > (end := end_of(topic, queue_id)):
                    begins[queue_id] = end
                    found.append(f"{topic} queue {queue_id} begins at {end}, not at {begin}")
        for waits in self.waits.values():
            for (topic, queue_id), offset in waits.items():
                waits[topic, queue_id] = min(offset, end_of(topic, queue_id))
        return found

    def _delete_topic(self, name: str, ends: Iterable[tuple[int, int]], waits: Iterable[QueueOffset]) -> None:
        """A topic of this name created later starts anew, so offsets in the old one must not hold it back."""
        old = self.topics.pop(name, None)
        self.queue_count -= old.queues if old is not None else 0
        self._raise_begins(name, ends)
        for topic, queue_id, end in waits:
            known = self.waits.setdefault(name, {})
            known[topic, queue_id] = max(end, known.get((topic, queue_id), 0))
        self.pop.delete_topic(name)
        self._forget_modes(lambda one: one.topic == name)
        for group, noted in self.groups.items():
            for key in [key for key in noted if key[0] == name]:
                del self._own(group)[key]
                self.offset_count -= 1

    def _forget_modes(self, is_gone: Callable[[TopicRequestMode], bool]) -> None:
        if self.request_modes:
            self.request_modes = {key: one for key, one in self.request_modes.items() if not is_gone(one)}

    def _raise_begins(self, name: str, wanted: Iterable[tuple[int, int]]) -> None:
        begins = self.begins.get(name, {})
        begins |= {queue_id: end for queue_id, end in wanted if end > begins.get(queue_id, 0)}
        if begins:
            self.begins[name] = begins

    def _commit(self, group: str, offsets: Iterable[QueueOffset], reset: bool) -> None:
        noted = self._own(group)
        before = len(noted)
        for topic, queue_id, offset in offsets:
            key = (topic, queue_id)
            if reset or offset > noted.get(key, -1):
                noted[key] = self.pop.moved(PopPlace(group, topic, queue_id), offset, reset=reset)
        self.offset_count += len(noted) - before
