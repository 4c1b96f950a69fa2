"""Families in the making: what a collector fills in and gives away. Only what the catalog has can be made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from cluster.metrics.catalog import SPECS
from cluster.metrics.histogram import Histogram
from dledger.conditions import Condition, ConditionKind

_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily)


class Families:
    """Fill in by name; ``labels`` are the values of those that every metric of this collector has."""

    def __init__(self, *labels: str) -> None:
        self._labels: Final = labels
        self._found: dict[str, Metric] = {}

    def gauge(self, name: str, value: float, *labels: str) -> None:
        """A gauge's sample."""
        self._family(name, GaugeMetricFamily).add_metric((*self._labels, *labels), value)

    def counter(self, name: str, value: float, *labels: str) -> None:
        """A counter's sample."""
        self._family(name, CounterMetricFamily).add_metric((*self._labels, *labels), value)

    def histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        """A histogram's samples."""
        buckets, total = histogram.read()
        self.buckets(name, buckets, total, *labels)

    def buckets(self, name: str, buckets: Sequence[tuple[str, float]], total: float, *labels: str) -> None:
        """A histogram's samples, from its buckets."""
        self._family(name, HistogramMetricFamily).add_metric((*self._labels, *labels), buckets, total)

    def conditions(self, now: Sequence[Condition]) -> None:
        """Every kind, whether it holds or not, so that an alert ends."""
        held = {one.kind for one in now}
        for kind in ConditionKind:
            self.gauge("dledger_condition", kind in held, kind)

    def all(self) -> list[Metric]:
        """What was filled in."""
        return list(self._found.values())

    def _family(self, name: str, make: type[_Family]) -> _Family:
        found = self._found.get(name)
        if found is None:
            spec = SPECS[name]
            found = self._found[name] = make(name, spec.meaning, labels=spec.all_labels)
        if not isinstance(found, make) or found.type != SPECS[name].kind:
            raise TypeError(f"{name} is a {SPECS[name].kind}, not a {found.type}")
        return found
