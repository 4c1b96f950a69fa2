"""The parts of the store, the broker state and the group that the broker's service uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dledger.members import MemberRole
from dledger.rpc.ports import NodeStatus
from dledger.types import Role
from rocketstore.broker_config import BrokerConfig
from rocketstore.types import BrokerRole, PutResult

StateDone = Callable[[PutResult], None]
"""Called once with the result of a state change, on any thread; must not block."""
QueueKey = tuple[str, int]
"""Topic and queue id."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """A broker's view of its group; a plain broker is its only member. Addresses are those of brokers."""

    role: str = ""
    term: int = 0
    leader: str = ""
    leader_address: str = ""
    members: dict[str, str] = field(default_factory=dict)
    """Node id to address, as far as known."""
    learners: frozenset[str] = frozenset()
    """Those of them that do not count, and may still lack most of the log."""
    number: int = 0
    """This member's, which never changes and is never given again; -1 if it is not one, or not yet."""
    removed: str = ""
    """Why this broker is no member any more."""


def group_view(status: NodeStatus, removed: str = "") -> GroupView:
    """A node's view of its group. In a broker's group, client addresses are the brokers' (``settings``)."""
    leader = status.leader
    numbers = {member.node_id: member.number for member in status.members}
    return GroupView(
        role=str(status.role),
        term=status.term,
        leader=leader.node_id if leader is not None else "",
        leader_address=leader.address if leader is not None else "",
        members={member.node_id: member.client_address for member in status.members},
        learners=frozenset(one.node_id for one in status.members if one.role is MemberRole.LEARNER),
        number=numbers.get(status.node_id, -1),
        removed=removed,
    )


def broker_id(config: BrokerConfig, store_role: BrokerRole, group: GroupView) -> int:
    """RocketMQ's broker id: 0 for the master, the member's number + 1 for a slave, -1 while no leader is known."""
    if config.dledger is None:
        return config.broker_id
    if store_role is not BrokerRole.SLAVE:
        return 0
    return group.number + 1 if group.leader else -1


def is_leader(status: NodeStatus) -> bool:
    """Whether the node leads its group."""
    return status.role is Role.LEADER
