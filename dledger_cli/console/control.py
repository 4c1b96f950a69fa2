"""The actions behind the console's buttons: a port and its two implementations.

``GroupControl`` can transfer leadership, as any client may. ``LocalControl`` belongs to a demo: it can also kill,
pause, resume and restart processes started by the same process.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from dledger.errors import InvalidRequestError
from dledger.types import ChangeKind, NodeId
from dledger_cli.console.changes import BrokerChange
from dledger_cli.local.group import LocalGroupError

if TYPE_CHECKING:
    from dledger.client import DLedgerClient
    from dledger_cli.local.group import LocalGroup
    from dledger_cli.targets import GroupTarget

TRANSFER_TIMEOUT_S: Final = 10.0


class Action(StrEnum):
    """A possible action."""

    TRANSFER = "transfer"
    REPLACE = "replace"
    """A member by a new one, whose id and address are asked for."""
    KILL = "kill"
    PAUSE = "pause"
    RESUME = "resume"
    RESTART = "restart"


class ActionRefusedError(Exception):
    """Raised when an action is not possible now or failed; the message is for users."""


class ClusterControl(Protocol):
    """Thread-safe; every call blocks until the action is done, or raises."""

    @property
    def actions(self) -> frozenset[Action]:
        """The supported actions."""

    @property
    def changes(self) -> frozenset[BrokerChange]:
        """The changes that are allowed at brokers."""

    def transfer(self, target: NodeId | None) -> str:
        """Transfer leadership to ``target``, or to the most caught-up member; returns a description.

        Raises ``DLedgerError``, or ``ActionRefusedError``.
        """

    def replace(self, old: NodeId, new: str, address: str) -> str:
        """Add the member ``new`` at ``address``, for which ``old`` leaves; returns a description, at once.

        Raises ``DLedgerError``, or ``ActionRefusedError``.
        """

    def act(self, action: Action, node: NodeId) -> str:
        """Perform any other action on one node; returns a description. Raises ``ActionRefusedError``."""

    def processes(self) -> dict[NodeId, str]:
        """``running``, ``paused``, ``starting`` or ``ended`` for each process under its control."""


class NoControl:
    """A read-only console."""

    actions: frozenset[Action] = frozenset()
    changes: frozenset[BrokerChange] = frozenset()

    def transfer(self, target: NodeId | None) -> str:  # noqa: ARG002
        raise ActionRefusedError("this console is read-only: it was started with --read-only")

    def replace(self, old: NodeId, new: str, address: str) -> str:  # noqa: ARG002
        raise ActionRefusedError("this console is read-only: it was started with --read-only")

    def act(self, action: Action, node: NodeId) -> str:  # noqa: ARG002
        raise ActionRefusedError("this console is read-only: it was started with --read-only")

    def processes(self) -> dict[NodeId, str]:
        return {}


class GroupControl:
    """Leadership transfer and replacement of members, over connections like those of commands."""

    actions: frozenset[Action] = frozenset({Action.TRANSFER, Action.REPLACE})
    changes: frozenset[BrokerChange] = frozenset(BrokerChange)

    def __init__(self, target: GroupTarget, group: Callable[[], str]) -> None:
        self._target = target
        self._group = group

    def transfer(self, target: NodeId | None) -> str:
        started = time.monotonic()
        with closing(self._client()) as client:
            try:
                leader = client.transfer_leadership(target)
            except InvalidRequestError as error:
                raise ActionRefusedError(str(error)) from error
        return f"{leader.node_id} leads now; the transfer took {(time.monotonic() - started) * 1000:,.0f} ms"

    def replace(self, old: NodeId, new: str, address: str) -> str:
        from dledger.client import member_change

        with closing(self._client()) as client:
            try:
                client.change_members(member_change(ChangeKind.ADD, new, address, replaces=old))
            except InvalidRequestError as error:
                raise ActionRefusedError(str(error)) from error
        return f"{new} was added: it replaces {old} when it has caught up. Start it with dLegerJoin=true"

    def _client(self) -> DLedgerClient:
        group = self._group()
        if not group:
            raise ActionRefusedError("no node has answered yet")
        return dataclasses.replace(self._target, group=group, timeout_s=TRANSFER_TIMEOUT_S).client()

    def act(self, action: Action, node: NodeId) -> str:
        """Always refused: it controls no processes."""
        raise ActionRefusedError(
            f"this console cannot {action} {node}: only the console of a demo can, for its own processes"
        )

    def processes(self) -> dict[NodeId, str]:
        """Empty: it controls no processes."""
        return {}


class LocalControl(GroupControl):
    """Controls the processes of a ``LocalGroup`` (or ``LocalBrokers``) in this process."""

    actions: frozenset[Action] = frozenset(Action) - {Action.REPLACE}  # it starts no new nodes

    def __init__(self, target: GroupTarget, local: LocalGroup) -> None:
        super().__init__(target, lambda: local.name)
        self._local = local
        self._lock = threading.Lock()  # one action at a time, because LocalGroup is not thread-safe
        self._paused: set[NodeId] = set()
        self._starting: set[NodeId] = set()

    def act(self, action: Action, node: NodeId) -> str:
        if node not in self._local.nodes:
            raise ActionRefusedError(f"there is no node {node}")
        with self._lock:
            try:
                return self._act(action, node)
            except LocalGroupError as error:
                raise ActionRefusedError(str(error).splitlines()[0]) from error

    def processes(self) -> dict[NodeId, str]:
        """The state of each process of the group."""
        return {node: self._process_state(node) for node in self._local.nodes}

    def _process_state(self, node: NodeId) -> str:
        if node in self._starting:
            return "starting"
        if not self._local.is_running(node):
            return "ended"
        return "paused" if node in self._paused else "running"

    def _act(self, action: Action, node: NodeId) -> str:
        running = self._local.is_running(node)
        if action is not Action.RESTART and not running:
            raise ActionRefusedError(f"{node} is not running")
        match action:
            case Action.KILL:
                self._local.kill(node)
                self._paused.discard(node)
                return f"{node} got SIGKILL"
            case Action.PAUSE:
                if node in self._paused:
                    raise ActionRefusedError(f"{node} is already paused")
                self._local.pause(node)
                self._paused.add(node)
                return f"{node} is paused (SIGSTOP)"
            case Action.RESUME:
                if node not in self._paused:
                    raise ActionRefusedError(f"{node} is not paused")
                self._local.resume(node)
                self._paused.discard(node)
                return f"{node} is running again (SIGCONT)"
            case Action.RESTART:
                return self._restart(node, running=running)
            case Action.TRANSFER:
                return self.transfer(node)
            case Action.REPLACE:
                raise ActionRefusedError(f"what replaces {node} is not said")

    def _restart(self, node: NodeId, *, running: bool) -> str:
        self._starting.add(node)
        try:
            if running:
                if node in self._paused:
                    self._local.resume(node)
                    self._paused.discard(node)
                self._local.stop(node)
            self._local.start(node)
        finally:
            self._starting.discard(node)
        return f"{node} was stopped gracefully and restarted" if running else f"{node} was restarted"
