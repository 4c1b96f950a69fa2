"""A broker's view of its group, and RocketMQ's numbers for its role."""

from __future__ import annotations

from dledger.rpc.ports import NodeStatus
from dledger.types import Role
from rocketstore.broker.ports import GroupView
from rocketstore.broker_config import BrokerConfig
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


def is_leader(status: NodeStatus) -> bool:
    """Whether the node leads its group."""
    return status.role is Role.LEADER
