"""What the console's buttons do: a port, and its two implementations.

``GroupControl`` can hand leadership over, which any client may. ``LocalControl`` belongs to a demo: it can also kill,
pause, resume and restart the processes of the group that the same process started.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from cluster.local.group import LocalGroupError
from dledger.errors import InvalidRequestError
from dledger.types import NodeId

if TYPE_CHECKING:
    from cluster.connection import GroupTarget
    from cluster.local.group import LocalGroup

TRANSFER_TIMEOUT_S: Final = 10.0


class Action(StrEnum):
    """What can be done."""

    TRANSFER = "transfer"
    KILL = "kill"
    PAUSE = "pause"
    RESUME = "resume"
    RESTART = "restart"


class ActionRefusedError(Exception):
    """Raised when an action makes no sense now, or did not work; the message is for people."""


class ClusterControl(Protocol):
    """Thread-safe; every call blocks until the thing is done, or raises."""

    @property
    def actions(self) -> frozenset[Action]:
        """What it can do."""

    def transfer(self, target: NodeId | None) -> str:
        """Hand leadership to ``target``, or to the most caught-up member; says what happened.

        Raises ``DLedgerError``, or ``ActionRefusedError``.
        """

    def act(self, action: Action, node: NodeId) -> str:
        """Do anything but a transfer to one node; says what happened. Raises ``ActionRefusedError``."""

    def processes(self) -> dict[NodeId, str]:
        """``running``, ``paused``, ``starting`` or ``ended`` for each process that it looks after."""


class NoControl:
    """A console that only shows."""

    actions: frozenset[Action] = frozenset()

    def transfer(self, target: NodeId | None) -> str:  # noqa: ARG002
        """Refused."""
        raise ActionRefusedError("this console is read-only: it was started with --read-only")

    def act(self, action: Action, node: NodeId) -> str:  # noqa: ARG002
        """Refused."""
        raise ActionRefusedError("this console is read-only: it was started with --read-only")

    def processes(self) -> dict[NodeId, str]:
        """None."""
        return {}


class GroupControl:
    """Leadership transfer, over a connection like that of ``dledger transfer-leader``."""

    actions: frozenset[Action] = frozenset({Action.TRANSFER})

    def __init__(self, target: GroupTarget, group: Callable[[], str]) -> None:
        self._target = target
        self._group = group

    def transfer(self, target: NodeId | None) -> str:
        """See ``ClusterControl``."""
        group = self._group()
        if not group:
            raise ActionRefusedError("no node has answered yet")
        started = time.monotonic()
        with closing(dataclasses.replace(self._target, group=group, timeout_s=TRANSFER_TIMEOUT_S).connect()) as client:
            try:
                leader = client.transfer_leadership(target)
            except InvalidRequestError as error:
                raise ActionRefusedError(str(error)) from error
        return f"{leader.node_id} leads now; the transfer took {(time.monotonic() - started) * 1000:,.0f} ms"

    def act(self, action: Action, node: NodeId) -> str:
        """Nothing but transfers."""
        raise ActionRefusedError(
            f"this console cannot {action} {node}: only the console of a demo can, for its own processes"
        )

    def processes(self) -> dict[NodeId, str]:
        """None of ours."""
        return {}


class LocalControl(GroupControl):
    """The processes of a ``LocalGroup`` (or ``LocalBrokers``) of this process."""

    actions: frozenset[Action] = frozenset(Action)

    def __init__(self, target: GroupTarget, local: LocalGroup) -> None:
        super().__init__(target, lambda: local.name)
        self._local = local
        self._lock = threading.Lock()  # one action at a time, for LocalGroup is not thread-safe
        self._paused: set[NodeId] = set()
        self._starting: set[NodeId] = set()

    def act(self, action: Action, node: NodeId) -> str:
        """See ``ClusterControl``."""
        if node not in self._local.nodes:
            raise ActionRefusedError(f"there is no node {node}")
        with self._lock:
            try:
                return self._act(action, node)
            except LocalGroupError as error:
                raise ActionRefusedError(str(error).splitlines()[0]) from error

    def processes(self) -> dict[NodeId, str]:
        """Of each process of the group."""
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
