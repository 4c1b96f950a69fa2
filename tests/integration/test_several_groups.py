"""Several groups in each of three processes: they share ports and threads, and fail apart (design notes §7)."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.errors import DLedgerError
from dledger.rpc.clients.codec import ReadMode
from dledger.types import NodeId
from dledger_cli.local.group import SeveralGroups
from tests.integration.harness import N0
from tests.support.damage import turn
from tests.support.waiting import wait_until

pytestmark = pytest.mark.lane("processes")

SMALL = {"segment_bytes": "1m", "index_segment_bytes": "64k"}


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[SeveralGroups]:
    """The groups a and b on three processes, started."""
    with SeveralGroups(tmp_path, ["a", "b"], settings=SMALL) as running:
        yield running


def _append(groups: SeveralGroups, group: str, text: bytes) -> int:
    with groups.client_of(group, timeout_s=30) as client:
        return client.append(text).index


def _bodies(groups: SeveralGroups, group: str) -> list[bytes]:
    with groups.client_of(group, timeout_s=30) as client:
        return [entry.body for entry in client.read(0, count=100, mode=ReadMode.LINEARIZABLE)]


def test_a_killed_process_moves_its_leaders_and_loses_nothing(groups: SeveralGroups) -> None:
    """Each group elects for itself; what was acknowledged in either is there afterwards, and only there."""
    for group in "ab":
        _append(groups, group, f"before, {group}".encode())
    victim = groups.leader_of("a")

    groups.kill(victim)

    for group in "ab":
        assert groups.leader_of(group, other_than=victim) != victim
        _append(groups, group, f"after, {group}".encode())
    groups.start(victim)
    for group in "ab":
        bodies = [body for body in _bodies(groups, group) if body.startswith((b"before", b"after"))]
        assert bodies == [f"before, {group}".encode(), f"after, {group}".encode()]
    for node in groups.nodes:
        assert groups.stop(node) == 0


def test_a_group_that_is_not_here_is_refused_with_those_that_are(groups: SeveralGroups) -> None:
    """A wrong name is a mistake of a person, who needs to know the right ones."""
    groups.leader_of("a")
    with groups.client_of("c", timeout_s=3) as client, pytest.raises(DLedgerError, match="serves the groups 'a', 'b'"):
        client.metadata(address=groups.nodes[N0].client_address)


def test_a_member_that_fails_stops_alone(tmp_path: Path) -> None:
    """Its process serves the other group on, says so, and is not ready; peers elect another leader (N1)."""
    groups = SeveralGroups(tmp_path, ["a", "b"], settings=SMALL)
    groups.serve_metrics()
    with groups:
        node = groups.leader_of("a")
        _append(groups, "b", b"two")
        _break(groups, node, "a")
        wait_until(lambda: "group a stops in this process" in groups.logs(node), "it fails")

        assert groups.is_running(node)
        assert groups.leader_of("a", other_than=node) != node
        assert _append(groups, "a", b"three") > 0
        assert _append(groups, "b", b"four") > 0
        with groups.client_of("b") as client:
            told = client.metadata(address=groups.nodes[node].client_address).conditions
        assert [one.subject for one in told if one.kind == "group_failed"] == ["a"]
        assert "group a has failed" in _ready(groups, node)
        assert groups.stop(node) == 0


def test_a_damaged_log_is_repaired_while_the_other_group_serves(groups: SeveralGroups) -> None:
    """Damage concerns one log; that of the other group is neither checked again nor kept waiting."""
    for group in "ab":
        _append(groups, group, b"before" * 1000)
    node = groups.leader_of("a")
    groups.kill(node)
    (segment,) = (groups.directory_of(node, "a") / "data").iterdir()
    for at in range(0, 4096, 64):
        turn(segment, at)

    groups.start(node)

    assert _append(groups, "b", b"after") > 0
    with groups.client_of("a") as client:
        address = groups.nodes[node].client_address
        ends = dict.fromkeys(groups.nodes, -1)

        def has_all() -> bool:
            ends.update({one: client.metadata(address=groups.nodes[one].client_address).end_index for one in ends})
            return len(set(ends.values())) == 1 and not client.metadata(address=address).conditions

        wait_until(has_all, "the log is whole again")
    assert "repaired" in groups.logs(node) or "fetching it again" in groups.logs(node)
    assert groups.is_running(node)


def test_further_groups_cost_little_while_they_are_idle(tmp_path: Path) -> None:
    """Ten groups in each of three processes, against one: processor time and memory.

    The least of three times is that of idle groups: on a busy machine, work of the start reaches into the first one.
    Measured on a busy machine: 3.9 to 4.4 times the processor time, 0.7 MB for each further group.
    """
    spent: dict[int, float] = {}
    anonymous: dict[int, float] = {}
    for count in (1, 10):
        names = [f"g{number}" for number in range(count)]
        with SeveralGroups(tmp_path / str(count), names, settings=SMALL) as groups:
            for name in names:
                groups.leader_of(name)
            spent[count] = min(_processor_s_in(groups, 6) for _ in range(3))
            anonymous[count] = max(_anonymous_mb(groups.pid(node)) for node in groups.nodes)

    assert spent[10] <= 6 * spent[1]
    assert anonymous[10] - anonymous[1] <= 9 * 15


def _pass_s(seconds: float) -> None:
    """Let time pass, which is what is measured."""
    threading.Event().wait(seconds)


def _processor_s(groups: SeveralGroups) -> float:
    """The processor time that the threads of the processes have used, to the microsecond."""
    return (
        sum(
            int(task.read_text().split()[0])
            for node in groups.nodes
            for task in Path(f"/proc/{groups.pid(node)}/task").glob("*/schedstat")
        )
        / 1e9
    )


def _processor_s_in(groups: SeveralGroups, seconds: float) -> float:
    before = _processor_s(groups)
    _pass_s(seconds)
    return _processor_s(groups) - before


def _anonymous_mb(pid: int) -> float:
    (line,) = (one for one in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if one.startswith("Pss_Anon:"))
    return int(line.split()[1]) / 1024


def test_a_process_without_a_group_left_ends(tmp_path: Path) -> None:
    """With 70, so that a service manager starts it again."""
    with SeveralGroups(tmp_path, ["a", "b"], settings=SMALL) as groups:
        node = groups.leader_of("a")
        for group in "ab":
            _break(groups, node, group)
        assert groups.wait_exit(node, 60) == 70


def test_a_process_may_end_with_its_first_group(tmp_path: Path) -> None:
    """``exit_with_any_group``."""
    with SeveralGroups(tmp_path, ["a", "b"], settings={**SMALL, "exit_with_any_group": "true"}) as groups:
        node = groups.leader_of("a")
        _break(groups, node, "a")
        assert groups.wait_exit(node, 60) == 70


def _break(groups: SeveralGroups, node: NodeId, group: str) -> None:
    """Make a node's member fail: its data are gone from where it measures the disk."""
    data = groups.directory_of(node, group) / "data"
    data.rename(data.with_name("gone"))


def _ready(groups: SeveralGroups, node: NodeId) -> str:
    """What ``/readyz`` says, which must be 503."""
    url = f"http://127.0.0.1:{groups.metrics_ports[node]}/readyz"
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(url, timeout=60)
    assert answer.value.code == 503
    return answer.value.read().decode()
