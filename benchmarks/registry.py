"""Which benchmarks exist and which scenario measures which figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.context import Context
from benchmarks.figures import Figure

Measure = Callable[[Context, frozenset[str]], Iterator[Figure]]
"""Yields the figures asked for, each as soon as it is known; whatever it started is gone when the iterator ends."""


class UnknownBenchmarkError(Exception):
    """Raised for a name that no scenario measures."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Figures that share one set-up: it is made once, however many of them are asked for."""

    title: str
    names: tuple[str, ...]
    measure: Measure


def chosen(scenarios: Sequence[Scenario], names: Sequence[str]) -> list[tuple[Scenario, frozenset[str]]]:
    """The scenarios to run, each with the names asked of it; all of everything when ``names`` is empty.

    Raises ``UnknownBenchmarkError`` listing every name that does not exist and those that do.
    """
    known = [name for scenario in scenarios for name in scenario.names]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownBenchmarkError(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(known)}")
    wanted = frozenset(names or known)
    picked = [(scenario, wanted.intersection(scenario.names)) for scenario in scenarios]
    return [(scenario, some) for scenario, some in picked if some]
