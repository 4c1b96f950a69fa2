"""``docs/operating.md``: its tables against the code, and its procedures on real processes."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner

from dledger.client import ReadMode
from dledger.runtime.threads import EXIT_FATAL
from dledger.types import LogIndex, Magic, NodeId
from dledger_cli import terminal
from dledger_cli.cli import main
from dledger_cli.local.group import LocalGroup, LocalGroupError, wait_until
from tests.docs.documents import ROOT, table_below
from tests.support.waiting import PATIENCE_S
from tools.docs_reference import commands, configuration
from tools.docs_reference.records import default_text

pytestmark = pytest.mark.lane("processes")  # real ones, which want a small machine for themselves

OPERATING: Final = ROOT / "docs" / "operating.md"
N0, N1, N2, N3 = (NodeId(f"n{number}") for number in range(4))
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
        if isinstance(command, terminal.ErrorReportingGroup)
        for name in command._writing
    }

    assert codes >= {terminal.EXIT_FAILED, terminal.EXIT_USAGE, terminal.EXIT_UNKNOWN_OUTCOME, EXIT_FATAL}
    assert codes >= {terminal.EXIT_INTERRUPTED, terminal.EXIT_CLOSED_PIPE}
    assert ends_with_3 == writing


# --- procedures ------------------------------------------------------------------------------------------------------


def _fill(group: LocalGroup) -> None:
    with closing(group.client(timeout_s=30)) as client:
        client.append_many(BODIES)
    group.wait_converged()


def _bodies(group: LocalGroup) -> list[bytes]:
    with closing(group.client(timeout_s=30)) as client:
        entries = client.read(LogIndex(0), count=1000, mode=ReadMode.LINEARIZABLE)  # who just started knows no leader
        return [entry.body for entry in entries if entry.magic is Magic.NORMAL]


def _wait_for_voters(group: LocalGroup) -> None:
    group.wait_converged()
    wait_until(lambda: all(one.voter for one in group.statuses().values()), PATIENCE_S, "a node does not vote")


def _wait_alike(group: LocalGroup) -> None:
    """Three members that run have the same committed entries."""

    def alike() -> bool:
        answers = group.statuses()  # of those that answer in time
        return len(answers) == 3 and len({one.committed_index for one in answers.values()}) == 1

    wait_until(alike, PATIENCE_S, "not alike")


def _seed(source: Path, target: Path) -> None:
    """What the document says: copy the directory of a stopped node, change the id in ``identity``."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    old, new = (path.name.removeprefix("dledger-") for path in (source, target))
    identity = target / "identity"
    identity.write_text(identity.read_text().replace(f'"node_id": "{old}"', f'"node_id": "{new}"'))


class _Growing(LocalGroup):
    """The last nodes of the group wait to be added; ``known`` are the members that its conf files name."""

    def __init__(self, directory: Path, *, founders: int, waiting: int) -> None:
        super().__init__(directory, size=founders + waiting, settings=SMALL)
        self.founders = self.known = list(self.nodes)[:founders]

    def __enter__(self) -> _Growing:
        try:
            self.start_together(self.known)
        except BaseException:
            self.close()
            raise
        return self

    def members_of(self, node: NodeId) -> str:
        known = [*self.known, *([] if node in self.known else [node])]
        return ";".join(f"{one}-{self.place(one)}" for one in known)

    def command(self, node: NodeId) -> list[str]:
        return [*super().command(node), *([] if node in self.founders else ["--set", "join=true"])]

    def place(self, node: NodeId) -> str:
        return self.peer_address(node, self.nodes[node])

    def member(self, *words: str) -> str:
        """Run a command of the page."""
        done = CliRunner().invoke(main, ["member", *words, "-b", ",".join(self.addresses), "--timeout", "30"])
        assert done.exit_code == 0, done.output
        return done.output


@pytest.mark.slow
def test_change_the_members_from_one_to_three_and_replace_a_dead_one(tmp_path: Path) -> None:
    """Grow, replace, shrink, as the page has it: every entry is there at the end."""
    with _Growing(tmp_path, founders=1, waiting=3) as group:
        with closing(group.client(timeout_s=30)) as client:
            client.append_many(BODIES)
        for node in (N1, N2):
            group.start(node)
            assert "dLegerJoin=true" in group.member("add", f"{node}={group.place(node)}")
            group.known = [*group.known, node]
        assert "majority 2 of 3 voters; tolerates 1 failure" in group.member("list")

        group.kill(N0)
        group.start(N3)
        assert "n0 was removed" in group.member("replace", "n0", f"n3={group.place(N3)}")
        assert _bodies(group) == BODIES

        _wait_alike(group)  # a leader is not removed while one of the two others is out of contact
        said = group.member("remove", group.leader())
        assert "majority 2 of 2 voters; tolerates 0 failures" in said
        assert _bodies(group) == BODIES


@pytest.mark.slow
def test_a_majority_is_lost_and_one_node_goes_on(tmp_path: Path) -> None:
    """Under another cluster id; then the group can grow again."""
    with _Growing(tmp_path, founders=3, waiting=1) as group:
        with closing(group.client(timeout_s=30)) as client:
            client.append_many(BODIES)
        _wait_alike(group)
        peers = group.members_of(N0)
        for node in group.known:
            group.kill(node)
        words = ["member", "force", str(group.store_dir(N0)), "--peers", peers, "--cluster-id", "second", "--yes"]
        forced = CliRunner().invoke(main, words)
        assert forced.exit_code == 0, forced.output
        assert f"  dLegerPeers=n0-{group.place(N0)}" in forced.output

        group.founders = group.known = [N0]
        group.start(N0, extra=["--set", "cluster_id=second"])
        assert _bodies(group) == BODIES
        group.start(N3, extra=["--set", "cluster_id=second"])
        assert "  cluster_id=second" in group.member("add", f"n3={group.place(N3)}")


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
