"""A local group whose nodes run a state machine of the benchmarks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.processes import REPOSITORY
from dledger.types import NodeId
from dledger_cli.local.group import LocalGroup

MODULE: Final = "benchmarks.children.machine_node"


class MachineGroup(LocalGroup):
    """See the module; ``state_bytes``: of each snapshot."""

    def __init__(self, directory: Path, state_bytes: int = 0, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(directory, settings=settings)
        self._state_bytes = state_bytes

    def command(self, node: NodeId) -> list[str]:
        """See ``LocalGroup``."""
        words = super().command(node)
        return [sys.executable, "-m", MODULE, str(self._state_bytes), *words[words.index("serve") + 1 :]]

    def environment(self) -> dict[str, str]:
        """See ``LocalGroup``."""
        known = super().environment()
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [known.get("PYTHONPATH", "")])])
        return known | {"PYTHONPATH": path}
