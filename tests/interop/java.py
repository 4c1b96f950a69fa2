"""Building and running the Java programs under ``java/``. Whatever is missing is an error that says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "java"
OPENED = ("java.nio", "sun.nio.ch", "jdk.internal.ref")
"""Packages of the JDK that RocketMQ 4.9.8 reaches into to unmap files."""
_BUILD_TIMEOUT_S = 1800
"""Downloads included: 300 MB."""
_RUN_TIMEOUT_S = 300


class JavaMissingError(RuntimeError):
    """Something that the Java programs need is not there."""


@cache
def build() -> None:
    """Compile the programs, once per process; Maven gets their dependencies from Maven Central into ``~/.m2``."""
    for program, package in (("java", "JDK 17 or newer"), ("mvn", "Maven 3")):
        if shutil.which(program) is None:
            raise JavaMissingError(f"`{program}` is not on the PATH: `make interop` needs {package}")
    command = ["mvn", "--batch-mode", "--quiet", "compile"]
    built = subprocess.run(
        command, cwd=SOURCES, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, env=environment(), check=False
    )
    if built.returncode:
        raise JavaMissingError(
            f"`{' '.join(command)}` in {SOURCES} failed; it needs a JDK 17 and Maven Central (or a filled ~/.m2):\n"
            f"{built.stdout[-4000:]}\n{built.stderr[-4000:]}"
        )


def run_store(command: str, directory: Path) -> list[str]:
    """Run the RocketMQ program; gives the lines that it printed."""
    return _run("store", "interop.Main", command, directory)


def run_ledger(command: str, directory: Path) -> list[str]:
    """Run the program of the newest DLedger; gives the lines that it printed."""
    return _run("dledger", "interop.LedgerMain", command, directory)


def run_state(command: str, directory: Path) -> list[str]:
    """Run the program of RocketMQ's broker; gives the lines that it printed."""
    return _run("state", "interop.StateMain", command, directory)


def run_remoting(command: str, directory: Path) -> list[str]:
    """Run the program of RocketMQ's remoting classes; gives the lines that it printed."""
    return _run("state", "interop.RemotingMain", command, directory)


@contextmanager
def ledger_client(group: str, peers: str, directory: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """DLedger's own client, for a group and its members (``n0-host:port;…``); gives the response to each command."""
    command = _command("dledger", "interop.LedgerClientMain", directory, group, peers)
    errors = directory / "client.err"
    with (
        errors.open("wb") as told,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, text=True, env=environment()
        ) as client,
    ):
        sending, receiving = client.stdin, client.stdout
        assert sending is not None
        assert receiving is not None

        def ask(words: str) -> dict[str, Any]:
            sending.write(words + "\n")
            sending.flush()
            line = receiving.readline()
            assert line, f"DLedger's client ended:\n{errors.read_text()[-6000:]}"
            found: dict[str, Any] = json.loads(line)
            return found

        try:
            yield ask
        finally:
            client.kill()


def _command(module: str, main: str, directory: Path, *arguments: str) -> list[str]:
    target = SOURCES / module / "target"
    class_path = f"{target / 'classes'}:{(target / 'class-path').read_text().strip()}"
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED]
    home = f"-Duser.home={directory.parent}"  # the libraries' log files go there
    return ["java", "-ea", home, *opened, "-cp", class_path, main, *arguments]


def _run(module: str, main: str, command: str, directory: Path) -> list[str]:
    ended = subprocess.run(
        _command(module, main, directory, command, str(directory)),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_RUN_TIMEOUT_S,
        env=environment(),
        check=False,
    )
    if ended.returncode:
        raise AssertionError(f"{main} {command} ended with status {ended.returncode}:\n{ended.stderr[-6000:]}")
    return ended.stdout.splitlines()


def environment() -> dict[str, str]:
    """The same on every machine."""
    return os.environ | {"LC_ALL": "C.UTF-8", "TZ": "UTC"}
