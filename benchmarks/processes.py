"""Child processes of the benchmarks. Each is always ended by its own id, never looked up by name."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

REPOSITORY = Path(__file__).resolve().parents[1]


class ChildError(Exception):
    """Raised when a child exited, stayed silent or sent an invalid response; contains the end of its stderr."""


def end(process: subprocess.Popen[bytes], grace_seconds: float = 5.0) -> None:
    """Terminate one process by its id, kill it if it does not exit, and reap it."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def spawn_daemon(
    argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program whose output goes to ``log``; the caller must ``end`` it."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )


class LineChild:
    """A program controlled by JSON lines over its stdin and stdout; its stderr goes to ``log``.

    It exits when its stdin is closed, so it cannot outlive a killed benchmark. ``name`` is for error messages.
    """

    def __init__(self, name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        self._name = name
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end(self.process)

    def tell(self, command: Mapping[str, object]) -> None:
        """Send one command."""
        pipe = self._pipe(self.process.stdin)
        try:
            pipe.write(json.dumps(command).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise ChildError(self._complaint("is gone")) from error

    def hear(self, timeout_seconds: float) -> dict[str, Any]:  # Any: the values of a JSON object
        """The next response. Raises ``ChildError`` on timeout."""
        pipe = self._pipe(self.process.stdout)
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise ChildError(self._complaint(f"did not answer in {timeout_seconds:g} s"))
            chunk = os.read(pipe.fileno(), 65536)
            if not chunk:
                raise ChildError(self._complaint("ended"))
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ChildError(self._complaint(f"answered {answer!r}"))
        return answer

    def ask(self, command: Mapping[str, object], timeout_seconds: float) -> dict[str, Any]:  # Any: as in ``hear``
        """Send a command and wait for its response."""
        self.tell(command)
        return self.hear(timeout_seconds)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.process.kill()
        self.process.wait()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise ChildError("the child was started without pipes")
        return pipe

    def _complaint(self, what: str) -> str:
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
        return f"{self._name} {what}" + (f"; it wrote:\n{tail}" if tail else "")


class PythonChild(LineChild):
    """One of our Python modules as a separate process."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH", "")])])
        super().__init__(module, [sys.executable, "-m", module, *arguments], log, {**os.environ, "PYTHONPATH": path})
