"""The scenarios, in the order in which they run: quiet and short ones first, those that fill the disk last."""

from __future__ import annotations

from typing import Final

from cluster.bench.registry import Scenario

ALL: Final[tuple[Scenario, ...]] = ()
