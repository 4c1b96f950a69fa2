"""A name server's tables against a model: any order of registrations, goodbyes, lost connections, and time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rocketstore.nameserver.tables import SILENCE_MS, BrokerRegistration
from rocketstore.remoting.topics import DataVersion, QueueData
from tests.unit.rocketstore.nameserver.support import new_tables

_NAMES = st.sampled_from(["g", "h"])
_ADDRESSES = st.sampled_from([f"{host}:1" for host in "abcd"])
_IDS = st.integers(0, 2)
_LINKS = st.integers(0, 3)
_TERMS = st.one_of(st.none(), st.integers(1, 4))
_VERSIONS = st.integers(1, 3)
_TOPICS = st.lists(st.sampled_from(["T", "U", "V"]), unique=True)
_STEPS_MS = st.sampled_from([1, SILENCE_MS // 2, SILENCE_MS, SILENCE_MS + 1])


@dataclass(frozen=True)
class _Live:
    """What is known of one address."""

    name: str
    broker_id: int
    link: int
    seen_ms: int
    version: DataVersion


@dataclass
class _Term:
    """Of a name's master."""

    term: int | None
    seen_ms: int


class _Model:
    """The same rules over flat tables: everything else is looked for when it is asked for."""

    def __init__(self) -> None:
        self.live: dict[str, _Live] = {}
        self.terms: dict[str, _Term] = {}
        self.queues: dict[tuple[str, str], QueueData] = {}
        self.applied: dict[str, tuple[str, DataVersion, int]] = {}

    def places(self, name: str) -> dict[int, str]:
        return {live.broker_id: address for address, live in sorted(self.live.items()) if live.name == name}

    def is_outdated(self, one: BrokerRegistration, now_ms: int) -> bool:
        known = self.terms.get(one.broker)
        if one.term is None or known is None or known.term is None or now_ms - known.seen_ms > SILENCE_MS:
            return False
        master = self.places(one.broker).get(0)
        if one.broker_id != 0:
            return one.term < known.term and master == one.address
        return one.term < known.term or (one.term == known.term and master not in (None, one.address))

    def register(self, one: BrokerRegistration, link: int, now_ms: int) -> bool:
        if self.is_outdated(one, now_ms):
            return False
        former = self.live.get(one.address)
        if former is not None and former.name != one.broker:
            self.drop(one.address)
        holder = self.places(one.broker).get(one.broker_id)
        if holder is not None:
            del self.live[holder]
        self.live[one.address] = _Live(one.broker, one.broker_id, link, now_ms, one.version)
        if one.broker_id == 0:
            self.terms[one.broker] = _Term(one.term, now_ms)
            self.apply(one)
        return True

    def apply(self, one: BrokerRegistration) -> None:
        key = one.address, one.version
        *before, count = self.applied.get(one.broker, ("", DataVersion(-1), 0))
        is_same = tuple(before) == key
        for topic, queues in one.topics.items():
            is_new = (topic, one.broker) not in self.queues
            if not is_same or (is_new and len(one.topics) > count):
                self.queues[topic, one.broker] = queues
        self.applied[one.broker] = (*key, max(len(one.topics), count if is_same else 0))

    def drop(self, address: str) -> None:
        name = self.live.pop(address).name
        if not self.places(name):
            self.terms.pop(name, None)
            self.applied.pop(name, None)
            self.queues = {key: one for key, one in self.queues.items() if key[1] != name}


class TablesMachine(RuleBasedStateMachine):
    """Two names, four addresses, four connections."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = new_tables()
        self.model = _Model()
        self.now_ms = 0
        self.told = (-1, "")

    @rule(
        name=_NAMES,
        address=_ADDRESSES,
        broker_id=_IDS,
        term=_TERMS,
        version=_VERSIONS,
        topics=_TOPICS,
        queues=st.integers(1, 3),
        link=_LINKS,
    )
    def register(
        self,
        name: str,
        address: str,
        broker_id: int,
        term: int | None,
        version: int,
        topics: list[str],
        queues: int,
        link: int,
    ) -> None:
        found = {topic: QueueData(name, queues, queues, 6) for topic in topics}
        said = repr((version, found)).encode()
        one = BrokerRegistration(
            "c", name, broker_id, address, f"ha-{address}", DataVersion(version), found, term, said
        )
        asked = one
        if (known := self.tables.repeated(name, broker_id, address, said)) is not None:
            asked = replace(one, topics={}, version=known)
        master_before, term_before = self.tables.master(name), self.tables.term_of(name, self.now_ms)

        told = self.tables.register(asked, link, self.now_ms, f"host-{link % 2}")

        assert told.is_taken == self.model.register(one, link, self.now_ms)
        if broker_id != 0 or not told.is_taken:
            master = self.model.places(name).get(0, "")
            assert (told.master, told.master_ha) == (master, f"ha-{master}" if master else "")
        if term is not None and term_before is not None and term < term_before:
            assert self.tables.master(name) == master_before  # an old leader never takes the place

    @rule(address=_ADDRESSES, version=_VERSIONS)
    def renew(self, address: str, version: int) -> None:
        live = self.model.live.get(address)
        changed = live is None or live.version != DataVersion(version)
        told = self.tables.renew(address, DataVersion(version), self.now_ms)
        assert told == (changed, None if live is None else live.version)
        if live is not None and not changed:
            self.model.live[address] = replace(live, seen_ms=self.now_ms)
            if live.broker_id == 0:
                self.model.terms[live.name].seen_ms = self.now_ms

    @rule(name=_NAMES, address=_ADDRESSES, broker_id=_IDS)
    def unregister(self, name: str, address: str, broker_id: int) -> None:
        live = self.model.live.get(address)
        is_there = live is not None and (live.name, live.broker_id) == (name, broker_id)
        assert self.tables.unregister(name, broker_id, address) == is_there
        if is_there:
            self.model.drop(address)

    @rule(link=_LINKS)
    def close(self, link: int) -> None:
        gone = sorted(address for address, live in self.model.live.items() if live.link == link)
        assert self.tables.closed(link) == tuple(gone)
        for address in gone:
            self.model.drop(address)

    @rule(step_ms=_STEPS_MS, expires=st.booleans())
    def wait(self, step_ms: int, expires: bool) -> None:
        self.now_ms += step_ms
        if not expires:
            return
        silent = {one: live.link for one, live in self.model.live.items() if self.now_ms - live.seen_ms > SILENCE_MS}
        assert dict(self.tables.expire(self.now_ms)) == silent
        for address in silent:
            self.model.drop(address)

    @rule(topic=st.sampled_from(["T", "U"]), cluster=st.sampled_from(["", "c", "other"]))
    def delete_topic(self, topic: str, cluster: str) -> None:
        self.tables.delete_topic(topic, cluster)
        if cluster != "other":
            self.model.queues = {key: one for key, one in self.model.queues.items() if key[0] != topic}

    @rule(name=_NAMES, gives=st.booleans())
    def change_permission(self, name: str, gives: bool) -> None:
        mine = [key for key in self.model.queues if key[1] == name]
        count = self.tables.add_write(name) if gives else self.tables.wipe_write(name)
        assert count == len(mine)
        for key in mine:
            old = self.model.queues[key]
            self.model.queues[key] = replace(old, perm=old.perm | 2 if gives else old.perm & ~2)

    @invariant()
    def agrees(self) -> None:
        model = self.model
        names = sorted({live.name for live in model.live.values()})
        assert [(one.broker_name, dict(one.broker_addrs)) for one in self.tables.brokers()] == [
            (name, model.places(name)) for name in names
        ]
        topics = sorted({topic for topic, _ in model.queues})
        assert self.tables.topics() == tuple(topics)
        for topic in topics:
            route = self.tables.route(topic)
            assert route is not None
            at = sorted(key for key in model.queues if key[0] == topic)
            assert [model.queues[key] for key in at] == list(route.queue_datas)
            assert [one.broker_name for one in route.broker_datas] == [name for _, name in at]
            assert all(one.broker_addrs for one in route.broker_datas)
        for name in names:
            known = model.terms.get(name)
            counts = known is not None and self.now_ms - known.seen_ms <= SILENCE_MS
            assert self.tables.term_of(name, self.now_ms) == (known.term if known is not None and counts else None)
        clients_see = repr((self.tables.brokers(), [self.tables.route(topic) for topic in topics]))
        if self.told[0] == self.tables.changes:
            assert clients_see == self.told[1]  # answers that are kept are still true
        self.told = self.tables.changes, clients_see
        shares = self.tables._hosts.values()
        assert self.tables.sizes() == (
            sum(one.names for one in shares),
            sum(one.addresses for one in shares),
            sum(one.topics for one in shares),
            sum(one.places for one in shares),
        )
        assert all(min(one.names, one.addresses, one.topics, one.places) >= 0 for one in shares)
        assert not any(one.is_empty for one in shares)
        assert self.tables.sizes() == (len(names), len(model.live), len(topics), len(model.queues))


TestTables = TablesMachine.TestCase
TestTables.settings = settings(stateful_step_count=40)
