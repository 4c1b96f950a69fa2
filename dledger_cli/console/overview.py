"""The console of all groups of brokers behind name servers: what it knows of them, and a group page for each.

A task per address, on the console's event loop, asks name servers and brokers for a ``Fleet``, by RocketMQ's protocol,
which all of them speak: a slow one holds up nobody, and is not asked again before it has answered or its time is up.
Together they send at most ``ASKED_PER_S_MAX`` requests per second to brokers; without an open page, hardly any.

A round of topics costs one request to a name server per topic, so it has a budget: with more topics, each round looks
at those that pages show and at some of the others in turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from dledger.errors import DLedgerError
from dledger.remoting.codes import RequestError
from dledger_cli.console.browse import QUEUES_MAX, safe_text
from dledger_cli.console.catalog import FILL_INTERVAL_S, INTERVAL_S, NAMES_PER_S, SHOWN_S
from dledger_cli.console.fleet import NAME_CHARS_MAX, Fleet
from dledger_cli.console.group_page import GroupPage, GroupPages, Streams
from dledger_cli.console.history import TEXT_MAX
from dledger_cli.console.listing import LIST_MAX, LookOrder, SortedBy, Wanted, list_page
from dledger_cli.console.sampler import SamplePace, wall_ms
from rocketstore.client import BrokerUnreachableError, ClientError, NotFoundError, RefusedError
from rocketstore.client.aio.cluster import check_signing
from rocketstore.client.aio.connections import BrokerConnections
from rocketstore.client.aio.routes import RouteServers, TopicQueues, parts_of
from rocketstore.message.checks import is_internal
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import TopicStatsTable
from rocketstore.remoting.headers import TopicHeader
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.remoting.topics import MASTER_ID, BrokerData, TopicRouteData

if TYPE_CHECKING:
    from dledger_cli.console.control import ClusterControl
    from dledger_cli.targets import BrokerTarget, GroupTarget


class ForeignGroupError(Exception):
    """Raised for a group that cannot be looked into: its brokers do not speak our protocol."""


class Overview:
    """On the console's event loop. ``control`` None: leadership of each group can be transferred.

    Raises ``ConfigError`` for name servers that an account must not trust.
    """

    def __init__(
        self,
        target: GroupTarget,
        brokers: BrokerTarget,
        *,
        control: ClusterControl | None = None,
        pace: SamplePace | None = None,
        fleet_pace: FleetPace | None = None,
    ) -> None:
        names, security = brokers.name_servers, brokers.security.for_client()
        check_signing(security)
        connections = BrokerConnections(names, security)
        self.fleet: Final = Fleet(names)
        self.watcher: Final = FleetWatcher(self.fleet, names, connections, fleet_pace)
        self.streams: Final = Streams(
            lambda: self.fleet.snapshot(wall_ms()),
            lambda after: self.fleet.update(after, wall_ms()),
            lambda: self.topics.state(),
            self._watch,
        )
        self.topics: Final = FleetTopics(self.fleet, names, connections, lambda: self.streams.hurry(catalog=True))
        self._group_pages = GroupPages(_group_page_maker(target, brokers, control, pace))

    @property
    def pages(self) -> int:
        """The number of open pages, of all groups together and of single ones."""
        return self.streams.count + self._group_pages.pages

    async def run(self) -> None:
        """Watch and publish until cancelled; then close everything."""
        async with asyncio.TaskGroup() as group:
            for part in (self.watcher.run, self.topics.run, self._group_pages.run, self.streams.run):
                group.create_task(part())

    def hang_up(self) -> None:
        """Close the streams of all pages, for a server that is about to end. On any thread."""
        self.streams.close_soon()
        self._group_pages.hang_up()

    def group_page(self, name: str) -> GroupPage:
        """The page of one group. Raises ``NotFoundError``, ``ForeignGroupError`` and ``TooManyGroupPagesError``."""
        addresses = self.fleet.addresses_of(name)
        if addresses is None:
            raise NotFoundError(f"no brokers named {name} have registered")
        if self.fleet.is_foreign(name):
            raise ForeignGroupError(f"{name} runs RocketMQ's own brokers: use its mqadmin to look into them")
        return self._group_pages.get(name, addresses)

    def state(self) -> dict[str, object]:
        """Everything, for scripts."""
        return {**self.fleet.snapshot(wall_ms()), "catalog": self.topics.state()}

    def _watch(self, watched: bool) -> None:
        self.watcher.watch(watched=watched)
        self.topics.watch(watched=watched)


def _group_page_maker(
    target: GroupTarget, brokers: BrokerTarget, control: ClusterControl | None, pace: SamplePace | None
) -> Callable[[tuple[str, ...]], GroupPage]:
    def make(addresses: tuple[str, ...]) -> GroupPage:
        found = replace(brokers, addresses=addresses, name_servers=())
        return GroupPage(replace(target, bootstrap=addresses, group=""), found, control, pace, brokers.name_servers)

    return make


ASKED_PER_S_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class FleetPace:
    """How often an address is asked, and how long it may take to answer."""

    watched_s: float = 2.0
    unwatched_s: float = 10.0
    timeout_s: float = 2.0


class FleetWatcher:
    """Between ``run``'s start and its cancellation, which closes ``connections``. Everything on one loop."""

    def __init__(
        self, fleet: Fleet, name_servers: Sequence[str], connections: BrokerConnections, pace: FleetPace | None = None
    ) -> None:
        self._fleet = fleet
        self._name_servers = tuple(name_servers)
        self._pace = pace or FleetPace()
        self._connections = connections
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._watched = False
        self._nudge = asyncio.Event()

    def watch(self, *, watched: bool) -> None:
        """Set whether a page is open; if so, everybody is asked at once."""
        if watched and not self._watched:
            self._nudge.set()
            self._nudge = asyncio.Event()
        self._watched = watched

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for address in self._name_servers:
                    group.create_task(self._follow_name_server(address))
        finally:
            await self._connections.close(at_once=True)

    async def _follow_name_server(self, address: str) -> None:
        names = RouteServers(self._connections, [address], are_name_servers=True, timeout_s=self._pace.timeout_s)
        while True:
            nudge = self._nudge
            try:
                found = await names.clusters()
            except DLedgerError as error:
                self._fleet.unheard(
                    address, _short(address, str(error).removeprefix("no name server answered: ")), wall_ms()
                )
            else:
                self._fleet.heard(address, found, wall_ms())
            self._cover()
            await self._pause(self._interval_s(), nudge)

    def _cover(self) -> None:
        """A task for each address, and none for those that were forgotten."""
        group, addresses = self._group, self._fleet.addresses()
        if group is None:
            return
        for address in self._tasks.keys() - set(addresses):
            self._tasks.pop(address).cancel()
        for address in addresses:
            if address not in self._tasks:
                self._tasks[address] = group.create_task(self._follow(address))

    async def _follow(self, address: str) -> None:
        while True:
            nudge = self._nudge
            await self._ask(address)
            await self._pause(max(self._interval_s(), len(self._tasks) / ASKED_PER_S_MAX), nudge)

    async def _ask(self, address: str) -> None:
        fleet, timeout_s = self._fleet, self._pace.timeout_s
        try:
            answer = await self._connections.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, timeout_s=timeout_s)
            info = RuntimeInfo.decode(answer.body)
        except (RefusedError, RequestError) as error:
            fleet.refused(address, _short(address, str(error)), wall_ms())
        except ClientError as error:
            is_unreachable = isinstance(error, BrokerUnreachableError)
            fleet.failed(address, _short(address, str(error)), wall_ms(), unreachable=is_unreachable)
        else:
            fleet.answered(address, info, wall_ms())

    def _interval_s(self) -> float:
        return self._pace.watched_s if self._watched else self._pace.unwatched_s

    async def _pause(self, seconds: float, nudge: asyncio.Event) -> None:
        """Until it is time, or a page has been opened since ``nudge`` was taken."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await nudge.wait()


def _short(address: str, error: str) -> str:
    """Without the address, which stands beside it."""
    return error.removeprefix(f"cannot connect to {address}: ").removeprefix(f"{address}: ")


TIMEOUT_S: Final = 2.0
SHARES_MAX: Final = 240
"""Groups shown of one topic."""
ROUND_REQUESTS: Final = 32


@dataclass(frozen=True, slots=True)
class FleetTopicRow:
    """One topic. ``shares``, None until it was looked at: group, read queues, write queues, permission of each."""

    name: str
    internal: bool
    shares: tuple[tuple[str, int, int, int], ...] | None = None
    seen_ms: int = field(default=0, compare=False)

    @property
    def queues(self) -> int | None:
        """For writing, in all groups."""
        return None if self.shares is None else sum(write for _, _, write, _ in self.shares)


SORTS: Final[Mapping[str, SortedBy[FleetTopicRow]]] = {
    "name": lambda row: row.name,
    "groups": lambda row: None if row.shares is None else len(row.shares),
    "queues": lambda row: row.queues,
}


class FleetTopics:
    """``on_change`` is called when the list has changed."""

    def __init__(
        self,
        fleet: Fleet,
        name_servers: Sequence[str],
        connections: BrokerConnections,
        on_change: Callable[[], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._connections = connections
        self._names = RouteServers(connections, name_servers, are_name_servers=True, timeout_s=TIMEOUT_S)
        self._on_change = on_change
        self._clock_s = clock_s
        self._rows: dict[str, FleetTopicRow] = {}
        self._order = LookOrder()
        self._list_at_s = 0.0
        self._shown: dict[str, float] = {}
        self._left_out = 0
        self._error = ""
        self._loaded = False
        self._version = 0
        self._seen_ms = 0
        self._watched = asyncio.Event()

    def watch(self, *, watched: bool) -> None:
        """Set whether a page is open; otherwise nothing is requested."""
        if watched:
            self._watched.set()
        else:
            self._watched.clear()

    def state(self) -> dict[str, object]:
        """Whether there is a list, of how many, how old, and how many topics each group has as far as is known."""
        counts = Counter(name for row in self._rows.values() if not row.internal for name, *_ in row.shares or ())
        return {
            "loaded": self._loaded,
            "error": self._error,
            "seen_ms": self._seen_ms,
            "version": self._version,
            "totals": {"topics": len(self._rows) + self._left_out},
            "unseen": self._unseen(),
            "counts": dict(counts),
        }

    def topics(self, wanted: Wanted) -> dict[str, object]:
        """A page of the topics."""
        listed = list_page(self._rows.values(), wanted, SORTS)
        self._shown |= dict.fromkeys((one.name for one in listed.rows), self._clock_s())
        about = {"loaded": self._loaded, "version": self._version, "left_out": self._left_out}
        return {**about, "unseen": self._unseen(), **listed.told()}

    def _unseen(self) -> int:
        return sum(one.seen_ms == 0 for one in self._rows.values())

    async def run(self) -> None:
        """Look every few seconds, while a page is open, until cancelled."""
        while True:
            await self._watched.wait()
            await self.look()
            await asyncio.sleep(FILL_INTERVAL_S if self._unseen() and not self._error else INTERVAL_S)

    async def look(self) -> None:
        """Run one round."""
        try:
            await self._look()
        except DLedgerError as failure:
            self._tell(error=safe_text(str(failure))[:TEXT_MAX])
        else:
            self._tell(error="")

    def _tell(self, *, error: str, changed: bool = False) -> None:
        if not error:
            self._seen_ms = wall_ms()
        if changed or error != self._error:
            self._error = error
            self._version += 1
            self._on_change()

    async def _look(self) -> None:
        if self._clock_s() >= self._list_at_s:
            await self._look_at_names()
            self._list_at_s = self._clock_s() + max(INTERVAL_S - FILL_INTERVAL_S, len(self._rows) / NAMES_PER_S)
        await self._look_at_shares()

    async def _look_at_names(self) -> None:
        found = sorted({name for name in await self._names.topics() if len(name) <= NAME_CHARS_MAX})
        places = self._fleet.names()
        rows = {name: _row(name, places, self._rows.get(name)) for name in found[:LIST_MAX]}
        left_out = len(found) - len(rows)
        changed = not self._loaded or (rows, left_out) != (self._rows, self._left_out)
        self._rows, self._left_out, self._loaded = rows, left_out, True
        self._order.renew(rows)
        if changed:
            self._tell(error="", changed=True)

    async def _look_at_shares(self) -> None:
        rows, since = self._rows, self._clock_s() - SHOWN_S
        self._shown = {name: at for name, at in self._shown.items() if at > since and name in rows}
        shown = sorted(self._shown, key=lambda name: rows[name].seen_ms)
        changed = False
        for name in self._order.take(shown, ROUND_REQUESTS):
            route = await self._names.route(name)
            shares = () if route is None else _shares(route)  # none: it was deleted meanwhile
            row = FleetTopicRow(name, rows[name].internal, shares, wall_ms())
            changed |= row != rows[name]
            rows[name] = row
        if changed:
            self._tell(error="", changed=True)

    # --- one topic ---------------------------------------------------------------------------------------------------

    async def topic(self, name: str) -> dict[str, object]:
        """A topic's queues in every group, as its masters tell. Raises ``ClientError``."""
        route = await self._names.route(name)
        if route is None:
            raise NotFoundError(f"topic {name} does not exist: no name server has a route to it")
        brokers = {one.broker_name: one for one in route.broker_datas}
        shares = parts_of(route)[:SHARES_MAX]
        looked = await asyncio.gather(*(self._group(name, one, brokers[one.broker]) for one in shares))
        return {"name": name, "groups": looked}

    async def _group(self, topic: str, share: TopicQueues, brokers: BrokerData) -> dict[str, object]:
        queues, error = [], ""
        try:
            queues = await self._queues(topic, brokers.broker_addrs.get(MASTER_ID, ""))
        except (ClientError, RequestError) as failure:
            error = str(failure)
        return {
            "cluster": safe_text(brokers.cluster),
            "name": share.broker,
            "read_queues": share.read_queues,
            "write_queues": share.write_queues,
            "permission": share.permission,
            "queues": queues[:QUEUES_MAX],
            "all_queues": len(queues),
            "error": safe_text(error)[:TEXT_MAX],
        }

    async def _queues(self, topic: str, master: str) -> list[dict[str, int]]:
        if not master:
            raise BrokerUnreachableError("no master is registered")
        code = RequestCode.GET_TOPIC_STATS_INFO
        answer = await self._connections.ask(master, code, TopicHeader(topic), timeout_s=TIMEOUT_S)
        table = TopicStatsTable.decode(answer.body).offset_table
        return [
            {
                "queue": queue.queue_id,
                "min_offset": max(one.min_offset, 0),
                "max_offset": one.max_offset,
                "newest_ms": one.last_update_timestamp,
            }
            for queue, one in sorted(table.items(), key=lambda item: item[0].queue_id)
        ]


def _shares(route: TopicRouteData) -> tuple[tuple[str, int, int, int], ...]:
    found = parts_of(route)[:SHARES_MAX]
    return tuple((one.broker, one.read_queues, one.write_queues, one.permission) for one in found)


def _row(name: str, places: frozenset[str], old: FleetTopicRow | None) -> FleetTopicRow:
    """Topics named after a cluster or a broker are RocketMQ's own; it may be known later than its topic."""
    internal = is_internal(name) or name in places
    if old is None:
        return FleetTopicRow(name, internal)
    return old if old.internal == internal else replace(old, internal=internal)
