"""Tells the name servers about this broker: at the start, every half a minute, and at once when something changes.

A name server that ends the connection has forgotten us, or restarts: it is told again soon.

A master registers as broker id 0 only once it takes writes, and with the Raft term in which it does: a name server of
ours then knows a deposed one from its successor. RocketMQ's own ignores the term.

An old master that comes back asks whether it has a successor, before it takes messages and then every half minute.

The name servers say who is registered as master of its name, and that broker says how often the log has changed its
master. RocketMQ's old master takes the route over by registering, and messages sent to it from then on are in no other
log. One that cannot find out serves: a master must start without its name servers. So does one that hears of a
successor which does not prove that it has this log (``rocketstore.ha.protocol``): anybody may register under its name.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from random import uniform
from socket import AF_INET, SOCK_STREAM
from typing import Final, Protocol

from dledger.errors import CorruptLogError, DiskError
from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import FrameError, RequestError
from dledger.remoting.connection import DisconnectedError, TooManyCallsError
from dledger.remoting.frame import Frame
from dledger.rpc.loops import Report, supervise
from dledger.values import parse_address
from rocketstore.broker.broker import Broker
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting.administration import TopicTable
from rocketstore.ha.protocol import PROOF, PROVE, ReadableLog, challenge, is_empty, possible_ends
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import (
    BrokerHeader,
    RegisterBrokerAnswer,
    RegisterBrokerHeader,
    read_header,
    write_header,
)
from rocketstore.remoting.runtime import HaFacts, RuntimeInfo
from rocketstore.remoting.topics import (
    MASTER_ID,
    ClusterInfo,
    KVTable,
    RegisterBrokerBody,
    TopicConfigTable,
    body_crc32,
)
from rocketstore.types import BrokerRole

_LOG: Final = logging.getLogger("rocketstore")
TERM_FIELD: Final = "dledgerTerm"
"""Ours, in REGISTER_BROKER: the Raft term in which the broker has its id."""
FAILURES: Final = (UnreachableError, DisconnectedError, TooManyCallsError, TimeoutError, RequestError)
ANNOUNCE_S_MAX: Final = 1.0
"""How long who changed a topic waits for the name servers."""
UNREGISTER_TIMEOUT_S: Final = 2.0
TOPICS_INTERVAL_S: Final = 1.0
"""How often it is looked whether a topic has changed."""
RETRY_S: Final = 0.25
"""After a first registration that failed, or a connection that ended; doubled each time until one lasts."""
RETRY_S_MAX: Final = 2.0
CONFIG_BYTES_MAX: Final = 64 * 1024
"""Of a name server's settings."""
REMARK_CHARS_MAX: Final = 256
"""Of what a name server answers, in logs."""
ADDRESSES_MAX: Final = 16
"""Of one name server's name."""
MASTER_LOOK_S: Final = 2.0
"""How often a slave that does not follow its master asks where it is: registering says so, but happens rarely."""


class _NameServer:
    """One name server, and what it has been told. A silent one must not delay what others are told."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.places: tuple[str, ...] = (address,)
        """Its addresses, if it is a name with several: each is a name server of its own."""
        self.untold: set[str] = set()
        """Those of its addresses that could not be told, or whose connection has ended since."""
        self.all_due_at = float("-inf")
        """When to tell all of them, in the loop's time."""
        self.news = asyncio.Event()  # set when one of the next two changes
        self.is_wanted = False
        """Whether it must be told at once."""
        self.announced: list[asyncio.Future[None]] = []  # wait for a round that begins after they did
        self.topic_changes = -1
        self.is_lost = False
        """Whether the connection has ended since the last round began."""
        self.is_looked_at = False
        """Whether it has been asked who may register."""
        self.setbacks = 0
        """Rounds in succession that failed, or were followed by the end of the connection."""
        self.belonged = True
        """Whether clients were to be sent here when it was told last."""
        self.failure: str | None = None
        """The last one; empty if there was none, None before the first round."""


class NameServerRegistration:
    """On the loop. ``wake`` when the role, the topics or their permissions change."""

    def __init__(self, broker: Broker, client: RemotingClient, address: str, ha_address: str) -> None:
        self._broker = broker
        self._client = client
        self._address = address
        self._ha_address = ha_address
        self._name_servers = tuple(_NameServer(one) for one in broker.config.name_servers)
        self._topics = TopicTable(broker)
        self.may_lead: Callable[[], bool] = lambda: True
        """Whether a plain master may take the master's place: it has no successor."""
        self.belongs: Callable[[], bool] = lambda: True
        """Whether clients may be sent here: a member that was removed, or is new, is not registered."""
        self._encoded: tuple[TopicConfigTable, bytes] | None = None  # the last table and its body
        self._rounds: tuple[asyncio.Task[None], ...] = ()
        self.lacks_master: Callable[[], bool] = lambda: False
        """Whether this is a slave that does not follow its master at this moment."""
        self.master = ""
        """On a slave: the master's address, as a name server has said last; empty if none knows it."""
        self.master_for_slaves = ""
        """On a slave: the master's address for slaves."""

    def start(self) -> None:
        """Begin, if there are name servers."""
        if self._name_servers and not self._rounds:
            self._broker.topics.news.listen(self.wake)
            loop = asyncio.get_running_loop()
            look = loop.create_task(self._look_for_master())
            self._rounds = (*(loop.create_task(self._run(one)) for one in self._name_servers), look)

    def wake(self) -> None:
        """Register at once."""
        for one in self._name_servers:
            one.is_wanted = True
            one.news.set()

    def lost(self, address: str) -> None:
        """The connection to a name server has ended."""
        for one in self._name_servers:
            if address in one.places:
                one.untold.add(address)
                one.is_lost = True
                one.news.set()

    async def announce(self) -> None:
        """Register at once. Returns when all name servers have been told, or have failed, or after a second."""
        if not self._rounds:
            return
        told = [asyncio.get_running_loop().create_future() for _ in self._name_servers]
        for one, future in zip(self._name_servers, told, strict=True):
            one.announced.append(future)
        self.wake()
        await asyncio.wait(told, timeout=ANNOUNCE_S_MAX)

    async def close(self) -> None:
        """Take this broker's address back from the name servers that have it in its place, and end. Idempotent."""
        rounds, self._rounds = self._rounds, ()
        if not rounds:
            return
        for task in rounds:
            task.cancel()
        await asyncio.gather(*rounds, return_exceptions=True)
        await asyncio.gather(*(self._unregister(place) for one in self._name_servers for place in one.places))

    def failures(self) -> dict[str, str]:
        """Name servers that could not be told, and why."""
        return {one.address: one.failure for one in self._name_servers if one.failure}

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _run(self, server: _NameServer) -> None:
        while True:
            if server.is_wanted:
                server.all_due_at = float("-inf")
            server.is_wanted = server.is_lost = False
            waiting, server.announced = server.announced, []
            try:
                is_told = await self._tell(server)
            finally:
                for told in waiting:
                    if not told.done():  # else nobody waits any more
                        told.set_result(None)
            if is_told:
                await self._changed(server, self._broker.config.register_name_server_period / 1000, until_lost=True)
            if is_told and not server.is_lost:
                server.setbacks = 0
            else:
                await self._changed(server, _pause_s(server.setbacks))
                server.setbacks += 1

    async def _changed(self, server: _NameServer, timeout_s: float, *, until_lost: bool = False) -> None:
        """Return once somebody wants it, or a topic has changed; or if the connection is lost."""
        state, loop = self._broker.state, asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (
            state.topic_changes == server.topic_changes and not server.is_wanted and self.belongs() == server.belonged
        ):
            rest_s = deadline - loop.time()
            if rest_s <= 0 or (until_lost and server.is_lost):
                return
            server.news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(rest_s, TOPICS_INTERVAL_S)):
                    await server.news.wait()

    async def _tell(self, server: _NameServer) -> bool:
        """Register at one: at all its addresses, or between two periods at those that lack it. Whether it knows now."""
        config, loop = self._broker.config, asyncio.get_running_loop()
        timeout_s = config.register_broker_timeout_mills / 1000
        try:
            if server.topic_changes != self._broker.state.topic_changes:
                server.all_due_at = float("-inf")
            server.topic_changes = self._broker.state.topic_changes
            if not self.may_lead():
                return True
            belonged, server.belonged = server.belonged, self.belongs()
            if not server.belonged:
                if belonged:
                    await asyncio.gather(*map(self._unregister, server.places))
                    server.untold.update(server.places)
                return True
            body = await self._broker.loop.readers.run(self._body)
            places = server.places  # with TLS, a certificate is for the name
            if not config.namesrv_tls:
                places = await addresses_of(server.address)
            new, server.places = set(places) - set(server.places), places
            if loop.time() >= server.all_due_at:
                server.all_due_at = loop.time() + config.register_name_server_period / 1000
                new = set(places)
            server.untold = (server.untold | new) & set(places)
            untold = [one for one in places if one in server.untold]
            told = await asyncio.gather(*(self._tell_at(server, one, body, timeout_s) for one in untold))
            failure = "; ".join(one for one in told if one)
            if not failure:
                await self._look_who_may_register(server, timeout_s)
        except FAILURES as error:
            failure = str(error) or f"no answer within {timeout_s:g} s"
        except Exception as error:  # noqa: BLE001  # whatever it is, it must not end all registrations
            failure = f"{type(error).__name__}: {error}"
        if failure and failure != server.failure:
            _LOG.warning("cannot register with the name server %s: %s", server.address, failure)
        elif not failure and server.failure != "":
            _LOG.info("registered with the name server %s", server.address)
        server.failure = failure
        return not failure

    async def _tell_at(self, server: _NameServer, place: str, body: bytes, timeout_s: float) -> str:
        """Register at one of a name server's addresses; returns why it could not be done."""
        whose = "" if place == server.address else f"{place}: "
        try:
            answer = await self._client.call(place, self._request(body), timeout_s)
        except FAILURES as error:
            return whose + (str(error) or f"no answer within {timeout_s:g} s")
        if answer.code:
            return f"{whose}it answered {answer.code}: {answer.remark[:REMARK_CHARS_MAX]!r}"
        server.untold.discard(place)
        self._learn(read_header(RegisterBrokerAnswer, answer.fields))
        return ""

    async def _look_who_may_register(self, server: _NameServer, timeout_s: float) -> None:
        """Until it has answered once. A stranger who registers gets what clients mean for this broker, which its access
        control cannot prevent. No answer keeps the broker from registering: the next round asks again.
        """
        if server.is_looked_at or not self._broker.config.access.acl_enable:
            return
        try:
            answer = await self._client.call(server.address, Frame(RequestCode.GET_NAMESRV_CONFIG, 0), timeout_s)
        except (*FAILURES, FrameError):
            return
        server.is_looked_at = True
        settings = answer.body[:CONFIG_BYTES_MAX].decode("utf-8", "replace").splitlines()
        if answer.code or not any(one.startswith("allowedBrokers=") and one.partition("=")[2] for one in settings):
            _LOG.warning(
                "access control is on, and anyone who can connect to the name server %s can register as a broker, and "
                "gets what clients send: set its allowedBrokers",
                server.address,
            )

    async def _look_for_master(self) -> None:
        """Register again as soon as a name server knows another master than this slave: the answer has its address for
        slaves.
        """
        while True:
            await asyncio.sleep(MASTER_LOOK_S)
            if not self.lacks_master():
                continue
            found = await asyncio.gather(*(self._master_at(one.address) for one in self._name_servers))
            if any(one and one != self.master for one in found):
                self.wake()

    async def _master_at(self, name_server: str) -> str:
        """The master's address according to a name server; empty if it knows none, or does not say."""
        config = self._broker.config
        timeout_s = config.register_broker_timeout_mills / 1000
        try:
            answer = await self._client.call(name_server, Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0), timeout_s)
            known = None if answer.code else ClusterInfo.decode(answer.body).broker_addr_table.get(config.name)
        except (*FAILURES, FrameError):  # registering says what is the matter
            return ""
        return "" if known is None else known.broker_addrs.get(MASTER_ID, "")

    def _learn(self, answer: RegisterBrokerAnswer) -> None:
        """Where the master is: of several name servers, the last that knows one is believed."""
        if answer.master_addr:
            self.master, self.master_for_slaves = answer.master_addr, answer.ha_server_addr

    def _body(self) -> bytes:
        """All topics. On a read thread: there may be thousands."""
        table, known = self._topics.now(), self._encoded
        if known is None or known[0] is not table:
            self._encoded = known = table, RegisterBrokerBody(table).encode()
        return known[1]

    def _request(self, body: bytes) -> Frame:
        """The term and who leads in it come from one view: a deposed master does not know yet that it is a slave."""
        config, view, store = self._broker.config, self._broker.mastership.view(), self._broker.store
        slave_id = view.number + 1 if store.log.is_replicated else config.broker_id
        leads = not store.log.is_replicated or view.leader == config.node_id
        header = RegisterBrokerHeader(
            config.name,
            self._address,
            config.cluster_name,
            self._ha_address,
            MASTER_ID if leads and store.role is not BrokerRole.SLAVE else slave_id,
            body_crc32=body_crc32(body),
            dledger_all_topics=True,
        )
        fields = write_header(header)
        if store.log.is_replicated:
            fields[TERM_FIELD] = str(view.term)
        return Frame(RequestCode.REGISTER_BROKER, 0, fields, body)

    async def _unregister(self, name_server: str) -> None:
        """Not by id alone: RocketMQ's name servers remove whatever address has the id, also the next master's."""
        config = self._broker.config
        try:
            asked = Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0)
            answer = await self._client.call(name_server, asked, UNREGISTER_TIMEOUT_S)
            if answer.code:
                return
            known = ClusterInfo.decode(answer.body).broker_addr_table.get(config.name)
            for place in () if known is None else _places_of(self._address, known.broker_addrs):
                header = BrokerHeader(config.name, self._address, config.cluster_name, place)
                leaving = Frame(RequestCode.UNREGISTER_BROKER, 0, write_header(header))
                await self._client.call(name_server, leaving, UNREGISTER_TIMEOUT_S)
        except (*FAILURES, FrameError) as error:
            _LOG.info("cannot unregister from the name server %s, it forgets us in 2 minutes: %s", name_server, error)


async def addresses_of(address: str) -> tuple[str, ...]:
    """The addresses of a name that has several, with the port; otherwise the name, or the address, itself."""
    host, port = parse_address(address)
    try:
        ip_address(host)
    except ValueError:
        pass
    else:
        return (address,)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=AF_INET, type=SOCK_STREAM)
    except OSError:  # who connects says so
        return (address,)
    hosts = sorted({str(one[4][0]) for one in found})[:ADDRESSES_MAX]
    return tuple(f"{one}:{port}" for one in hosts) if len(hosts) > 1 else (address,)


def _pause_s(setbacks: int) -> float:
    """Before the next attempt. Random: all brokers of a name server lose their connections at the same time."""
    longest_s = min(RETRY_S_MAX, RETRY_S * 2 ** min(setbacks, 16))
    return uniform(longest_s / 2, longest_s)


def _places_of(address: str, places: Mapping[int, str]) -> list[int]:
    """Broker ids under which an address is registered."""
    return [place for place, one in places.items() if one == address]


TIMEOUT_S: Final = 1.0
PROOF_TIMEOUT_S: Final = 5.0
"""For all questions about the log together."""
INTERVAL_S: Final = 30.0


class WatchedMaster(Protocol):
    """This broker, as far as it may have a successor: see ``ha.service``."""

    @property
    def epoch(self) -> int:
        """How often its log has changed its master; 0 before it has begun."""

    @property
    def log(self) -> ReadableLog:
        """The log that a successor must have."""

    def superseded(self, why: str) -> None:
        """There is one."""

    def suspected(self, why: str) -> None:
        """Some broker says that it is one, and does not prove it."""


class SuccessorWatch:
    """On the loop of the broker's clients, until ``close``."""

    def __init__(
        self,
        config: BrokerConfig,
        address: Callable[[], str],
        master: WatchedMaster,
        to_brokers: RemotingClient,
        to_name_servers: RemotingClient,
    ) -> None:
        """``address``: this broker's. The clients are closed with it."""
        self._config = config
        self._address = address
        self._master = master
        self._to_brokers = to_brokers
        self._to_name_servers = to_name_servers
        self._task: asyncio.Task[None] | None = None
        self._told = ""
        self.found = False
        """Whether there is one. It stays so: messages that this broker took before are not in its log."""

    def start(self, report: Report) -> None:
        """Look regularly; ``report`` is told if that ends by itself."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        supervise(self._task, report)

    async def close(self) -> None:
        """End. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._to_brokers.close()
        await self._to_name_servers.close()

    async def look(self) -> None:
        """Ask all name servers, at the same time."""
        await asyncio.gather(*(self._look_at(one) for one in self._config.name_servers))

    async def _run(self) -> None:
        while not self.found:
            await asyncio.sleep(INTERVAL_S)
            await self.look()
        await asyncio.get_running_loop().create_future()

    async def _look_at(self, name_server: str) -> None:
        try:
            asked = Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0)
            answer = await self._to_name_servers.call(name_server, asked, TIMEOUT_S)
            known = None if answer.code else ClusterInfo.decode(answer.body).broker_addr_table.get(self._config.name)
            master = "" if known is None else known.broker_addrs.get(MASTER_ID, "")
            if not master or master == self._address():
                return
            asked = Frame(RequestCode.GET_BROKER_RUNTIME_INFO, 0)
            answer = await self._to_brokers.call(master, asked, TIMEOUT_S)
            facts = None if answer.code else RuntimeInfo.decode(answer.body).ha
            epoch = max(1, self._master.epoch)  # it begins with 1
            if facts is None or facts.is_slave or facts.epoch <= epoch:
                return
            proves = await self._proves(master, facts)
        except (*FAILURES, FrameError, CorruptLogError, DiskError) as error:
            _LOG.info("cannot find out by %s whether there is a later master: %s", name_server, error)
            return
        says = f"{master} has been promoted meanwhile (epoch {facts.epoch}, here {epoch})"
        if proves:
            self.found = True
            self._master.superseded(
                f"{says}. Stop this broker, look at what only it holds, and start it as slave (brokerRole=SLAVE)"
            )
        else:
            told = f"{says}, as it says, but does not prove that it has this broker's log: find out who registered it"
            if told != self._told:
                self._told = told
                _LOG.warning("%s", told)
            self._master.suspected(told)

    async def _proves(self, master: str, facts: HaFacts) -> bool:
        """Whether that broker has a block of this log from before it took over. An empty log has nothing to lose."""
        log = self._master.log
        if is_empty(log):
            return True
        async with asyncio.timeout(PROOF_TIMEOUT_S):
            for end in possible_ends(log, facts.begin):
                wanted = await asyncio.to_thread(challenge, log, end)
                if wanted is None:
                    continue
                asked = Frame(RequestCode.GET_BROKER_RUNTIME_INFO, 0, {PROVE: wanted.text})
                answer = await self._to_brokers.call(master, asked, TIMEOUT_S)
                said = "" if answer.code else KVTable.decode(answer.body).table.get(PROOF, "")
                if hmac.compare_digest(said.encode(), wanted.digest.encode()):
                    return True
        return False
