"""Builds the metric families of one scrape. Only metrics in the catalog can be added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dledger.conditions import Condition, ConditionKind
from dledger_cli.metrics.catalog import SPECS
from dledger_cli.metrics.histogram import Histogram

_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily)


class Families:
    """Adds samples by metric name; ``labels`` are the values of this collector's common labels."""

    def __init__(self, *labels: str) -> None:
        self._labels: Final = labels
        self._found: dict[str, Metric] = {}

    def of(self, *labels: str) -> Families:
        """The same families, for samples with other values of the common labels."""
        other = Families(*labels)
        other._found = self._found
        return other

    def gauge(self, name: str, value: float, *labels: str) -> None:
        """Add a gauge's sample."""
        self._family(name, GaugeMetricFamily).add_metric((*self._labels, *labels), value)

    def counter(self, name: str, value: float, *labels: str) -> None:
        """Add a counter's sample."""
        self._family(name, CounterMetricFamily).add_metric((*self._labels, *labels), value)

    def histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        """Add a histogram's samples."""
        buckets, total = histogram.read()
        self.buckets(name, buckets, total, *labels)

    def buckets(self, name: str, buckets: Sequence[tuple[str, float]], total: float, *labels: str) -> None:
        """Add a histogram's samples, given its buckets."""
        self._family(name, HistogramMetricFamily).add_metric((*self._labels, *labels), buckets, total)

    def conditions(self, now: Sequence[Condition]) -> None:
        """Add every kind of condition, present or not, so that alerts end."""
        held = {one.kind for one in now}
        for kind in ConditionKind:
            self.gauge("dledger_condition", kind in held, kind)

    def all(self) -> list[Metric]:
        """All families added."""
        return list(self._found.values())

    def _family(self, name: str, make: type[_Family]) -> _Family:
        found = self._found.get(name)
        if found is None:
            spec = SPECS[name]
            found = self._found[name] = make(name, spec.meaning, labels=spec.all_labels)
        if not isinstance(found, make) or found.type != SPECS[name].kind:
            raise TypeError(f"{name} is a {SPECS[name].kind}, not a {found.type}")
        return found


class MetricsSource(Protocol):
    """A node or broker."""

    def add_to(self, families: Families) -> None:
        """Add all its metrics as of now."""


class Collection(Collector):
    """The metrics of all ``sources``, which are asked for at each scrape."""

    def __init__(self, sources: Callable[[], Iterable[MetricsSource]]) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        """Empty: registration needs nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All metrics as of now."""
        found = Families()
        for source in self._sources():
            source.add_to(found)
        return found.all()
