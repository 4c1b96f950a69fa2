"""The console of all groups of brokers behind name servers: what it knows of them, and a group page for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dledger_cli.console.fleet import Fleet
from dledger_cli.console.fleet_topics import FleetTopics
from dledger_cli.console.group_page import GroupPage, GroupPages
from dledger_cli.console.sampler import SamplePace, wall_ms
from dledger_cli.console.streams import Streams
from dledger_cli.console.watcher import FleetPace, FleetWatcher
from rocketstore.client import NotFoundError
from rocketstore.client.aio.cluster import check_signing
from rocketstore.client.aio.connections import BrokerConnections

if TYPE_CHECKING:
    from dledger_cli.broker_target import BrokerTarget
    from dledger_cli.connection import GroupTarget
    from dledger_cli.console.control import ClusterControl


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
