"""A broker's status."""

from __future__ import annotations

import platform
from collections.abc import Callable

from dledger import __version__
from dledger.conditions import Conditions
from dledger.rpc.ports import NodeStatus
from dledger.types import Role
from rocketstore.broker.ports import GroupView
from rocketstore.broker_config import BrokerConfig
from rocketstore.pb import broker_pb2 as pb
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BrokerRole


def group_view(status: NodeStatus) -> GroupView:
    """A node's view of its group. In a broker's group, client addresses are the brokers' (``settings``)."""
    leader = status.leader
    return GroupView(
        role=str(status.role),
        term=status.term,
        leader=leader.node_id if leader is not None else "",
        leader_address=leader.address if leader is not None else "",
        members={member.node_id: member.client_address for member in status.members},
    )


def broker_id(config: BrokerConfig, store_role: BrokerRole, group: GroupView) -> int:
    """RocketMQ's broker id: 0 for the master, 1 to 3 for n0 to n2 as slaves, -1 while no leader is known."""
    if config.dledger is None:
        return config.broker_id
    if store_role is not BrokerRole.SLAVE:
        return 0
    if not group.leader:
        return -1
    digits = config.node_id[1:]
    return int(digits) + 1 if digits.isascii() and digits.isdigit() else 1


class StatusReport:
    """Builds the response; may wait for a disk (free space) and for the node's lock, so not on the event loop."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        view: Callable[[], GroupView],
        extra: Callable[[], dict[str, str]],
        conditions: Conditions,
    ) -> None:
        self._config = config
        self._store = store
        self._view = view
        self._extra = extra
        self._conditions = conditions
        self._version = __version__

    def encode(self) -> bytes:
        """The response to a status request."""
        config, store = self._config, self._store
        group, role, log = self._view(), store.role, store.log
        runtime = store.runtime_info() | self._extra()
        stats = store.stats
        return pb.StatusResponse(
            cluster=config.cluster_name,
            broker_name=config.name,
            node_id=config.node_id,
            broker_role=role,
            broker_id=broker_id(config, role, group),
            replicated=log.is_replicated,
            raft_role=group.role,
            term=group.term,
            leader=group.leader,
            leader_address=group.leader_address,
            members=group.members,
            min_offset=log.min_offset,
            max_offset=log.max_offset,
            end_offset=log.end_offset,
            dispatch_behind_bytes=store.dispatch_behind_bytes,
            put_tps=stats.put_tps(),
            get_tps=stats.get_tps(),
            disk_ratio=float(runtime.get("commitLogDiskRatio", "-1")),
            put_total=stats.arrived,
            get_total=stats.transferred,
            earliest_message_ms=store.earliest_message_time(),
            version=self._version,
            boot_ms=stats.boot_ms,
            runtime=runtime | {"brokerVersionDesc": self._version, "pythonVersion": platform.python_version()},
            conditions=[
                pb.Condition(kind=one.kind, message=one.message, since_ms=one.since_ms, subject=one.subject)
                for one in self._conditions.now()
            ],
        ).SerializeToString()


def is_leader(status: NodeStatus) -> bool:
    """Whether the node leads its group."""
    return status.role is Role.LEADER
