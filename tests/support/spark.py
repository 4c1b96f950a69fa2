"""One Spark session for all tests that need one, and where Spark keeps its files meanwhile.

``spark`` is the fixture: name it as an argument of a test. A directory whose tests use Spark needs, in its
``conftest.py``::

    from tests.support.spark import in_spark_group, spark as spark

    def pytest_collection_modifyitems(items): in_spark_group(items, HERE)

All of them run on one worker of pytest-xdist (the group ``spark``), so that there is one JVM. It is small: serial
collector, first compiler only, a gigabyte at most, no UI. Temporary views and formats that a test registers stay until
the session ends: give them names of their own.
"""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger_spark.errors import JavaMissingError
from dledger_spark.session import JAVA_VERSION_MIN, java_version, spark_session
from tests.support import memory_disk
from tests.support.lacking import lacks
from tests.support.spark_forks import forking_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss4m",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.ui.enabled": "false",
}
ROOT = Path(__file__).parents[2]
MASTER = "local[2,4]"
"""Two tasks at a time; a task may fail three times."""


def in_spark_group(items: list[pytest.Item], directory: Path) -> None:
    """Keep the tests below a directory on the one worker that has the session."""
    for item in items:
        if directory in item.path.parents:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(autouse=True)
def spark_sockets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close what PySpark leaves of its sockets to the JVM while its own test lasts: others would be blamed for them."""
    yield
    if "spark" in request.fixturenames:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def need_java() -> None:
    """Skip the test where Spark would find no Java that it can use."""
    try:
        java_version(os.environ)
    except JavaMissingError:
        lacks("Java", f"apt-get install openjdk-{JAVA_VERSION_MIN}-jre-headless, or set JAVA_HOME")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session. Skipped, loudly, where there is no Java."""
    need_java()
    directory = memory_disk.new_directory("spark")
    places = {
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": f"{SETTINGS['spark.driver.extraJavaOptions']} -Dderby.system.home={directory}",
    }
    with forking_python(directory) as environment:
        with pytest.MonkeyPatch.context() as patch:
            # Workers find the sources by it; what pytest adds to sys.path they do not know.
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
            for name, value in environment.items():
                patch.setenv(name, value)
            session = spark_session(MASTER, "tests", **(SETTINGS | places))
        yield session
        session.stop()
    shutil.rmtree(directory, ignore_errors=True)
