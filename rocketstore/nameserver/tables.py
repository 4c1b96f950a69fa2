"""What a name server knows: which brokers there are, and which queues of each topic they have. Pure: it gets the time.

A broker's *name* stands for a master (id 0) and its slaves, or for the members of a DLedger group. The rules are
RocketMQ's, but that

- an address has one place, and a place one address: whoever unregisters, falls silent or hangs up takes nobody else's;
- a registration may carry the Raft term in which it was made. Then a deposed leader, which has not noticed yet, cannot
  take the master's place back. The term of a name is known for as long as its master registers, and is forgotten once
  that has been silent for ``SILENCE_MS``: the terms of a group that was rebuilt from nothing start again;
- a registration of all topics brings those that came in earlier ones which were lost, also if the version is not new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from dledger.records import record
from rocketstore.remoting.bodies.routes import BrokerData, QueueData, TopicRouteData
from rocketstore.remoting.bodies.topics import DataVersion
from rocketstore.remoting.errors import RequestError

SILENCE_MS: Final = 120_000
"""RocketMQ's: a broker that has not registered for so long is dropped."""
MASTER_ID: Final = 0
PERMISSION_WRITE: Final = 2
SYS_FLAG_UNIT: Final = 1
SYS_FLAG_UNIT_SUB: Final = 2


@record(frozen=True, slots=True)
class TableLimits:
    """How much may be registered."""

    brokers_max: int
    """Names."""
    addresses_max: int
    topics_max: int
    places_max: int
    """Pairs of a topic and a broker's name."""


@record(frozen=True, slots=True)
class Registration:
    """What a broker says of itself."""

    cluster: str
    broker: str
    broker_id: int
    address: str
    ha_address: str
    version: DataVersion
    topics: Mapping[str, QueueData]
    """Some or all of them: what is not among them stays as it is."""
    term: int | None = None
    """The Raft term in which it has this id; None: Java's brokers do not say."""
    digest: bytes = b""
    """Of what it says about its topics, see ``repeated``; empty if none was made."""


class Registered(NamedTuple):
    """What became of a registration."""

    is_taken: bool
    """False: there is a newer master, and nothing was changed."""
    master: str
    """Its address, for everybody else; empty if there is none."""
    master_ha: str


class _Applied(NamedTuple):
    """The registration whose topics count."""

    address: str
    version: DataVersion
    topics: int

    def is_of(self, one: Registration) -> bool:
        """Whether it was made by the same address, of the same version."""
        return (self.address, self.version) == (one.address, one.version)


class _Broker:
    """All of one name."""

    __slots__ = ("addresses", "applied", "cluster", "led_ms", "name", "term", "topics")

    def __init__(self, name: str, cluster: str) -> None:
        self.name = name
        self.cluster = cluster
        self.addresses: dict[int, str] = {}
        self.topics: set[str] = set()
        self.applied: _Applied | None = None
        self.term: int | None = None
        self.led_ms = 0  # when the master of that term was last heard of


class _Live:
    """One address that has registered."""

    __slots__ = ("broker", "broker_id", "digest", "ha_address", "link", "seen_ms", "version")

    def __init__(self, one: Registration, link: object, now_ms: int) -> None:
        self.broker = one.broker
        self.broker_id = one.broker_id
        self.ha_address = one.ha_address
        self.version = one.version
        self.digest = one.digest
        self.link = link
        self.seen_ms = now_ms


class Tables:
    """Everything that is registered. ``link`` stands for the connection over which a broker registers."""

    def __init__(self, limits: TableLimits) -> None:
        self._limits = limits
        self._brokers: dict[str, _Broker] = {}
        self._live: dict[str, _Live] = {}  # exactly the addresses of all brokers
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._places = 0
        self._by_link: dict[object, set[str]] = {}

    # -- what brokers say ----------------------------------------------------------------------------------------------

    def register(self, one: Registration, link: object, now_ms: int) -> Registered:
        """Take a registration, or leave everything as it is if there is a newer master. Raises ``RequestError``."""
        broker = self._brokers.get(one.broker)
        if broker is not None and _is_outdated(one, broker, now_ms):
            return Registered(False, *self._master_of(broker))
        is_master = one.broker_id == MASTER_ID
        topics = _news(one, broker) if is_master else {}
        self._check_room(one, broker, topics, now_ms)
        broker = self._take_place(one, broker)
        self._note(one, link, now_ms)
        if is_master:
            broker.cluster, broker.term, broker.led_ms = one.cluster, one.term, now_ms
            broker.applied = _applied(one, broker.applied)
            self._apply(broker, topics)
        return Registered(True, *(("", "") if is_master else self._master_of(broker)))

    def repeated(self, name: str, broker_id: int, address: str, digest: bytes) -> DataVersion | None:
        """The version of an address that said the same of its topics when it registered last, None if it did not.

        Then its registration may have no topics: they would change nothing.
        """
        live = self._live.get(address)
        if live is None or not digest or (live.broker, live.broker_id, live.digest) != (name, broker_id, digest):
            return None
        return live.version

    def renew(self, address: str, version: DataVersion, now_ms: int) -> tuple[bool, DataVersion | None]:
        """A broker asks whether it must register: whether its topics have changed, and which version is known here."""
        live = self._live.get(address)
        if live is None:
            return True, None
        if live.version != version:
            return True, live.version
        live.seen_ms = now_ms
        if live.broker_id == MASTER_ID:
            self._brokers[live.broker].led_ms = now_ms
        return False, live.version

    def unregister(self, name: str, broker_id: int, address: str) -> bool:
        """A broker goes. False if the address has another place by now, or none: then nothing is changed."""
        live = self._live.get(address)
        if live is None or (live.broker, live.broker_id) != (name, broker_id):
            return False
        self._drop(address)
        return True

    def closed(self, link: object) -> tuple[str, ...]:
        """A connection has ended: drop, and give, the addresses that registered over it last."""
        gone = tuple(sorted(self._by_link.get(link, ())))
        for address in gone:
            self._drop(address)
        return gone

    def expire(self, now_ms: int) -> tuple[tuple[str, object], ...]:
        """Drop the addresses that have been silent for too long; gives them and their connections."""
        silent = [(one, live.link) for one, live in self._live.items() if now_ms - live.seen_ms > SILENCE_MS]
        for address, _ in silent:
            self._drop(address)
        return tuple(silent)

    # -- what administrators change ------------------------------------------------------------------------------------

    def delete_topic(self, topic: str, cluster: str = "") -> None:
        """Forget a topic, or its queues at the brokers of one cluster, until a changed registration has it again."""
        for name in tuple(self._topics.get(topic, ())):
            broker = self._brokers[name]
            if not cluster or broker.cluster == cluster:
                self._take_queues(broker, topic)

    def wipe_write(self, name: str) -> int:
        """Take the write permission from all topics of a broker, until a changed registration; gives their number."""
        return self._permit(name, take=PERMISSION_WRITE)

    def add_write(self, name: str) -> int:
        """Give it back; gives the number of topics."""
        return self._permit(name, give=PERMISSION_WRITE)

    def _permit(self, name: str, *, take: int = 0, give: int = 0) -> int:
        broker = self._brokers.get(name)
        if broker is None:
            return 0
        for topic in broker.topics:
            old = self._topics[topic][name]
            self._topics[topic][name] = replace(old, perm=old.perm & ~take | give)
        return len(broker.topics)

    # -- what clients ask ----------------------------------------------------------------------------------------------

    def route(self, topic: str) -> TopicRouteData | None:
        """Where a topic is; None: nowhere."""
        at = self._topics.get(topic)
        if at is None:
            return None
        names = sorted(at)
        return TopicRouteData(tuple([at[one] for one in names]), tuple([self._data_of(one) for one in names]))

    def brokers(self) -> tuple[BrokerData, ...]:
        """All of them, in the order of their names."""
        return tuple([self._data_of(name) for name in sorted(self._brokers)])

    def topics(self) -> tuple[str, ...]:
        """The names of all topics, in their order."""
        return tuple(sorted(self._topics))

    def topics_of_cluster(self, cluster: str) -> tuple[str, ...]:
        """Those with queues at a broker of that cluster."""
        found = {topic for one in self._brokers.values() if one.cluster == cluster for topic in one.topics}
        return tuple(sorted(found))

    def topics_with(self, sys_flag: int, without: int = 0) -> tuple[str, ...]:
        """Those whose system flag has all of some bits, and none of others."""
        return tuple(topic for topic, flag in self._sys_flags() if flag & sys_flag == sys_flag and not flag & without)

    def _sys_flags(self) -> Iterator[tuple[str, int]]:
        """Of every topic, at the first of its brokers."""
        for topic in sorted(self._topics):
            at = self._topics[topic]
            yield topic, at[min(at)].topic_sys_flag

    def master(self, name: str) -> str:
        """The address of a name's master; empty if there is none."""
        broker = self._brokers.get(name)
        return "" if broker is None else broker.addresses.get(MASTER_ID, "")

    def term_of(self, name: str, now_ms: int) -> int | None:
        """The term of a name's master, if it counts."""
        broker = self._brokers.get(name)
        return None if broker is None else _known_term(broker, now_ms)

    def sizes(self) -> tuple[int, int, int, int]:
        """How many names, addresses, topics, and pairs of topic and name there are."""
        return len(self._brokers), len(self._live), len(self._topics), self._places

    # -- the parts of a change -----------------------------------------------------------------------------------------

    def _data_of(self, name: str) -> BrokerData:
        broker = self._brokers[name]
        return BrokerData(broker.cluster, name, dict(sorted(broker.addresses.items())))

    def _master_of(self, broker: _Broker) -> tuple[str, str]:
        address = broker.addresses.get(MASTER_ID)
        return ("", "") if address is None else (address, self._live[address].ha_address)

    def _check_room(
        self, one: Registration, broker: _Broker | None, news: Mapping[str, QueueData], now_ms: int
    ) -> None:
        """Raises ``RequestError`` if it would be too much; a broker that is known stays so."""
        limits = self._limits
        live = self._live.get(one.address)
        if broker is None and len(self._brokers) >= limits.brokers_max:
            raise RequestError(f"there are {limits.brokers_max} brokers, the most this name server takes (brokersMax)")
        if live is None and len(self._live) >= limits.addresses_max:
            raise RequestError(
                f"there are {limits.addresses_max} broker addresses, the most this name server takes (addressesMax)"
            )
        topics = len(self._topics) + sum(1 for topic in news if topic not in self._topics)
        known = broker.topics if broker is not None else ()
        places = self._places + sum(1 for topic in news if topic not in known)
        if topics <= limits.topics_max and places <= limits.places_max:
            return
        if live is not None and (live.broker, live.broker_id) == (one.broker, one.broker_id):
            live.seen_ms = now_ms
        if topics > limits.topics_max:
            raise RequestError(f"{topics} topics: this name server takes at most {limits.topics_max} (topicsMax)")
        raise RequestError(
            f"{places} pairs of topic and broker: this name server takes at most {limits.places_max} (placesMax)"
        )

    def _take_place(self, one: Registration, broker: _Broker | None) -> _Broker:
        """Give the address its place, and take it from whoever had it."""
        live = self._live.get(one.address)
        if live is not None and live.broker != one.broker:
            self._drop(one.address)
        if broker is None:
            broker = self._brokers[one.broker] = _Broker(one.broker, one.cluster)
        elif live is not None and live.broker == one.broker and live.broker_id != one.broker_id:
            del broker.addresses[live.broker_id]
        former = broker.addresses.get(one.broker_id)
        if former is not None and former != one.address:
            self._forget(former)
        broker.addresses[one.broker_id] = one.address
        return broker

    def _note(self, one: Registration, link: object, now_ms: int) -> None:
        if one.address in self._live:
            self._forget(one.address)
        self._live[one.address] = _Live(one, link, now_ms)
        self._by_link.setdefault(link, set()).add(one.address)

    def _apply(self, broker: _Broker, topics: Mapping[str, QueueData]) -> None:
        for topic, queues in topics.items():
            at = self._topics.setdefault(topic, {})
            if broker.name not in at:
                self._places += 1
                broker.topics.add(topic)
            at[broker.name] = queues

    def _forget(self, address: str) -> _Live:
        live = self._live.pop(address)
        of_link = self._by_link[live.link]
        of_link.discard(address)
        if not of_link:
            del self._by_link[live.link]
        return live

    def _drop(self, address: str) -> None:
        """An address goes; with the last one of a name, all that is known of the name goes."""
        live = self._forget(address)
        broker = self._brokers[live.broker]
        del broker.addresses[live.broker_id]
        if broker.addresses:
            return
        del self._brokers[live.broker]
        for topic in tuple(broker.topics):
            self._take_queues(broker, topic)

    def _take_queues(self, broker: _Broker, topic: str) -> None:
        broker.topics.discard(topic)
        self._places -= 1
        at = self._topics[topic]
        del at[broker.name]
        if not at:
            del self._topics[topic]


def _applied(one: Registration, before: _Applied | None) -> _Applied:
    topics = before.topics if before is not None and before.is_of(one) else 0
    return _Applied(one.address, one.version, max(len(one.topics), topics))


def _known_term(broker: _Broker, now_ms: int) -> int | None:
    return broker.term if now_ms - broker.led_ms <= SILENCE_MS else None


def _news(one: Registration, broker: _Broker | None) -> Mapping[str, QueueData]:
    """Which topics of a master's registration change something.

    Of a version that is known already those that are not known, if an earlier registration of it had fewer: it was of
    the last change only, and what was sent before it may not have arrived. Permissions that an administrator has taken
    away stay so.
    """
    applied = None if broker is None else broker.applied
    if broker is None or applied is None or not applied.is_of(one):
        return one.topics
    if len(one.topics) <= applied.topics:
        return {}
    return {topic: queues for topic, queues in one.topics.items() if topic not in broker.topics}


def _is_outdated(one: Registration, broker: _Broker, now_ms: int) -> bool:
    """Whether a newer master is known than the one that a registration comes from, or speaks of.

    Two masters in one term cannot be: they are of two groups with the same name, and the first keeps its place.
    """
    known = _known_term(broker, now_ms)
    if one.term is None or known is None:
        return False
    holder = broker.addresses.get(MASTER_ID)
    if one.broker_id == MASTER_ID:
        return one.term < known or (one.term == known and holder not in (None, one.address))
    return one.term < known and holder == one.address
