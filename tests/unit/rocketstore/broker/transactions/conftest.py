"""A log and a clock."""

from __future__ import annotations

import pytest

from tests.support.waiting import ManualClock
from tests.unit.rocketstore.broker.transactions.fakes import Log


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
