"""The tables of clients."""

from __future__ import annotations

from typing import cast

from rocketstore.broker.remoting.clients import ClientTables
from rocketstore.remoting.bodies.clients import HeartbeatData, ProducerData
from rocketstore.remoting.connection import RemotingConnection


class _Tables:
    """Connections have names here."""

    def __init__(self) -> None:
        self.tables = ClientTables(lambda: 0.0, lambda _name, _group: None)

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
