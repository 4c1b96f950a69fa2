"""The common part of all clients: connections, routes, a clock for each call, and the rules for repeating a request.

``Cluster`` belongs to the event loop it is first used on. A client is given the addresses of a group's brokers, or of
name servers: everything else is the same for both.

By ``Heartbeats`` brokers know a client, so that they can ask it about transactions or tell it about its group.
RocketMQ's clients send one every 30 s to each broker; a broker forgets a client that is silent for two minutes, or
whose connection has ended. So a broker also gets one as soon as it becomes known or its connection was lost. Brokers
are looked up as often, as RocketMQ's clients look up routes (``pollNameServerInterval``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from dledger.errors import ConfigError
from dledger.remoting.frame import Frame
from dledger.values import parse_address, split
from rocketstore.client.aio.connections import ATTEMPT_S_MAX, BrokerConnections, Deadline
from rocketstore.client.aio.errors import (
    OTHER_PROCESS,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    ConnectionEndedError,
    NoBrokersError,
    NotFoundError,
    RefusedError,
    TimedOutError,
    may_repeat,
)
from rocketstore.client.aio.outgoing import CREATING_TOPIC
from rocketstore.client.aio.routes import RouteCache, RoutedBroker, RouteServers, TopicRoute, no_such_topic
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import HeartbeatData
from rocketstore.remoting.headers import RouteHeader, UnregisterClientHeader, write_header

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dledger.client.shared import ClientSecurity
    from dledger.remoting.connection import RemotingConnection

_OTHER_LOOP: Final = "this client was made on another event loop: make one for each loop, and close it there"
PAUSE_S: Final = 0.05
"""Before a request is repeated for the first time; then up to ``PAUSE_S_MAX``, each time twice as long."""
PAUSE_S_MAX: Final = 1.0
SILENT_S: Final = 0.2
"""How long a master may take to accept a connection before another one is looked for."""
SLOW_S: Final = 0.5
"""How long a broker may take to answer before others are asked: for a read a copy, otherwise who is the master now."""
ASKED_AT_ONCE: Final = 64
"""Requests about single queues, topics or groups that are in progress for one call."""
_T = TypeVar("_T")


class Cluster:
    """The brokers behind some addresses. It may be made anywhere, and is then used on one event loop.

    ``requests`` receives what brokers ask of this client; ``lost`` is called with the address of each connection that
    ended by itself. Raises ``ConfigError`` for addresses that are none, for both kinds of them or neither, and for what
    ``ClientSecurity`` does not allow.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str | None,
        name_servers: Sequence[str] | str | None,
        *,
        timeout_s: float,
        security: ClientSecurity | None = None,
        requests: Callable[[RemotingConnection, Frame], None] | None = None,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        given = self.given = parse_given(addresses, name_servers)
        self.by_name_servers: Final = name_servers is not None
        if self.by_name_servers and security is not None:
            check_signing(security)
        self.timeout_s: Final = timeout_s
        self.connections: Final = BrokerConnections(given, security, requests=requests, lost=lost)
        source = RouteServers(self.connections, given, are_name_servers=self.by_name_servers, timeout_s=timeout_s)
        self.routes: Final = RouteCache(source)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self.is_closed = False

    async def close(self) -> None:
        """Close every connection; calls in progress fail. Idempotent. Raises ``ClientClosedError`` on another loop."""
        if not self.is_closed:
            self.check_place()
        self.is_closed = True
        self.routes.close()
        await self.connections.close()

    def check(self) -> None:
        """Raises ``ClientClosedError`` if it is closed, or used in a forked child or on another loop."""
        self.check_place()
        if self.is_closed:
            raise ClientClosedError("this client is closed")

    def check_place(self) -> None:
        """Raises ``ClientClosedError`` if it is used in a forked child or on another loop."""
        if os.getpid() != self._process:
            raise ClientClosedError(OTHER_PROCESS)
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise ClientClosedError(_OTHER_LOOP)

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        """The end of a call that begins now."""
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    # -- finding brokers -----------------------------------------------------------------------------------------------

    async def route(self, topic: str, deadline: Deadline) -> TopicRoute:
        """Where a topic is. Raises ``NotFoundError``, and what keeps it from being looked up."""
        route = await within(deadline, self.routes.find(topic), f"the route of topic {topic}")
        if route is None:
            raise no_such_topic(topic, by_name_servers=self.by_name_servers)
        return route

    async def brokers(self, deadline: Deadline) -> tuple[RoutedBroker, ...]:
        """All brokers, by name, as they are known now. Raises ``BrokerUnreachableError`` if there are none."""
        await within(deadline, self.routes.find_brokers(), "the list of brokers")
        found = self.routes.brokers
        if not found:
            raise NoBrokersError("no broker has registered with the name server")
        return found

    async def broker(self, name: str, deadline: Deadline) -> RoutedBroker:
        """The brokers of a name; an empty name means the only ones. Raises ``NotFoundError``, which lists them."""
        known = self.routes.broker(name) if name else None
        if known is not None:
            return known
        found = await self.brokers(deadline)
        named = [one for one in found if name in ("", one.name)]
        if len(named) != 1:
            names = ", ".join(one.name for one in found)
            asked = f"no brokers are named {name}" if name else "there are several brokers: name one"
            raise NotFoundError(f"{asked} (there are {names})")
        return named[0]

    # -- asking brokers ------------------------------------------------------------------------------------------------

    async def ask_master(
        self,
        name: str,
        code: int,
        header: DataclassInstance | None = None,
        body: bytes = b"",
        *,
        deadline: Deadline,
        harmless: bool = True,
        check: Callable[[Frame], None] = lambda _answer: None,
    ) -> Frame:
        """The successful answer of the master of that name, found again after each change until the deadline.

        ``harmless``: carrying the request out twice is the same as once, so that it may be repeated without knowing
        what became of it. ``check`` raises what a successful answer says of failures: errors of that attempt. Raises
        ``RefusedError`` and the other errors of the last attempt; if an earlier one may have been carried out, their
        outcome is unknown.
        """

        async def attempt() -> Frame:
            address = (await self.broker(name, deadline)).master
            if not address:
                raise BrokerUnreachableError(f"brokers {name or 'of this group'} have no master now")
            timeout_s = min(ATTEMPT_S_MAX, deadline.remaining_s)
            asking = self.connections.ask(address, code, header, body, timeout_s=timeout_s)
            answer = await (self.unless_replaced(name, address, asking, SLOW_S) if harmless else asking)
            if answer is None:
                raise ConnectionEndedError(f"{address} is silent, and not the master of {name} any more")
            check(answer)
            return answer

        return await self.repeat(attempt, deadline, harmless=harmless)

    async def ask_reader(
        self,
        name: str,
        code: int,
        header: DataclassInstance | None = None,
        body: bytes = b"",
        *,
        deadline: Deadline,
    ) -> Frame:
        """The successful answer of the master of that name, or of a copy if it is gone or slow. Raises as
        ``ask_master``.
        """

        async def attempt() -> Frame:
            waiting = list((await self.broker(name, deadline)).readable)
            asking: set[asyncio.Task[Frame]] = set()
            failure: ClientError | None = None
            try:
                while waiting or asking:
                    if waiting:
                        timeout_s = min(ATTEMPT_S_MAX, deadline.remaining_s)
                        call = self.connections.ask(waiting.pop(0), code, header, body, timeout_s=timeout_s)
                        asking.add(asyncio.get_running_loop().create_task(call))
                    patience_s = SLOW_S if waiting else None
                    done, asking = await asyncio.wait(asking, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        try:
                            return task.result()
                        except ClientError as error:
                            if not may_repeat(error, harmless=True):
                                raise
                            failure = failure or error
            finally:
                for task in asking:
                    task.cancel()
            raise failure or BrokerUnreachableError(f"brokers {name or 'of this group'} have no address now")

        return await self.repeat(attempt, deadline, harmless=True)

    async def find_master(self, name: str) -> str:
        """The master of a broker name, looked up now; empty if there is none, or nobody tells."""
        with suppress(ClientError):
            await self.routes.refresh_brokers()
        broker = self.routes.broker(name)
        return broker.master if broker is not None else ""

    async def unless_replaced(
        self, name: str, address: str, reaching: Coroutine[object, object, _T], silent_s: float = SILENT_S
    ) -> _T | None:
        """The result of ``reaching`` a master; None if another one is found while it is silent for ``silent_s``.

        A machine that is gone refuses nothing. Raises what ``reaching`` does.
        """
        task = asyncio.ensure_future(reaching)
        try:
            while not (await asyncio.wait((task,), timeout=silent_s))[0]:
                looking = asyncio.ensure_future(self.find_master(name))
                await asyncio.wait((task, looking), return_when=asyncio.FIRST_COMPLETED)
                if not looking.done():
                    looking.cancel()
                elif looking.result() not in ("", address):
                    return None
            return task.result()
        finally:
            if not task.cancel() and not task.cancelled():
                task.exception()  # nobody else looks at it, if there is another master

    async def repeat(self, attempt: Callable[[], Awaitable[_T]], deadline: Deadline, *, harmless: bool) -> _T:
        """``attempt`` until it succeeds, or fails for good, or the deadline passes: then its last error."""
        pause_s = PAUSE_S
        failure: ClientError | None = None
        while True:
            self.check()
            try:
                return await attempt()
            except ClientError as error:
                if failure is not None and isinstance(error, TimedOutError) and error.outcome == "not_applied":
                    raise failure from None  # it says more than that there was no time for another attempt
                if failure is not None and failure.outcome == "unknown":
                    error.outcome = "unknown"  # that of the call: an earlier attempt may have been carried out
                if not may_repeat(error, harmless=harmless) or deadline.remaining_s <= pause_s:
                    raise
                failure = error
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
            try:
                await within(deadline, self.routes.refresh_brokers(), "the list of brokers")
            except ClientError:  # the next attempt says what is the matter
                self.check()


async def within(deadline: Deadline, awaited: Awaitable[_T], what: str) -> _T:
    """The result by the deadline. Raises ``TimedOutError``: nothing was done."""
    try:
        async with asyncio.timeout(deadline.remaining_s):
            return await awaited
    except TimeoutError as error:
        raise TimedOutError(f"{what} was not found within {deadline.timeout_s:g} s", outcome="not_applied") from error


async def at_once(work: Iterable[Awaitable[_T]]) -> list[_T]:
    """The results, in order; not more than ``ASKED_AT_ONCE`` are in progress.

    Work is taken when it is its turn: if this is cancelled, nothing was made that is never awaited.
    """
    numbered = enumerate(work)
    found: dict[int, _T] = {}

    async def take_turns() -> None:
        for number, one in numbered:
            found[number] = await one

    await asyncio.gather(*(take_turns() for _ in range(ASKED_AT_ONCE)))
    return [found[number] for number in range(len(found))]


def parse_given(addresses: Sequence[str] | str | None, name_servers: Sequence[str] | str | None) -> tuple[str, ...]:
    """The addresses of brokers, or of name servers, given as one text or several. Raises ``ConfigError``."""
    if (addresses is None) == (name_servers is None):
        raise ConfigError(["give either the addresses of brokers, or name_servers=… (not both)"])
    given = addresses if addresses is not None else name_servers
    try:
        parts = split(given, ",;") if isinstance(given, str) else [str.strip(one) for one in given or ()]
    except TypeError:
        raise TypeError(f'addresses are texts, such as "127.0.0.1:10911", or a list of them, not {given!r}') from None
    found = tuple(dict.fromkeys(one for one in parts if one))
    problems = [] if found else ["no address given: give host:port of at least one broker or name server"]
    for one in found:
        try:
            parse_address(one)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return found


def check_signing(security: ClientSecurity) -> None:
    """RocketMQ's signature says neither what is asked, nor whom, nor when.

    Anyone who gets one can use it for other requests, at other brokers, for as long as the account exists; and anybody
    who can reach a name server can register there.
    """
    if security.access_key and security.tls is None and not security.trust_name_servers:
        raise ConfigError(
            [
                "an access key with name_servers needs TLS, because anybody can register an address at a name server "
                "and would get signatures that never expire: use TLS (--tls-ca), or pass --trust-name-servers to "
                "accept the risk (in Python ClientSecurity(tls=TlsFiles(…)), or trust_name_servers=True)"
            ]
        )


_log = logging.getLogger(__name__)
INTERVAL_S: Final = 30.0
"""RocketMQ's ``heartbeatBrokerInterval``."""
LOOK_S: Final = 1.0
"""How often it is checked whether there are brokers that have not had one."""
LEAVE_S_MAX: Final = 1.0
"""How long one broker may take to note that this client leaves."""


class Heartbeats:
    """Sends ``make()`` to the master of every known broker, and with ``to_copies`` to the others, too.

    ``make`` returns the groups that this client belongs to now. Use it on the cluster's loop.
    """

    def __init__(self, cluster: Cluster, make: Callable[[], HeartbeatData], *, to_copies: bool = False) -> None:
        self._cluster = cluster
        self._make = make
        self._to_copies = to_copies
        self._sent_at: dict[str, float] = {}
        self._errors: dict[str, ClientError] = {}
        self._task: asyncio.Task[None] | None = None
        self._changes = 0  # of groups, and lost connections: a heartbeat from before one does not count
        self._wanted = asyncio.Event()
        self._turn = asyncio.Lock()
        self._looked_at = float("-inf")

    @property
    def known_at(self) -> frozenset[str]:
        """The addresses of the brokers that know this client."""
        return frozenset(self._sent_at)

    def error(self, address: str) -> ClientError | None:
        """Why a broker does not know this client, if it refused to."""
        return self._errors.get(address)

    def start(self) -> None:
        """Begin. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="rocketmq-heartbeats")

    def lost(self, address: str) -> None:
        """The connection to a broker has ended, and with it what it knew of this client."""
        self._sent_at.pop(address, None)
        self._changes += 1
        self._wanted.set()

    def soon(self) -> None:
        """Tell all brokers: the groups of this client have changed."""
        self._sent_at.clear()
        self._changes += 1
        self._wanted.set()

    async def send_now(self) -> None:
        """Tell every broker that has not heard of this client for a while; returns once all have answered."""
        async with self._turn:
            now = asyncio.get_running_loop().time()
            addresses = self._addresses()
            for gone in self._sent_at.keys() - addresses:
                del self._sent_at[gone]
            due = [one for one in addresses if now - self._sent_at.get(one, float("-inf")) >= INTERVAL_S]
            if due:
                body = self._make().encode()
                await asyncio.gather(*(self._send(one, body) for one in due))

    async def stop(self) -> None:
        """End, and tell the brokers that know this client that it leaves its groups. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        data = self._make()
        left = [UnregisterClientHeader(data.client_id, one.group_name) for one in data.producer_data_set]
        left += [UnregisterClientHeader(data.client_id, "", one.group_name) for one in data.consumer_data_set]
        await asyncio.gather(*(self._leave(address, one) for address in self._sent_at for one in left))
        self._sent_at.clear()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _addresses(self) -> set[str]:
        brokers = self._cluster.routes.brokers
        if self._to_copies:
            return {address for one in brokers for address in one.readable}
        return {one.master for one in brokers if one.master}

    async def _run(self) -> None:
        while True:
            self._wanted.clear()
            try:
                await self._look_for_masters()
                await self.send_now()
            except Exception:  # noqa: BLE001  # without this task brokers would forget this client
                _log.exception("heartbeats cannot be sent; retrying")
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(LOOK_S / 20)  # a broker that hangs up again and again

    async def _look_for_masters(self) -> None:
        """A client that asks for nothing would not hear of another master, which does not know it."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= INTERVAL_S:
            with suppress(ClientError):  # nobody answers: again soon
                await self._cluster.routes.find_brokers()
                self._looked_at = now

    async def _send(self, address: str, body: bytes) -> None:
        sent_at, changes = asyncio.get_running_loop().time(), self._changes
        try:
            await self._cluster.connections.ask(address, RequestCode.HEART_BEAT, None, body, timeout_s=ATTEMPT_S_MAX)
        except ClientError as error:
            if isinstance(error, RefusedError) and str(error) != str(self._errors.get(address)):
                _log.warning("a broker refuses this client's heartbeat: %s", error)
            self._errors[address] = error
        else:
            self._errors.pop(address, None)
            if changes == self._changes:
                self._sent_at[address] = sent_at

    async def _leave(self, address: str, header: UnregisterClientHeader) -> None:
        try:
            await self._cluster.connections.ask(address, RequestCode.UNREGISTER_CLIENT, header, timeout_s=LEAVE_S_MAX)
        except ClientError as error:
            _log.info("%s was not told that this client leaves: %s", address, error)


async def numbers_messages(cluster: Cluster, address: str) -> bool:
    """Whether a broker recognizes numbered messages: its first answer says so. Raises ``ClientError``."""
    any_request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, 0, write_header(RouteHeader(CREATING_TOPIC)))
    return await cluster.connections.knows_ours(address, any_request, ATTEMPT_S_MAX)
