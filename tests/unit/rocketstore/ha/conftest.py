"""Fixtures of the tests of replication."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.rocketstore.ha.records import close_all
from tests.unit.rocketstore.ha.replicating import Replication


@pytest.fixture
def replication(tmp_path: Path) -> Iterator[Replication]:
    one = Replication(tmp_path)
    try:
        yield one
    finally:
        try:
            one.close()
        finally:
            close_all()
