"""The map of ``dledger kv`` on real processes under faults: one order explains all that its clients were told.

For minutes: ``tests/soak/test_map_faults.py``.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.integration.conftest import Adopt
from tests.support.map_faults import FAULTS, MapGroup, replace_member

pytestmark = pytest.mark.lane("processes")


@pytest.mark.slow
def test_answers_are_of_one_order_under_each_fault(adopt: Adopt, tmp_path: Path) -> None:
    """S1 to S6: kills, pauses, snapshots each 500 entries, a lost disk, other members; all states are alike."""
    group = adopt(MapGroup(tmp_path / "group"))
    group.start_all()
    group.leader()
    chance = random.Random(1)
    with group.load():
        group.go_on(500)
        for fault in (*FAULTS, replace_member):
            fault(group, chance)
        group.go_on(500)

    group.check()
