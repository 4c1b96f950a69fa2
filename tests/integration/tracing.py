"""Injecting failures and delays into the system calls of a running node, with strace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.lacking import lacks
from tests.support.waiting import wait_until


def why_not() -> str:
    """Why strace cannot be used here; empty if it can."""
    if shutil.which("strace") is None:
        return "apt-get install strace"
    probe = subprocess.run(["strace", "-f", "-o", os.devnull, "true"], check=False, capture_output=True, text=True)
    return f"strace does not work here: {probe.stderr.strip()}" if probe.returncode else ""


def need_strace() -> None:
    """Skip the test where it cannot be used."""
    if reason := why_not():
        lacks("strace", reason)


class Trace:
    """What a tracer has seen so far."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def count(self, words: str) -> int:
        """How often the words occur in the trace."""
        return self._file.read_text().count(words)


@contextmanager
def traced(pid: int, inject: str) -> Iterator[Trace]:
    """Attach to all threads of ``pid`` and tamper with what ``inject`` names; undone at the end."""
    with tempfile.TemporaryDirectory() as directory:
        file, errors = Path(directory, "trace"), Path(directory, "errors")
        call = inject.partition(":")[0]
        words = ["strace", "-f", "-p", str(pid), "-o", str(file), "-e", f"trace={call}", "-e", f"inject={inject}"]
        with errors.open("wb") as out:
            tracer = subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        try:
            wait_until(lambda: "attached" in errors.read_text() or tracer.poll() is not None, "strace attaches")
            assert tracer.poll() is None, errors.read_text()
            yield Trace(file)
        finally:
            if tracer.poll() is None:
                tracer.send_signal(signal.SIGTERM)
            try:
                tracer.wait(60)
            except subprocess.TimeoutExpired:
                tracer.kill()
                tracer.wait()
