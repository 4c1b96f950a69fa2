"""Tests of the pipeline within Spark: one session, on one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.spark import in_spark_group
from tests.support.spark import spark as spark

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One JVM for all."""
    in_spark_group(items, HERE)
