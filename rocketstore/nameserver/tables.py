"""The tables of a name server: the brokers, the queues that each topic has at them, and administrators' values by
namespace and key (in RocketMQ's ``kvConfig.json``). The first two are pure: the time is an argument.

A broker's *name* stands for a master (id 0) and its slaves, or for the members of a DLedger group; an id of a name is a
place. The rules are RocketMQ's, with these differences:

- an address has one place, and a place one address: a broker that unregisters, disconnects or expires leaves only its
  own place;
- a registration may contain the Raft term in which it was made. A deposed leader that does not know it yet then cannot
  regain the master's place. The term of a name counts while its master registers, and is forgotten ``SILENCE_MS`` after
  the last time, because the terms of a group rebuilt from nothing start again;
- a registration of all topics adds those of earlier registrations that were lost, even if its version is known; if it
  says that it has all, as our brokers' do, topics that it does not have are removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Final, NamedTuple

from dledger.errors import ConfigError
from dledger.records import record
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably
from rocketstore.remoting.body import Body
from rocketstore.remoting.topics import MASTER_ID, BrokerData, DataVersion, QueueData, TopicRouteData

SILENCE_MS: Final = 120_000
"""RocketMQ's: a broker that has not registered for this time is removed."""
PERMISSION_WRITE: Final = 2
SYS_FLAG_UNIT: Final = 1
SYS_FLAG_UNIT_SUB: Final = 2


@record(frozen=True, slots=True)
class TableLimits:
    brokers_max: int
    """Names."""
    addresses_max: int
    topics_max: int
    places_max: int
    """Pairs of a topic and a broker's name."""
    host_percent: int = 100
    """How much of each limit the brokers that register from one host may take."""


@record(frozen=True, slots=True)
class BrokerRegistration:
    """A broker's registration."""

    cluster: str
    broker: str
    broker_id: int
    address: str
    ha_address: str
    version: DataVersion
    topics: Mapping[str, QueueData]
    """All topics, or only changed ones; the others stay unchanged."""
    term: int | None = None
    """The Raft term in which the broker has this id; None for Java's brokers."""
    digest: bytes = b""
    """Digest of version and topics, see ``repeated``; empty: none."""
    is_complete: bool = False
    """Whether it says that ``topics`` are all, so that the others have been deleted."""


class RegistrationResult(NamedTuple):
    """The outcome of a registration."""

    is_taken: bool
    """False: a newer master is known, and nothing was changed."""
    master: str
    """The master's address, for other brokers; empty: none."""
    master_ha: str


class _Applied(NamedTuple):
    """The registration that the topics of a name come from."""

    address: str
    version: DataVersion
    topics: int

    def is_of(self, one: BrokerRegistration) -> bool:
        """Return whether ``one`` has the same address and version."""
        return (self.address, self.version) == (one.address, one.version)


class _Broker:
    """Everything known of one name."""

    __slots__ = ("addresses", "applied", "cluster", "host", "led_ms", "name", "term", "topics")

    def __init__(self, name: str, cluster: str, host: str) -> None:
        self.name = name
        self.host = host  # from which it was first registered
        self.cluster = cluster
        self.addresses: dict[int, str] = {}
        self.topics: set[str] = set()
        self.applied: _Applied | None = None
        self.term: int | None = None
        self.led_ms = 0  # when the master of that term last registered


class _Live:
    """A registered address."""

    __slots__ = ("broker", "broker_id", "digest", "ha_address", "host", "link", "seen_ms", "version")

    def __init__(self, one: BrokerRegistration, link: object, now_ms: int, host: str) -> None:
        self.host = host
        self.broker = one.broker
        self.broker_id = one.broker_id
        self.ha_address = one.ha_address
        self.version = one.version
        self.digest = one.digest
        self.link = link
        self.seen_ms = now_ms


class _Share:
    """The share of the tables that the brokers of one host have."""

    __slots__ = ("addresses", "names", "places", "topics")

    def __init__(self) -> None:
        self.names = self.addresses = self.topics = self.places = 0

    @property
    def is_empty(self) -> bool:
        """Whether that is nothing."""
        return not (self.names or self.addresses or self.topics or self.places)


_NO_SHARE: Final = _Share()


class RouteTables:
    """All registrations. ``link`` identifies the connection of a broker."""

    def __init__(self, limits: TableLimits) -> None:
        self._limits = limits
        self._brokers: dict[str, _Broker] = {}
        self._live: dict[str, _Live] = {}  # the addresses of all brokers, and no others
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._places = 0
        self._by_link: dict[object, set[str]] = {}
        self._hosts: dict[str, _Share] = {}
        self._bringers: dict[str, str] = {}  # of each topic, the host that first registered it
        self.changes = 0
        """How often something of what clients are told has changed."""

    # -- brokers -------------------------------------------------------------------------------------------------------

    def register(self, one: BrokerRegistration, link: object, now_ms: int, host: str = "") -> RegistrationResult:
        """Apply a registration, unless a newer master is known; ``host`` is where it comes from.

        Raises ``RequestError``: a limit is reached.
        """
        broker = self._brokers.get(one.broker)
        if broker is not None and _is_outdated(one, broker, now_ms):
            return RegistrationResult(False, *self._master_of(broker))
        is_master = one.broker_id == MASTER_ID
        topics = _news(one, broker) if is_master else {}
        if is_master and broker is not None:
            self._take_deleted(one, broker)
        self._check_room(one, broker, topics, now_ms, host)
        broker = self._take_place(one, broker, host)
        self._note(one, link, now_ms, host)
        if is_master:
            self.changes += broker.cluster != one.cluster
            broker.cluster, broker.term, broker.led_ms = one.cluster, one.term, now_ms
            broker.applied = _applied(one, broker.applied)
            self._apply(broker, topics, host)
        return RegistrationResult(True, *(("", "") if is_master else self._master_of(broker)))

    def repeated(self, name: str, broker_id: int, address: str, digest: bytes) -> DataVersion | None:
        """Return the version last registered if that had the same digest, else None.

        The new registration may then omit its topics: they would change nothing.
        """
        live = self._live.get(address)
        if live is None or not digest or (live.broker, live.broker_id, live.digest) != (name, broker_id, digest):
            return None
        return live.version

    def renew(self, address: str, version: DataVersion, now_ms: int) -> tuple[bool, DataVersion | None]:
        """Renew an address, or return True with the known version if it must register: its version is another one."""
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
        """Remove a broker. False if the address has no place, or another one: nothing was changed."""
        live = self._live.get(address)
        if live is None or (live.broker, live.broker_id) != (name, broker_id):
            return False
        self._drop(address)
        return True

    def closed(self, link: object) -> tuple[str, ...]:
        """Remove and return the addresses that last registered over a connection, which has ended."""
        gone = tuple(sorted(self._by_link.get(link, ())))
        for address in gone:
            self._drop(address)
        return gone

    def expire(self, now_ms: int) -> tuple[tuple[str, object], ...]:
        """Remove and return the addresses that have not registered in time, with their connections."""
        silent = [(one, live.link) for one, live in self._live.items() if now_ms - live.seen_ms > SILENCE_MS]
        for address, _ in silent:
            self._drop(address)
        return tuple(silent)

    # -- administrators ------------------------------------------------------------------------------------------------

    def delete_topic(self, topic: str, cluster: str = "") -> None:
        """Remove a topic, or its queues at the brokers of one cluster, until a changed registration contains it."""
        for name in tuple(self._topics.get(topic, ())):
            broker = self._brokers[name]
            if not cluster or broker.cluster == cluster:
                self._take_queues(broker, topic)

    def wipe_write(self, name: str) -> int:
        """Remove the write permission of all topics of a broker, until a changed registration; return their number."""
        return self._permit(name, take=PERMISSION_WRITE)

    def add_write(self, name: str) -> int:
        """Restore it; return the number of topics."""
        return self._permit(name, give=PERMISSION_WRITE)

    def _permit(self, name: str, *, take: int = 0, give: int = 0) -> int:
        broker = self._brokers.get(name)
        if broker is None:
            return 0
        self.changes += 1
        for topic in broker.topics:
            old = self._topics[topic][name]
            self._topics[topic][name] = replace(old, perm=old.perm & ~take | give)
        return len(broker.topics)

    # -- clients -------------------------------------------------------------------------------------------------------

    def route(self, topic: str) -> TopicRouteData | None:
        """Return where a topic is; None: unknown topic."""
        at = self._topics.get(topic)
        if at is None:
            return None
        names = sorted(at)
        return TopicRouteData(tuple([at[one] for one in names]), tuple([self._data_of(one) for one in names]))

    def brokers(self) -> tuple[BrokerData, ...]:
        """Return all names and their addresses, sorted."""
        return tuple([self._data_of(name) for name in sorted(self._brokers)])

    def topics(self) -> tuple[str, ...]:
        """Return the names of all topics, sorted."""
        return tuple(sorted(self._topics))

    def topics_of_cluster(self, cluster: str) -> tuple[str, ...]:
        """Return the topics with queues at a broker of that cluster."""
        found = {topic for one in self._brokers.values() if one.cluster == cluster for topic in one.topics}
        return tuple(sorted(found))

    def topics_with(self, sys_flag: int, without: int = 0) -> tuple[str, ...]:
        """Return the topics whose system flag has all bits of ``sys_flag`` and none of ``without``."""
        return tuple(topic for topic, flag in self._sys_flags() if flag & sys_flag == sys_flag and not flag & without)

    def _sys_flags(self) -> Iterator[tuple[str, int]]:
        """Yield each topic with its flag at the first of its brokers."""
        for topic in sorted(self._topics):
            at = self._topics[topic]
            yield topic, at[min(at)].topic_sys_flag

    def master(self, name: str) -> str:
        """Return the address of a name's master; empty: none."""
        broker = self._brokers.get(name)
        return "" if broker is None else broker.addresses.get(MASTER_ID, "")

    def term_of(self, name: str, now_ms: int) -> int | None:
        """Return the term of a name's master, if it counts."""
        broker = self._brokers.get(name)
        return None if broker is None else _known_term(broker, now_ms)

    def without_master(self) -> int:
        """Return the number of names without a master."""
        return sum(1 for one in self._brokers.values() if MASTER_ID not in one.addresses)

    def sizes(self) -> tuple[int, int, int, int]:
        """Return the numbers of names, addresses, topics, and pairs of topic and name."""
        return len(self._brokers), len(self._live), len(self._topics), self._places

    # -- changes -------------------------------------------------------------------------------------------------------

    def _data_of(self, name: str) -> BrokerData:
        broker = self._brokers[name]
        return BrokerData(broker.cluster, name, dict(sorted(broker.addresses.items())), enable_acting_master=False)

    def _master_of(self, broker: _Broker) -> tuple[str, str]:
        address = broker.addresses.get(MASTER_ID)
        return ("", "") if address is None else (address, self._live[address].ha_address)

    def _check_room(
        self, one: BrokerRegistration, broker: _Broker | None, news: Mapping[str, QueueData], now_ms: int, host: str
    ) -> None:
        """Raise ``RequestError`` if a limit is exceeded; a known broker is renewed all the same."""
        limits = self._limits
        live = self._live.get(one.address)
        here = self._hosts.get(host, _NO_SHARE)
        if broker is None:
            self._check(len(self._brokers) + 1, here.names + 1, limits.brokers_max, "brokers", "brokersMax", host)
        if live is None:
            most = limits.addresses_max
            self._check(len(self._live) + 1, here.addresses + 1, most, "broker addresses", "addressesMax", host)
        topics = sum(1 for topic in news if topic not in self._topics)
        known = broker.topics if broker is not None else ()
        places = sum(1 for topic in news if topic not in known)
        if not places:  # and so no topics
            return
        of_places = self._hosts.get(broker.host, _NO_SHARE) if broker is not None else here
        try:
            self._check(
                len(self._topics) + topics, here.topics + topics, limits.topics_max, "topics", "topicsMax", host
            )
            most = limits.places_max
            what = "pairs of topic and broker"
            self._check(self._places + places, of_places.places + places, most, what, "placesMax", host)
        except RequestError:
            if live is not None and (live.broker, live.broker_id) == (one.broker, one.broker_id):
                live.seen_ms = now_ms
            raise

    def _check(self, count: int, of_host: int, most: int, what: str, setting: str, host: str) -> None:
        """Raise ``RequestError`` if all hosts together, or this one, would have too many."""
        if count > most:
            raise RequestError(f"{count} {what}: this name server takes at most {most} ({setting})")
        host_most = max(1, most * self._limits.host_percent // 100)
        if of_host > host_most:
            raise RequestError(
                f"{of_host} {what} from {host}: this name server takes at most {host_most} from one address "
                f"(hostSharePercent={self._limits.host_percent}, {setting}={most})"
            )

    def _share(self, host: str) -> _Share:
        return self._hosts.setdefault(host, _Share())

    def _give_back(self, host: str) -> None:
        """Forget a host that has nothing any more."""
        if self._hosts[host].is_empty:
            del self._hosts[host]

    def _take_place(self, one: BrokerRegistration, broker: _Broker | None, host: str) -> _Broker:
        """Assign the place to the address, and remove the one that had it."""
        live = self._live.get(one.address)
        if live is not None and live.broker != one.broker:
            self._drop(one.address)
        if broker is None:
            broker = self._brokers[one.broker] = _Broker(one.broker, one.cluster, host)
            self._share(host).names += 1
        elif live is not None and live.broker == one.broker and live.broker_id != one.broker_id:
            del broker.addresses[live.broker_id]
        former = broker.addresses.get(one.broker_id)
        if former is not None and former != one.address:
            self._forget(former)
        self.changes += former != one.address
        broker.addresses[one.broker_id] = one.address
        return broker

    def _note(self, one: BrokerRegistration, link: object, now_ms: int, host: str) -> None:
        if one.address in self._live:
            self._forget(one.address)
        self._live[one.address] = _Live(one, link, now_ms, host)
        self._share(host).addresses += 1
        self._by_link.setdefault(link, set()).add(one.address)

    def _apply(self, broker: _Broker, topics: Mapping[str, QueueData], host: str) -> None:
        if not topics:
            return
        self.changes += 1
        bringer, owner = self._share(host), self._share(broker.host)
        for topic, queues in topics.items():
            at = self._topics.get(topic)
            if at is None:
                at = self._topics[topic] = {}
                self._bringers[topic] = host
                bringer.topics += 1
            if broker.name not in at:
                self._places += 1
                owner.places += 1
                broker.topics.add(topic)
            at[broker.name] = queues

    def _forget(self, address: str) -> _Live:
        live = self._live.pop(address)
        of_link = self._by_link[live.link]
        of_link.discard(address)
        if not of_link:
            del self._by_link[live.link]
        self._hosts[live.host].addresses -= 1
        self._give_back(live.host)
        return live

    def _drop(self, address: str) -> None:
        """Remove an address, and with the last one of a name everything known of the name."""
        live = self._forget(address)
        self.changes += 1
        broker = self._brokers[live.broker]
        del broker.addresses[live.broker_id]
        if broker.addresses:
            return
        del self._brokers[live.broker]
        for topic in tuple(broker.topics):
            self._take_queues(broker, topic)
        self._hosts[broker.host].names -= 1
        self._give_back(broker.host)

    def _take_deleted(self, one: BrokerRegistration, broker: _Broker) -> None:
        """Remove the topics that a master does not have any more, if its registration would show them."""
        if one.is_complete and (broker.applied is None or not broker.applied.is_of(one)):
            for topic in broker.topics - one.topics.keys():
                self._take_queues(broker, topic)

    def _take_queues(self, broker: _Broker, topic: str) -> None:
        self.changes += 1
        broker.topics.discard(topic)
        self._places -= 1
        self._hosts[broker.host].places -= 1  # it has at least this name
        at = self._topics[topic]
        del at[broker.name]
        if not at:
            del self._topics[topic]
            bringer = self._bringers.pop(topic)
            self._hosts[bringer].topics -= 1
            self._give_back(bringer)


def _applied(one: BrokerRegistration, before: _Applied | None) -> _Applied:
    topics = before.topics if before is not None and before.is_of(one) else 0
    return _Applied(one.address, one.version, max(len(one.topics), topics))


def _known_term(broker: _Broker, now_ms: int) -> int | None:
    return broker.term if now_ms - broker.led_ms <= SILENCE_MS else None


def _news(one: BrokerRegistration, broker: _Broker | None) -> Mapping[str, QueueData]:
    """Return the topics of a master's registration that change something.

    If the version is known, these are the unknown topics, and only if the earlier registration of that version had
    fewer: it contained the last change only, and those before it may have been lost. Permissions removed by an
    administrator stay removed.
    """
    applied = None if broker is None else broker.applied
    if broker is None or applied is None or not applied.is_of(one):
        return one.topics
    if len(one.topics) <= applied.topics:
        return {}
    return {topic: queues for topic, queues in one.topics.items() if topic not in broker.topics}


def _is_outdated(one: BrokerRegistration, broker: _Broker, now_ms: int) -> bool:
    """Return whether a registration is older than the known master.

    A term has one leader, so two masters in one term belong to two groups of the same name: the first keeps the place.
    """
    known = _known_term(broker, now_ms)
    if one.term is None or known is None:
        return False
    holder = broker.addresses.get(MASTER_ID)
    if one.broker_id == MASTER_ID:
        return one.term < known or (one.term == known and holder not in (None, one.address))
    return one.term < known and holder == one.address


ORDER_TOPICS: Final = "ORDER_TOPIC_CONFIG"
"""RocketMQ's namespace of ordered topics: ``topic`` to ``broker:queues;broker:queues``."""
NAME_CHARS_MAX: Final = 1024
VALUE_CHARS_MAX: Final = 65_536
_FILE_BYTES_MAX: Final = 64 * 1024 * 1024

Table = Mapping[str, Mapping[str, str]]


@record(frozen=True, slots=True)
class KvFile(Body):
    """The file's content."""

    config_table: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class KvConfig:
    """Reads are from memory; a change is written to the file before it is visible. One thread changes, any may read.

    The constructor raises ``ConfigError`` if the file is damaged or cannot be used.
    """

    def __init__(self, path: Path, *, entries_max: int, bytes_max: int, fs: FileSystem | None = None) -> None:
        self._path = path
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._fs = fs or FileSystem()
        try:
            self._table: Table = _load(path)
        except OSError as error:
            raise ConfigError([f"{path}: cannot be used: {error.strerror}"]) from error

    def get(self, namespace: str, key: str) -> str | None:
        """Return a value, if it is set."""
        return self._table.get(namespace, {}).get(key)

    def __len__(self) -> int:
        """Return the number of values."""
        return sum(map(len, self._table.values()))

    def table(self, namespace: str) -> Mapping[str, str] | None:
        """Return a namespace's values, if it exists."""
        return self._table.get(namespace)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value durably. Raises ``RequestError``: a limit is exceeded, or the file cannot be written."""
        for what, text, limit in (
            ("namespace", namespace, NAME_CHARS_MAX),
            ("key", key, NAME_CHARS_MAX),
            ("value", value, VALUE_CHARS_MAX),
        ):
            if len(text) > limit:
                raise RequestError(f"the {what} has {len(text)} characters: at most {limit} are allowed")
        self._write({**self._table, namespace: {**self._table.get(namespace, {}), key: value}})

    def delete(self, namespace: str, key: str) -> None:
        """Remove a value durably, if it is set, and its namespace with the last one. Raises ``RequestError``."""
        if self.get(namespace, key) is None:
            return
        left = {one: value for one, value in self._table[namespace].items() if one != key}
        self._write(_without_empty({**self._table, namespace: left}))

    def _write(self, table: Table) -> None:
        entries = sum(map(len, table.values())) + len(table)
        if entries > self._entries_max:
            raise RequestError(f"more than {self._entries_max} values and namespaces (kvEntriesMax)")
        content = KvFile(table).encode()
        if len(content) > self._bytes_max:
            raise RequestError(f"all values together take more than {self._bytes_max} bytes (kvBytesMax)")
        try:
            make_dirs_durably(self._fs, self._path.parent)
            replace_durably(self._fs, self._path, content)
        except OSError as error:
            raise RequestError(f"{self._path} cannot be written: {error.strerror}", AnswerCode.SYSTEM_ERROR) from error
        self._table = table


def _without_empty(table: Table) -> Table:
    """No request removes an empty namespace, which counts towards the limit."""
    return {namespace: values for namespace, values in table.items() if values}


def _load(path: Path) -> Table:
    try:
        content = read_whole(path, _FILE_BYTES_MAX)
    except FileNotFoundError:
        return {}
    try:
        return _without_empty(KvFile.decode(content).config_table)  # RocketMQ keeps them
    except RequestError as error:
        raise ConfigError(
            [
                f"{path}: damaged ({error}): restore it from a copy or from another name server, or move it aside to "
                "start without the values set by administrators"
            ]
        ) from error
