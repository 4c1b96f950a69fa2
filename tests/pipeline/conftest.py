"""Tests of the pipeline within Spark: one session, on one worker."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import memory_disk
from tests.support.spark import in_spark_group
from tests.support.spark import spark as spark
from tests.support.spark import spark_sockets as spark_sockets

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist, which is else first if this directory is named on the command line
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One JVM for all."""
    in_spark_group(items, HERE)


@pytest.fixture(scope="session")
def tmp_path_factory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[pytest.TempPathFactory]:
    """As pytest's own, but in memory if there is room: none of these tests is about disks (see ``memory_disk``)."""
    if memory_disk.why_not():
        yield tmp_path_factory
        return
    ours = copy.copy(tmp_path_factory)
    ours._basetemp = memory_disk.new_directory("pipeline")
    yield ours
    if not request.session.testsfailed:
        shutil.rmtree(ours._basetemp, ignore_errors=True)
