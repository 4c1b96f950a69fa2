"""The tables of broker state. Pure: every node applies the same changes in the same order and has the same tables.

Not thread-safe; ``BrokerState`` guards them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

from rocketstore.state.changes import (
    OFFSETS_MAX,
    Change,
    CommitOffsets,
    DeleteGroup,
    DeleteTopic,
    PutTopic,
    QueueOffset,
    SetDelayOffsets,
    TopicConfig,
)


class Tables:
    """Topics, groups with their consumer offsets, and delay progress."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self.topics: dict[str, TopicConfig] = {}
        self.groups: dict[str, dict[tuple[str, int], int]] = {}
        self.delay_offsets: dict[int, int] = {}
        for change in changes:
            self.apply(change)

    def apply(self, change: Change) -> None:
        """Make one change. Never fails: whether a change is allowed was decided before it was written."""
        match change:
            case PutTopic(topic):
                self.topics[topic.name] = topic
            case DeleteTopic(name):
                self._delete_topic(name)
            case CommitOffsets(group, offsets, reset):
                self._commit(self.groups.setdefault(group, {}), offsets, reset)
            case DeleteGroup(group):
                self.groups.pop(group, None)
            case SetDelayOffsets(delays):
                self.delay_offsets.update(delays)
            case _:
                assert_never(change)

    def changes_nothing(self, change: CommitOffsets) -> bool:
        """Whether a commit that is no reset only repeats what is noted."""
        noted = self.groups.get(change.group)
        if noted is None or change.reset:
            return False
        return all(noted.get((topic, queue_id), -1) >= offset for topic, queue_id, offset in change.offsets)

    def as_changes(self) -> Iterator[Change]:
        """The changes that make these tables of empty ones."""
        for topic in self.topics.values():
            yield PutTopic(topic)
        for group, noted in self.groups.items():
            offsets = [QueueOffset(topic, queue_id, offset) for (topic, queue_id), offset in noted.items()]
            for start in range(0, max(len(offsets), 1), OFFSETS_MAX):
                yield CommitOffsets(group, tuple(offsets[start : start + OFFSETS_MAX]))
        if self.delay_offsets:
            yield SetDelayOffsets(tuple(self.delay_offsets.items()))

    def _delete_topic(self, name: str) -> None:
        """A topic of this name that is made later begins anew, so offsets in the old one must not hold it back."""
        self.topics.pop(name, None)
        for noted in self.groups.values():
            for key in [key for key in noted if key[0] == name]:
                del noted[key]

    @staticmethod
    def _commit(noted: dict[tuple[str, int], int], offsets: Iterable[QueueOffset], reset: bool) -> None:
        for topic, queue_id, offset in offsets:
            key = (topic, queue_id)
            if reset or offset > noted.get(key, -1):
                noted[key] = offset
