"""Half an hour of resets under load with starved processors: a live leader stays the leader."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.integration.harness import ProxiedGroup
from tests.support.false_alarms import assert_no_false_election

MINUTES: Final = 30
RESETS_MIN: Final = 1000
PATIENT: Final = {"election_timeout_ms_min": "10000", "election_timeout_ms_max": "12000"}
"""Longer than starved processes are late: then only a suspicion can end a term."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProxiedGroup]:
    made = ProxiedGroup(tmp_path / "group", settings=PATIENT)
    made.start_all()
    made.leader(timeout_s=60)
    yield made
    made.hard_kill()


def test_half_an_hour_of_resets_costs_no_election(group: ProxiedGroup) -> None:
    """Whose connection broke is asked, and says that it leads (docs/protocol.md, "Suspicion")."""
    until_s = time.monotonic() + 60 * MINUTES

    done = assert_no_false_election(group, random.Random(30), resets=10**9, until_s=until_s)

    assert done >= RESETS_MIN
    assert group.complaints() == []
