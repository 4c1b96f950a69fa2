"""Tests of the pipeline within Spark: one session, on one worker; none of them is about disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.memory_factory import tmp_path_factory as tmp_path_factory
from tests.support.spark import in_spark_group
from tests.support.spark import spark as spark
from tests.support.spark import spark_sockets as spark_sockets

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist, which is else first if this directory is named on the command line
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One JVM for all."""
    in_spark_group(items, HERE)
