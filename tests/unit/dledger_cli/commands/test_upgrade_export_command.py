"""``dledger upgrade export``: what it prints, and what it asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger_cli.cli import main
from rocketstore.config import MessageStoreConfig
from tests.unit.dledger_cli.commands.test_verify_command import write_conf
from tests.unit.rocketstore.bench import bodies, fill, running, small_config
from tests.unit.rocketstore.export.members import plain
from tests.unit.rocketstore.store.test_message_store_replicated import master


@pytest.fixture
def config(tmp_path: Path) -> MessageStoreConfig:
    """A stopped member with ten messages, and its conf file beside it."""
    found = small_config(tmp_path / "member", enable_dledger_commit_log=True)
    with master(found) as store:
        fill(store, 10)
    write_conf(found, tmp_path)
    return found


def export(config: MessageStoreConfig, *more: str) -> Result:
    """Run it with the conf file; the target is ``plain`` beside the member."""
    root = config.store_path_root_dir
    conf = root.parent / "broker.conf"
    return CliRunner().invoke(
        main, ["upgrade", "export", str(root), str(root.parent / "plain"), "-c", str(conf), *more]
    )


def test_it_says_what_was_exported_and_what_the_conf_file_needs(config: MessageStoreConfig) -> None:
    """So that nobody starts a broker with files of another size."""
    shown = export(config)

    target = config.store_path_root_dir.parent / "plain"
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0].startswith(f"{target}: 10 messages, physical offsets 0 to ")
    assert lines[1] == "verified: 2 queues, 10 keys; every record equals the member's"
    assert lines[-1].endswith(f"storePathRootDir={target} mappedFileSizeCommitLog=16384")
    with running(plain(config, target)) as store:
        assert bodies(store) == [0, 2, 4, 6, 8]
    assert CliRunner().invoke(main, ["verify", str(target), "-c", str(target.parent / "broker.conf")]).exit_code == 0


def test_json_has_the_counts(config: MessageStoreConfig) -> None:
    """For scripts."""
    found = json.loads(export(config, "--json").output)

    assert (found["messages"], found["queues"], found["tail_messages"]) == (10, 2, 0)


def test_a_second_run_and_a_directory_without_a_member_are_refused(config: MessageStoreConfig, tmp_path: Path) -> None:
    """Exit code 2, and what to do."""
    assert export(config).exit_code == 0
    again = export(config)
    other = CliRunner().invoke(main, ["upgrade", "export", str(tmp_path / "plain"), str(tmp_path / "new")])

    assert (again.exit_code, other.exit_code) == (2, 2)
    assert "is not empty: name a directory that does not exist" in again.output
    assert "holds no group member" in other.output
