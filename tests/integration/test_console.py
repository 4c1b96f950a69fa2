"""The web console as a process over groups that are protected: the same options as for every other command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.access_harness import SecuredBrokers
from tests.integration.conftest import Adopt
from tests.integration.harness import Group
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.support import Reply, request


@contextmanager
def console(addresses: list[str], **variables: str) -> Iterator[str]:
    """Its address; ended when the block ends."""
    words = [sys.executable, "-m", "dledger_cli.cli", "console", "--nodes", ",".join(addresses)]
    words += ["--listen", "127.0.0.1:0", "--until-stdin-closes"]
    environ = {name: text for name, text in os.environ.items() if not name.startswith("DLEDGER_")} | variables
    with subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.stdin.close()
            assert process.wait(30) == 0


def state(url: str) -> dict[str, Any]:
    return request(f"{url}api/state").json()


def states(url: str) -> set[str]:
    return {one["state"] for one in state(url)["nodes"]}


def transfer(url: str) -> Reply:
    headers = {"x-csrf-token": str(request(f"{url}api/session").json()["csrf"])}
    return request(f"{url}api/act", method="POST", headers=headers, body={"action": "transfer"})


@pytest.mark.smoke
def test_a_group_that_speaks_tls_is_shown_with_a_certificate_and_hands_over(
    make_group: Callable[..., Group],
) -> None:
    """By the variables that all commands read; without them every lane says that it was refused."""
    group = make_group(tls=True)
    group.start_all()
    leader = group.leader()
    assert group.tls is not None
    here = group.tls.directory
    files = {"CA": "ca.crt", "CERT": "client.crt", "KEY": "client.key"}

    with console(group.addresses, **{f"DLEDGER_TLS_{name}": str(here / file) for name, file in files.items()}) as url:
        wait_until(lambda: state(url)["group"]["leader"] == leader, "the leader is shown")
        wait_until(lambda: states(url) == {"leader", "follower"}, "all are shown")
        told = transfer(url)
        assert told.status == 200, told.body
        wait_until(lambda: state(url)["group"]["leader"] not in ("", leader), "another one leads")

    with console(group.addresses) as url:
        wait_until(lambda: states(url) == {"unreachable"}, "nobody answers in the clear")
        assert all(one["error"] for one in state(url)["nodes"])


@pytest.fixture
def guarded(adopt: Adopt, tmp_path: Path) -> SecuredBrokers:
    """Three brokers that ask for access keys, and have a master."""
    made = adopt(SecuredBrokers(tmp_path / "brokers"))
    made.start_all()
    made.create_topic()
    return made


def test_a_group_with_access_keys_is_shown_to_an_administrator_and_to_nobody_else(guarded: SecuredBrokers) -> None:
    """An administrator's console sees topics and hands over; without a key every lane says that it was refused."""
    keys = {"DLEDGER_ACCESS_KEY": "root", "DLEDGER_SECRET_KEY": "root-secret"}

    with console(guarded.addresses, **keys) as url:
        wait_until(lambda: states(url) == {"leader", "follower"}, "all are shown")
        assert state(url)["group"]["kind"] == "brokers"
        leader = state(url)["group"]["leader"]
        told = transfer(url)
        assert told.status == 200, told.body
        wait_until(lambda: state(url)["group"]["leader"] not in ("", leader), "another one leads")

    with console(guarded.addresses) as url:
        wait_until(lambda: states(url) == {"unreachable"}, "nobody answers without a key")
        assert all("key" in one["error"] for one in state(url)["nodes"])
