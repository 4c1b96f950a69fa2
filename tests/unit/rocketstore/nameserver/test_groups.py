"""What name servers know, as groups: also if somebody has registered nonsense."""

from __future__ import annotations

import pytest

from rocketstore.nameserver.groups import QUEUES_MAX, shares_of
from rocketstore.remoting.bodies.routes import BrokerData, QueueData, TopicRouteData


def route(*queues: tuple[str, int, int]) -> TopicRouteData:
    """With an address for each broker."""
    return TopicRouteData(
        tuple(QueueData(name, read, write, 6) for name, read, write in queues),
        tuple(BrokerData("c", name, {0: f"{name}:1"}) for name, _, _ in queues),
    )


@pytest.mark.parametrize(
    "poison", [("zz", 2**31 - 1, 2**31 - 1), ("aa", QUEUES_MAX + 1, 1), ("aa", 1, QUEUES_MAX), ("zz", -1, 4)]
)
def test_one_poisoned_share_leaves_the_sound_ones(poison: tuple[str, int, int]) -> None:
    """A client that refused the whole route could not send to the sound brokers."""
    found = shares_of(route(("b", 4, 4), poison, ("c", 8, 2)))
    assert [(one.group.name, one.read_queues, one.write_queues) for one in found] == [("b", 4, 4), ("c", 8, 2)]


@pytest.mark.parametrize(("read", "write"), [(QUEUES_MAX // 2, 1), (1, QUEUES_MAX // 2), (QUEUES_MAX // 2,) * 2])
def test_queues_to_read_and_to_write_count_alike(read: int, write: int) -> None:
    """Each of these brokers takes half of all queues, whichever kind it has so many of: there is room for two."""
    found = shares_of(route(*((name, read, write) for name in "abc")))
    assert [one.group.name for one in found] == ["a", "b"]


def test_all_together_are_no_more_than_clients_remember() -> None:
    """Those with the fewest are kept."""
    found = shares_of(route(*((f"p{number}", QUEUES_MAX, 1) for number in range(3)), ("b", 4, 4)))
    assert [one.group.name for one in found] == ["b"]
    whole = shares_of(route(("b", QUEUES_MAX // 2, 4), ("c", QUEUES_MAX // 2, 4)))
    assert [one.group.name for one in whole] == ["b", "c"]
