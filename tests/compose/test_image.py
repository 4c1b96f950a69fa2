"""The image: small, without rights, told what to do by its environment, and gone when it is told to go."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.containers import Container

from cluster.image import ensure_image
from tests.compose.project import output_of
from tests.support.waiting import wait_until

OVER_BASE_BYTES_MAX = 200_000_000
EXIT_TIMEOUT_S = 20
Run = Callable[..., Container]


@pytest.fixture
def run(docker_engine: docker.DockerClient, image: str) -> Iterator[Run]:
    """Run a container as the docs say; it is removed at the end, with its volume."""
    started: list[Container] = []

    def start(*command: str, **options: Any) -> Container:  # noqa: ANN401  # docker-py's own arguments
        locked: dict[str, Any] = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
        container = docker_engine.containers.run(
            image,
            list(command) or None,
            detach=True,
            network_mode="none",
            tmpfs={"/tmp": "size=1m"},
            **locked | options,
        )
        started.append(container)
        return container

    yield start
    for container in started:
        container.remove(force=True, v=True)


def exit_code(container: Container) -> int:
    """Wait for its end."""
    return int(container.wait(timeout=EXIT_TIMEOUT_S)["StatusCode"])


def is_ready(container: Container) -> bool:
    """Whether its broker said that it serves."""
    return b" is ready: " in container.logs()


def test_the_image_is_small(
    docker_engine: docker.DockerClient, image: str, record_property: Callable[[str, object], None]
) -> None:
    """At most 200 MB over its base, and the base's own size is not counted."""
    layers = docker_engine.images.get(image).history()
    numbers = [number for number, layer in enumerate(layers) if "LABEL org.opencontainers" in layer["CreatedBy"]]
    assert len(numbers) == 1, "the first instruction of the last stage says where the base ends"

    over_base_bytes = sum(layer["Size"] for layer in layers[: numbers[0]])

    record_property("over_base_bytes", over_base_bytes)
    assert 50_000_000 < over_base_bytes <= OVER_BASE_BYTES_MAX


def test_an_image_is_not_built_twice(docker_engine: docker.DockerClient, image: str) -> None:
    """The same sources are the same image."""
    assert ensure_image(docker_engine) == image


def test_a_container_has_no_rights(run: Run) -> None:
    """Not root, no capability, no way to get one, nothing to write but the volume and /tmp."""
    script = """
import json, os
def writable(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "uid": os.getuid(),
    "capabilities": [int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": status["NoNewPrivs"],
    "writable": [path for path in ("/x", "/opt/dledger/x", "/etc/x", "/data/x", "/tmp/x") if writable(path)],
}))
"""
    container = run("-c", script, entrypoint="python")

    assert exit_code(container) == 0, container.logs().decode()
    assert json.loads(container.logs()) == {
        "uid": 10001,
        "capabilities": [0, 0, 0, 0],
        "no_new_privileges": "1",
        "writable": ["/data/x", "/tmp/x"],
    }


def test_a_broker_serves_and_says_so(run: Run) -> None:
    """By gRPC's health protocol; the engine asks the same by the image's own check."""
    container = run()
    wait_until(lambda: is_ready(container), "the broker serves")

    assert output_of(container, "dledger", "health") == "127.0.0.1:10911: serving\n"
    code, output = container.exec_run(["dledger", "health", "127.0.0.1:1", "--timeout", "0.5"])
    assert code == 1, output
    check = container.attrs["Config"]
    assert check["Healthcheck"]["Test"] == ["CMD", "dledger", "health"]
    assert check["Volumes"] == {"/data": {}}

    container.stop(timeout=EXIT_TIMEOUT_S)
    assert exit_code(container) == 0


def test_a_container_that_is_still_starting_ends_at_once(run: Run) -> None:
    """The first process of a container has no default for signals: from its first lines on, ours has one."""
    container = run()
    container.reload()
    wait_until(lambda: catches_sigterm(container.attrs["State"]["Pid"]), "Python has begun")

    container.kill("SIGTERM")

    assert exit_code(container) in (0, 143)


def catches_sigterm(pid: int) -> bool:
    """Whether the process has a handler for it (proc(5), SigCgt)."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_wrong_settings_end_it_with_a_sentence(run: Run) -> None:
    """Settings come from the environment alone, so a mistyped name must not be passed over."""
    container = run(environment={"DLEDGER_LISTEN_PROT": "10911"})

    assert exit_code(container) == 2
    assert b"DLEDGER_LISTEN_PROT: unknown setting: did you mean DLEDGER_LISTEN_PORT?" in container.logs()
