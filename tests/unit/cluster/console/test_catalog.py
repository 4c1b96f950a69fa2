"""What the console lists of topics and groups."""

from __future__ import annotations

from cluster.console import catalog
from cluster.console.catalog import Catalog
from rocketstore.client import Admin, QueueRange, TopicInfo


class ManyTopics(Admin):
    """A broker with more topics and groups than a page shows."""

    def __init__(self, topics: int, groups: int) -> None:
        self._topics_there, self._groups_there = topics, groups

    def topics(self) -> list[TopicInfo]:
        return [TopicInfo(f"topic-{number:05}") for number in range(self._topics_there)]

    def groups(self) -> list[str]:
        return [f"group-{number:05}" for number in range(self._groups_there)]

    def offsets(self, group: str, topic: str = "") -> dict[tuple[str, int], int]:
        return {}

    def queue_range(self, topic: str, queue_id: int) -> QueueRange:
        return QueueRange(queue_id, 0, 1, 0)


def test_a_list_that_is_cut_says_of_how_many() -> None:
    """Nobody takes the first 500 for all."""
    looked = Catalog(ManyTopics(catalog.TOPICS_MAX + 4, catalog.GROUPS_MAX + 1), lambda: True)
    looked.look()

    snapshot = looked.snapshot()
    assert isinstance(snapshot["topics"], list)
    assert len(snapshot["topics"]) == catalog.TOPICS_MAX
    assert snapshot["totals"] == {"topics": catalog.TOPICS_MAX + 4, "groups": catalog.GROUPS_MAX + 1}
