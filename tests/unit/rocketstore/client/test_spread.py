"""How messages are spread over groups of brokers: nothing but the choice."""

from __future__ import annotations

from collections import Counter

import pytest

from dledger.errors import InvalidRequestError
from rocketstore.client.errors import MessageRefusedError
from rocketstore.client.outgoing import queue_of_key
from rocketstore.client.spread import Route, Spread, named_group, queue_for_key, route_of
from rocketstore.nameserver.groups import BrokerGroup, TopicShare, groups_of, shares_of
from rocketstore.remoting.bodies.routes import BrokerData, ClusterInfo, QueueData, TopicRouteData


def share(name: str, queues: int, *, master: bool = True, permission: int = 6) -> TopicShare:
    return TopicShare(BrokerGroup("c", name, (f"{name}:1",), master), queues, queues, permission)


def chosen(spread: Spread, route: Route, count: int) -> Counter[str]:
    return Counter(spread.next("t", route).name for _ in range(count))


def test_each_queue_has_its_turn() -> None:
    """A group with twice the queues gets twice the messages, and the groups alternate."""
    route = route_of([share("a", 2), share("b", 4)])

    assert [one.name for one in route.turns] == ["a", "b", "a", "b", "b", "b"]
    assert chosen(Spread(), route, 60) == {"a": 20, "b": 40}


def test_a_group_without_a_master_is_passed_over() -> None:
    """As RocketMQ's producer does; if none has a master, one of them may have it soon."""
    assert chosen(Spread(), route_of([share("a", 2, master=False), share("b", 1)]), 9) == {"b": 9}
    assert len(chosen(Spread(), route_of([share("a", 1, master=False), share("b", 1, master=False)]), 9)) == 2


def test_a_failure_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds; if all have failed, all are used."""
    now = [100.0]
    monkeypatch.setattr("rocketstore.client.spread.time.monotonic", lambda: now[0])
    spread, route = Spread(), route_of([share("a", 1), share("b", 1)])

    spread.avoid("a")
    assert chosen(spread, route, 10) == {"b": 10}
    spread.avoid("b")
    assert len(chosen(spread, route, 10)) == 2
    now[0] += 6
    assert len(chosen(spread, route, 10)) == 2
    assert spread.next("t", route, ["a"]).name == "b"
    assert spread.next("t", route, ["a", "b"]).name in ("a", "b")


def test_a_key_has_one_queue() -> None:
    """Of all queues of all groups, whether or not there is a master: elsewhere the order would be lost."""
    route = route_of([share("a", 2, master=False), share("r", 8, permission=4), share("b", 3)])
    places = {key: queue_for_key("t", key, route) for key in map(str, range(200))}

    assert {(group.name, queue) for group, queue in places.values()} == {
        *(("a", queue) for queue in range(2)),
        *(("b", queue) for queue in range(3)),
    }
    assert all(
        queue_of_key(key, 5) == (queue if group.name == "a" else queue + 2) for key, (group, queue) in places.items()
    )


def test_a_single_group_takes_keys_as_its_own_producer() -> None:
    """The same queue as ``Producer`` chooses."""
    route = route_of([share("a", 7)])

    assert all(queue_for_key("t", key, route)[1] == queue_of_key(key, 7) for key in map(str, range(50)))


def test_what_cannot_be_written_is_refused() -> None:
    """No queue, or no permission."""
    for route in (route_of([]), route_of([share("a", 0)]), route_of([share("a", 4, permission=4)])):
        with pytest.raises(MessageRefusedError):
            Spread().next("t", route)
        with pytest.raises(MessageRefusedError):
            queue_for_key("t", "k", route)


def test_a_queue_needs_its_group() -> None:
    """Each group has a queue 0."""
    route = route_of([share("a", 1), share("b", 1)])

    assert named_group("t", "b", route).name == "b"
    assert named_group("t", "", route_of([share("a", 1)])).name == "a"
    with pytest.raises(InvalidRequestError, match="at a, b: give broker_name"):
        named_group("t", "", route)
    with pytest.raises(InvalidRequestError, match="not at c"):
        named_group("t", "c", route)


def test_what_name_servers_say_becomes_groups() -> None:
    """The master's address comes first; a name without an address is no group."""
    data = {
        "b": BrokerData("c", "b", {2: "b:2", 0: "b:0"}),
        "a": BrokerData("c", "a", {1: "a:1"}),
        "none": BrokerData("c", "none", {}),
    }
    queues = (QueueData("b", 3, 2, 2), QueueData("a", 1, 1, 4), QueueData("none", 1, 1, 6), QueueData("gone", 1, 1, 6))
    a, b = BrokerGroup("c", "a", ("a:1",), False), BrokerGroup("c", "b", ("b:0", "b:2"), True)

    assert groups_of(ClusterInfo(data, {})) == (a, b)
    found = shares_of(TopicRouteData(queues, tuple(data.values())))
    assert found == (TopicShare(a, 1, 1, 4), TopicShare(b, 3, 2, 2))
    assert [(one.is_readable, one.is_writable) for one in found] == [(True, False), (False, True)]
