"""Minutes of faults on the map of ``dledger kv``: one order explains all that its clients were told."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.integration.conftest import Adopt, adopt
from tests.support.map_faults import FAULTS, MapGroup, replace_member

MINUTES = float(os.environ.get("MINUTES", "15"))
__all__ = ["adopt"]


@pytest.mark.parametrize("seed", [int(os.environ.get("SEED", "1"))])
def test_answers_are_of_one_order_for_minutes(adopt: Adopt, tmp_path: Path, seed: int) -> None:
    """S1 to S6, with faults in any order; one member is replaced in the end."""
    group = adopt(MapGroup(tmp_path / "group"))
    group.start_all()
    group.leader()
    chance = random.Random(seed)
    until_s = time.monotonic() + 60 * MINUTES
    with group.load():
        while time.monotonic() < until_s:
            chance.choice(FAULTS)(group, chance)
            group.go_on(chance.randrange(200, 2000))
        replace_member(group, chance)

    group.check()
