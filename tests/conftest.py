"""Where tests keep their files: those of the code itself in memory, if there is room (see ``memory_disk``)."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from dledger_cli.local.group import LocalGroup
from tests.support import lacking, memory_disk, preloaded, sweeps, tiers

IN_MEMORY = frozenset({"contract", "crash", "fuzz", "paper", "scenarios", "unit"})
"""Directories of tests that need nothing of a real disk."""
HERE = Path(__file__).parent

PORT_SHARES = 8
"""A divisor of 10,000, by which a node's two ports differ."""

_failed = pytest.StashKey[bool]()

EXAMPLES = 50
"""Of each property whose test names no other number; times ``FUZZ``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--tier`` and ``--measure``, see ``tests/support/tiers.py``."""
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=tiers.TIERS, default=tiers.ALL, help="which part of the tests to run")
    group.addoption("--measure", action="store_true", help=f"write how long each module took to {tiers.DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Let programs be interrupted, and prepare a worker of pytest-xdist: its ports are its own.

    A shell without job control starts what runs in the background with SIGINT ignored, and its children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.dont_write_bytecode = False  # else every worker compiles all tests anew, which takes longer than many of them
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if config.option.tier in (tiers.QUICK, tiers.MACHINE):
        os.environ[sweeps.THIN] = "thin"
    # How long an example takes says how busy the machine is. A change is judged by the examples of the change before;
    # whoever looks for new ones sets FUZZ.
    settings.register_profile(
        "any machine",
        max_examples=sweeps.fewer(EXAMPLES, 5) * int(os.environ.get("FUZZ", "1")),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="FUZZ" not in os.environ,
    )
    settings.load_profile("any machine")
    if not hasattr(config, "workerinput"):
        return
    number = int(config.workerinput["workerid"].removeprefix("gw"))
    os.environ["LOCAL_PORTS"] = f"{number % PORT_SHARES}/{PORT_SHARES}"


@pytest.fixture(scope="session", autouse=True)
def no_contexts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the contexts of whoever runs the tests out of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


def pytest_collection_finish() -> None:
    """Leave modules and thousands of tests out of every later collection: an eighth of the time of small tests."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not load modules of which the tier runs nothing: each worker would, which takes longer than many tests."""
    is_module = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_module and not tiers.may_run(config.option.tier, collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for its groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another tier runs, and put tests that would disturb each other on lanes."""
    if lost := tiers.overlooked(items):
        raise pytest.UsageError(f"{lost[0].nodeid} would never run: its module does not tell, see {tiers.may_run}")
    others = [item for item in items if not tiers.belongs(item, config.option.tier)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if tiers.belongs(item, config.option.tier)]
    if hasattr(config, "workerinput"):
        items[:] = tiers.arrange(items, tiers.durations())


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> tiers.Lanes | None:
    """Deal out what was arranged so, in its order."""
    return tiers.Lanes(config, log) if config.option.dist == "loadgroup" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line per thing that this machine lacks."""
    skipped = [
        str(one.longrepr[2]) for one in terminalreporter.getreports("skipped") if isinstance(one.longrepr, tuple)
    ]
    if skipped:
        terminalreporter.section("not tested on this machine")
        for line in lacking.summary(skipped):
            terminalreporter.line(line)
    if config.option.measure:
        tiers.measure(terminalreporter.stats)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what does not run here, and why."""
    if config.option.markexpr != "not interop and not soak":
        return []
    left = ["what is marked soak and tests/interop (make nightly)"]
    if config.option.tier == tiers.QUICK:
        left.insert(
            0, "most tests of processes, containers, browser and Spark, and most of long sweeps (make test-all)"
        )
    return [f"not run here: {'; '.join(left)}"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the fixture below know that the test failed."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def _quick_starts() -> Iterator[None]:
    """All local groups start their nodes from a process that has loaded the modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalGroup, "launch", preloaded.launch)
        yield


def _kept_in_memory(request: pytest.FixtureRequest) -> bool:
    path = request.path
    return HERE in path.parents and path.relative_to(HERE).parts[0] in IN_MEMORY and not memory_disk.why_not()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """As pytest's own, but in memory where that is all the same; removed unless the test failed."""
    if not _kept_in_memory(request):
        yield request.getfixturevalue("tmp_path")
        return
    path = memory_disk.new_directory(re.sub(r"\W", "_", request.node.name))
    yield path
    if not request.node.stash.get(_failed, False):
        shutil.rmtree(path, ignore_errors=True)
