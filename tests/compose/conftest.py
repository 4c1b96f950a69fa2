"""Tests with real containers: they share one engine and one image, on one worker.

Without root or Docker they are skipped, which the summary says with the reason; REQUIRE_CONTAINERS=1 makes them fail.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.containers.engine import EngineClient, engine, why_not
from cluster.containers.image import ensure_image
from tests.compose.project import give_up

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist, which is else first if this directory is named on the command line
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All on one worker of pytest-xdist: one engine, and containers that do not take each other's time."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("containers"))


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[EngineClient]:
    """A working engine."""
    reason = why_not()
    if reason:
        give_up(reason)
    with engine() as client:
        yield client


@pytest.fixture(scope="session")
def image(docker_engine: EngineClient) -> str:
    """An image of the present sources.

    Its base, if it must be made, takes minutes of unpacking packages: no reason to dump every thread's stack.
    """
    faulthandler.cancel_dump_traceback_later()
    return ensure_image(docker_engine)
