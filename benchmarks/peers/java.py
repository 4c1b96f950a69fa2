"""Programs in Java beside which ours are measured. Maven gets their jars from Maven Central into ``~/.m2``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from benchmarks.processes import REPOSITORY, ChildError

INSTALL: Final = (
    "a JDK 17 and Maven (Debian: apt-get install openjdk-17-jdk-headless maven), with access to Maven Central"
)
_SOURCES: Final = REPOSITORY / "benchmarks" / "java"
_BUILD_S: Final = 600.0
_OPENED: Final = ("java.nio", "sun.nio.ch", "jdk.internal.ref")
"""Packages of the JDK that RocketMQ's broker reaches into to unmap files."""


def available() -> bool:
    """Whether a JDK and Maven are installed."""
    return all(shutil.which(program) is not None for program in ("javac", "mvn"))


def build(*modules: str) -> None:
    """Compile some of our programs. Raises ``ChildError`` if that fails, for instance without Maven Central."""
    argv = ["mvn", "--batch-mode", "--quiet", "--projects", ",".join(modules), "compile"]
    built = subprocess.run(argv, cwd=_SOURCES, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    if built.returncode:
        raise ChildError(f"`{' '.join(argv)}` in {_SOURCES} failed:\n{(built.stdout + built.stderr)[-4000:]}")


def command(module: str, main: str, directory: Path, *arguments: str, heap: tuple[str, ...]) -> list[str]:
    """The command line of a program; its log files go to ``directory``."""
    target = _SOURCES / module / "target"
    class_path = f"{target / 'classes'}:{(target / 'class-path').read_text(encoding='utf-8').strip()}"
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    return ["java", f"-Duser.home={directory}", *heap, *opened, "-cp", class_path, main, *arguments]
