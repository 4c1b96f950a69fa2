"""Polls every node: who leads, in which term, who responds, how far each one is."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Final, Self

from cluster.drill.history import HistoryRecorder, NodeView
from cluster.drill.target import SECURITY, DrillError
from dledger.errors import DLedgerError
from dledger.types import NodeId
from dledger_cli.local.group import wait_until as poll_until
from rocketstore.client import Admin
from rocketstore.remoting.runtime import RuntimeInfo

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
