"""The list of benchmarks, and the scenario that measures each figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.context import BenchSettings, Context
from benchmarks.figures import Figure

Measure = Callable[[Context, frozenset[str]], Iterator[Figure]]
"""Yields the requested figures, each as soon as it is known; everything it started is gone when the iterator ends."""


class UnknownBenchmarkError(Exception):
    """Raised for a name that no scenario measures."""


def constant(gib: float) -> Callable[[BenchSettings], float]:
    """The disk space of a scenario whose sizes are its own."""
    return lambda _settings: gib


def load(count: int, gib_per_s: float = 0.25) -> Callable[[BenchSettings], float]:
    """The disk space of ``count`` loads that go on for a round's seconds; as fast as brokers or nodes take them."""
    return lambda settings: 2 + count * gib_per_s * (settings.warmup_seconds + settings.rounds * settings.seconds)


def logs(count: float) -> Callable[[BenchSettings], float]:
    """The disk space of so many logs of ``BENCH_LOG_GIB``."""
    return lambda settings: 2 + count * settings.log_gib


_SMALL: Final = constant(2)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Figures with a common set-up, which is done once, however many of them are requested."""

    title: str
    names: tuple[str, ...]
    measure: Measure
    disk_gib: Callable[[BenchSettings], float] = _SMALL
    """How much it may have on disk at the same time."""


def chosen(scenarios: Sequence[Scenario], names: Sequence[str]) -> list[tuple[Scenario, frozenset[str]]]:
    """The scenarios to run, each with the requested names; everything if ``names`` is empty.

    Raises ``UnknownBenchmarkError`` listing unknown names and those that exist.
    """
    known = [name for scenario in scenarios for name in scenario.names]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownBenchmarkError(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(known)}")
    wanted = frozenset(names or known)
    picked = [(scenario, wanted.intersection(scenario.names)) for scenario in scenarios]
    return [(scenario, some) for scenario, some in picked if some]
