"""``dledger ha status`` against what answers as a broker."""

from __future__ import annotations

from click.testing import CliRunner

from dledger_cli.cli import main
from tests.support.runtime_broker import JAVA, ours, runtime_broker


def test_a_member_of_a_group_is_no_classic_broker_and_no_riddle() -> None:
    """Its role is told, and which command shows more; of RocketMQ's own broker nothing is known."""
    members = {"n0": "10.0.0.1:10911"}
    with runtime_broker(ours("n0", "LEADER", 7, members)) as member, runtime_broker(JAVA) as other:
        shown = CliRunner().invoke(main, ["ha", "status", "-b", f"{member.address},{other.address}"])

    rows = shown.output.splitlines()
    assert shown.exit_code == 0
    assert "leader" in rows[1].split()
    assert rows[1].endswith("member of a group that elects its master: see dledger cluster list")
    assert rows[2].endswith("it tells nothing of classic replication")
