"""Where tests keep their files: those of the code itself in memory, if there is room (see ``memory_disk``)."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cluster.local.group import LocalGroup
from tests.support import memory_disk, preloaded

IN_MEMORY = frozenset({"contract", "crash", "fuzz", "paper", "scenarios", "unit"})
"""Directories of tests that need nothing of a real disk."""
HERE = Path(__file__).parent

PORT_SHARES = 8
"""A divisor of 10,000, by which a node's two ports differ."""

_failed = pytest.StashKey[bool]()

EXAMPLES = 50
"""Of each property whose test names no other number; times ``FUZZ``."""

# How long an example takes says how busy the machine is. A change is judged by the examples of the change before;
# whoever looks for new ones sets FUZZ.
settings.register_profile(
    "any machine",
    max_examples=EXAMPLES * int(os.environ.get("FUZZ", "1")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="FUZZ" not in os.environ,
)
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Let programs be interrupted, and prepare a worker of pytest-xdist: its ports are its own.

    A shell without job control starts what runs in the background with SIGINT ignored, and its children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what does not run here, and why."""
    if config.option.markexpr != "not interop and not soak":
        return []
    return ["not run here: what is marked soak (minutes: make soak), tests/interop (Java and Maven: make interop)"]


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
