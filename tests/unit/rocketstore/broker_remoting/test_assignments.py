"""A broker divides queues as RocketMQ 5 does: every queue has somebody, and nobody has one that is not theirs."""

from __future__ import annotations

from collections import Counter

import pytest

from rocketstore.broker_remoting.assignments import RULES, shares
from rocketstore.state.attributes import TopicRequestMode
from rocketstore.types import RequestMode

PULL = TopicRequestMode("T", "g", RequestMode.PULL)


def pop(share: int) -> TopicRequestMode:
    return TopicRequestMode("T", "g", RequestMode.POP, share)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("queues", [1, 2, 7, 8])
@pytest.mark.parametrize("members", [1, 2, 3, 9])
def test_each_queue_is_pulled_by_one(name: str, queues: int, members: int) -> None:
    ids = [f"c{number}" for number in range(members)]
    found = [shares(PULL, RULES[name], range(queues), ids, me) for me in ids]
    assert sorted(one for each in found for one in each) == list(range(queues))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_the_rules_are_rocketmqs() -> None:
    """AllocateMessageQueueAveragely: runs, the first ones longer; by circle: one each in turn."""
    ids = ["a", "b", "c"]
    assert [shares(PULL, RULES["AVG"], range(8), ids, me) for me in ids] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [shares(PULL, RULES["AVG_BY_CIRCLE"], range(8), ids, me) for me in ids] == [[0, 3, 6], [1, 4, 7], [2, 5]]


@pytest.mark.parametrize("share", [-1, 0, 3, 9])
def test_without_a_share_or_with_one_for_all_everyone_pops_from_all(share: int) -> None:
    ids = ["a", "b", "c", "d"]
    assert shares(pop(share), RULES["AVG"], range(8), ids, "a") == [-1]
    assert shares(pop(share), RULES["AVG"], range(8), ids, "unknown") == [-1]


def test_a_share_adds_the_queues_of_those_behind() -> None:
    """In a circle: each queue is popped from by one more than the share says."""
    ids = ["a", "b", "c", "d"]
    found = {me: shares(pop(1), RULES["AVG"], range(8), ids, me) for me in ids}
    assert found["a"] == [0, 1, 2, 3]
    assert found["d"] == [6, 7, 0, 1]
    assert set(Counter(one for each in found.values() for one in each).values()) == {2}
    assert shares(pop(1), RULES["AVG"], range(8), ids, "unknown") == []


def test_more_consumers_than_queues_share_nothing() -> None:
    """As in RocketMQ: each has its own, if there is one."""
    ids = ["a", "b", "c", "d"]
    assert [shares(pop(1), RULES["AVG"], range(3), ids, me) for me in ids] == [[0], [1], [2], []]
