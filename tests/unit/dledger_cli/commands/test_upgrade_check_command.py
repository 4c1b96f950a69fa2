"""``dledger upgrade check``: what it says and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.store.fs import FileSystem
from dledger_cli.cli import main
from rocketstore.store.directory import ABORT_FILE, StoreDirectory
from tests.unit.rocketstore.upgrade.support import bodies, copied, cut, overwrite, record_offsets, write_broker
from tests.unit.rocketstore.upgrade.test_members import conf


def check(*arguments: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(main, ["upgrade", "check", *map(str, arguments)])


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Three brokers with equal logs."""
    one = write_broker(tmp_path / "a", bodies(20))
    return [one, copied(one, "b"), copied(one, "c")]


def nodes(roots: list[Path]) -> tuple[str, str]:
    """The option for them."""
    return "--nodes", ",".join(map(str, roots))


def test_equal_logs_may_start(roots: list[Path]) -> None:
    """Exit code 0, and where the group goes on."""
    shown = check(*nodes(roots))

    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[-1] == (
        "the old logs are equal: these brokers may start as a group, which goes on at offset 8,192"
    )
    found = json.loads(check(*nodes(roots), "--json").output)
    assert (found["ok"], found["divided"], found["problems"]) == (True, 8192, [])
    assert [one["standing"] for one in found["nodes"]] == ["equal"] * 3


def test_directories_may_be_given_one_by_one(roots: list[Path]) -> None:
    """As shells complete them."""
    assert check(*(word for root in roots for word in ("--nodes", root))).exit_code == 0


def test_a_log_that_lags_may_not_start(roots: list[Path]) -> None:
    """Exit code 1, with how much it lacks."""
    cut(roots[1], record_offsets(roots[1])[15])

    shown = check(*nodes(roots))

    assert shown.exit_code == 1
    assert "BEHIND: b ends at offset" in shown.output
    assert "lacks 5 messages" in shown.output
    assert "do not start these brokers as a group" in shown.output.splitlines()[-1]
    found = json.loads(check(*nodes(roots), "--json").output)
    assert [one["messages_apart"] for one in found["nodes"]] == [0, 5, 0]


def test_a_log_that_differs_may_not_start(tmp_path: Path, roots: list[Path]) -> None:
    """The first message that differs is named."""
    other = write_broker(tmp_path / "d", [*bodies(13), b"x" * 200])

    shown = check(*nodes([*roots, other]))

    assert shown.exit_code == 1
    assert (
        f"DIFFERS: d and a at offset {record_offsets(roots[0])[13]:,}: d has a message of queue orders-1"
        in shown.output
    )
    found = json.loads(check(*nodes([*roots, other]), "--json").output)
    assert found["nodes"][3]["divergence"]["reference"]["keys"] == "key13"


def test_a_damaged_log_may_not_start(roots: list[Path]) -> None:
    """File, offset and reason; the two others are compared all the same."""
    overwrite(roots[0], 150, b"!")

    shown = check(*nodes(roots))

    assert shown.exit_code == 1
    assert "PROBLEM: a: " in shown.output
    assert "does not match its CRC" in shown.output
    found = json.loads(check(*nodes(roots), "--json").output)
    assert [one["standing"] for one in found["nodes"]] == ["damaged", "equal", "equal"]


def test_a_running_broker_may_not_start(roots: list[Path]) -> None:
    """Its log grows meanwhile."""
    held = StoreDirectory(roots[2], FileSystem())
    try:
        shown = check(*nodes(roots))
    finally:
        held.release()

    assert shown.exit_code == 1
    assert f"PROBLEM: c: a broker is using {roots[2]}: stop it" in shown.output
    assert "before the problems above are solved" in shown.output.splitlines()[-1]


def test_a_torn_end_is_a_note_after_an_unclean_stop_only(roots: list[Path]) -> None:
    """The next start cuts it; after a clean stop it is damage."""
    end = record_offsets(roots[0])[-1]
    for root in roots:
        overwrite(root, end + 150, b"!")

    assert check(*nodes(roots)).exit_code == 1
    for root in roots:
        (root / ABORT_FILE).touch()
    shown = check(*nodes(roots))
    assert shown.exit_code == 0, shown.output
    assert "note: a: was not stopped cleanly, and a torn end at" in shown.output


def test_the_master_is_compared_with_if_it_is_named(roots: list[Path]) -> None:
    """A slave that has more than its master is not the truth then."""
    cut(roots[0], record_offsets(roots[0])[15])

    shown = check(*nodes(roots), "--master", roots[0])

    assert shown.exit_code == 1
    assert "AHEAD: b has 5 messages" in shown.output
    assert check(*nodes(roots), "--master", roots[0].parent).exit_code == 2


def test_conf_files_are_compared_with_each_other_and_with_the_files(tmp_path: Path, roots: list[Path]) -> None:
    """A wrong file size is found although all members have it."""
    peers = "n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913"
    files = [
        conf(
            tmp_path / f"{number}.conf",
            root,
            dLegerSelfId=f"n{number}",
            dLegerPeers=peers,
            mappedFileSizeCommitLog="4096",
        )
        for number, root in enumerate(roots)
    ]
    arguments = [word for one in files for word in ("-c", one)]
    assert check(*arguments).exit_code == 0, check(*arguments).output

    for number, root in enumerate(roots):
        conf(files[number], root, dLegerSelfId=f"n{number}", dLegerPeers=peers)
    shown = check(*arguments)
    assert shown.exit_code == 1
    assert "mappedFileSizeCommitLog=1073741824, but the log's files have 4096 bytes" in shown.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name the future members' directories with --nodes"),
        (("--nodes", "{0}"), "a comparison takes at least two directories"),
        (("--nodes", "{0},{0}"), "is given 2 times"),
        (("--nodes", "{0},/nowhere"), "/nowhere is not a directory"),
        (("--nodes", "{0},{1}", "--dry-run"), "use them with --align"),
        (("--nodes", "{0},{1}", "--align", "--discard", "/nowhere"), "is not among the directories"),
        (("--nodes", "{0},{1}", "--align", "--discard", "{0}", "--master", "{0}"), "cannot be both"),
    ],
)
def test_wrong_usage_is_refused(roots: list[Path], arguments: tuple[str, ...], said: str) -> None:
    """With exit code 2 and a sentence."""
    shown = check(*(one.format(*roots) for one in arguments))

    assert shown.exit_code == 2
    assert said in shown.output


def test_what_lags_is_aligned(roots: list[Path]) -> None:
    """A dry run says what would be done; then it is done, and the logs are compared again."""
    cut(roots[1], record_offsets(roots[1])[15])
    before = (roots[1] / "commitlog" / f"{4096:020d}").read_bytes()

    shown = check(*nodes(roots), "--align", "--dry-run")
    assert shown.exit_code == 1
    assert "would be done: b: append 5 messages" in shown.output
    assert (roots[1] / "commitlog" / f"{4096:020d}").read_bytes() == before

    shown = check(*nodes(roots), "--align")
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[0].startswith("b: append 5 messages")
    assert "the old logs are equal" in shown.output
    again = json.loads(check(*nodes(roots), "--align", "--json").output)
    assert (again["ok"], again["aligned"]) == (True, [])


def test_what_differs_is_aligned_only_if_master_and_loser_are_named(tmp_path: Path, roots: list[Path]) -> None:
    """Never by chance; what the loser had is kept."""
    other = write_broker(tmp_path / "d", [*bodies(13), *[b"x" * 200] * 20])
    everything = nodes([*roots, other])

    shown = check(*everything, "--align")
    assert shown.exit_code == 1
    assert "say with --master DIR which log is right" in shown.output
    shown = check(*everything, "--align", "--master", roots[0])
    assert shown.exit_code == 1
    assert f"name it with --discard {other}" in shown.output
    assert not (other / "commitlog.discarded-1").exists()

    shown = check(*everything, "--align", "--master", roots[0], "--discard", other)
    assert shown.exit_code == 0, shown.output
    assert f"what it had is in {other}/commitlog.discarded-1" in shown.output


def test_a_member_to_be_is_made_by_aligning(tmp_path: Path, roots: list[Path]) -> None:
    """From an empty directory, as the guide prepares a third node by copying."""
    (tmp_path / "n").mkdir()

    shown = check(*nodes([*roots, tmp_path / "n"]), "--align")

    assert shown.exit_code == 0, shown.output
    assert "copy all of" in shown.output.splitlines()[0]


def test_nothing_is_aligned_while_a_broker_runs(roots: list[Path]) -> None:
    """The locks are held from before the comparison to the end."""
    cut(roots[1], record_offsets(roots[1])[15])
    held = StoreDirectory(roots[2], FileSystem())
    try:
        shown = check(*nodes(roots), "--align")
    finally:
        held.release()

    assert shown.exit_code == 1
    assert f"{roots[2]} is in use" in shown.output
    assert check(*nodes(roots)).exit_code == 1
    assert check(*nodes(roots), "--align").exit_code == 0


def test_members_without_any_log_may_start(tmp_path: Path) -> None:
    """There is nothing to differ."""
    for name in "ab":
        (tmp_path / name).mkdir()

    shown = check("--nodes", f"{tmp_path}/a,{tmp_path}/b")

    assert shown.exit_code == 0
    assert shown.output.splitlines()[-1].startswith("there are no old messages")
