"""What the hot paths tell whoever measures: one call per batch, push or flush, never one per entry.

``Instruments`` does nothing; ``cluster.metrics`` overrides it. Calls come from any thread, also under the node's lock
or the store's flush lock, so they must be quick, must not block and must not raise. What can be read from the state of
a node when somebody looks (indexes, lags, what is pending) is found by ``DLedgerServer.measure`` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.errors import DLedgerError
from dledger.types import AppendedBatch, NodeId

AppendDone = Callable[[AppendedBatch | DLedgerError], None]


class Instruments:
    """Takes every figure and forgets it."""

    def wrote(self, entries: int, size_bytes: int, *, as_leader: bool) -> None:
        """A batch is in the log, not yet flushed: the leader's own, or a run that a follower took from its leader."""

    def timed(self, done: AppendDone) -> AppendDone:
        """Wrap what an append of the leader is answered with, when it comes: how long it takes, and with what."""
        return done

    def push_acknowledged(self, peer: NodeId, entries: int, size_bytes: int, took_s: float) -> None:
        """``peer`` has told that it holds a push (durably, unless it flushes asynchronously) so long after it went."""

    def flushed(self, size_bytes: int, took_s: float) -> None:
        """What was written is durable now."""


SILENT: Final = Instruments()
"""For a node that nobody measures."""
