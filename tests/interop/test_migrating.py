"""The migrations of docs/migrating.md with RocketMQ's broker 4.9.7: ``make interop``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop import java
from tests.interop.migrating import Books, Broker, group_of, served
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.interop


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[str]:
    java.build()
    with running(config_in(tmp_path)) as server:
        yield server.address


def test_a_plain_broker_comes_here_and_goes_back(tmp_path: Path, name_server: str) -> None:
    """Twice, with the same conf file; and everything that is written on either side is there on the other."""
    broker, books = Broker(tmp_path / "plain", {"namesrvAddr": name_server}), Books()
    with served([broker], "java") as one:
        books.begin(one)
        books.write(one)
    for side in ("ours", "java", "ours", "java"):
        with served([broker], side) as one:
            books.check(one)
            books.write(one)
            books.check(one)


def test_three_members_come_here_and_go_back(tmp_path: Path, name_server: str) -> None:
    """RocketMQ's slaves lag behind with the state, so the master's files are copied before."""
    members, books = group_of(tmp_path, 3, name_server), Books()
    with served(members, "java") as master:
        books.begin(master)
        books.write(master)
        books.check(master)
    for one in members:
        if one is not master:
            shutil.rmtree(one.root / "config", ignore_errors=True)
            shutil.copytree(master.root / "config", one.root / "config")
    for import_unchecked in (True, False):
        with served(members, "ours", import_unchecked=import_unchecked) as master:
            books.check(master)
            books.write(master)
            books.check(master)
    with served(members, "java") as master:  # which would lose offsets written here if it changed its master
        books.check(master)


def test_a_group_of_ours_goes_back_to_a_plain_broker(tmp_path: Path, name_server: str) -> None:
    """The way back that RocketMQ lacks: export a member, start RocketMQ's broker on the export."""
    members, books = group_of(tmp_path, 3, name_server), Books()
    with served(members, "ours") as master:
        books.begin(master)
        for _ in range(2):
            books.write(master)
        books.check(master)
    plain = Broker(tmp_path / "plain", {"namesrvAddr": name_server})
    command = [sys.executable, "-m", "dledger_cli.entry", "upgrade", "export", str(master.root), str(plain.root)]
    printed = subprocess.run([*command, "-c", str(master.conf)], capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    assert "every record equals the member's" in printed.stdout
    for side in ("java", "ours", "java"):
        with served([plain], side) as one:
            books.check(one)
            books.write(one)
            books.check(one)
