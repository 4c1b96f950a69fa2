"""Registrations for tests."""

from __future__ import annotations

from rocketstore.nameserver.tables import BrokerRegistration, RouteTables, TableLimits
from rocketstore.remoting.topics import DataVersion, QueueData

LIMITS = TableLimits(brokers_max=10, addresses_max=20, topics_max=10, places_max=20)


def registration(
    broker_id: int,
    address: str,
    *,
    name: str = "g",
    cluster: str = "c",
    term: int | None = None,
    version: int = 1,
    topics: tuple[str, ...] = ("T",),
    queues: int = 4,
    complete: bool = False,
) -> BrokerRegistration:
    """Of one broker."""
    found = {topic: QueueData(name, queues, queues, 6) for topic in topics}
    seen = DataVersion(version, 7)
    return BrokerRegistration(
        cluster, name, broker_id, address, f"ha-{address}", seen, found, term, is_complete=complete
    )


def new_tables(limits: TableLimits = LIMITS) -> RouteTables:
    """Empty ones."""
    return RouteTables(limits)


def addresses(tables: RouteTables, name: str = "g") -> dict[int, str]:
    """Where a broker is, by id."""
    return next((dict(one.broker_addrs) for one in tables.brokers() if one.broker_name == name), {})


def queues_of(tables: RouteTables, topic: str = "T") -> dict[str, int]:
    """How many a topic has at each broker."""
    route = tables.route(topic)
    return {} if route is None else {one.broker_name: one.write_queue_nums for one in route.queue_datas}
