"""A ``tmp_path_factory`` in memory: directories for several tests or examples lie where those of single tests do.

For a ``conftest.py`` to import, for the tests below it.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator

import pytest

from tests.support import memory_disk


@pytest.fixture(scope="session")
def tmp_path_factory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[pytest.TempPathFactory]:
    """As pytest's own, but in memory where that is all the same; what it made is removed unless a test failed."""
    if memory_disk.why_not():
        yield tmp_path_factory
        return
    factory = copy.copy(tmp_path_factory)
    factory._basetemp = memory_disk.new_directory("session")
    yield factory
    if not request.session.testsfailed:
        shutil.rmtree(factory._basetemp, ignore_errors=True)
