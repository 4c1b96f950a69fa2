"""RocketMQ's official clients as processes that take and give lines of JSON: ``README.md`` says which."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import official_client
from benchmarks.processes import ChildError
from tests.interop import java, rocketmq

HERE: Final = Path(__file__).parent
INSTALL_TIMEOUT_S: Final = 1500
"""Downloads and compiling included."""
ANSWER_TIMEOUT_S: Final = 120

Fields = dict[str, Any]  # Any: of JSON


class InstallError(RuntimeError):
    """A client is not to be had here."""


class ClientError(AssertionError):
    """What a client says went wrong."""


@dataclass(frozen=True, slots=True)
class Language:
    """A client, and what it has."""

    name: str
    install: Callable[[], None]
    """Does it once per process."""
    command: Callable[[Path], Sequence[str]]
    """With a home directory."""
    lacks: frozenset[str] = frozenset()
    """``push``, ``change``, ``recall``, ``priority``, ``tls``, ``addresses`` (several of them), ``retries``."""
    takes_any_certificate: bool = False
    separator: str = ";"
    """Between addresses."""

    def has(self, what: str) -> bool:
        """Whether the client can do it."""
        return what not in self.lacks


class OfficialClient:
    """A running process. ``events`` and ``ask`` are for one thread; answers may come in any order."""

    def __init__(self, language: Language, home: Path, variables: Mapping[str, str]) -> None:
        self.language = language
        self._stderr = home / f"{language.name}.err"
        self._err = self._stderr.open("ab")
        self.process = subprocess.Popen(
            language.command(home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._err,
            cwd=home,
            env=java.environment() | {"HOME": str(home), "user.home": str(home), **variables},
            text=True,
            encoding="utf-8",
        )
        self._changed = threading.Condition()
        self._answers: dict[int, Fields] = {}
        self._events: list[Fields] = []
        self._asked = 0
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, name=f"reads {language.name}")
        self._reader.start()

    def ask(self, op: str, **fields: object) -> Fields:
        """The answer to a request. Raises ``ClientError``: the client says that it failed."""
        return self.answer(self.begin(op, **fields))

    def begin(self, op: str, **fields: object) -> int:
        """Ask without waiting for the answer, which ``answer`` gives for the number returned."""
        self._asked += 1
        stdin = self.process.stdin
        assert stdin is not None
        given = {name: value for name, value in fields.items() if value is not None}
        stdin.write(json.dumps({"id": self._asked, "op": op, **given}) + "\n")
        stdin.flush()
        return self._asked

    def answer(self, number: int, timeout_s: float = ANSWER_TIMEOUT_S) -> Fields:
        """Raises ``ClientError``: the client says that it failed."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._has_ended, timeout_s)
            found = self._answers.pop(number, None)
        if found is None:
            raise AssertionError(f"no answer of {self.language.name} within {timeout_s} s: {self.complaints()}")
        if "error" in found:
            raise ClientError(found["error"])
        done: Fields = found["ok"]
        return done

    def events(self, kind: str, name: str) -> list[Fields]:
        """What one of its clients told so far."""
        with self._changed:
            return [one for one in self._events if (one["event"], one["from"]) == (kind, name)]

    def wait_for(
        self, kind: str, name: str, enough: Callable[[list[Fields]], bool], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> list[Fields]:
        """``events`` once they are enough. Raises ``AssertionError``: they are not in time."""
        with self._changed:
            self._changed.wait_for(lambda: enough(self.events(kind, name)) or self._has_ended, timeout_s)
            found = self.events(kind, name)
        assert enough(found), f"{self.language.name} told only {found[-50:]}: {self.complaints()}"
        return found

    def complaints(self) -> str:
        """The end of what it wrote elsewhere."""
        return self._stderr.read_text("utf-8", "replace")[-3000:]

    def kill(self) -> None:
        """End it at once. Idempotent."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for one in (self.process.stdin, self.process.stdout):
            assert one is not None
            with suppress(BrokenPipeError):
                one.close()
        self._err.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line = json.loads(text)
            with self._changed:
                if "event" in line:
                    self._events.append(line)
                else:
                    self._answers[line["id"]] = line
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


@contextmanager
def running(language: Language, home: Path, variables: Mapping[str, str] | None = None) -> Iterator[OfficialClient]:
    """A client meanwhile, killed at the end."""
    home.mkdir(parents=True, exist_ok=True)
    client = OfficialClient(language, home, variables or {})
    try:
        yield client
    finally:
        client.kill()


# --- how each is had --------------------------------------------------------------------------------------------------


@cache
def _install_python() -> None:
    try:
        official_client.install()
    except ChildError as error:
        raise InstallError(str(error)) from error


@cache
def _install_node() -> None:
    _needs("npm", "Node.js 20 or newer")
    if not (HERE / "node" / "node_modules" / ".package-lock.json").exists():
        _run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"], HERE / "node")


@cache
def _install_go() -> None:
    _needs("go", "Go 1.24 or newer")
    _run(["go", "build", "-o", str(HERE / "go" / "driver"), "."], HERE / "go", {"GOTOOLCHAIN": "local"})


@cache
def _install_rust() -> None:
    _needs("cargo", "Rust 1.70 or newer")
    _run(["cargo", "build", "--quiet"], HERE / "rust", {"CARGO_TARGET_DIR": str(HERE / "rust" / "target")})


def _needs(program: str, what: str) -> None:
    if shutil.which(program) is None:
        raise InstallError(f"`{program}` is not on the PATH: `make interop` needs {what}")


def _run(command: Sequence[str], cwd: Path, variables: Mapping[str, str] | None = None) -> None:
    ended = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        env=os.environ | (variables or {}),
        check=False,
    )
    if ended.returncode:
        raise InstallError(
            f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr[-6000:]}"
        )


def _java_command(home: Path) -> Sequence[str]:
    return rocketmq.command("official", "interop.DriverMain", home)


LANGUAGES: Final = {
    one.name: one
    for one in (
        Language("python", _install_python, lambda _: official_client.command(HERE / "python" / "driver.py")),
        Language("node", _install_node, lambda _: ["node", str(HERE / "node" / "driver.js")], frozenset({"addresses"})),
        Language("java", java.build, _java_command, takes_any_certificate=True),
        Language(
            "go",
            _install_go,
            lambda _: [str(HERE / "go" / "driver")],
            frozenset({"recall", "priority"}),
            takes_any_certificate=True,
        ),
        Language(
            "rust",
            _install_rust,
            lambda _: [str(HERE / "rust" / "target" / "debug" / "interop-official")],
            frozenset({"push", "change", "recall", "priority", "tls", "retries"}),
            separator=",",
        ),
    )
}
NOT_TRIED: Final = {
    "C#": "it needs .NET and NuGet, and a driver like the others'",
    "C++": "no package index has it, only its source for Bazel; and a driver like the others'",
}
"""Clients without a driver, and why."""
