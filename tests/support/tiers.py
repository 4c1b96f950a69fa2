"""Which tests a command runs, and on which lane of pytest-xdist, the longest first.

``--tier=test`` is ``make test``: what needs little time and nothing but Python. ``--tier=rest`` is the rest of ``make
test-all``, and ``--tier=machine`` that part of ``make test`` which starts programs. None includes what is marked
``soak`` or ``interop`` (``make nightly``).

Tests that start groups of processes take each other's time, so they run on lanes: one test at a time on each. A module
stays on one lane. ``tests/durations.json`` says how long each module took; ``make durations`` measures anew.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from hypothesis import is_hypothesis_test
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

TESTS: Final = Path(__file__).parents[1]
DURATIONS: Final = TESTS / "durations.json"
ALL, QUICK, REST, MACHINE = TIERS = ("all", "test", "rest", "machine")
QUICK_DIRECTORIES: Final = frozenset(
    {
        "contract",
        "crash",
        "docs",
        "fuzz",
        "interop",
        "paper",
        "scenarios",
        "sim",
        "sim_consumer",
        "sim_pop",
        "sim_store",
        "unit",
    }
)
PROGRAMS: Final = frozenset({"subprocess", "program", "lacks", "need_root", "LocalGroup", "LocalBrokers"})
"""Names in modules whose tests start programs."""
WORDS_OF_THE_REST: Final = ("mark.slow", "mark.sweep", "hypothesis", "TestCase")
"""One of them is in each module of a quick directory that the rest runs something of."""
LANES: Final[Mapping[str, int]] = {"processes": 2, "faults": 2}
"""Groups of tests that are dealt out to so many lanes; all others are on one."""
GROUPS: Final[Mapping[str, str]] = {
    "browser": "containers",
    "compose": "containers",
    "examples": "processes",
    "soak": "soak",
    "spark": "spark",
}
"""By directory, where the test itself names none."""
FAULTS: Final = frozenset(
    {
        "test_broker_group",
        "test_broker_kill",
        "test_broker_partition",
        "test_broker_plain",
        "test_broker_stop",
        "test_classic_ha",
        "test_disk",
        "test_drills",
        "test_kill",
        "test_nemesis",
        "test_partition",
        "test_stop",
    }
)
"""Where groups are hurt under load; elsewhere they mostly answer questions."""
KEPT_S: Final = 1.0
"""Less is not worth a line of ``durations.json``."""
WHOLE_S: Final = 5.0
"""A module that takes longer is not kept together: it would be the last to end."""
UNKNOWN_S: Final = 5.0
"""Of a test on a lane whose module was never measured."""


def directory(path: Path) -> str:
    """The directory below ``tests`` that a module belongs to."""
    return path.relative_to(TESTS).parts[0]


@cache
def may_run(tier: str, module: Path) -> bool:
    """Whether a tier runs anything of a module, as far as can be told without loading it."""
    if tier == ALL:
        return True
    is_apart = directory(module) not in QUICK_DIRECTORIES
    text = module.read_text(encoding="utf-8")
    if tier == REST:
        return is_apart or directory(module) == "fuzz" or any(one in text for one in WORDS_OF_THE_REST)
    if "mark.smoke" in text:
        return True
    return not is_apart and (tier == QUICK or not PROGRAMS.isdisjoint(re.findall(r"\w+", text)))


def overlooked(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests of tiers that do not load their modules: they would never run."""
    return [one for one in items for tier in TIERS if belongs(one, tier) and not may_run(tier, one.path)]


def is_quick(item: pytest.Item) -> bool:
    """Whether ``make test`` runs it."""
    if item.get_closest_marker("smoke"):
        return True
    return directory(item.path) in QUICK_DIRECTORIES and not item.get_closest_marker("slow")


def belongs(item: pytest.Item, tier: str) -> bool:
    """Whether a tier runs it."""
    if tier == ALL:
        return True
    if tier == QUICK:
        return is_quick(item)
    if tier == MACHINE:
        return is_quick(item) and _looks_at_the_machine(item)
    return not is_quick(item) or _is_thinned(item)


def _looks_at_the_machine(item: pytest.Item) -> bool:
    """Whether it starts programs, or may be skipped for want of something."""
    names = vars(getattr(item, "module", item))
    return bool(item.get_closest_marker("smoke")) or not PROGRAMS.isdisjoint(names)


def _is_thinned(item: pytest.Item) -> bool:
    """Whether ``make test`` runs less of the test itself."""
    test = getattr(item, "obj", None)
    is_property = is_hypothesis_test(test) or getattr(test, "__name__", "") == "runTest"
    return bool(item.get_closest_marker("sweep")) or is_property or directory(item.path) == "fuzz"


def durations() -> Mapping[str, float]:
    """Seconds by module, relative to ``tests``."""
    loaded: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return loaded


def module_of(item: pytest.Item) -> str:
    """Its file, relative to ``tests``."""
    return str(item.path.relative_to(TESTS))


def group_of(item: pytest.Item) -> str:
    """Whom it must not run beside; nothing for a test that may run anywhere at any time.

    There is one Spark session. Chromium gives up whatever it is loading (ERR_NETWORK_CHANGED) when a network comes or
    goes on this machine, so it shares a lane with the tests that make networks.
    """
    marker = item.get_closest_marker("lane")
    if marker:
        return str(marker.args[0])
    where = directory(item.path)
    if where == "integration":
        if "namespaced" in getattr(item, "fixturenames", ()):
            return "containers"
        return "faults" if item.path.stem in FAULTS else "processes"
    return GROUPS.get(where, "")


def deal(seconds: Mapping[str, float], lanes: int) -> dict[str, int]:
    """A lane for each module: the longest first, each to the lane that has least."""
    load = [0.0] * lanes
    chosen: dict[str, int] = {}
    for name in sorted(seconds, key=lambda one: (-seconds[one], one)):
        lane = min(range(lanes), key=lambda one: load[one])
        chosen[name] = lane
        load[lane] += seconds[name]
    return chosen


def arrange(items: Sequence[pytest.Item], known: Mapping[str, float]) -> list[pytest.Item]:
    """Give each group its lanes, and begin with the lane that takes longest; the tests of a lane keep their order.

    Then come those that are on none, which fill the time that the workers have left, the longest modules first.
    """
    modules: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for item in items:
        if group := group_of(item):
            name = module_of(item)
            modules[group][name] = known.get(name) or modules[group].get(name, 0.0) + UNKNOWN_S
    dealt = {group: deal(seconds, LANES.get(group, 1)) for group, seconds in modules.items()}
    lanes: dict[pytest.Item, str] = {}
    total: defaultdict[str, float] = defaultdict(float)
    for group, seconds in modules.items():
        for name, second in seconds.items():
            total[f"{group}-{dealt[group][name]}"] += second
    for item in items:
        if group := group_of(item):
            lanes[item] = f"{group}-{dealt[group][module_of(item)]}"
            item.add_marker(pytest.mark.xdist_group(lanes[item]))

    def order(item: pytest.Item) -> tuple[bool, float, str]:
        lane = lanes.get(item, "")
        return not lane, -(total[lane] if lane else known.get(module_of(item), 0.0)), lane

    return sorted(items, key=order)


class Lanes(LoadGroupScheduling):  # type: ignore[misc]  # pytest-xdist is not typed
    """Deals out lanes, then whole modules, in the order of the collection; modules that take long by single tests."""

    def __init__(self, config: pytest.Config, log: Producer | None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._long = {name for name, seconds in durations().items() if seconds > WHOLE_S}

    def _split_scope(self, nodeid: str) -> str:
        name = nodeid.partition("::")[0]
        if "@" in nodeid.rpartition("]")[2]:
            return str(super()._split_scope(nodeid))
        return nodeid if name.removeprefix(f"{TESTS.name}/") in self._long else name


def measure(stats: Mapping[str, Sequence[object]]) -> None:
    """Write the durations of the modules that ran, beside those of the others that are still there."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in stats.values():
        for one in reports:
            if isinstance(one, pytest.TestReport):
                seconds[one.nodeid.partition("::")[0].removeprefix(f"{TESTS.name}/")] += one.duration
    known = {name: before for name, before in durations().items() if (TESTS / name).exists()}
    found = known | {name: round(total, 1) for name, total in seconds.items()}
    kept = {name: total for name, total in sorted(found.items()) if total >= KEPT_S}
    DURATIONS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
