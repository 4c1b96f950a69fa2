"""A group half of which still runs an earlier version: a rolling upgrade loses nothing and counts nobody wrongly."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from dledger.errors import DLedgerError
from dledger.types import NodeId, Role
from tests.docs.documents import ROOT
from tests.integration.harness import Group
from tests.support.lacking import lacks

EARLIER: Final = "be5458b"
"""The last version whose members know nothing of standing."""


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the earlier version, from the repository's own history."""
    directory = tmp_path_factory.mktemp("earlier")
    archive = directory / "source.tar"
    made = subprocess.run(
        ["git", "-C", str(ROOT), "archive", f"--output={archive}", EARLIER, "dledger", "rocketstore", "cluster"],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        lacks(f"commit {EARLIER}", "fetch the whole history of the repository: git fetch --unshallow")
    with tarfile.open(archive) as source:
        source.extractall(directory, filter="data")
    return directory


def run_earlier(group: Group, node: NodeId, earlier: Path) -> None:
    """From its next start on the node runs the earlier version."""
    group.prefixes[node] = ["env", "-C", str(earlier), f"PYTHONPATH={earlier}"]


def _wait_for(group: Group, node: NodeId, end: int) -> None:
    group.wait_for(lambda all_: node in all_ and all_[node].committed_index >= end, f"{node} has it all", 60)


def test_a_group_is_upgraded_member_by_member_under_load(make_group: Callable[..., Group], earlier: Path) -> None:
    """Each member is stopped and comes back with the present version, the leader last; nothing acknowledged is lost."""
    group = make_group()
    for node in group.nodes:
        run_earlier(group, node, earlier)
    group.start_all()
    with group.workload() as load:
        load.history.wait_for_acks(200)
        leader = group.leader()
        for node in [*group.followers(leader), leader]:
            group.stop(node)
            del group.prefixes[node]
            group.start(node)
            load.history.wait_for_acks(200)
            end = group.statuses()[group.leader()].end_index
            _wait_for(group, node, end)

    group.verify()
    assert all(one.voter for one in group.statuses().values())


def test_an_earlier_leader_does_not_count_a_wiped_member_of_the_present_version(
    make_group: Callable[..., Group], earlier: Path
) -> None:
    """With the third member down nothing is acknowledged, although the wiped one stores it; then it gets its vote."""
    group = make_group()
    for node in group.nodes:
        run_earlier(group, node, earlier)
    group.start_all()
    group.append(100)
    leader = group.leader()
    wiped, third = group.followers(leader)
    group.stop(wiped)
    shutil.rmtree(group.store_dir(wiped))
    del group.prefixes[wiped]
    group.start(wiped)
    end = group.statuses()[leader].end_index
    group.wait_for(lambda all_: all_[wiped].end_index >= end, "the wiped member is filled")
    assert not group.statuses()[wiped].voter
    group.kill(third)

    with closing(group.client(timeout_s=3.0)) as client, pytest.raises(DLedgerError) as refused:
        client.append(b"nobody but the leader can vouch for this")

    assert refused.value.outcome == "unknown" or group.statuses()[leader].committed_index == end
    for node in (third, leader):
        if group.is_running(node):
            group.stop(node)
        del group.prefixes[node]
        group.start(node)
    group.append(100)
    group.wait_for(lambda all_: all(one.voter for one in all_.values()), "all vote", 60)


def test_a_new_group_of_two_versions_says_why_it_cannot_begin_and_begins_with_one(
    make_group: Callable[..., Group], earlier: Path
) -> None:
    """The earlier version waits for all to say that they are new, the present one for all votes; neither gets them."""
    group = make_group()
    *old, present = sorted(group.nodes)
    for node in old:
        run_earlier(group, node, earlier)
    for node in (present, *old):
        group.start(node)

    def told(node: NodeId) -> str:
        found = group.statuses()
        return " ".join(one.message for one in found[node].conditions) if node in found else ""

    group.wait_for(lambda _: all(node in told(present) for node in old), "it says whose votes it lacks", 60)
    assert f"no vote from {', '.join(old)}: its disk is new and its version cannot start a group" in told(present)
    assert all(one.role is not Role.LEADER for one in group.statuses().values())

    for node in old:
        group.stop(node)
        del group.prefixes[node]
        group.start(node)
    group.append(100)
    group.wait_for(lambda all_: all(one.voter for one in all_.values()), "all vote", 60)
