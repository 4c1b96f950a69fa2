"""A killed leader is replaced without waiting for its silence, and a live one is not."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from dledger_cli.local.group import LocalGroup
from tests.integration.conftest import Adopt
from tests.integration.harness import ProxiedGroup
from tests.support.false_alarms import assert_no_false_election

TIMEOUT_S = 12.0
"""The election timeout: so long that no busy machine takes as long for an election."""


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
def test_a_killed_leader_is_replaced_long_before_an_election_timeout(tmp_path: Path, tls: bool) -> None:
    """Its kernel says at once that it is gone (design notes F1 to F3)."""
    with group_of(tmp_path, fast=True, tls=tls) as group:
        assert replacement_s(group) < TIMEOUT_S - 1


@pytest.mark.slow
def test_resets_on_a_starved_machine_cost_no_election(adopt: Adopt, tmp_path: Path) -> None:
    """A leader whose connections break is asked, and says that it leads; ``make soak`` does this for half an hour."""
    settings = {"election_timeout_ms_min": "8000", "election_timeout_ms_max": "9000"}
    group = adopt(ProxiedGroup(tmp_path / "group", settings=settings))
    group.start_all()
    group.leader(timeout_s=60)

    done = assert_no_false_election(group, random.Random(1), resets=20, until_s=time.monotonic() + 200)

    assert done == 20


@pytest.mark.slow
def test_without_fast_failover_its_silence_is_waited_for(tmp_path: Path) -> None:
    """The setting, and the proof that the other test shows anything."""
    with group_of(tmp_path, fast=False) as group:
        assert replacement_s(group) > TIMEOUT_S - 0.5


def group_of(directory: Path, *, fast: bool, tls: bool = False) -> LocalGroup:
    settings = {
        "election_timeout_ms_min": f"{1000 * TIMEOUT_S:.0f}",
        "election_timeout_ms_max": f"{1000 * TIMEOUT_S + 500:.0f}",
        "fast_failover": str(fast).lower(),
    }
    return LocalGroup(directory, settings=settings, tls=tls)


def replacement_s(group: LocalGroup) -> float:
    """The time from the leader's SIGKILL to the next leader; nothing acknowledged is lost."""
    with group.client(timeout_s=30) as client:
        first = client.append(b"before")
        leader = group.leader()
        started = time.monotonic()
        group.kill(leader)
        group.leader(other_than=leader)
        took = time.monotonic() - started
        assert client.append(b"after").index > first.index
        assert [entry.body for entry in client.read(first.index, count=1)] == [b"before"]
    return took
