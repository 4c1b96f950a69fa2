"""Apache Ratis 3.3: three members on loopback with a state machine that counts, and a load on them or on etcd."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.load import CommandRates
from benchmarks.peers import java
from benchmarks.processes import ChildError, end
from dledger_cli.local.group import HOST, free_ports

MODULE: Final = "machines"
_NODE_HEAP: Final = ("-Xms512m", "-Xmx512m")
_LOAD_HEAP: Final = ("-Xms256m", "-Xmx256m")
_ANSWER_S: Final = 90.0
"""How much longer than its load a program may take; the first one waits for an election."""


@dataclass(frozen=True, slots=True)
class RatisGroup:
    """A running group. ``members``: as its programs take them."""

    members: str
    pids: tuple[int, ...]


@contextlib.contextmanager
def ratis_group(directory: Path, size: int = 3) -> Iterator[RatisGroup]:
    """Members with their data in ``directory`` and Ratis's defaults, but the election timeouts of ours."""
    names = [f"n{number}" for number in range(size)]
    members = ",".join(f"{name}={HOST}:{port}" for name, port in zip(names, free_ports(size), strict=True))
    with contextlib.ExitStack() as stack:
        pids: list[int] = []
        for name in names:
            home = directory / name
            home.mkdir(parents=True)
            argv = java.command(MODULE, "machines.RatisNode", home, name, members, str(home / "data"), heap=_NODE_HEAP)
            with (home / "node.log").open("ab") as log:
                process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log)
            stack.callback(end, process)
            pids.append(process.pid)
        yield RatisGroup(members, tuple(pids))


def measure(kind: str, members: str, callers: int, body_bytes: int, times: Sequence[float], log: Path) -> CommandRates:
    """Load a group of ``kind``, ``ratis`` or ``etcd``; ``times``: seconds of warm-up and of measurement.

    Raises ``ChildError`` if a command fails.
    """
    words = [kind, members, str(callers), str(body_bytes), *map(str, times)]
    argv = java.command(MODULE, "machines.CommandLoad", log.parent, *words, heap=_LOAD_HEAP)
    done = subprocess.run(
        argv, env=os.environ, capture_output=True, text=True, timeout=sum(times) + _ANSWER_S, check=False
    )
    log.write_text(done.stderr, encoding="utf-8")
    if done.returncode:
        raise ChildError(f"the load on {kind} failed:\n{done.stderr[-2000:]}")
    return CommandRates(**json.loads(done.stdout))
