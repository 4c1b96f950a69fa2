"""The documents' lines for a name server and for three machines, with this machine's addresses and directories.

Its lines for Java are part of ``make interop``, and the drill ``upgrade`` has tests of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dledger.values import CLIENT_PORT_OFFSET
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import free_ports, wait_until
from tests.docs.documents import ROOT
from tests.docs.test_readme import DEADLINE_S, PATH, block, run
from tests.integration.harness import STEADY

ENVIRONMENT = {**os.environ, "PATH": PATH}
SMALL = {"mappedFileSizeCommitLog": "4m", "warm_bytes": "0", **STEADY}


@contextmanager
def running(line: str, directory: Path, ready: str) -> Iterator[str]:
    """What is typed, until it says that it is ``ready``, which is given; ended by SIGTERM."""
    command = ["bash", "-c", f"exec {line}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=directory, env=ENVIRONMENT) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            assert ready in said
            yield said
        finally:
            server.terminate()
            assert server.wait(DEADLINE_S) == 0


@pytest.mark.slow
def test_a_name_server_knows_the_brokers_as_shown(tmp_path: Path) -> None:
    """Terms, numbers of slaves and rates differ."""
    start, ready, listing, *shown = block((ROOT / "docs" / "brokers.md").read_text(), "$ dledger nameserver &")
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    listing = listing[2:].replace("127.0.0.1:9876", address)

    def listed() -> list[list[str]]:
        return [line.split() for line in run(listing, ENVIRONMENT)]

    def without_figures(rows: list[list[str]]) -> list[list[str]]:
        return sorted([*row[:2], row[4], *row[6:7]] for row in rows[1:])

    expected = [line.split() for line in shown]
    kept = tmp_path / "home" / "kvConfig.json"
    typed = f"{start[2:].removesuffix(' &')} --port {port} --kv {kept}"
    with (
        running(typed, tmp_path, "name server is ready") as said,
        LocalBrokers(tmp_path / "brokers", settings={**SMALL, "namesrvAddr": address}) as brokers,
    ):
        brokers.master(timeout_s=DEADLINE_S)
        wait_until(lambda: len(listed()) == 4, DEADLINE_S, "all are registered")
        wait_until(lambda: ["0"] in [row[2:3] for row in listed()], DEADLINE_S, "the master is registered")
        found = listed()

    assert (
        said.split() == ready.replace("127.0.0.1:9876", address).replace("/home/me/namesrv", str(kept.parent)).split()
    )
    assert found[0] == expected[0]
    assert without_figures(found) == without_figures(expected)
    assert {row[3] for row in found[1:]} == set(brokers.addresses)


@pytest.mark.slow
def test_three_machines_start_from_the_files_and_certificates_shown(tmp_path: Path) -> None:
    """Each with its own, and a client with its certificate sees all three."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    ports = free_ports(3, companion=CLIENT_PORT_OFFSET)
    init, node, client = block(text, "$ dledger certs init certs")
    conf = "\n".join(block(text, "# n0.conf:"))
    serve, export, status = block(text, "$ dledger serve -c n0.conf")
    own = {
        "10.0.0.1": "127.0.0.1",
        "10.0.0.2": "127.0.0.1",
        "10.0.0.3": "127.0.0.1",
        "/var/lib/dledger": f"{tmp_path}/n0",
    }

    def here(line: str, number: int = 0) -> str:
        for each, port in enumerate(ports):
            line = line.replace(f"10.0.0.{each + 1}:20911", f"127.0.0.1:{port}")
            line = line.replace(f"10.0.0.{each + 1}:30911", f"127.0.0.1:{port + CLIENT_PORT_OFFSET}")
        for there, instead in own.items():
            line = line.replace(there, instead)
        return re.sub(r"(?<!\w)n0(?!-)", f"n{number}", line.removeprefix("$ "))

    for line in (here(init), *(here(node, number) for number in range(3)), here(client)):
        run(f"cd {tmp_path} && {line}", ENVIRONMENT)
    small = "".join(f"\n{name}={value}" for name, value in SMALL.items())
    for number in range(3):
        (tmp_path / f"n{number}.conf").write_text(here(conf, number) + small)
    asked = f"cd {tmp_path}; {here(export)}; {here(status)}"

    def rows() -> list[list[str]]:
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False, env=ENVIRONMENT)
        return [line.split() for line in done.stdout.splitlines() if re.match(r"n\d ", line)]

    with ExitStack() as servers:
        for number in range(3):
            servers.enter_context(running(here(serve, number), tmp_path, "is ready"))
        wait_until(
            lambda: sorted(row[1] for row in rows()) == ["FOLLOWER", "FOLLOWER", "LEADER"], DEADLINE_S, "one leads"
        )
