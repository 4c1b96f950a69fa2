"""Minutes of faults on the map of ``dledger kv``: one order explains all that its clients were told."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.integration.conftest import Adopt, adopt
from tests.support.map_faults import FAULTS, MapGroup, replace_member

OPERATIONS = int(os.environ.get("OPERATIONS", "0"))
MINUTES = float(os.environ.get("MINUTES", "0" if OPERATIONS else "15"))
__all__ = ["adopt"]


@pytest.mark.parametrize("seed", [int(os.environ.get("SEED", "1"))])
def test_answers_are_of_one_order_for_minutes(adopt: Adopt, tmp_path: Path, seed: int) -> None:
    """S1 to S6, with faults in any order; one member is replaced in the end. ``OPERATIONS``: until so many have
    succeeded, however long that takes.
    """
    group = adopt(MapGroup(tmp_path / "group"))
    group.start_all()
    group.leader()
    chance = random.Random(seed)
    until_s = time.monotonic() + 60 * MINUTES
    with group.load():
        while time.monotonic() < until_s or group.told.done < OPERATIONS:
            chance.choice(FAULTS)(group, chance)
            group.go_on(chance.randrange(200, 2000))
        replace_member(group, chance)

    print(f"{group.told.done} operations succeeded")  # noqa: T201  # what the run was for
    group.check()
