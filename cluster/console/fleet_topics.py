"""The topics of all groups of brokers, as name servers tell them, and one topic's queues as the brokers tell them.

A round costs one request to a name server per topic, so it has a budget: with more topics, each round looks at some of
them in turn. Everything is on the console's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from cluster.console.browse import QUEUES_MAX, safe_text
from cluster.console.catalog import INTERVAL_S, ROUND_REQUESTS_MAX, TOPICS_MAX
from cluster.console.fleet import NAME_CHARS_MAX, Fleet
from cluster.console.history import TEXT_MAX
from cluster.console.sampler import wall_ms
from dledger.client.security import ClientSecurity
from dledger.errors import ConfigError, DLedgerError
from rocketstore.client.errors import NotFoundError
from rocketstore.client.name_server_tls import check_plaintext
from rocketstore.client.runtime import body_of, sign
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.nameserver.aio_lookups import AsyncNameServers
from rocketstore.nameserver.groups import TopicShare, shares_of
from rocketstore.nameserver.tables import MASTER_ID
from rocketstore.remoting.bodies.routes import TopicRouteData
from rocketstore.remoting.bodies.stats import TopicStatsTable
from rocketstore.remoting.client import RemotingClient, UnreachableError
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.connection import DisconnectedError, TooManyCallsError
from rocketstore.remoting.errors import RequestError
from rocketstore.remoting.frame import Frame
from rocketstore.remoting.headers import TopicHeader, write_header

TIMEOUT_S: Final = 2.0
SHARES_MAX: Final = 240
"""Groups shown of one topic."""
_INTERNAL: Final = NO_SEND_TOPICS | {"TBW102", "BenchmarkTest", "OFFSET_MOVED_EVENT"}
_INTERNAL_PREFIXES: Final = ("%RETRY%", "rmq_sys_", "RMQ_SYS_", "SCHEDULE_TOPIC_")


@dataclass(frozen=True, slots=True)
class FleetTopicRow:
    """One topic. ``shares``, None until it was looked at: group, read queues, write queues, permission of each."""

    name: str
    system: bool
    shares: tuple[tuple[str, int, int, int], ...] | None = None
    seen_ms: int = 0


class FleetTopics:
    """``on_change`` is called when the list has changed."""

    def __init__(
        self,
        fleet: Fleet,
        name_servers: Sequence[str],
        frames: RemotingClient,
        security: ClientSecurity,
        on_change: Callable[[], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._fleet = fleet
        self._frames = frames
        self._security = security
        self._names = AsyncNameServers(name_servers, frames, timeout_s=TIMEOUT_S)
        self._on_change = on_change
        self._interval_s = interval_s
        self._rows: dict[str, FleetTopicRow] = {}
        self._total = 0
        self._error = ""
        self._loaded = False
        self._watched = asyncio.Event()

    def watch(self, *, watched: bool) -> None:
        """Set whether a page is open; otherwise nothing is requested."""
        if watched:
            self._watched.set()
        else:
            self._watched.clear()

    def snapshot(self) -> dict[str, object]:
        """The last results."""
        rows = [asdict(self._rows[name]) for name in sorted(self._rows)]
        return {"loaded": self._loaded, "error": self._error, "total": self._total, "topics": rows}

    async def run(self) -> None:
        """Look every few seconds, while a page is open, until cancelled."""
        while True:
            await self._watched.wait()
            await self.look()
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Run one round."""
        before = self._told()
        try:
            await self._look()
        except (DLedgerError, TooManyCallsError) as failure:
            self._error = safe_text(str(failure))[:TEXT_MAX]
        else:
            self._error, self._loaded = "", True
        if self._told() != before:
            self._on_change()

    def _told(self) -> list[object]:
        rows = [(one.name, one.shares) for one in self._rows.values()]
        return [self._loaded, self._error, self._total, sorted(rows, key=lambda one: one[0])]

    async def _look(self) -> None:
        found = sorted({name for name in await self._names.topics() if len(name) <= NAME_CHARS_MAX})
        self._total = len(found)
        places = self._fleet.names()
        fresh = {
            name: self._rows.get(name) or FleetTopicRow(name, _is_internal(name, places)) for name in found[:TOPICS_MAX]
        }
        self._rows = fresh
        for row in sorted(fresh.values(), key=lambda one: one.seen_ms)[:ROUND_REQUESTS_MAX]:
            route = await self._names.route(row.name, refresh=True)
            if route is not None:  # otherwise it was deleted meanwhile
                fresh[row.name] = FleetTopicRow(row.name, row.system, _shares(route), wall_ms())

    # --- one topic ---------------------------------------------------------------------------------------------------

    async def topic(self, name: str) -> dict[str, object]:
        """A topic's queues in every group, as its masters tell. Raises ``NotFoundError`` and ``NameServerError``."""
        route = await self._names.route(name, refresh=True)
        if route is None:
            raise NotFoundError(f"topic {name} does not exist: no name server has a route to it")
        shares = shares_of(route)[:SHARES_MAX]
        masters = {one.broker_name: one.broker_addrs.get(MASTER_ID, "") for one in route.broker_datas}
        looked = await asyncio.gather(*(self._group(name, one, masters[one.group.name]) for one in shares))
        return {"name": name, "groups": looked}

    async def _group(self, topic: str, share: TopicShare, master: str) -> dict[str, object]:
        queues, error = [], ""
        try:
            queues = await self._queues(topic, master)
        except (RequestError, UnreachableError, ConfigError, DisconnectedError, TooManyCallsError) as failure:
            error = str(failure)
        except TimeoutError:
            error = f"{master} did not answer within {TIMEOUT_S:g} s"
        return {
            "cluster": safe_text(share.group.cluster),
            "name": share.group.name,
            "read_queues": share.read_queues,
            "write_queues": share.write_queues,
            "permission": share.permission,
            "queues": queues[:QUEUES_MAX],
            "all_queues": len(queues),
            "error": safe_text(error)[:TEXT_MAX],
        }

    async def _queues(self, topic: str, master: str) -> list[dict[str, int]]:
        if not master:
            raise UnreachableError("no master is registered")
        check_plaintext([master], self._security)
        asked = Frame(RequestCode.GET_TOPIC_STATS_INFO, 0, write_header(TopicHeader(topic)))
        answer = await self._frames.call(master, sign(asked, self._security), TIMEOUT_S)
        table = TopicStatsTable.decode(body_of(answer)).offset_table
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
    found = shares_of(route)[:SHARES_MAX]
    return tuple((one.group.name, one.read_queues, one.write_queues, one.permission) for one in found)


def _is_internal(name: str, places: frozenset[str]) -> bool:
    """Whether no application sends to it: a broker's own, or one of those named after a cluster or a broker."""
    return name in _INTERNAL or name in places or name.startswith(_INTERNAL_PREFIXES) or name.endswith("_REPLY_TOPIC")
