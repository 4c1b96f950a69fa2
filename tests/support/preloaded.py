"""Real node processes that need not load Python's modules first: forked from one that has loaded them.

Loading is nine tenths of the processor time of a start, and the tests of groups start processes some thousand times.
Everything else is as with ``python -m dledger_cli.entry``: one process each, to be killed, with its own pipes and
signals.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import IO, Final

from dledger_cli.local.group import LocalGroup, NodeProcess

MODULES: Final = (
    "dledger_cli.cli",
    "dledger_cli.commands.broker",
    "dledger_cli.commands.serve",
    "dledger_cli.metrics",
    "dledger.server",
    "rocketstore.server",
)
_ENTRY: Final = [sys.executable, "-m", "dledger_cli.entry"]
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(list(MODULES))


_plain_launch: Final = LocalGroup.launch


def launch(group: LocalGroup, words: Sequence[str], log: IO[bytes]) -> NodeProcess:
    """As ``LocalGroup.launch``; what is not just a node (a tracer, a network namespace) is begun by that."""
    if list(words[:3]) != _ENTRY or group.is_detached:
        return _plain_launch(group, words, log)
    return _Forked(words[3:], group.environment(), str(log.name))


class _Forked:
    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: str) -> None:
        reading, writing = os.pipe()
        with Connection(reading, writable=False) as stdin:
            self._process = _processes.Process(
                target=_run, args=(list(arguments), dict(environment), log, stdin), daemon=True
            )
            self._process.start()
        self.stdin: IO[bytes] = os.fdopen(writing, "wb")
        self._looking = threading.Lock()  # what tells the exit status can be read once

    @property
    def pid(self) -> int:
        """Of the node itself."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As last seen."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        with self._looking:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status."""
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"node {self.pid}", timeout or 0.0)
            wait_for([self._process.sentinel], left)
        return status

    def send_signal(self, number: int) -> None:
        """As ``os.kill``, while it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], environment: dict[str, str], log: str, stdin: Connection) -> None:
    """Be the node; in the forked process."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for wanted, found in ((0, stdin.fileno()), (1, output), (2, output)):
        os.dup2(found, wanted)
    stdin.close()
    os.close(output)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False, buffering=1) for number, mode in enumerate("rww")
    )
    os.environ.clear()
    os.environ.update(environment)
    from dledger_cli import entry

    sys.argv = [entry.__file__, *arguments]
    entry.main()
