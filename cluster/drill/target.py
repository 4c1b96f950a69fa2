"""The operations a drill needs of a group of brokers, wherever they run.

``Watch`` polls every node of it: who leads, in which term, who responds, how far each one is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

from cluster.drill.history import HistoryRecorder, NodeView
from dledger.client.shared import ClientSecurity
from dledger.errors import DLedgerError
from dledger.types import NodeId
from dledger_cli.local.group import wait_until as poll_until
from rocketstore.client import Admin
from rocketstore.remoting.runtime import RuntimeInfo

SMALL_FILES: Final = {
    "mappedFileSizeCommitLog": str(4 << 20),
    "index_segment_bytes": str(1 << 20),
    "mappedFileSizeConsumeQueue": "40000",
    "maxHashSlotNum": "5000",
    "maxIndexNum": "20000",
    "cleanFileForciblyEnable": "false",
    "fileReservedTime": "72",
    "diskMaxUsedSpaceRatio": "97",
    "diskSpaceCleanForciblyRatio": "98",
    "diskSpaceWarningLevelRatio": "99",
}
"""Settings of every broker: files fit on small disks, nothing is removed before it is read back, and a host's disk that
is rather full (by default 90 %) stops no drill; one filled on purpose is full to the last byte.
"""
SECURITY: Final = ClientSecurity(insecure=True)
"""For a drill's clients: containers have their own addresses, but on networks inside this host."""
TOOL_TIMEOUT_S: Final = 300.0
"""For comparing, aligning or exporting what a drill has stored."""
SMALL_DISK_MIB: Final = 96
"""Size of each broker's disk if one is to be filled."""
SPARES: Final = 2
"""Nodes that are no members at first."""


class Direction(StrEnum):
    """Which packets of an isolated node are dropped."""

    OUT = "out"
    """Packets it sends."""
    IN = "in"
    """Packets sent to it."""


class DrillError(Exception):
    """Raised when a group does not do what a drill requires: the drill has failed, whatever became of the messages."""


class NotPossibleError(Exception):
    """Raised when something is not possible here; says why, and what would help."""


class DrillTarget(Protocol):
    """A group of brokers that faults can be injected into. Used by one thread at a time."""

    @property
    def kind(self) -> str:
        """``containers`` or ``processes``."""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The members, in order."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences of this kind of group that affect the result."""

    def address(self, node: NodeId) -> str:
        """The address (``host:port``) at which clients on this host reach a broker."""

    def start(self) -> None:
        """Start all nodes; returns when all serve. Raises ``NotPossibleError``."""

    def close(self) -> None:
        """Stop and remove everything. Idempotent."""

    def kill(self, *nodes: NodeId) -> None:
        """SIGKILL, to all at once."""

    def stop(self, node: NodeId) -> None:
        """SIGTERM, and wait until it has exited."""

    def restart(self, *nodes: NodeId) -> None:
        """Start nodes that were killed or stopped, all at once; they may still be recovering when this returns."""

    def pause(self, node: NodeId) -> None:
        """Freeze it, with all its connections open."""

    def resume(self, node: NodeId) -> None:
        """Continue it."""

    def disconnect(self, node: NodeId) -> None:
        """Drop all packets from and to it."""

    def reconnect(self, node: NodeId) -> None:
        """Undo ``disconnect``."""

    def isolate(self, node: NodeId, direction: Direction) -> None:
        """Drop packets between it and the other members in one direction; clients still reach it."""

    def rejoin(self, node: NodeId) -> None:
        """Undo ``isolate``."""

    def fill_disk(self, node: NodeId) -> None:
        """Fill the disk of its data to the last byte."""

    def free_disk(self, node: NodeId) -> None:
        """Undo ``fill_disk``."""

    def empty_volume(self, node: NodeId) -> None:
        """Empty the volume of a killed or stopped node, as if its disk were new."""

    def log_of(self, node: NodeId) -> str:
        """The end of its output."""


@runtime_checkable
class MemberTarget(DrillTarget, Protocol):
    """A group whose members change while it runs; ``nodes`` are its present members."""

    @property
    def spares(self) -> tuple[NodeId, ...]:
        """Nodes that are no members at present, do not run, and have empty directories."""

    def add(self, node: NodeId) -> None:
        """Start a spare and add it; returns when it votes."""

    def remove(self, node: NodeId) -> None:
        """Remove a member, then stop it and empty its directory: it is a spare."""

    def replace(self, lost: NodeId, node: NodeId) -> None:
        """Start a spare in place of a member that does not run any more; returns when the other one is a spare."""


class MigrationForm(StrEnum):
    """The forms of a migration's brokers, one after the other, on the same directories."""

    PAIR = "pair"
    """The first node is a plain master, the second its slave; the others do not run."""
    GROUP = "group"
    """All are members of a group."""
    PLAIN = "plain"
    """One is a plain broker, on the directory that was exported from the group."""


CLUSTER: Final = "DrillCluster"


def plain_settings(form: MigrationForm, number: int, master_address: str, slaves_port: int) -> dict[str, str]:
    """The settings of a plain broker, as in RocketMQ's ``2m-2s-sync``. ``slaves_port``: its own ``haListenPort``."""
    common = {"haListenPort": str(slaves_port), "brokerClusterName": CLUSTER}
    if form is MigrationForm.PLAIN:
        return {**common, "brokerRole": "ASYNC_MASTER", "brokerId": "0"}
    if number == 0:
        return {**common, "brokerRole": "SYNC_MASTER", "brokerId": "0"}
    return {**common, "brokerRole": "SLAVE", "brokerId": str(number), "haMasterAddress": master_address}


@runtime_checkable
class MigrationTarget(DrillTarget, Protocol):
    """Brokers that change their form on the way; each node's address stays."""

    def start_as(self, form: MigrationForm, *nodes: NodeId) -> None:
        """Start stopped nodes with the settings of this form; returns when they serve."""

    def root_of(self, node: NodeId) -> str:
        """Its ``storePathRootDir``, as ``run_tool`` sees it."""

    def conf_of(self, node: NodeId) -> str:
        """Its conf file as a member of the group, as ``run_tool`` sees it."""

    def plain_root_of(self, node: NodeId) -> str:
        """Where the node's log is to be exported to, as ``run_tool`` sees it."""

    def run_tool(self, *words: str) -> tuple[int, str]:
        """Run ``dledger`` with these arguments where all directories can be seen; returns exit code and output."""


def change_members(addresses: Iterable[str], group: str, *words: str) -> None:
    """Run ``dledger member`` with these words; returns when the change is complete. Raises ``DrillError``."""
    command = [sys.executable, "-m", "dledger_cli.entry", "member", *words, "-b", ",".join(addresses), "-g", group]
    environment = {**os.environ, "DLEDGER_INSECURE": "true"}  # on networks inside this host
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise DrillError(f"member {' '.join(words)} did not end within {TOOL_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise DrillError(f"member {' '.join(words)}: {done.stderr.strip()}")


INTERVAL_S: Final = 0.05
STALL_S: Final = 0.5
"""A tick this late shows that this process, and so all its measurements, was stalled."""
ANSWER_TIMEOUT_S: Final = 0.5

wait_until: Final = partial(poll_until, error=DrillError)
"""``condition, timeout_s, complaint``: as for local groups; the drill has failed at the deadline."""


class Watch:
    """One thread per node, from entry to exit. ``statuses`` contains the last response of nodes that still respond."""

    def __init__(self, addresses: Mapping[NodeId, str], recorder: HistoryRecorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()  # guards the fields below
        self._statuses: dict[NodeId, tuple[float, RuntimeInfo]] = {}
        """With the time of the request."""
        self._views: dict[NodeId, NodeView] = {}
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._look_at, args=(node, address), name=f"drill-watch-{node}", daemon=True)
            for node, address in addresses.items()
        ]
        self._threads.append(threading.Thread(target=self._look_at_ourselves, name="drill-watch-self", daemon=True))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    @property
    def statuses(self) -> dict[NodeId, RuntimeInfo]:
        """The statuses of responding nodes."""
        return self.statuses_since(float("-inf"))

    def statuses_since(self, asked_s: float) -> dict[NodeId, RuntimeInfo]:
        """The statuses requested at ``asked_s`` (the recorder's time) or later."""
        with self._lock:
            return {node: status for node, (at_s, status) in self._statuses.items() if at_s >= asked_s}

    def leader(self, timeout_s: float, *, other_than: NodeId | None = None) -> NodeId:
        """Wait for a node that leads and accepts messages; of several, the one of the highest term."""
        found: list[tuple[int, NodeId]] = []

        def someone() -> bool:
            masters = [(one.term, node) for node, one in self.statuses.items() if one.is_master and node != other_than]
            found[:] = sorted(masters)[-1:]
            return bool(found)

        wait_until(someone, timeout_s, "no leader that accepts messages")
        return found[0][1]

    def _look_at(self, node: NodeId, address: str) -> None:
        with Admin([address], timeout_s=ANSWER_TIMEOUT_S, security=SECURITY) as admin:
            while not self._stopping.wait(INTERVAL_S):
                asked_s = self._recorder.now_s
                try:
                    status: RuntimeInfo | None = admin.status(address).runtime
                except DLedgerError:
                    status = None
                self._take(node, asked_s, status)

    def _look_at_ourselves(self) -> None:
        before_s = self._recorder.now_s
        while not self._stopping.wait(INTERVAL_S):
            now_s = self._recorder.now_s
            if now_s - before_s > STALL_S:
                self._recorder.stalled(before_s, now_s)
            before_s = now_s

    def _take(self, node: NodeId, asked_s: float, status: RuntimeInfo | None) -> None:
        view = NodeView() if status is None else _view(status)
        with self._lock:
            if status is None:
                self._statuses.pop(node, None)
            else:
                self._statuses[node] = asked_s, status
            changed = self._views.get(node) != view
            self._views[node] = view
        if changed:
            self._recorder.saw(node, view)


def _view(status: RuntimeInfo) -> NodeView:
    """A plain broker has no term."""
    if status.role:
        return NodeView(status.role, status.term, status.is_master)
    return NodeView(status.store_role, is_master=status.is_master)
