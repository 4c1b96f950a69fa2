"""Measurements from the hot paths, kept until the next scrape.

Histograms are as cheap for their callers as Python allows; ``prometheus_client``'s iterate over all buckets.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

from dledger.core.messages import RoleChange
from dledger.errors import DLedgerError
from dledger.monitoring import AppendDone, Instruments
from dledger.types import AppendedBatch, ChangeKind, NodeId

LATENCY_BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
ENTRIES_BOUNDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
BYTES_BOUNDS: Final = (256, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


class Histogram:
    """Counts values up to each bound. Thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()  # guards the fields below
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        at = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[at] += 1
            self._sum += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """The cumulative buckets, as Prometheus has them, and the sum."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        return cumulative(self._bounds, counts), total


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Upper bounds as text, each with the number of values at or below it."""
    so_far = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, map(float, bounds)), "+Inf"), counts, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    return buckets


class PeerRecord:
    """Pushes acknowledged by one peer."""

    def __init__(self) -> None:
        self.latency_s = Histogram(LATENCY_BOUNDS_S)
        self.entries = Histogram(ENTRIES_BOUNDS)
        self.size_bytes = Histogram(BYTES_BOUNDS)


class MetricsRecorder(Instruments):
    """Implements the port ``dledger.monitoring``, and ``RoleChangeHandler``."""

    def __init__(self) -> None:
        self.append_latency_s = Histogram(LATENCY_BOUNDS_S)
        self.append_entries = Histogram(ENTRIES_BOUNDS)
        self.append_bytes = Histogram(BYTES_BOUNDS)
        self.flush_latency_s = Histogram(LATENCY_BOUNDS_S)
        self.flush_bytes = Histogram(BYTES_BOUNDS)
        self.peers: dict[NodeId, PeerRecord] = {}
        # A node writes its log on one thread at a time, so these need no lock.
        self.received_entries = 0
        self.received_bytes = 0
        self._lock = threading.Lock()  # guards the counters below
        self._failures: Counter[str] = Counter()
        self._role_changes: Counter[tuple[str, str]] = Counter()
        self._member_changes: Counter[tuple[str, str]] = Counter()

    # -- Instruments -------------------------------------------------------------------------------------------------

    def wrote(self, entries: int, size_bytes: int, *, as_leader: bool) -> None:
        if as_leader:
            self.append_entries.observe(entries)
            self.append_bytes.observe(size_bytes)
        else:
            self.received_entries += entries
            self.received_bytes += size_bytes

    def timed(self, done: AppendDone) -> AppendDone:
        began_s = time.monotonic()

        def answered(result: AppendedBatch | DLedgerError) -> None:
            if isinstance(result, AppendedBatch):
                self.append_latency_s.observe(time.monotonic() - began_s)
            else:
                with self._lock:
                    self._failures[result.code.name] += 1
            done(result)

        return answered

    def push_acknowledged(self, peer: NodeId, entries: int, size_bytes: int, took_s: float) -> None:
        record = self.peers.get(peer)
        if record is None:
            record = self.peers.setdefault(peer, PeerRecord())
        record.latency_s.observe(took_s)
        record.entries.observe(entries)
        record.size_bytes.observe(size_bytes)

    def members_changed(self, kind: ChangeKind, error: DLedgerError | None) -> None:
        with self._lock:
            self._member_changes[kind, "SUCCESS" if error is None else error.code.name] += 1

    def flushed(self, size_bytes: int, took_s: float) -> None:
        self.flush_latency_s.observe(took_s)
        self.flush_bytes.observe(size_bytes)

    # -- RoleChangeHandler -------------------------------------------------------------------------------------------

    def startup(self) -> None:
        """Does nothing."""

    def role_changed(self, change: RoleChange) -> None:
        """Count the change."""
        with self._lock:
            self._role_changes[change.role.lower(), change.reason or "unknown"] += 1

    def shutdown(self) -> None:
        """Does nothing."""

    # -- what was told -----------------------------------------------------------------------------------------------

    def failures(self) -> dict[str, int]:
        """Refused or unconfirmed appends by DLedger's response code."""
        with self._lock:
            return dict(self._failures)

    def role_changes(self) -> dict[tuple[str, str], int]:
        """Role changes by new role and reason."""
        with self._lock:
            return dict(self._role_changes)

    def member_changes(self) -> dict[tuple[str, str], int]:
        """Requests to change the members, by kind and DLedger's response code."""
        with self._lock:
            return dict(self._member_changes)
