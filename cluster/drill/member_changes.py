"""Changes of a drilled group's members, by ``dledger member``, as an operator makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

from cluster.drill.target import TOOL_TIMEOUT_S, DrillError

SPARES: Final = 2
"""Nodes that are no members at first."""


def change_members(addresses: Iterable[str], group: str, *words: str) -> None:
    """Run ``dledger member`` with these words; returns when the change is complete. Raises ``DrillError``."""
    command = [sys.executable, "-m", "cluster.entry", "member", *words, "-b", ",".join(addresses), "-g", group]
    environment = {**os.environ, "DLEDGER_INSECURE": "true"}  # on networks inside this host
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise DrillError(f"member {' '.join(words)} did not end within {TOOL_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise DrillError(f"member {' '.join(words)}: {done.stderr.strip()}")
