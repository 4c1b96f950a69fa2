"""Random worlds keep the rules of pop (docs/messages.md); every planted bug of tests/mutants about them breaks one."""

from __future__ import annotations

import pytest

from tests.sim_pop.__main__ import run
from tests.support.sweeps import fewer

SEEDS = fewer(4000, 4)
PARTS = 8
REGRESSIONS = (
    109,
    142,
    184,
    265,
    305,
    685,
    759,
    1208,
    1271,
    1948,
    2249,
    2722,
    4838,
    21990,
    24476,
    40902,
    49803,
    55492,
    61299,
    513350,
    570114,
    828867,
    1073663,
)
"""Seeds that have found something."""


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_acked_comes_again_nothing_unacked_is_lost_nothing_is_visible_twice(part: int) -> None:
    """P1 to P8, over failovers with clocks that differ, answers that are lost and ticks of unknown outcome."""
    assert not run(range(SEEDS * part // PARTS, SEEDS * (part + 1) // PARTS), 150)


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_once_failed_does_not(seed: int) -> None:
    """Each of these worlds broke a rule while the engine was written."""
    assert not run(range(seed, seed + 1), 150)
