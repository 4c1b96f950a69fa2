"""mqadmin in one process, for many commands: its start takes longer than most of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.interop import rocketmq
from tests.support.waiting import wait_until

COMMAND_TIMEOUT_S: Final = 120
_END: Final = b"\x04\n"


class AdminSession:
    """Runs one command after the other; gives what each prints, with its errors."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output
        self._read = 0

    def __call__(self, *words: str) -> str:
        """Raises ``AssertionError``: the command ended mqadmin, as one with wrong options does, or does not end."""
        assert self._process.stdin is not None
        self._process.stdin.write("\t".join(words).encode() + b"\n")
        self._process.stdin.flush()
        printed = b""

        def is_complete() -> bool:
            nonlocal printed
            ended = self._process.poll() is not None
            printed = self._output.read_bytes()[self._read :]
            assert not ended, f"`mqadmin {' '.join(words)}` ended:\n{printed.decode()}"
            return printed.endswith(_END)

        wait_until(is_complete, f"`mqadmin {' '.join(words)}` has ended", COMMAND_TIMEOUT_S)
        self._read += len(printed)
        return printed.removesuffix(_END).decode()


@contextmanager
def admin_session(directory: Path, module: str = "client", main: str = "AdminMain") -> Iterator[AdminSession]:
    """One meanwhile, of RocketMQ 4 or another module's; killed at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    output = directory / "admin.out"
    with output.open("wb") as out:
        process = subprocess.Popen(
            rocketmq.command(module, f"interop.{main}", directory),
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=directory,  # some commands write files
            env=rocketmq.environment_in(directory),
        )
    try:
        yield AdminSession(process, output)
    finally:
        process.kill()
        process.communicate()
