"""The cost of a start of the command line: the processor time of a whole command, user and system."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario
from benchmarks.targets import BARE_PYTHON
from dledger_cli.local.group import LocalGroup

STARTS: Final = 15
WAIT_S: Final = 60.0
HELP: Final = "cli_help"
STATUS: Final = "cli_status"


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """``dledger --help``, and ``dledger status`` of one node; beside them, an interpreter that does nothing."""
    bare = processor_s(["-c", "pass"])
    if HELP in names:
        yield Figure(HELP, processor_s(["-m", "dledger_cli.entry", "--help"]), "s", BARE_PYTHON, bare)
    if STATUS in names:
        with LocalGroup(context.directory / "cli", size=1) as group:
            (address,) = (node.client_address for node in group.nodes.values())
            group.leader()
            taken = processor_s(["-m", "dledger_cli.entry", "status", "--bootstrap", address])
        yield Figure(STATUS, taken, "s", BARE_PYTHON, bare)


def processor_s(arguments: list[str]) -> float:
    """The least of several runs of Python, the first of which may write compiled files and does not count.

    A command does the same each time; whatever else the machine does can only add to it.
    """
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    took: list[float] = []
    for _ in range(STARTS + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True, timeout=WAIT_S
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(took[1:])


SCENARIO: Final = Scenario("the start of a command", (HELP, STATUS), measure)
