"""What name servers know, as groups of brokers: a cluster is one or more, and a topic is in some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dledger.records import record
from rocketstore.nameserver.tables import MASTER_ID
from rocketstore.remoting.bodies.routes import BrokerData, ClusterInfo, QueueData, TopicRouteData

_READ, _WRITE = 4, 2
QUEUES_MAX: Final = 65_536
"""Queues of a topic, at all brokers together: clients remember each."""


@record(frozen=True, slots=True)
class BrokerGroup:
    """The registered brokers of one name."""

    cluster: str
    name: str
    addresses: tuple[str, ...]
    """By broker id, so the master's is the first."""
    has_master: bool


@record(frozen=True, slots=True)
class TopicShare:
    """A topic's queues in one group."""

    group: BrokerGroup
    read_queues: int
    write_queues: int
    permission: int

    @property
    def is_readable(self) -> bool:
        """Whether consumers may read from it."""
        return bool(self.permission & _READ) and self.read_queues > 0

    @property
    def is_writable(self) -> bool:
        """Whether producers may send to it."""
        return bool(self.permission & _WRITE) and self.write_queues > 0


def groups_of(clusters: ClusterInfo) -> tuple[BrokerGroup, ...]:
    """All groups that have an address, by cluster and name."""
    found = [_group_of(one) for one in clusters.broker_addr_table.values() if one.broker_addrs]
    return tuple(sorted(found, key=lambda one: (one.cluster, one.name)))


def shares_of(route: TopicRouteData) -> tuple[TopicShare, ...]:
    """A topic's shares, by the groups' names; without groups that have no address, or more queues than there can be.

    Anybody may have registered any number: the sound brokers are told all the same.
    """
    groups = {one.broker_name: _group_of(one) for one in route.broker_datas if one.broker_addrs}
    queues = sorted(_possible(route.queue_datas), key=lambda one: one.broker_name)
    return tuple(
        TopicShare(groups[one.broker_name], one.read_queue_nums, one.write_queue_nums, one.perm)
        for one in queues
        if one.broker_name in groups
    )


def _possible(queues: Sequence[QueueData]) -> list[QueueData]:
    """Without those that have the most queues, if there are too many in all."""
    found: list[QueueData] = []
    left = QUEUES_MAX
    for one in sorted(queues, key=lambda one: max(one.read_queue_nums, one.write_queue_nums)):
        count = max(one.read_queue_nums, one.write_queue_nums)
        if min(one.read_queue_nums, one.write_queue_nums) >= 0 and count <= left:
            left -= count
            found.append(one)
    return found


def _group_of(data: BrokerData) -> BrokerGroup:
    addresses = tuple(dict.fromkeys(address for _, address in sorted(data.broker_addrs.items())))
    return BrokerGroup(data.cluster, data.broker_name, addresses, MASTER_ID in data.broker_addrs)
