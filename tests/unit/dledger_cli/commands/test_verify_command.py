"""``dledger verify``: nodes and brokers on disk, sound ones and damaged ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dledger_cli.cli import main
from rocketstore.config import MessageStoreConfig
from tests.support.damage import turn
from tests.unit.dledger_spark.rebuild.stores import put_all
from tests.unit.rocketstore.bench import crashed, running, small_config
from tests.unit.rocketstore.store.test_message_store_replicated import master


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "replicated"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MessageStoreConfig:
    """A broker's directory, plain or replicated."""
    return stored_in(tmp_path_factory.mktemp("store") / "root", replicated=request.param)


def stored_in(root: Path, *, replicated: bool) -> MessageStoreConfig:
    """A broker's directory with messages of every kind, cleanly stopped, and its conf file beside it."""
    config = small_config(root, enable_dledger_commit_log=replicated, max_index_num=120)
    with master(config) if config.enable_dledger_commit_log else running(config) as store:
        put_all(store, 300)
    write_conf(config, config.store_path_root_dir.parent)
    return config


def write_conf(config: MessageStoreConfig, directory: Path) -> None:
    """The conf file for a root in that directory."""
    (directory / "broker.conf").write_text(
        f"mappedFileSizeConsumeQueue={config.mapped_file_size_consume_queue}\n"
        f"mappedFileSizeCommitLog={config.mapped_file_size_commit_log}\n"
        f"maxHashSlotNum={config.max_hash_slot_num}\nmaxIndexNum={config.max_index_num}\n"
    )


@pytest.fixture
def root(stored: MessageStoreConfig, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(stored.store_path_root_dir.parent, tmp_path / "copy")
    return tmp_path / "copy" / "root"


Verify = Callable[..., Result]


@pytest.fixture
def verify() -> Verify:
    """Run ``dledger verify`` with a broker's conf file."""

    def run(*directories: Path, more: tuple[str, ...] = ()) -> Result:
        conf = directories[0].parent / "broker.conf"
        return CliRunner().invoke(main, ["verify", *map(str, directories), "-c", str(conf), *more])

    return run


def document(verify: Verify, *directories: Path) -> dict[str, Any]:
    """What ``--json`` says."""
    found: dict[str, Any] = json.loads(verify(*directories, more=("--json",)).output)
    return found


def test_a_sound_broker_checks_out(root: Path, verify: Verify) -> None:
    """Log, queues, key index, checkpoint, state; exit code 0."""
    shown = verify(root)

    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[-1] == "no problems found"
    found = document(verify, root)
    assert found["ok"] is True
    assert found["brokers"][0]["messages"] >= 300
    assert found["brokers"][0]["keys"] > 100


def test_what_a_stopped_member_has_yet_to_build_is_no_damage(tmp_path: Path, verify: Verify) -> None:
    """Its group may commit more while it stops; the next start builds queues and index from the checkpoint on."""
    config = small_config(tmp_path / "root", enable_dledger_commit_log=True, max_index_num=120)
    root, earlier = config.store_path_root_dir, tmp_path / "earlier"
    with master(config) as store:
        put_all(store, 200)
        store.flush()
        shutil.copytree(root, earlier, ignore=shutil.ignore_patterns("*.tmp"))
        put_all(store, 100)
    for derived in ("consumequeue", "index"):
        shutil.rmtree(root / derived)
        (earlier / derived).rename(root / derived)
    (earlier / "checkpoint").replace(root / "checkpoint")
    write_conf(config, tmp_path)

    assert verify(root).exit_code == 0, verify(root).output
    path = max(root.glob("consumequeue/[!S]*/*/*"), key=lambda one: sum(map(bool, one.read_bytes())))
    turn(path, 20 * 3 + 15)
    assert verify(root).exit_code == 1


def test_a_turned_bit_in_a_queue_is_named_with_file_and_offset(root: Path, verify: Verify) -> None:
    """A tags code that hides a message from filters; an offset that leads nowhere."""
    path = max(root.glob("consumequeue/[!S]*/*/*"), key=lambda one: sum(map(bool, one.read_bytes())))
    turn(path, 20 * 3 + 15)

    found = document(verify, root)

    assert found["ok"] is False
    assert [(one["file"], one["offset"]) for one in found["problems"]] == [(str(path), 60)]
    assert verify(root).exit_code == 1


def test_a_missing_queue_and_a_turned_bit_in_the_key_index_are_named(root: Path, verify: Verify) -> None:
    """Whatever a query or a pull would silently not find."""
    queue = min(root.glob("consumequeue/[!S]*/*"))
    shutil.rmtree(queue)
    index = min((root / "index").iterdir())
    turn(index, index.stat().st_size - 20 * 110 + 11)

    files = {one["file"] for one in document(verify, root)["problems"]}

    assert str(index) in files
    assert any(one.startswith(str(queue)) for one in files)


def test_damage_in_the_log_is_named_and_what_is_before_it_is_compared(root: Path, verify: Verify) -> None:
    """A record in the middle: of the node's log, or of the plain one."""
    data = sorted(root.glob("dledger-n0/data/*") if (root / "dledger-n0").exists() else root.glob("commitlog/*"))
    turn(data[1], 5)

    problems = document(verify, root)["problems"]

    assert problems[0]["file"] == str(data[1])
    assert problems[0]["offset"] == 0


@pytest.mark.parametrize("kept", [0, 1, 300, 1 / 2])
def test_a_file_of_the_log_that_was_cut_short_is_named(root: Path, verify: Verify, kept: float) -> None:
    """And read no further, nor again and again for what is not there."""
    data = sorted(root.glob("dledger-n0/data/*") if (root / "dledger-n0").exists() else root.glob("commitlog/*"))
    os.truncate(data[0], int(kept if kept != 1 / 2 else data[0].stat().st_size / 2))

    problems = document(verify, root)["problems"]

    assert str(data[0]) in {one["file"] for one in problems}


@pytest.mark.parametrize("files", [slice(-1, None), slice(-2, -1), slice(None)], ids=["last", "before it", "all"])
def test_a_file_of_the_log_that_says_it_has_a_terabyte_is_not_looked_through(
    root: Path, verify: Verify, files: slice
) -> None:
    """Nothing of it was ever written, so there is nothing to read; it would take hours."""
    data = sorted(root.glob("dledger-n0/data/*") if (root / "dledger-n0").exists() else root.glob("commitlog/*"))
    for path in data[files]:
        os.truncate(path, 1 << 40)

    problems = document(verify, root)["problems"]

    assert {str(path) for path in data[files]} & {one["file"] for one in problems}


def test_a_file_far_behind_the_log_is_one_problem(tmp_path: Path, verify: Verify) -> None:
    """Not one for each file that is missing between."""
    config = stored_in(tmp_path / "broker", replicated=False)
    last = max(config.store_path_root_dir.glob("commitlog/*"))
    shutil.copy(last, last.with_name(f"{1 << 60:020d}"))

    problems = document(verify, config.store_path_root_dir)["problems"]

    told = [one["reason"] for one in problems if "missing" in one["reason"]]
    assert len(told) == 1
    assert told[0].startswith(f"{((1 << 60) - int(last.name)) // last.stat().st_size - 1} files from here on")


@pytest.mark.parametrize("flushed", [False, True])
def test_a_record_that_a_killed_broker_left_half_written_is_no_damage_behind_its_checkpoint(
    tmp_path: Path, verify: Verify, *, flushed: bool
) -> None:
    """The next start cuts it. Where the checkpoint says that all was durable, something has happened to it since."""
    config, root = small_config(tmp_path / "live"), tmp_path / "killed" / "root"
    with crashed(config, root) as store:
        put_all(store, 20)
        last = store.log.max_offset
        put_all(store, 1)
        store.flush()
        end = store.log.max_offset
    write_conf(config, root.parent)
    log = root / "commitlog" / f"{0:020d}"
    content = log.read_bytes()
    torn = last if flushed else end
    log.write_bytes(content[:torn] + content[:50] + bytes(len(content) - torn - 50))

    found = document(verify, root)

    place = {"file": str(log), "offset": torn}
    items = found["problems"] if flushed else [found["brokers"][0]["torn"]]
    assert found["ok"] is not flushed, found
    assert place.items() <= items[0].items()


def test_damaged_small_files_are_named(root: Path, verify: Verify) -> None:
    """Checkpoint, the list of deleted queues, the snapshot of the broker's state."""
    turn(root / "checkpoint", 70)
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "deletedQueues.json").write_text("{")
    (root / "config" / "brokerState.json").write_text('{"checksum":1,"state":{}}\n')

    files = {Path(one["file"]).name for one in document(verify, root)["problems"]}

    assert {"checkpoint", "deletedQueues.json", "brokerState.json"} <= files


def test_without_what_is_derived_only_the_log_is_read(root: Path, verify: Verify) -> None:
    """``--log-only``: no conf file is needed."""
    shutil.rmtree(root / "consumequeue")

    assert verify(root, more=("--log-only",)).exit_code == 0


def test_two_nodes_of_a_group_are_compared(tmp_path: Path, verify: Verify) -> None:
    """Their logs are equal, or the first entry that differs is named."""
    node = stored_in(tmp_path / "root", replicated=True).store_path_root_dir / "dledger-n0"
    other = tmp_path / "other"
    shutil.copytree(node, other)

    shown = verify(node, other)

    assert shown.exit_code == 2  # the conf file is beside the root
    shown = CliRunner().invoke(main, ["verify", str(node), str(other)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[-1] == "no problems found, and the logs are equal"


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    """With what is looked for."""
    shown = CliRunner().invoke(main, ["verify", str(tmp_path)])

    assert shown.exit_code == 2
    assert "holds neither a node" in shown.output


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """In a sentence."""
    log = tmp_path / "commitlog"
    log.mkdir()
    (log / f"{0:020d}").symlink_to(log / f"{0:020d}")

    shown = CliRunner().invoke(main, ["verify", str(tmp_path)])

    assert shown.exit_code == 1
    assert shown.output.startswith(f"error: {log}/{0:020d}: ")
