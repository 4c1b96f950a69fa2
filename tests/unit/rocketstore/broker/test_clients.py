"""The tables of clients."""

from __future__ import annotations

from typing import NamedTuple, cast

import pytest

from rocketstore.broker import clients as module
from rocketstore.broker.clients import (
    MEETINGS,
    ClientLink,
    ClientTables,
    ConsumerGroup,
    ConsumingClient,
    Heartbeat,
    Subscription,
    Trouble,
)
from rocketstore.broker.refusal import Refusal


class _Place(NamedTuple):
    """A connection."""

    address: str


class _Tables:
    """Connections have names here."""

    def __init__(self) -> None:
        self.tables = ClientTables(lambda: 0.0, lambda _name: None)

    def beat(self, connection: str, client_id: str, *groups: str) -> None:
        self.tables.heartbeat(cast("ClientLink", connection), Heartbeat(client_id, groups))

    def close(self, connection: str) -> None:
        self.tables.closed(cast("ClientLink", connection))

    def at(self, client_id: str) -> object:
        found = self.tables.producer_by_id(client_id)
        return None if found is None else found.link


def test_a_producer_is_found_by_its_id_as_long_as_it_is_here() -> None:
    """Replies go to whoever has the id now."""
    tables = _Tables()
    tables.beat("first", "one", "g", "h")
    tables.beat("second", "two", "g")
    assert (tables.at("one"), tables.at("two"), tables.at("three")) == ("first", "second", None)
    tables.tables.unregister(cast("ClientLink", "first"), "g", "")
    assert tables.at("one") == "first"
    tables.tables.unregister(cast("ClientLink", "first"), "h", "")
    assert tables.at("one") is None
    tables.beat("third", "two", "g")
    tables.close("second")
    assert tables.at("two") == "third"


def test_ids_that_a_connection_no_longer_has_are_forgotten() -> None:
    """Otherwise a client that changes its id would fill the memory."""
    tables = _Tables()
    for number in range(10):
        tables.beat("first", f"id{number}", "g")
    assert [tables.at(f"id{number}") for number in range(10)] == [None] * 9 + ["first"]
    tables.close("first")
    assert tables.at("id9") is None


def test_subscriptions_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat may hold a megabyte of them, and a client may be in thousands of groups."""
    monkeypatch.setattr(module, "SUBSCRIPTION_BYTES_MAX", 10_000)
    tables = _Tables().tables
    connection = cast("ClientLink", "first")

    def beat(group: str) -> None:
        consumer = ConsumingClient(group, subscriptions=(Subscription("T", "x" * 3000),))
        tables.heartbeat(connection, Heartbeat("id", (), (consumer,)))

    beat("a")
    beat("b")
    with pytest.raises(Refusal, match="too many subscriptions"):
        beat("c")
    tables.unregister(connection, "", "a")
    for _ in range(5):
        beat("c")
    tables.closed(connection)
    assert tables._subscription_bytes == {}


def test_a_group_counts_with_the_subscriptions_of_its_last_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of one heartbeat with the last that names it."""
    monkeypatch.setattr(module, "SUBSCRIPTION_BYTES_MAX", 10_000)
    tables = _Tables().tables
    connection = cast("ClientLink", "first")

    def group(name: str, *subscriptions: tuple[str, int, int]) -> ConsumingClient:
        data = tuple(Subscription(topic, "x" * size, version=version) for topic, size, version in subscriptions)
        return ConsumingClient(name, subscriptions=data)

    def beat(*groups: ConsumingClient) -> None:
        tables.heartbeat(connection, Heartbeat("id", (), groups))

    beat(group("a", ("T0", 3000, 9)))
    beat(group("a", ("T0", 3000, 1), ("T1", 3000, 9)))
    with pytest.raises(Refusal, match="too many subscriptions"):
        beat(group("a", ("T0", 3000, 1), ("T1", 3000, 1), ("T2", 3000, 9)))
    with pytest.raises(Refusal, match="too many subscriptions"):
        beat(group("b", ("T", 3000, 1)))
    with pytest.raises(Refusal, match="too many subscriptions"):
        beat(*[group("a", ("T0", 1, 1))] * 20, group("a", ("T0", 3000, 9), ("T1", 3000, 9)), group("b", ("T", 3000, 1)))
    tables.closed(connection)
    assert tables._subscription_bytes == {}


def test_one_owner_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connections and groups it has; a group's subscriptions count for whoever named it last."""
    monkeypatch.setattr(module, "SUBSCRIPTION_BYTES_MAX", 10_000)
    monkeypatch.setattr(module, "MEMBERS_MAX", 8)
    tables = ClientTables(lambda: 0.0, lambda _name: None, 50)

    def beat(connection: str, group: str, size: int = 0, owner: str = "") -> None:
        data = (Subscription("T", "x" * size),) if size else ()
        consumer = ConsumingClient(group, subscriptions=data)
        place = cast("ClientLink", _Place(connection))
        tables.heartbeat(place, Heartbeat("id", (), (consumer,)), owner)

    for number in range(4):
        beat(f"bad{number}", f"g{number}", owner="bad")
    with pytest.raises(Refusal, match="too many groups of this client's account or address"):
        beat("bad4", "g4", owner="bad")
    beat("good", "g0", 4000, owner="good")
    with pytest.raises(Refusal, match="too many subscriptions of this client's account or address"):
        beat("good", "h", 1000, owner="good")
    beat("bad0", "g0", 4000, owner="bad")
    beat("good", "h", 1000, owner="good")
    for one in ("bad0", "bad1", "bad2", "bad3", "bad4", "good"):
        tables.closed(cast("ClientLink", _Place(one)))
    assert (tables._members, tables._subscription_bytes, tables._owners) == ({}, {}, {})


def test_the_list_of_consumers_follows_every_change() -> None:
    tables = _Tables().tables
    for name in ("first", "second"):
        beat = Heartbeat(f"id of {name}", (), (ConsumingClient("g"),))
        tables.heartbeat(cast("ClientLink", name), beat)
        group = tables.consumers("g")
        assert group is not None
        assert f"id of {name}" in group.ids
    tables.closed(cast("ClientLink", "first"))
    assert group is not None
    assert group.ids == ("id of second",)


def test_a_consumer_that_connects_again_is_one_consumer() -> None:
    """Its old connection may last for two minutes: every member would leave queues to a second one of that name."""
    tables = _Tables().tables
    for name, client_id in (("old", "one"), ("other", "two"), ("new", "one")):
        tables.heartbeat(cast("ClientLink", name), Heartbeat(client_id, (), (ConsumingClient("g"),)))
    group, found = tables.consumers("g"), tables.consumer("g", "one")
    assert group is not None
    assert found is not None
    assert (group.ids, str(found.link)) == (("one", "two"), "new")
    tables.closed(cast("ClientLink", "old"))
    assert set(group.ids) == {"one", "two"}


@pytest.mark.parametrize("beat", [Heartbeat("i" * 2000), Heartbeat("i", ("g" * 300,))])
def test_names_have_a_length(beat: Heartbeat) -> None:
    """They are kept in tables."""
    with pytest.raises(Refusal, match="characters"):
        _Tables().tables.heartbeat(cast("ClientLink", "first"), beat)


class _Consumers:
    """Of group g, each at a connection of its own; time stands still unless it is told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[tuple[Trouble, str]] = []
        self.tables = ClientTables(
            lambda: self.now,
            lambda _name: None,
            tell=lambda trouble, group, _message: self.told.append((trouble, group)),
        )

    def beat(
        self, place: str, tags: str = "*", client_id: str = "", version: int = 0, topics: tuple[str, ...] = ("T",)
    ) -> None:
        """One second after the last."""
        self.now += 1
        tag_set = () if tags == "*" else tuple(tags.split("||"))
        data = tuple(Subscription(one, tags, tag_set, version=version) for one in topics)
        beat = Heartbeat(client_id or place, consumers=(ConsumingClient("g", subscriptions=data),))
        self.tables.heartbeat(cast("ClientLink", _Place(place)), beat)

    def version(self, place: str) -> int:
        return self.group.version_of(cast("ClientLink", _Place(place)), "T")

    def close(self, place: str) -> None:
        self.tables.closed(cast("ClientLink", _Place(place)))

    @property
    def group(self) -> ConsumerGroup:
        found = self.tables.consumers("g")
        assert found is not None
        return found

    @property
    def tags(self) -> str:
        return self.group.subscriptions["T"].expression


def test_what_a_consumer_says_anew_counts_whatever_its_clock_says() -> None:
    """Versions are times of clients' clocks: one that is behind may change its tags all the same."""
    consumers = _Consumers()
    consumers.beat("one", "a", version=1000)
    consumers.beat("two", "b", version=10)
    assert consumers.tags == "b"
    consumers.beat("one", "a", version=1000)
    assert consumers.tags == "b", "it says nothing new"
    consumers.beat("one", "c", version=1001)
    assert consumers.tags == "c"
    consumers.beat("two", "d", version=5)
    assert consumers.tags == "d"
    assert (consumers.version("one"), consumers.version("two"), consumers.version("three")) == (1001, 5, 5)


def test_consumers_with_different_tags_are_told_until_one_is_left() -> None:
    """Each misses what is in the other's queues. The order of tags makes no difference."""
    consumers = _Consumers()
    consumers.beat("one", "a||b")
    consumers.beat("two", "b||a")
    assert consumers.told == []
    consumers.beat("two", "a")
    consumers.beat("one", "a||b")
    assert consumers.told == [(Trouble.SUBSCRIPTIONS, "g")] * 2
    consumers.close("two")
    consumers.beat("one", "a||b")
    assert len(consumers.told) == 2


def test_consumers_of_different_topics_are_told_until_one_is_left() -> None:
    """Nobody reads the queues of a topic that fall to a member that does not subscribe to it. One that subscribes to
    nothing, because it chooses queues itself, and topics for retries make no difference."""
    consumers = _Consumers()
    consumers.beat("one", topics=("T", "U"))
    consumers.beat("two", topics=("U", "T", "%RETRY%g"))
    consumers.beat("free", topics=())
    consumers.beat("one", topics=("T", "U"))
    assert consumers.told == []
    consumers.beat("two", topics=("T",))
    consumers.beat("one", topics=("T", "U"))
    consumers.beat("free", topics=())
    assert consumers.told == [(Trouble.SUBSCRIPTIONS, "g")] * 2
    for place in ("one", "two"):
        told = consumers.tables.difference("g", cast("ClientLink", _Place(place)))
        assert "different topics: one to U, and two does not" in told
    assert not consumers.tables.difference("g", cast("ClientLink", _Place("free")))
    consumers.close("two")
    consumers.beat("one", topics=("T", "U"))
    assert len(consumers.told) == 2


def test_two_consumers_with_one_client_id_are_told_but_not_one_that_has_connected_again() -> None:
    """The old connection of one that has connected again says nothing more, also if it has not been closed yet."""
    consumers = _Consumers()
    for place in ("old", "old", "new", "new", "new"):
        consumers.beat(place, client_id="me")
    assert consumers.told == []
    consumers.close("old")
    consumers.beat("other", client_id="me")
    consumers.beat("new", client_id="me")
    assert consumers.told == [(Trouble.CLIENT_ID, "g")]
    consumers.close("other")
    consumers.beat("new", client_id="me")
    assert len(consumers.told) == 1


def test_two_consumers_with_one_client_id_that_connect_again_and_again_are_told() -> None:
    """They do so while the other is there. One whose old connection hangs for once is no such case."""
    once = _Consumers()
    for place in ("old", "new", "new"):
        once.beat(place, client_id="me")
    once.close("old")
    once.beat("newer", client_id="me")
    assert once.told == []
    consumers = _Consumers()
    consumers.beat("a0", client_id="me")
    for number in range(4):
        consumers.beat(f"b{number}", client_id="me")
        consumers.close(f"a{number}")
        consumers.beat(f"a{number + 1}", client_id="me")
        consumers.close(f"b{number}")
    assert consumers.told


@pytest.mark.parametrize("meetings", range(1, MEETINGS + 1))
def test_so_many_meetings_of_one_client_id_make_it_two_clients_and_no_fewer(meetings: int) -> None:
    """A client whose old connection hangs once or twice is one client all the same."""
    consumers = _Consumers()
    consumers.beat("0", client_id="me")
    for number in range(meetings):
        consumers.beat(f"{number + 1}", client_id="me")
        consumers.close(f"{number}")
    assert consumers.told == ([(Trouble.CLIENT_ID, "g")] if meetings == MEETINGS else [])
