"""Measuring points of the hot paths: one call per batch, push or flush, never one per entry.

``Instruments`` does nothing; ``dledger_cli.metrics`` overrides it. Calls come from any thread, also under the node's
lock or the store's flush lock, so they must be quick, must not block and must not raise. Figures that can be read from
a node's state on demand (indexes, lags, pending entries) come from ``DLedgerServer.measure`` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.errors import DLedgerError
from dledger.members import ChangeKind
from dledger.types import AppendedBatch, NodeId

AppendDone = Callable[[AppendedBatch | DLedgerError], None]


class Instruments:
    """Ignores every measurement."""

    def wrote(self, entries: int, size_bytes: int, *, as_leader: bool) -> None:
        """A batch is in the log, not yet flushed: the leader's own, or a run that a follower took from its leader."""

    def timed(self, done: AppendDone) -> AppendDone:
        """Wrap the completion of a leader's append, to measure its duration and result."""
        return done

    def push_acknowledged(self, peer: NodeId, entries: int, size_bytes: int, took_s: float) -> None:
        """``peer`` acknowledged a push (durably, unless it flushes asynchronously) after this time."""

    def members_changed(self, kind: ChangeKind, error: DLedgerError | None) -> None:
        """A request to change the members was carried out, or refused."""

    def flushed(self, size_bytes: int, took_s: float) -> None:
        """Written bytes have become durable."""


SILENT: Final = Instruments()
"""For nodes without measurements."""
