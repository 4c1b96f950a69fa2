"""Whether this broker is the master, which alone makes changes, who is instead, and at which addresses its group is.

Changes of the broker's state are messages of its log, so each has an outcome as a send has (``StateChanges``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final

from dledger.access.addresses import parse_address
from dledger.rpc.loops import LoopBridge, LoopCallback
from dledger.rpc.ports import NodeStatus
from dledger.types import MemberRole, Role
from dledger.values import address_text, host_of
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import LOOPBACK, HostAddress
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult

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


class Mastership:
    """For any thread. ``view`` is this broker's view of its group.

    ``has_caught_up``: whether it is known here which entries are committed; as long as it is not, no answer is
    reliable.
    """

    def __init__(
        self, store: MessageStore, view: Callable[[], GroupView], has_caught_up: Callable[[], bool] = lambda: True
    ) -> None:
        self._store = store
        self.view = view
        self._has_caught_up = has_caught_up

    @property
    def is_master(self) -> bool:
        """Whether this broker takes changes at this moment."""
        return self._store.role is not BrokerRole.SLAVE

    @property
    def leader_address(self) -> str:
        """The master's address, empty if it is unknown."""
        return self.view().leader_address

    def require(self) -> None:
        """Raises ``Refusal`` unless this broker is the master."""
        if self._store.role is BrokerRole.SLAVE:
            refused = self.refusal()
            raise Refusal.of(refused)

    def refusal(self) -> PutResult:
        """The result of a message that a slave is sent."""
        view = self.view()
        leader = view.leader_address
        if view.removed:
            reason = f"{view.removed}: look for the group's other brokers"
            return PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason=reason)
        reason = f"this broker is a slave: ask the master, {leader}"
        if not leader:
            reason = "this broker is a slave, and the master is unknown"
        return PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason=reason, leader=leader)

    def require_caught_up(self) -> None:
        """Raises ``Refusal`` as long as this broker does not know which entries are committed."""
        if not self._has_caught_up():
            view = self.view()
            reason = view.removed or "this broker has just started and does not know yet which entries are committed"
            raise Refusal(RefusalKind.UNAVAILABLE, reason, leader=view.leader_address)


class CatchUp:
    """Tells when a restarted broker has caught up with what was committed before.

    After a restart, a member does not know which of its entries are committed, so its queues and state may be outdated
    or empty until it hears from the leader. A client that still takes it for the master would be told that a topic does
    not exist, or that a queue ends before the offset it has reached. So reads are refused until then, and the client
    looks for the master. After that, a slave serves what it has, which may lag behind.

    A callable that returns whether this member has caught up; once true, it stays true. Create it before the node
    starts.
    """

    def __init__(
        self,
        status: Callable[[], NodeStatus],
        store: MessageStore,
        committed_position: Callable[[], int],
        state_is_applied: Callable[[], bool],
    ) -> None:
        self._status = status
        self._store = store
        self._committed_position = committed_position
        self._state_is_applied = state_is_applied
        self._recovered_index: Final = status().end_index
        self._position: int | None = None  # the position up to which dispatch must get, once known
        self._done = False

    def __call__(self) -> bool:
        """Cheap; any thread."""
        if not self._done:
            self._done = self._store.role is not BrokerRole.SLAVE or self._has_caught_up()
        return self._done

    def _has_caught_up(self) -> bool:
        if self._position is None:
            status = self._status()
            # A new disk recovers nothing; its member's vote counts once it has everything the others had when it
            # joined.
            if status.leader is None or not status.voter:
                return False
            # Recovered entries may be replaced by fewer, so their last index may not be reached again.
            if status.committed_index < min(self._recovered_index, status.end_index):
                return False
            self._position = self._committed_position()
        dispatched = self._committed_position() - self._store.dispatch_behind_bytes
        return dispatched >= self._position and self._state_is_applied()


_CHANGES_AT_ONCE: Final = 64
"""Of several in one request: looking at each takes the loop's time."""

StateChange = Callable[[StateDone], None]
"""Begins a change; calls the function with its outcome."""


class StateChanges:
    """On the loop."""

    def __init__(self, bridge: LoopBridge, mastership: Mastership) -> None:
        self._bridge = bridge
        self._mastership = mastership

    async def make(self, *changes: StateChange) -> None:
        """Returns once all are stored and applied. Raises ``Refusal``."""
        done = 0
        for start in range(0, len(changes), _CHANGES_AT_ONCE):
            results = await asyncio.gather(*map(self.outcome, changes[start : start + _CHANGES_AT_ONCE]))
            done += sum(one.ok for one in results)
            failed = next((one for one in results if not one.ok), None)
            if failed is not None:
                count = f"{done} of {len(changes)} changes are done: " if len(changes) > 1 else ""
                nothing = not done and all(one.outcome == "not_applied" for one in results)
                outcome = failed.outcome if nothing else "unknown"
                refused = failed._replace(reason=f"{count}{failed.reason or failed.status}", outcome=outcome)
                raise Refusal.of(refused, self._mastership.leader_address)

    def outcome(self, change: StateChange) -> asyncio.Future[PutResult]:
        """Begins a change; the future gets what became of it."""
        outcome: LoopCallback[PutResult] = LoopCallback(self._bridge)
        change(outcome.done)
        return outcome.future


TRIES: Final = 3
PAUSE_S: Final = 1.0
_log = logging.getLogger("rocketstore")
LOOK_UP_INTERVAL_S: Final = 10.0
"""How often the members' names are looked up."""


def host_address(host: str, port: int) -> HostAddress:
    """A client's address, given as text; loopback if it is not an IP address."""
    try:
        return HostAddress(parse_address(host).packed, port)
    except ValueError:
        return LOOPBACK


def host_text(host: HostAddress) -> str:
    """``host:port``."""
    return address_text(str(ip_address(host.ip)), host.port)


def resolve(host: str, port: int) -> HostAddress:
    """The store host for records: the name's first address; loopback if it has none, with a warning."""
    try:
        return HostAddress(parse_address(host).packed, port)
    except ValueError:
        pass
    for left in reversed(range(TRIES)):  # a name server may not be up yet when a machine or a container starts
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except OSError as error:
            if left:
                time.sleep(PAUSE_S)
                continue
            _log.warning(
                "this broker's own name %s cannot be resolved (%s): until the next start, message ids and records name "
                "127.0.0.1. Set brokerIP1 to an IP address, or to a name that this machine can resolve",
                host, error,
            )  # fmt: skip
            return HostAddress(LOOPBACK.ip, port)
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return HostAddress(parse_address(str(found[0][4][0])).packed, port)


class MemberHosts:
    """From which addresses a request may say that a member of the group has passed it on.

    On the loop, of a broker that is a member of a group.
    """

    def __init__(self, mastership: Mastership, readers: ReadThreads) -> None:
        self._mastership = mastership
        self._readers = readers
        self._task: asyncio.Task[None] | None = None
        self.known: frozenset[str] = frozenset()
        """The members' IP addresses."""

    def start(self) -> None:
        """Look them up from now on. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look_up_members())

    async def close(self) -> None:
        """Look nothing up any more."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _look_up_members(self) -> None:
        while True:
            try:
                self.known = await self._addresses_of_members()
            except Exception:  # noqa: BLE001  # what was known stays; without this task it would never change again
                _log.exception("the addresses of the group's members cannot be looked up; retrying")
            await asyncio.sleep(LOOK_UP_INTERVAL_S)

    async def _addresses_of_members(self) -> frozenset[str]:
        found: set[str] = set()
        for name in {host_of(one) for one in self._mastership.view().members.values() if one}:
            with suppress(OSError, UnicodeError):  # no such name, now or ever
                places = await self._readers.run(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
                found.update(str(place[4][0]) for place in places)
        return frozenset(found)
