"""What the console lists of topics and groups, and what it costs the brokers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from dledger.errors import UnavailableError
from dledger_cli.console import catalog
from dledger_cli.console.catalog import Catalog
from dledger_cli.console.listing import PAGE_ROWS, Wanted
from rocketstore.client import Admin, GroupInfo, MessageQueue, QueueProgress, QueueRange, TopicInfo
from tests.support.waiting import wait_until


class Clock:
    """Moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Brokers(Admin):
    """Topics of some queues, each with as many messages as its name says; groups that consumed none of them."""

    def __init__(self, topics: dict[str, int], groups: Mapping[str, Sequence[str]] | None = None) -> None:
        self.there, self.consuming = topics, groups or {}
        self.unreadable: set[str] = set()
        self.asked_topics: list[list[str]] = []
        self.asked_groups: list[list[str]] = []
        self.lists = 0
        self.error: UnavailableError | None = None
        self.permissions: dict[str, int] = {}

    def topics(self, *, system: bool = False) -> list[TopicInfo]:
        if self.error is not None:
            raise self.error
        self.lists += 1
        return [
            TopicInfo(name, queues, queues, self.permissions.get(name, 6))
            for name, queues in sorted(self.there.items())
        ]

    def groups(self) -> list[GroupInfo]:
        return [GroupInfo(name) for name in sorted(self.consuming)]

    def close(self) -> None:
        pass

    def topic_ranges(self, topics: Iterable[str]) -> dict[str, list[QueueRange]]:
        names = list(topics)
        self.asked_topics.append(names)
        readable = [name for name in names if name in self.there and name not in self.unreadable]
        return {
            name: [
                QueueRange(queue_of(name, number), 1, 1 + messages_of(name), 7) for number in range(self.there[name])
            ]
            for name in readable
        }

    def progress_of(self, groups: Iterable[str]) -> dict[str, list[QueueProgress]]:
        names = list(groups)
        self.asked_groups.append(names)
        return {
            name: [QueueProgress(queue_of(topic, 0), 1, 1, 0) for topic in self.consuming[name]]
            for name in names
            if name in self.consuming
        }

    @property
    def queues_looked_at(self) -> list[int]:
        return [sum(self.there[name] for name in names) for names in self.asked_topics]


def queue_of(topic: str, number: int) -> MessageQueue:
    return MessageQueue(topic, "b", number)


def messages_of(name: str) -> int:
    digits = "".join(one for one in name if one.isdigit())
    return int(digits) if digits else 0


def many(count: int, queues: int = 4) -> dict[str, int]:
    return {f"topic-{number:05}": queues for number in range(count)}


def watching(brokers: Brokers) -> tuple[Catalog, Clock, list[None]]:
    clock, told = Clock(), list[None]()
    return Catalog(brokers, lambda: True, lambda: told.append(None), clock), clock, told


def topics(looked: Catalog, **wanted: Any) -> dict[str, Any]:  # noqa: ANN401  # by name
    found: dict[str, Any] = looked.topics(Wanted(**wanted))
    return found


def groups(looked: Catalog, **wanted: Any) -> dict[str, Any]:  # noqa: ANN401  # by name
    found: dict[str, Any] = looked.groups(Wanted(**wanted))
    return found


def state(looked: Catalog) -> dict[str, Any]:
    return looked.state()


def test_a_page_of_many_topics_has_figures_and_says_how_many_there_are() -> None:
    """Not more rows than a page; the page after it continues where it ended."""
    looked, _, _ = watching(Brokers(many(1000)))
    looked.look()

    first, second = topics(looked), topics(looked, page=1)
    assert [one["name"] for one in first["rows"]] == [f"topic-{number:05}" for number in range(PAGE_ROWS)]
    assert second["rows"][0]["name"] == f"topic-{PAGE_ROWS:05}"
    assert (first["total"], first["pages"], state(looked)["totals"]) == (1000, 40, {"topics": 1000, "groups": 0})
    assert first["rows"][3]["messages"] == 4 * 3
    assert (first["rows"][3]["end"], first["rows"][3]["newest_ms"]) == (4 * 4, 7)


def test_names_are_told_before_figures_are_asked_for() -> None:
    """Ten thousand topics are on the page at once."""
    brokers = Brokers(many(10))
    seen: list[int] = []
    looked = Catalog(brokers, lambda: True, lambda: seen.append(len(brokers.asked_topics)))

    looked.look()

    assert seen == [0, 1]


def test_a_round_asks_for_no_more_than_its_budget_and_all_have_their_turn() -> None:
    """A thousand topics are known within a few rounds; sorted by messages, the unknown ones are last until then."""
    brokers = Brokers(many(1000))
    looked, _, _ = watching(brokers)
    looked.look()
    assert topics(looked)["unseen"] == 1000 - catalog.ROUND_QUEUES // 4
    assert (
        topics(looked, sort="messages", descending=True)["rows"][0]["name"]
        == f"topic-{catalog.ROUND_QUEUES // 4 - 1:05}"
    )

    for _ in range(-(-1000 * 4 // (catalog.ROUND_QUEUES - 2 * PAGE_ROWS * 4))):
        looked.look()

    assert max(brokers.queues_looked_at) <= catalog.ROUND_QUEUES
    assert topics(looked)["unseen"] == 0
    assert topics(looked, sort="messages", descending=True)["rows"][0]["name"] == "topic-00999"


def test_what_a_page_shows_is_looked_at_in_every_round() -> None:
    """Until the page shows something else for a while."""
    brokers = Brokers(many(1000))
    looked, clock, _ = watching(brokers)
    looked.look()
    shown = [one["name"] for one in topics(looked, page=39)["rows"]]

    looked.look()
    looked.look()
    assert all(set(shown) <= set(names) for names in brokers.asked_topics[1:])
    clock.now += catalog.SHOWN_S + 1
    looked.look()
    assert not set(shown) <= set(brokers.asked_topics[-1])


def test_many_names_are_listed_rarely() -> None:
    """A few in every round; ten thousand three times a minute, unless somebody changed something."""
    few, many_ = Brokers(many(10)), Brokers(many(10_000))
    for brokers, lists in ((few, 20), (many_, 3)):
        looked, clock, _ = watching(brokers)
        for _ in range(20):
            looked.look()
            clock.now += catalog.INTERVAL_S
        assert brokers.lists == lists


def test_a_topic_that_cannot_be_read_keeps_nothing_from_the_others() -> None:
    """It has no figures, and counts as looked at."""
    brokers = Brokers({"a1": 1, "b2": 1})
    brokers.unreadable.add("a1")
    looked, _, _ = watching(brokers)
    looked.look()

    found = topics(looked)
    assert [(one["name"], one["messages"]) for one in found["rows"]] == [("a1", None), ("b2", 2)]
    assert (found["unseen"], state(looked)["error"]) == (0, "")


def test_the_brokers_own_topics_are_internal() -> None:
    """Retries and answers, too; dead letters are for people."""
    names = ["orders", "%DLQ%g", "%RETRY%g", "TBW102", "SCHEDULE_TOPIC_XXXX", "DefaultCluster_REPLY_TOPIC", "rmq_sys_x"]
    looked, _, _ = watching(Brokers(dict.fromkeys(names, 1)))
    looked.look()

    assert [one["name"] for one in topics(looked)["rows"]] == ["%DLQ%g", "orders"]
    assert topics(looked, internal=True)["total"] == len(names)


def test_a_silent_group_leaves_what_was_known_with_the_reason_and_the_time() -> None:
    """A page is told once that it fails, and once that it works again; the rows stay."""
    brokers = Brokers(many(2))
    looked, clock, told = watching(brokers)
    looked.look()
    seen_ms, before = state(looked)["seen_ms"], len(told)
    clock.now += 60
    brokers.error = UnavailableError("no broker answers")
    looked.look()
    looked.look()

    assert state(looked) | {"version": 0} == {
        "loaded": True,
        "error": "no broker answers",
        "seen_ms": seen_ms,
        "version": 0,
        "totals": {"topics": 2, "groups": 0},
    }
    assert len(topics(looked)["rows"]) == 2
    assert len(told) == before + 1
    brokers.error = None
    looked.look()
    assert (state(looked)["error"], len(told)) == ("", before + 2)


def test_nothing_is_told_while_nothing_changes() -> None:
    """However often it is looked at; the version stays the same, so that pages ask for nothing."""
    brokers = Brokers(many(3), {"g": ["topic-00001"]})
    looked, clock, told = watching(brokers)
    looked.look()
    version, before = state(looked)["version"], len(told)
    for _ in range(5):
        clock.now += catalog.INTERVAL_S
        looked.look()

    assert (state(looked)["version"], len(told)) == (version, before)
    brokers.there["topic-00009"] = 4
    clock.now += catalog.INTERVAL_S
    looked.look()
    assert state(looked)["version"] > version


def test_a_topic_that_was_deleted_goes_and_one_that_changed_changes() -> None:
    """Queues and permission are those of the newest list, figures those of the last look."""
    brokers = Brokers({"a1": 1, "b1": 1})
    looked, clock, _ = watching(brokers)
    looked.look()
    del brokers.there["a1"]
    brokers.there["b1"] = 2
    clock.now += catalog.INTERVAL_S
    looked.look()

    assert [(one["name"], one["write_queues"], one["messages"]) for one in topics(looked)["rows"]] == [("b1", 2, 2)]
    brokers.permissions["b1"] = 4
    clock.now += catalog.INTERVAL_S
    looked.look()
    assert [one["permission"] for one in topics(looked)["rows"]] == [4]


def test_the_newest_message_of_a_topic_is_that_of_all_its_queues() -> None:
    """However long ago another queue got its last one; an empty queue has none."""

    class Uneven(Brokers):
        def topic_ranges(self, topics: Iterable[str]) -> dict[str, list[QueueRange]]:
            times = enumerate((0, 9, 3))
            return {name: [QueueRange(queue_of(name, number), 0, 1, ms) for number, ms in times] for name in topics}

    looked, _, _ = watching(Uneven({"a1": 3}))
    looked.look()

    assert [one["newest_ms"] for one in topics(looked)["rows"]] == [9]


def test_names_are_listed_anew_as_soon_as_somebody_changed_something() -> None:
    """However rarely so many are listed otherwise: whoever made a topic looks for it now."""
    brokers = Brokers(many(20))
    looked, _, _ = watching(brokers)  # whose clock stands still: it is never time for the next list
    looked.start()
    try:
        looked.watch(watched=True)
        wait_until(lambda: bool(state(looked)["loaded"]), "the first list")
        brokers.there["made-now"] = 1
        looked.nudge()
        wait_until(lambda: topics(looked, search="made-now")["matching"] == 1, "the new topic")
    finally:
        looked.stop()


def test_a_list_that_is_too_long_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes what is kept for all."""
    monkeypatch.setattr(catalog, "LIST_MAX", 5)
    looked, _, _ = watching(Brokers(many(7), {f"g{number}": [] for number in range(6)}))
    looked.look()

    assert (topics(looked)["left_out"], groups(looked)["left_out"]) == (2, 1)
    assert state(looked)["totals"] == {"topics": 7, "groups": 6}


# --- groups ----------------------------------------------------------------------------------------------------------


def test_the_lag_of_a_group_is_that_of_all_its_topics_at_one_time() -> None:
    """Its topics are looked at in the same round, whether or not it is their turn."""
    brokers = Brokers(many(1000), {"late": ["topic-00900", "topic-00999"], "idle": []})
    looked, _, _ = watching(brokers)
    looked.look()

    rows = {one["name"]: one for one in groups(looked)["rows"]}
    assert {"topic-00900", "topic-00999"} <= set(brokers.asked_topics[0])
    assert rows["late"]["lag"] == 4 * (900 + 999)
    assert rows["late"]["topics"] == ("topic-00900", "topic-00999")
    assert (rows["idle"]["topics"], rows["idle"]["lag"]) == ((), 0)


def test_a_group_of_very_many_topics_names_some_and_counts_all() -> None:
    """A page of such groups would else have megabytes of names; their lag is that of all."""
    looked, _, _ = watching(Brokers(many(300), {"all": list(many(300)), "few": ["topic-00001"]}))
    looked.look()
    looked.look()

    rows = {one["name"]: one for one in groups(looked, sort="topics", descending=True)["rows"]}
    assert list(rows) == ["all", "few"]
    assert rows["all"]["topics"] == tuple(sorted(many(300)))[: catalog.TOPICS_NAMED_MAX]
    assert (rows["all"]["all_topics"], rows["few"]["all_topics"]) == (300, 1)
    assert rows["all"]["lag"] == sum(map(messages_of, many(300))) * 4


def test_a_deleted_topic_has_no_lag_and_an_unreadable_one_an_unknown_one() -> None:
    """A group must not look idle because part of its lag cannot be seen."""
    brokers = Brokers({"a1": 1, "b5": 1}, {"of-deleted": ["b5", "deleted"], "of-unreadable": ["a1", "b5"]})
    brokers.unreadable.add("a1")
    looked, _, _ = watching(brokers)
    looked.look()

    assert {one["name"]: one["lag"] for one in groups(looked)["rows"]} == {"of-deleted": 5, "of-unreadable": None}
    assert groups(looked)["unseen"] == 0


def test_groups_of_wide_topics_wait_but_all_have_their_turn() -> None:
    """Each round looks at one of them at least, and at few queues more than it may."""
    wide = {f"wide-{number}": catalog.ROUND_QUEUES for number in range(5)}
    members = {f"g{name}": [name] for name in wide}
    brokers = Brokers(wide | many(1, 1), {**members, "small": ["topic-00000"]})
    looked, _, _ = watching(brokers)
    for _ in range(6):
        looked.look()

    assert groups(looked)["unseen"] == 0
    assert {one["lag"] is None for one in groups(looked)["rows"]} == {False}
    assert max(brokers.queues_looked_at) <= 4 * catalog.ROUND_QUEUES


def test_a_group_wider_than_a_round_has_its_turn_all_the_same() -> None:
    """Otherwise its lag would never be known, and the groups behind it would wait with it."""
    wide = catalog.ROUND_QUEUES + 1
    brokers = Brokers({"wide-1": wide, "wide-2": wide}, {"g": ["wide-1", "wide-2"]})
    looked, _, _ = watching(brokers)
    for _ in range(3):
        looked.look()

    assert [one["lag"] for one in groups(looked)["rows"]] == [wide * (1 + 2)]


def test_a_thousand_groups_are_all_looked_at() -> None:
    """A few in each round; by lag, those that are known come first."""
    brokers = Brokers(many(20), {f"g{number:04}": [f"topic-{number % 20:05}"] for number in range(1000)})
    looked, _, _ = watching(brokers)
    looked.look()
    assert groups(looked)["unseen"] == 1000 - catalog.ROUND_GROUPS
    for _ in range(1000 // (catalog.ROUND_GROUPS - PAGE_ROWS)):
        looked.look()

    assert groups(looked)["unseen"] == 0
    assert groups(looked, sort="lag", descending=True)["rows"][0]["name"] == "g0019"
    assert {len(names) for names in brokers.asked_groups} <= {catalog.ROUND_GROUPS}
