"""Telling name servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from dledger.config import AccessConfig
from dledger.remoting.client import RemotingClient
from dledger.remoting.codes import FrameError
from dledger.remoting.frame import Frame
from dledger.rpc import loops
from rocketstore.broker.mastership import GroupView
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting import registration as registration_module
from rocketstore.broker_remoting.registration import TERM_FIELD, NameServerRegistration, addresses_of
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import BrokerData, ClusterInfo, RegisterBrokerBody
from rocketstore.state.changes import TopicConfig
from tests.support.waiting import PATIENCE_S
from tests.unit.rocketstore.broker.harness import Harness


class _NameServers:
    """In the place of a client: knows what it was told; one that is ``held`` never answers."""

    def __init__(self) -> None:
        self.told: list[tuple[str, set[str]]] = []
        self.ids: list[tuple[str, str | None]] = []
        self.asked = 0
        self.tried: Counter[str] = Counter()
        """How often each was asked for anything."""
        self.silent: set[str] = set()
        self.failures: list[Exception] = []
        self.masters: dict[str, str] = {}
        """What they know, by broker."""
        self.looked = 0
        self.configs: list[Frame | Exception] = []
        """Answers to who may register; when they are used up, ``allowedBrokers`` is set."""
        self.answer: dict[str, str] = {}
        self.answers = asyncio.Event()
        self.answers.set()

    async def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        self.tried[address] += 1
        if address in self.silent:
            await asyncio.sleep(timeout_s)
            raise TimeoutError
        if self.failures:
            raise self.failures.pop()
        if request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            self.looked += 1
            table = {name: BrokerData("c", name, {0: address}) for name, address in self.masters.items()}
            return request.answer(body=ClusterInfo(table, {}).encode())
        if request.code == RequestCode.GET_NAMESRV_CONFIG:
            answer = self.configs.pop(0) if self.configs else Frame(0, 0, body=b"allowedBrokers=10.0.0.0/8")
            if isinstance(answer, Exception):
                raise answer
            return answer
        self.ids.append((request.fields["brokerId"], request.fields.get(TERM_FIELD)))
        assert request.fields["dledgerAllTopics"] == "true"
        self.asked += 1
        topics = set(RegisterBrokerBody.decode(request.body).topics.topic_config_table)
        await asyncio.wait_for(self.answers.wait(), timeout_s)
        self.told.append((address, topics))
        return request.answer(fields=self.answer)


@pytest.fixture(autouse=True)
def _patient_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end when all have been told, however long that takes here."""
    monkeypatch.setattr(registration_module, "ANNOUNCE_S_MAX", PATIENCE_S)


def _registering(
    test: Callable[[Harness, NameServerRegistration, _NameServers], Any],
    *,
    replicated: bool = False,
    **settings: Any,  # noqa: ANN401  # of a broker
) -> None:
    with Harness(BrokerConfig(namesrv_addr="127.0.0.1:1;127.0.0.1:2", **settings)) as harness:
        if replicated:
            harness.view = replace(harness.view, leader=harness.config.node_id)
            harness.store.log.is_replicated = True

        async def run() -> None:
            servers = _NameServers()
            client = cast("RemotingClient", servers)
            registration = NameServerRegistration(harness.broker, client, "127.0.0.1:3", "127.0.0.1:4")
            registration.start()
            try:
                await asyncio.wait_for(test(harness, registration, servers), PATIENCE_S)
            finally:
                for one in asyncio.all_tasks() - {asyncio.current_task()}:
                    one.cancel()

        loops.run(run())


def test_an_announcement_is_over_when_all_name_servers_know() -> None:
    """A round that was under way before may have had the old topics."""

    async def test(harness: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        servers.answers.clear()
        while servers.asked < 2:  # the first round begins
            await asyncio.sleep(0.01)
        harness.state.table["New"] = TopicConfig("New")
        announced = asyncio.create_task(registration.announce())
        await asyncio.sleep(0)
        servers.answers.set()
        await announced
        assert {address for address, topics in servers.told if "New" in topics} == {"127.0.0.1:1", "127.0.0.1:2"}

    _registering(test)


def test_an_announcement_does_not_wait_for_a_name_server_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "ANNOUNCE_S_MAX", 0.1)

    async def test(_: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        servers.answers.clear()
        await registration.announce()
        assert servers.told == []

    _registering(test)


def test_a_name_with_several_addresses_is_as_many_name_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They know nothing of each other, so a broker registers with each, also with those that the name has later."""
    places = {"127.0.0.1:1": ("127.0.0.2:1", "127.0.0.3:1"), "127.0.0.1:2": ("127.0.0.1:2",)}

    async def resolve(address: str) -> tuple[str, ...]:
        return places[address]

    monkeypatch.setattr(registration_module, "addresses_of", resolve)

    async def test(_: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        await registration.announce()
        assert {address for address, _ in servers.told} == {"127.0.0.2:1", "127.0.0.3:1", "127.0.0.1:2"}
        places["127.0.0.1:1"] = ("127.0.0.3:1", "127.0.0.4:1")
        servers.silent.add("127.0.0.3:1")
        servers.told.clear()
        registration.wake()
        while ("127.0.0.4:1" not in {address for address, _ in servers.told}) or not registration.failures():
            await asyncio.sleep(0.01)
        assert "127.0.0.3:1: no answer" in registration.failures()["127.0.0.1:1"]

    _registering(test, register_broker_timeout_mills=100)


def test_of_several_addresses_only_those_that_failed_are_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is gone for long costs the others nothing; a change is for all. The same where one has hung up."""
    good, bad, other = "127.0.0.2:1", "127.0.0.3:1", "127.0.0.1:2"

    async def resolve(address: str) -> tuple[str, ...]:
        return (other,) if address == other else (good, bad)

    monkeypatch.setattr(registration_module, "addresses_of", resolve)
    monkeypatch.setattr(registration_module, "_pause_s", lambda _number: 0.0)

    async def test(_: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        async def tried(address: str, times: int) -> None:
            enough = servers.tried[address] + times
            while servers.tried[address] < enough:
                await asyncio.sleep(0.01)

        servers.silent.add(bad)
        await tried(other, 1)
        await tried(bad, 5)
        assert (servers.tried[good], servers.tried[other]) == (1, 1)
        registration.wake()
        await tried(other, 1)  # by a task of its own
        await tried(bad, 3)
        assert (servers.tried[good], servers.tried[other]) == (2, 2)
        servers.silent.clear()
        while registration.failures():
            await asyncio.sleep(0.01)
        assert servers.told[-1][0] == bad
        registration.lost(bad)
        await tried(bad, 1)
        assert (servers.tried[good], servers.tried[other]) == (2, 2)

    _registering(test, register_broker_timeout_mills=10, register_name_server_period=60_000)


def test_all_addresses_are_told_each_period_though_one_fails_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server forgets who is silent for two minutes."""
    good, bad, other = "127.0.0.2:1", "127.0.0.3:1", "127.0.0.1:2"

    async def resolve(address: str) -> tuple[str, ...]:
        return (other,) if address == other else (good, bad)

    monkeypatch.setattr(registration_module, "addresses_of", resolve)
    monkeypatch.setattr(registration_module, "_pause_s", lambda _number: 0.0)

    async def test(_: Harness, _registration: NameServerRegistration, servers: _NameServers) -> None:
        servers.silent.add(bad)
        while servers.tried[good] < 4:
            await asyncio.sleep(0.01)

    _registering(test, register_broker_timeout_mills=10, register_name_server_period=100)


def test_only_a_name_has_several_addresses() -> None:
    """An address, or a name that nobody knows, stands for itself; who connects says what is wrong."""

    async def resolve() -> list[tuple[str, ...]]:
        return [await addresses_of(one) for one in ("127.0.0.1:9", "no.such.host.invalid:9")]

    assert loops.run(resolve()) == [("127.0.0.1:9",), ("no.such.host.invalid:9",)]


def test_without_name_servers_there_is_nobody_to_wait_for() -> None:
    async def run(harness: Harness) -> None:
        client = cast("RemotingClient", _NameServers())
        registration = NameServerRegistration(harness.broker, client, "127.0.0.1:3", "127.0.0.1:4")
        registration.start()
        await asyncio.wait_for(registration.announce(), PATIENCE_S)

    with Harness() as harness:
        loops.run(run(harness))


def test_a_silent_name_server_does_not_delay_what_others_hear() -> None:
    """A new master would have to wait."""

    async def test(_harness: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        servers.silent.add("127.0.0.1:1")
        while not servers.told:
            await asyncio.sleep(0.01)
        for _ in range(3):
            before = len(servers.told)
            registration.wake()
            while len(servers.told) == before:
                await asyncio.sleep(0.01)
        assert {address for address, _ in servers.told} == {"127.0.0.1:2"}

    _registering(test, register_broker_timeout_mills=3_600_000)


def test_whatever_fails_registrations_go_on() -> None:
    async def test(_: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        servers.failures += [FrameError("too long"), RuntimeError("unheard of"), KeyError("x"), FrameError("again")]
        while len({address for address, _ in servers.told}) < 2:
            registration.wake()
            await asyncio.sleep(0.01)
        assert registration.failures() == {}

    _registering(test)


def test_a_master_that_was_deposed_and_does_not_know_it_registers_as_none() -> None:
    """With the term of its successor, a name server would take it for that."""

    async def test(harness: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        while not servers.ids:
            await asyncio.sleep(0.01)
        assert set(servers.ids) == {("0", "3")}
        harness.view = GroupView("FOLLOWER", 4, "n1", "host:2", {"n0": "host:1", "n1": "host:2"})
        before = len(servers.ids)
        registration.wake()
        while len(servers.ids) < before + 2:
            await asyncio.sleep(0.01)
        for broker_id, term in servers.ids[before:]:
            assert broker_id != "0" or term == "3"

    _registering(test, replicated=True, broker_id=1)


def test_a_topic_that_was_created_here_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers ask for its route right after the answer to the first message."""
    monkeypatch.setattr(registration_module, "TOPICS_INTERVAL_S", 3600.0)

    async def test(harness: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        await registration.announce()
        harness.state.table["New"] = TopicConfig("New")
        harness.broker.topics.news.tell()
        while not any("New" in topics for _, topics in servers.told):
            await asyncio.sleep(0.01)

    _registering(test)


def test_a_topic_that_comes_while_the_others_are_listed_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only after the period of half a minute."""

    async def test(harness: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        body = registration._body

        def slow() -> bytes:
            found = body()
            if "New" not in harness.state.table:
                harness.state.table["New"] = TopicConfig("New")
            return found

        monkeypatch.setattr(registration, "_body", slow)
        registration.wake()
        while {one for one, topics in servers.told if "New" in topics} != {"127.0.0.1:1", "127.0.0.1:2"}:
            await asyncio.sleep(0.01)

    _registering(test)


def test_a_name_server_whose_connection_ends_is_told_again_at_once() -> None:
    """It was restarted, and knows nothing. The next period may be half a minute away."""

    async def test(_: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        await registration.announce()
        before = len(servers.told)
        registration.lost("127.0.0.1:2")
        while len(servers.told) == before:
            await asyncio.sleep(0.01)
        assert [address for address, _ in servers.told[before:]] == ["127.0.0.1:2"]

    _registering(test, register_name_server_period=60_000)


def test_a_name_server_that_lets_anybody_register_is_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Once each, with access control; one that does not answer is asked again, and is registered with all the same."""
    rules = tmp_path / "plain_acl.yml"
    rules.write_text("accounts: []\n")

    async def test(_: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        servers.configs = [TimeoutError(), TimeoutError(), Frame(0, 0, body=b"allowedBrokers="), Frame(1, 0)]
        while servers.configs:
            await registration.announce()
        assert [address for address, _ in servers.told].count("127.0.0.1:1") >= 2, "registered without an answer, too"
        await registration.announce()

    _registering(test, access=AccessConfig(acl_enable=True, acl_file=rules))

    named = [one.args[0] for one in caplog.records if "allowedBrokers" in one.msg and isinstance(one.args, tuple)]
    assert sorted(map(str, named)) == ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.mark.parametrize("known_before", ["", "10.0.0.1:10911"])
def test_a_slave_learns_of_a_master_that_registers_after_it(monkeypatch: pytest.MonkeyPatch, known_before: str) -> None:
    """Within seconds, also if another master takes over; a slave that follows one asks nothing."""
    monkeypatch.setattr(registration_module, "MASTER_LOOK_S", 0.01)
    master = "10.0.0.9:10911"

    async def test(harness: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        await registration.announce()
        registration.master = known_before
        before = len(servers.told)
        servers.masters = {harness.config.name: known_before} if known_before else {}
        lacks = True
        registration.lacks_master = lambda: lacks
        while servers.looked < 4:
            await asyncio.sleep(0.01)
        assert len(servers.told) == before, "nobody else is master"
        servers.masters, servers.answer = {harness.config.name: master}, {"masterAddr": master, "haServerAddr": "h:1"}
        while registration.master != master:
            await asyncio.sleep(0.01)
        assert registration.master_for_slaves == "h:1"
        lacks = False
        looked = servers.looked + 2  # two name servers may be asked just now
        await registration.announce()
        await registration.announce()
        assert servers.looked <= looked

    _registering(test, register_name_server_period=60_000)


def test_a_name_server_that_keeps_hanging_up_is_told_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have too many connections. Once one lasts, the next end is taken for a restart again."""
    setbacks: list[int] = []

    def pause_s(number: int) -> float:
        setbacks.append(number)
        return 0.0

    monkeypatch.setattr(registration_module, "_pause_s", pause_s)

    async def test(_: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        await registration.announce()
        for _round in range(3):
            before = len(servers.told)
            registration.lost("127.0.0.1:1")
            while len(servers.told) == before:
                await asyncio.sleep(0.01)
        assert setbacks == [0, 1, 2]
        await registration.announce()  # a round, and no loss before it
        registration.lost("127.0.0.1:1")
        while len(setbacks) < 4:
            await asyncio.sleep(0.01)
        assert setbacks == [0, 1, 2, 0]

    _registering(test, register_name_server_period=60_000)


def test_pauses_grow_differ_and_have_a_limit() -> None:
    """All brokers of a name server lose their connections at the same time."""
    pauses = [[registration_module._pause_s(number) for _ in range(50)] for number in (0, 1, 2, 100_000)]
    assert all(max(one) <= max(two) for one, two in pairwise(pauses))
    assert all(len(set(one)) > 1 for one in pauses)
    assert min(pauses[-1]) >= registration_module.RETRY_S_MAX / 2
    assert max(pauses[-1]) <= registration_module.RETRY_S_MAX


def test_who_does_not_belong_is_not_registered_and_leaves_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner registers once it has caught up; who is removed takes its address back, at once and once."""
    monkeypatch.setattr(registration_module, "TOPICS_INTERVAL_S", 0.01)

    async def test(harness: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        left: list[str] = []

        async def unregister(place: str) -> None:
            left.append(place)

        monkeypatch.setattr(registration, "_unregister", unregister)
        while len(servers.ids) < 2:
            await asyncio.sleep(0.01)
        registration.belongs = lambda: False
        while len(left) < 2:
            await asyncio.sleep(0.01)
        told = len(servers.ids)
        await registration.announce()
        assert (sorted(left), len(servers.ids)) == (["127.0.0.1:1", "127.0.0.1:2"], told)

        registration.belongs = lambda: True
        while len(servers.ids) < told + 2:
            await asyncio.sleep(0.01)

    _registering(test)


def test_a_members_broker_id_is_its_number_and_one() -> None:
    """Whatever its rank is: the ids of the others stay when a member leaves."""

    async def test(harness: Harness, registration: NameServerRegistration, servers: _NameServers) -> None:
        harness.view = GroupView("FOLLOWER", 4, "n1", "host:2", {"n0": "host:1", "n1": "host:2"}, number=6)
        await registration.announce()
        assert servers.ids[-1] == ("7", "4")

    _registering(test, replicated=True)
