"""``python -m cluster.drill``: which drills are run, where, and what the exit code says."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import docker
import pytest
from click.testing import CliRunner, Result

from cluster.drill import __main__ as drill_main
from cluster.drill.__main__ import main as drill_command
from cluster.drill.drills import DRILLS, Drill, DrillOptions
from cluster.drill.history import DrillEvent
from cluster.drill.processes import ProcessMembers, ProcessMigration, ProcessTarget
from cluster.drill.runner import DrillResult
from cluster.drill.target import DrillError, DrillTarget, NotPossibleError
from tests.unit.cluster.drill.histories import failover, perfect, result_of

Ran = list[tuple[str, DrillOptions]]


class NoGroup:
    """Stands for a target that is never started."""

    notes = ("the files stay in /here",)

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Every drill passes at once, except that ``fill-disk`` loses a message and ``restart-all`` does not start."""
    found: Ran = []

    def run_drill(
        drill: Drill, target: DrillTarget, options: DrillOptions, tell: Callable[[DrillEvent], None]
    ) -> DrillResult:
        found.append((drill.name, options))
        history = perfect()
        if drill.name == "fill-disk":
            history.change_queue(0, history.queue(0)[:-1])
        if drill.name == "restart-all":
            raise DrillError("the group cannot create the topic")
        return result_of(failover(), history.verdict(), name=drill.name)

    monkeypatch.setattr(drill_main, "run_drill", run_drill)
    monkeypatch.setattr(drill_main, "_process_target", lambda *_: NoGroup())
    return found


def drill(*words: str) -> Result:
    return CliRunner().invoke(drill_command, words)


def test_a_passed_drill_ends_with_0(ran: Ran) -> None:
    """And its options reach it."""
    result = drill(
        "kill-leader", "--on", "processes", "--nodes", "5", "--rounds", "3", "--rate", "100", "--calm", "0.5"
    )

    assert result.exit_code == 0, result.output
    assert [(name, options.nodes, options.rounds, options.rate, options.calm_s) for name, options in ran] == [
        ("kill-leader", 5, 3, 100, 0.5)
    ]
    assert "The brokers run as processes on this host" in result.stderr


def test_a_lost_message_ends_with_1(ran: Ran) -> None:
    """Whatever else has passed."""
    assert drill("kill-leader", "fill-disk", "--on", "processes").exit_code == 1


def test_a_group_that_does_not_start_ends_with_1_and_the_others_run(ran: Ran) -> None:
    """It is said which, and why; nothing is passed over in silence."""
    result = drill("restart-all", "kill-leader", "--on", "processes")

    assert result.exit_code == 1
    assert "✗ restart-all: the group cannot create the topic" in result.stderr
    assert [name for name, _ in ran] == ["restart-all", "kill-leader"]


def test_what_is_kept_of_a_group_that_does_not_start_is_told(ran: Ran) -> None:
    """That is when somebody wants to look at it."""
    assert "stay in /here" in drill("restart-all", "--on", "processes", "--keep").stderr
    assert "stay in /here" not in drill("restart-all", "--on", "processes").stderr


def test_all_runs_every_drill_and_isolates_both_ways(ran: Ran) -> None:
    """One after the other."""
    drill("all", "--on", "processes")

    names = [name for name, _ in ran]
    assert sorted(set(names)) == sorted(DRILLS)
    assert [options.direction for name, options in ran if name == "isolate-leader"] == ["out", "in"]
    assert len(names) == len(DRILLS) + 1


def test_json_is_one_document_and_nothing_else(ran: Ran) -> None:
    """For programs; what people must know is among it, too."""
    result = drill("kill-leader", "restart-all", "--on", "processes", "--json")

    document = json.loads(result.stdout)
    assert [one["name"] for one in document["drills"]] == ["kill-leader"]
    assert any("processes" in note for note in document["notes"])
    assert document["not_run"] == ["restart-all: the group cannot create the topic"]
    assert document["passed"] is False


def test_the_report_is_written(ran: Ran, tmp_path: Path) -> None:
    """Also one of a drill that failed."""
    file = tmp_path / "report.html"

    drill("fill-disk", "--on", "processes", "--html", str(file))

    assert "<h1>Failover drill fill-disk</h1>" in file.read_text()
    assert "✗ Failed<ul>" in file.read_text()


def test_without_containers_it_runs_on_processes_and_says_so_and_why(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loudly: a result on processes is not one of containers."""

    def no_daemon(*, timeout: int) -> NoReturn:
        raise docker.errors.DockerException("connection refused")

    monkeypatch.setattr(docker, "from_env", no_daemon)

    automatic, demanded = drill("kill-leader"), drill("kill-leader", "--on", "containers")

    assert automatic.exit_code == 0
    assert "NOT IN CONTAINERS" in automatic.stderr
    assert "no Docker: connection refused" in automatic.stderr
    assert demanded.exit_code == 1
    assert "no Docker: connection refused" in demanded.stderr
    assert len(ran) == 1


def test_without_the_docker_sdk_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drills are run in a clone, where there is a Makefile."""
    monkeypatch.setitem(sys.modules, "docker", None)

    refused = drill("kill-leader", "--on", "containers")

    assert refused.exit_code == 1
    assert "the Docker SDK is not installed" in refused.stderr
    assert refused.stderr.rstrip().endswith("run make install")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("kill-leader", ProcessTarget), ("upgrade", ProcessMigration), ("replace-node", ProcessMembers)],
)
def test_each_drill_on_processes_has_a_group_that_can_do_it(
    name: str, kind: type[DrillTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration begins with a pair; a change of members needs nodes that are no members yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with closing(drill_main._process_target(DRILLS[name], DrillOptions(nodes=3))) as target:
        assert type(target) is kind
        assert len(target.nodes) == 3


def test_the_list_names_every_drill() -> None:
    """With what happens in it."""
    result = drill("list")

    assert result.exit_code == 0
    assert all(one.name in result.output and one.summary in result.output for one in DRILLS.values())


def test_an_unknown_drill_is_refused() -> None:
    """With the names that exist."""
    result = drill("kill-everything")

    assert result.exit_code == 2
    assert "kill-leader" in result.stderr


def test_a_disk_cannot_be_filled_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear sentence instead of a full disk of the host."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(NotPossibleError, match="requires root"):
        ProcessTarget(size=3, small_disks=True)
