"""A console in a process of its own, which outlives the demo that started it, as its group does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from cluster.console.playground import DEMO_PORT
from cluster.local.group import HOST, READY_WORDS, START_TIMEOUT_S, LocalGroup, LocalGroupError, wait_until

LOG_NAME: Final = "console.log"


class KeptConsole:
    """Started and listening once created, at the usual port of a demo's console, or at any if that is taken.

    Raises ``LocalGroupError`` with the end of its log if it does not start.
    """

    def __init__(self, group: LocalGroup, *, port: int = DEMO_PORT) -> None:
        self._log_file = group.directory / LOG_NAME
        try:
            self._process, self.url = self._start(group, port)
        except LocalGroupError:
            self._process, self.url = self._start(group, 0)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def close(self) -> None:
        """End it now. Idempotent."""
        self._process.kill()
        self._process.wait()

    def _start(self, group: LocalGroup, port: int) -> tuple[subprocess.Popen[bytes], str]:
        words = [sys.executable, "-m", "cluster.entry", "console", "--group", group.name]
        words += ["--nodes", ",".join(group.addresses), "--listen", f"{HOST}:{port}"]
        with self._log_file.open("wb") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=group.environment() | {"DLEDGER_LOG_FORMAT": "text"},
                start_new_session=True,  # Ctrl-C is for the demo
            )
        try:
            wait_until(
                lambda: process.poll() is not None or _address(self._log_file) != "",
                START_TIMEOUT_S,
                "the console is not ready",
            )
        except BaseException:
            process.kill()
            process.wait()
            raise
        if url := _address(self._log_file):
            return process, url
        raise LocalGroupError(f"the console ended: {self._log_file.read_text(errors='replace')[-1000:]}")


def _address(log_file: Path) -> str:
    """What the console said once it listened; empty before."""
    _, found, rest = log_file.read_text(errors="replace").partition(READY_WORDS)
    return rest.split("\n")[0].strip() if found and "\n" in rest else ""
