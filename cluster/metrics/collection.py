"""Collects what several sources in one process measure, each metric family once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.metrics.families import Families


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
