"""The programs of ``docs/rocketmq.md``, as they are but for the address: each sends a message and receives it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from benchmarks.peers import official_client
from cluster.image import PROJECT
from rocketstore.client import Admin, GroupInfo, TopicInfo
from tests.interop import java
from tests.interop.official.clients import HERE, INSTALL_TIMEOUT_S, Language
from tests.interop.official.test_security import broker
from tests.interop.rocketmq import class_path

pytestmark = pytest.mark.interop

PAGE: Final = PROJECT / "docs" / "rocketmq.md"
IN_PAGE: Final = "127.0.0.1:8081"


def _python(program: Path) -> Sequence[str]:
    return official_client.command(program)


def _node(program: Path) -> Sequence[str]:
    (program.parent / "node_modules").symlink_to(HERE / "node" / "node_modules")
    return ["node", str(program)]


def _java(program: Path) -> Sequence[str]:
    return ["java", f"-Duser.home={program.parent}", "-cp", class_path("official"), str(program)]


def _go(program: Path) -> Sequence[str]:
    for name in ("go.mod", "go.sum"):
        shutil.copy(HERE / "go" / name, program.parent)
    return ["go", "run", "."]


def _rust(program: Path) -> Sequence[str]:
    """With another name than the driver, beside which it is built."""
    directory = program.parent.parent
    shutil.copy(HERE / "rust" / "Cargo.lock", directory)
    settings = (HERE / "rust" / "Cargo.toml").read_text().replace("interop-official", "interop-page")
    (directory / "Cargo.toml").write_text(settings)
    return ["cargo", "run", "--quiet"]


PROGRAMS: Final[dict[str, tuple[str, str, Callable[[Path], Sequence[str]]]]] = {
    "python": ("python", "example.py", _python),
    "node": ("javascript", "example.mjs", _node),
    "java": ("java", "Example.java", _java),
    "go": ("go", "main.go", _go),
    "rust": ("rust", "src/main.rs", _rust),
}
"""By language: how the page marks it, the file, and how it is run."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a broker where the group begins with the first message, so that a program receives what it has just sent."""
    with broker(tmp_path / "broker", {}) as server:
        with Admin([f"127.0.0.1:{server.port}"]) as admin:
            admin.put_topic(TopicInfo("Orders", 1, 1))
            admin.put_group(GroupInfo("billing"))
            admin.reset_offsets("billing", "Orders", "first")
        yield f"127.0.0.1:{server.grpc_port}"


def test_the_program_of_a_language_works(language: Language, address: str, tmp_path: Path) -> None:
    mark, file, command = PROGRAMS[language.name]
    (text,) = re.findall(rf"```{mark}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert IN_PAGE in text
    program = tmp_path / "program" / file
    program.parent.mkdir(parents=True)
    program.write_text(text.replace(IN_PAGE, address))
    directory = tmp_path / "program"

    ended = subprocess.run(
        command(program),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        env=java.environment()
        | {"CARGO_TARGET_DIR": str(HERE / "rust" / "target"), "GOTOOLCHAIN": "local", **_homes(language, directory)},
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert any("hello" in line for line in ended.stdout.splitlines()), ended.stdout + ended.stderr


def _homes(language: Language, directory: Path) -> dict[str, str]:
    """Clients log to the home directory; compilers keep what they have downloaded there."""
    return {"user.home": str(directory)} | ({} if language.name in ("go", "rust") else {"HOME": str(directory)})
