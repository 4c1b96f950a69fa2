"""The project of ``compose.yaml``, brought up for tests on ports that are free."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from docker.models.containers import Container

from cluster.image import PROJECT
from dledger.values import GRPC_PORT_OFFSET
from dledger_cli.local.group import free_ports
from tests.support.lacking import lacks
from tests.support.waiting import wait_until

UP_TIMEOUT_S = 120.0
TOKEN = "a token of the tests"
NODES = ("n0", "n1", "n2")


def compose_command() -> list[str] | None:
    """Docker's plugin, or Debian's docker-compose 1.29; None if there is neither."""
    if shutil.which("docker") is not None:
        asked = subprocess.run(["docker", "compose", "version"], check=False, capture_output=True)
        if asked.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") is not None else None


@dataclass(frozen=True, slots=True)
class Project:
    """A project that is up, and its published ports by their names in the files: ``N0``, ``N0_METRICS``, …"""

    command: list[str]
    environment: dict[str, str]
    ports: dict[str, int]

    def compose(self, *arguments: str) -> str:
        """``docker compose …``"""
        return run([*self.command, *arguments], self.environment)

    def dledger(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        """A command on the host, which knows nothing but the published ports."""
        return run([sys.executable, "-m", "dledger_cli.entry", *arguments], self.environment | dict(environment or {}))

    def nodes(self) -> list[dict[str, Any]]:  # Any: JSON
        """What ``dledger status`` says."""
        found: list[dict[str, Any]] = json.loads(self.dledger("status", "--json"))["nodes"]
        return found

    def leader(self) -> str | None:
        """Who leads, by its own word."""
        return next((node["node_id"] for node in self.nodes() if node.get("role") == "LEADER"), None)

    def is_up(self) -> bool:
        """Whether all three answer and one leads."""
        try:
            roles = sorted(node.get("role", "") for node in self.nodes())
        except AssertionError:
            return False
        return roles == ["FOLLOWER", "FOLLOWER", "LEADER"]

    def container(self, service: str) -> str:
        """The id of a service's container, also of a stopped one."""
        return self.compose("ps", "--all", "--quiet", service).strip()


def run(command: list[str], environment: dict[str, str]) -> str:
    """Run to the end; fails with what it said."""
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=UP_TIMEOUT_S)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def published_ports(*files: str) -> dict[str, int]:
    """A free port for each that the files publish, all of one draw; gRPC's is as far from its node's as by default."""
    found = {name for file in files for name in re.findall(r"\$\{DLEDGER_(\w+)_PORT:-", (PROJECT / file).read_text())}
    chosen = sorted(name for name in found if not name.endswith("_GRPC"))
    ports = dict(zip(chosen, free_ports(len(chosen)), strict=True))
    return ports | {name: ports[name.removesuffix("_GRPC")] + GRPC_PORT_OFFSET for name in found - ports.keys()}


@contextmanager
def project(image: str, *files: str, profile: str = "", settings: Mapping[str, str] | None = None) -> Iterator[Project]:
    """Started (not yet waited for) from some compose files; all of it is gone at the end. Skips without Compose."""
    compose = compose_command()
    if compose is None:
        lacks("Docker Compose", "apt-get install docker-compose")
    for file in files:
        compose += ["--file", file]
    if profile:
        compose += ["--profile", profile]
    ports = published_ports(*files)
    addresses = ",".join(f"127.0.0.1:{port}" for name, port in ports.items() if re.fullmatch(r"N[012]|LOG\d", name))
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("DLEDGER_")},
        "COMPOSE_PROJECT_NAME": f"dledger-test-{os.getpid()}",
        "DLEDGER_IMAGE": image,
        **{f"DLEDGER_{name}_PORT": str(port) for name, port in ports.items()},
        "DLEDGER_CONSOLE_TOKEN": TOKEN,
        "DLEDGER_MAPPED_FILE_SIZE_COMMIT_LOG": "16m",
        "DLEDGER_SEGMENT_BYTES": "16m",
        "DLEDGER_BROKER": addresses,
        "DLEDGER_BOOTSTRAP": addresses,
        **(settings or {}),
    }
    made = Project(compose, environment, ports)
    try:
        made.compose("up", "--detach", "--no-build")
        yield made
    except AssertionError as error:
        error.add_note(made.compose("logs", "--tail", "20"))
        raise
    finally:
        made.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")


def wait_until_up(project: Project) -> None:
    """Return once ``dledger status`` shows three members and their leader."""
    wait_until(project.is_up, "the group has a leader", UP_TIMEOUT_S)


def output_of(container: Container, *command: str) -> str:
    """What a command in a container prints; fails with that if it does not end with 0.

    A busy engine sometimes gives nothing of what a command that ended at once has printed: such a one is asked again.
    """
    said: list[str] = []

    def says_something() -> bool:
        code, output = container.exec_run(list(command))
        assert isinstance(output, bytes)
        assert code == 0, output.decode()
        said[:] = [output.decode()]
        return bool(output)

    wait_until(says_something, f"{command} prints something", 30.0)
    return said[0]
