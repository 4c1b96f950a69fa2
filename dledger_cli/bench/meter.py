"""Measures a load, in constant memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dledger.errors import DLedgerError, Outcome
from dledger_cli.metrics.histogram import Histogram

_STEP: Final = 1.02
_FIRST_S: Final = 0.000_01
_LAST_S: Final = 1000.0
BOUNDS_S: Final = tuple(_FIRST_S * _STEP**n for n in range(1 + math.ceil(math.log(_LAST_S / _FIRST_S, _STEP))))
"""Buckets for latencies with a resolution of 2 %, less than the variation between runs."""
PERCENTS: Final = (50.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """How many records failed in the same way; ``first`` is the first one's message."""

    kind: str
    outcome: Outcome
    count: int
    first: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Totals so far. Latencies are in seconds, of acknowledged records only; None if there are none."""

    acknowledged: int
    average_s: float | None
    percentiles_s: dict[float, float]
    max_s: float | None
    errors: tuple[ErrorCount, ...]

    @property
    def failed(self) -> int:
        """Records not known to be stored."""
        return sum(one.count for one in self.errors)


class Recent(NamedTuple):
    """Records acknowledged since the last query."""

    records: int
    average_s: float
    max_s: float


class Meter:
    """Counts records as they are answered. Thread-safe."""

    def __init__(self) -> None:
        self._latencies = Histogram(BOUNDS_S)
        self._lock = threading.Lock()  # guards the fields below
        self._acknowledged = 0
        self._max_s = 0.0
        self._recent: tuple[int, float, float] = (0, 0.0, 0.0)
        self._errors: dict[tuple[str, Outcome], ErrorCount] = {}

    def acknowledge(self, latency_s: float) -> None:
        """Count a stored record."""
        self._latencies.observe(latency_s)
        with self._lock:
            self._acknowledged += 1
            self._max_s = max(self._max_s, latency_s)
            count, total_s, max_s = self._recent
            self._recent = (count + 1, total_s + latency_s, max(max_s, latency_s))

    def fail(self, error: DLedgerError) -> None:
        """Count a record that is not stored, or may not be."""
        key = (type(error).__name__, error.outcome)
        with self._lock:
            before = self._errors.get(key)
            first = before.first if before else " ".join(str(error).split())
            self._errors[key] = ErrorCount(*key, (before.count if before else 0) + 1, first)

    def take_recent(self) -> Recent:
        """The records acknowledged since the last call."""
        with self._lock:
            (count, total_s, max_s), self._recent = self._recent, (0, 0.0, 0.0)
        return Recent(count, total_s / max(count, 1), max_s)

    @property
    def failed(self) -> int:
        """The number of failures so far."""
        with self._lock:
            return sum(one.count for one in self._errors.values())

    def read(self) -> Measured:
        """The totals so far."""
        buckets, total_s = self._latencies.read()
        with self._lock:
            count, max_s, errors = self._acknowledged, self._max_s, tuple(self._errors.values())
        if not count:
            return Measured(0, None, {}, None, errors)
        found = {percent: min(percentile(buckets, percent), max_s) for percent in PERCENTS}
        return Measured(count, total_s / count, found, max_s, errors)


def percentile(buckets: Sequence[tuple[str, float]], percent: float) -> float:
    """The lowest bound that ``percent`` % of the values do not exceed; ``buckets`` come from ``Histogram.read``."""
    wanted = math.ceil(buckets[-1][1] * percent / 100)
    return next(float(bound) for bound, up_to in buckets if up_to >= wanted)
