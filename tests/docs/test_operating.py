"""``docs/operating.md``: its tables against the code, and its procedures on real processes."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Final

import click
import pytest

from cluster import reporting
from cluster.cli import main
from cluster.local.group import LocalGroup, LocalGroupError, wait_until
from dledger.runtime.supervisor import EXIT_FATAL
from dledger.types import LogIndex, Magic, NodeId
from tests.docs.documents import ROOT, table_below
from tools.docs_reference import commands, configuration
from tools.docs_reference.records import default_text

pytestmark = pytest.mark.lane("processes")  # real ones, which want a small machine for themselves

OPERATING: Final = ROOT / "docs" / "operating.md"
N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
SMALL: Final = {"segment_bytes": "1m", "index_segment_bytes": "32k"}
BODIES: Final = [b"entry %d" % number for number in range(100)]


def test_the_timers_have_the_defaults_that_the_table_says() -> None:
    """Row by row."""
    defaults = {one.name: default_text(one.field, "ms") for one in configuration.entries()}

    rows = {re.sub(r"\[(\w+)\].*", r"\1", row[0]): row[1] for row in table_below(OPERATING, "Timers")}

    assert len(rows) >= 5
    assert rows == {name: defaults[name] for name in rows}


def test_the_exit_codes_are_those_of_the_code() -> None:
    """Their numbers, and which commands end with 3."""
    rows = table_below(OPERATING, "Exit codes")
    codes = {int(code) for row in rows for code in re.findall(r"\d+", row[0])}
    ends_with_3 = next(set(re.findall(r"`([^`]+)`", row[1])) for row in rows if row[0] == "3")

    writing = {
        f"{context.command_path} {name}".removeprefix("dledger ")
        for command, context in [(main, click.Context(main, info_name="dledger")), *commands.walk()]
        if isinstance(command, reporting.ErrorReportingGroup)
        for name in command._writing
    }

    assert codes >= {reporting.EXIT_FAILED, reporting.EXIT_USAGE, reporting.EXIT_UNKNOWN_OUTCOME, EXIT_FATAL}
    assert codes >= {reporting.EXIT_INTERRUPTED, reporting.EXIT_CLOSED_PIPE}
    assert ends_with_3 == writing


# --- procedures ------------------------------------------------------------------------------------------------------


def _fill(group: LocalGroup) -> None:
    with closing(group.client(timeout_s=30)) as client:
        client.append_many(BODIES)
    group.wait_converged()


def _bodies(group: LocalGroup) -> list[bytes]:
    with closing(group.client(timeout_s=30)) as client:
        return [entry.body for entry in client.read(LogIndex(0), count=1000) if entry.magic is Magic.NORMAL]


def _wait_for_voters(group: LocalGroup) -> None:
    group.wait_converged()
    wait_until(lambda: all(one.voter for one in group.statuses().values()), 30, "a node does not vote")


def _seed(source: Path, target: Path) -> None:
    """What the document says: copy the directory of a stopped node, change the id in ``identity``."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    old, new = (path.name.removeprefix("dledger-") for path in (source, target))
    identity = target / "identity"
    identity.write_text(identity.read_text().replace(f'"node_id": "{old}"', f'"node_id": "{new}"'))


@pytest.mark.slow
def test_change_the_members_from_three_to_five_and_back(tmp_path: Path) -> None:
    """Nothing of the members is part of the log's identity."""
    with LocalGroup(tmp_path, settings=SMALL) as group:
        _fill(group)

    with LocalGroup(tmp_path, size=5, settings=SMALL) as group:
        _wait_for_voters(group)
        assert _bodies(group) == BODIES
    with LocalGroup(tmp_path, settings=SMALL) as group:
        _wait_for_voters(group)
        assert _bodies(group) == BODIES


@pytest.mark.slow
def test_change_the_members_from_one_to_three_with_one_seeded(tmp_path: Path) -> None:
    """One old member is no majority of three, so one more is seeded with a copy."""
    named = SMALL | {"cluster_id": "mine"}
    with LocalGroup(tmp_path, size=1, settings=named) as group:
        _fill(group)

    _seed(tmp_path / "dledger-n0", tmp_path / "dledger-n1")

    with LocalGroup(tmp_path, settings=named) as group:
        _wait_for_voters(group)
        assert _bodies(group) == BODIES


@pytest.mark.slow
def test_restore_a_whole_group_from_the_copy_of_one_stopped_follower(tmp_path: Path) -> None:
    """Every node starts from the same copy; what came after it is gone; the group takes appends."""
    backup = tmp_path / "backup" / "dledger-n2"
    with LocalGroup(tmp_path, settings=SMALL) as group:
        _fill(group)
        if group.leader() == N2:
            with closing(group.client(timeout_s=30)) as client:
                client.transfer_leadership(N0)
        group.stop(N2)
        shutil.copytree(group.store_dir(N2), backup)
        group.start(N2)
        with closing(group.client(timeout_s=30)) as client:
            client.append(b"after the backup")

    for node in (N0, N1, N2):
        _seed(backup, tmp_path / f"dledger-{node}")

    with LocalGroup(tmp_path, settings=SMALL) as group:
        _wait_for_voters(group)
        assert _bodies(group) == BODIES
        with closing(group.client(timeout_s=30)) as client:
            client.append(b"again")


@pytest.mark.slow
def test_a_copy_whose_identity_was_not_changed_is_refused(tmp_path: Path) -> None:
    """Two nodes must not become one by a copy."""
    with LocalGroup(tmp_path, settings=SMALL) as group:
        _fill(group)
        group.stop(N0)
        shutil.rmtree(group.store_dir(N0))
        shutil.copytree(group.store_dir(N1), group.store_dir(N0))

        with pytest.raises(LocalGroupError, match="node_id is 'n1' there and 'n0' here"):
            group.start(N0)
