"""The tables of clients."""

from __future__ import annotations

from typing import cast

import pytest

from rocketstore.broker.remoting import clients as module
from rocketstore.broker.remoting.clients import ClientTables
from rocketstore.remoting.bodies.clients import (
    ConsumerData,
    ConsumerIdList,
    HeartbeatData,
    ProducerData,
    SubscriptionData,
)
from rocketstore.remoting.connection import RemotingConnection
from rocketstore.remoting.errors import RequestError


class _Tables:
    """Connections have names here."""

    def __init__(self) -> None:
        self.tables = ClientTables(lambda: 0.0, lambda _name: None)

    def beat(self, connection: str, client_id: str, *groups: str) -> None:
        producers = tuple(ProducerData(group) for group in groups)
        self.tables.heartbeat(cast("RemotingConnection", connection), 0, 0, HeartbeatData(client_id, producers))

    def close(self, connection: str) -> None:
        self.tables.closed(cast("RemotingConnection", connection))

    def at(self, client_id: str) -> object:
        found = self.tables.producer_by_id(client_id)
        return None if found is None else found.connection


def test_a_producer_is_found_by_its_id_as_long_as_it_is_here() -> None:
    """Replies go to whoever has the id now."""
    tables = _Tables()
    tables.beat("first", "one", "g", "h")
    tables.beat("second", "two", "g")
    assert (tables.at("one"), tables.at("two"), tables.at("three")) == ("first", "second", None)
    tables.tables.unregister(cast("RemotingConnection", "first"), "g", "")
    assert tables.at("one") == "first"
    tables.tables.unregister(cast("RemotingConnection", "first"), "h", "")
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
    connection = cast("RemotingConnection", "first")

    def beat(group: str) -> None:
        consumer = ConsumerData(group, subscription_data_set=(SubscriptionData("T", "x" * 3000),))
        tables.heartbeat(connection, 0, 0, HeartbeatData("id", (), (consumer,)))

    beat("a")
    beat("b")
    with pytest.raises(RequestError, match="too many subscriptions"):
        beat("c")
    tables.unregister(connection, "", "a")
    for _ in range(5):
        beat("c")
    tables.closed(connection)
    assert tables._subscription_bytes == 0


def test_the_list_of_consumers_follows_every_change() -> None:
    tables = _Tables().tables
    for name in ("first", "second"):
        beat = HeartbeatData(f"id of {name}", (), (ConsumerData("g"),))
        tables.heartbeat(cast("RemotingConnection", name), 0, 0, beat)
        group = tables.consumers("g")
        assert group is not None
        assert f"id of {name}" in ConsumerIdList.decode(group.encoded_ids()).consumer_id_list
    tables.closed(cast("RemotingConnection", "first"))
    assert group is not None
    assert ConsumerIdList.decode(group.encoded_ids()).consumer_id_list == ("id of second",)


@pytest.mark.parametrize("beat", [HeartbeatData("i" * 2000), HeartbeatData("i", (ProducerData("g" * 300),))])
def test_names_have_a_length(beat: HeartbeatData) -> None:
    """They are kept in tables."""
    with pytest.raises(RequestError, match="characters"):
        _Tables().tables.heartbeat(cast("RemotingConnection", "first"), 0, 0, beat)
