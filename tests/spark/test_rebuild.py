"""The job ``rebuild`` within Spark."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pyspark.errors import PySparkException

from dledger.errors import DirectoryLockedError
from dledger_spark.directory import SplitSizes, open_directory, plan_splits
from dledger_spark.errors import PipelineError
from dledger_spark.jobs.rebuild import RebuildOptions, run
from dledger_spark.rebuild import INDEX, PARTS, QUEUES
from dledger_spark.rebuild.derive import records_of
from dledger_spark.rebuild.rows import ORDER, rows_of
from dledger_spark.source.derived import Attempt, DerivedOptions, DerivedWriter, read_counts
from rocketstore.config import MessageStoreConfig
from rocketstore.store.directory import decode_checkpoint
from tests.unit.dledger_spark.rebuild.stores import index_files, put_all, queue_files
from tests.unit.rocketstore.bench import bodies, fill, running, small_config, with_key
from tests.unit.rocketstore.store.test_message_store_replicated import master

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 200


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "replicated"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MessageStoreConfig:
    """A stopped store with messages of every kind, and some that are easy to ask for."""
    root = tmp_path_factory.mktemp("store") / "root"
    config = small_config(root, enable_dledger_commit_log=request.param, max_index_num=120)
    with master(config) if request.param else running(config) as store:
        put_all(store, MESSAGES)
        fill(store, 40)
    return config


@pytest.fixture
def config(pristine: MessageStoreConfig, tmp_path: Path) -> MessageStoreConfig:
    """A copy of it."""
    shutil.copytree(pristine.store_path_root_dir, tmp_path / "root")
    return replace(pristine, store_path_root_dir=tmp_path / "root")


def options_for(config: MessageStoreConfig, *, verify: bool = False, out: Path | None = None) -> RebuildOptions:
    return RebuildOptions(config.store_path_root_dir, config, out, verify=verify, split_bytes=8192)


def test_a_broker_goes_on_with_a_rebuilt_store(spark: SparkSession, config: MessageStoreConfig) -> None:
    """Queues and index lost: rebuilt they are the same bytes, and the store takes them for its own."""
    root = config.store_path_root_dir
    queues, index = queue_files(root / "consumequeue"), index_files(root / "index")
    shutil.rmtree(root / "consumequeue")
    shutil.rmtree(root / "index")

    report = run(spark, options_for(config))

    assert queue_files(root / "consumequeue") == queues
    assert index_files(root / "index") == index
    assert report.exit_code == 0
    assert int(report.fact("messages") or 0) > MESSAGES / 2
    assert not list(root.glob(".*"))
    with master(config) if config.enable_dledger_commit_log else running(config) as store:
        assert bodies(store) == list(range(0, 40, 2))
        assert with_key(store, 7) == [7]
        fill(store, 2, first=40)
        assert bodies(store)[-1] == 40


def test_verify_names_the_first_unit_and_entry_that_differ(spark: SparkSession, config: MessageStoreConfig) -> None:
    """Equal first; then one bit in a queue and one in the index, and nothing is written."""
    root = config.store_path_root_dir
    equal = run(spark, options_for(config, verify=True))
    queue = root / "consumequeue" / "T" / "1" / f"{0:020d}"
    with queue.open("r+b") as file:
        file.seek(3 * 20 + 19)
        file.write(b"\xee")
    entry = min((root / "index").iterdir())
    with entry.open("r+b") as file:
        file.seek(40 + 4 * config.max_hash_slot_num + 5 * 20 + 3)
        file.write(b"\xee")
    before = queue_files(root)

    found = run(spark, options_for(config, verify=True))

    assert (equal.exit_code, equal.fact("verdict")) == (0, "equal")
    assert (found.exit_code, len(found.problems)) == (1, 2)
    assert f"{queue}, number 3: offset" in found.problems[0]
    assert f"{entry}, number 5: hash" in found.problems[1]
    assert queue_files(root) == before


def test_a_running_broker_is_verified_but_never_rebuilt(spark: SparkSession, config: MessageStoreConfig) -> None:
    """Its lock keeps a rebuild out, and what it has not dispatched yet is no difference."""
    with master(config) if config.enable_dledger_commit_log else running(config):
        with pytest.raises(DirectoryLockedError):
            run(spark, options_for(config))
        assert run(spark, options_for(config, verify=True)).problems == ()


def test_a_store_is_rebuilt_elsewhere_from_its_log_alone(
    spark: SparkSession, config: MessageStoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into another directory, named from here: the broker's own stay as they are."""
    root, out = config.store_path_root_dir, tmp_path / "out"
    before = queue_files(root)
    monkeypatch.chdir(tmp_path)

    run(spark, replace(options_for(config, out=Path("out")), root=root.relative_to(tmp_path)))

    assert queue_files(out / "consumequeue") == queue_files(root / "consumequeue")
    assert {name: data for name, data in queue_files(root).items() if name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }


def last_message(config: MessageStoreConfig, number_from_end: int) -> tuple[Path, int]:
    """The file and the offset in it of a message near the end of a plain log."""
    log = open_directory(config.store_path_root_dir)
    split = plan_splits(log, log.segments[-1].base, log.end, SplitSizes(1 << 30))[-1]
    starts = np.concatenate([records.starts for records in records_of(split)])
    return log.segments[-1].path, int(starts[-number_from_end])


@pytest.mark.parametrize("pristine", [False], indirect=True)
def test_a_damaged_record_in_the_last_file_stops_rebuild_and_verify(
    spark: SparkSession, config: MessageStoreConfig
) -> None:
    """What stands behind it is neither left out of the queues nor taken for newer than the log."""
    root = config.store_path_root_dir
    queues, index = queue_files(root / "consumequeue"), index_files(root / "index")
    path, start = last_message(config, 5)
    with path.open("r+b") as file:
        file.seek(start + 7)
        file.write(b"\xff")

    for verify in (True, False):
        with pytest.raises(PySparkException, match=f"segment {path.name}, offset {start}: no message starts here"):
            run(spark, options_for(config, verify=verify))

    assert queue_files(root / "consumequeue") == queues
    assert index_files(root / "index") == index


@pytest.mark.parametrize("pristine", [False], indirect=True)
def test_a_torn_end_of_a_killed_broker_is_left_out(spark: SparkSession, config: MessageStoreConfig) -> None:
    """Its units are newer than what is left of the log, and a rebuild makes none."""
    root = config.store_path_root_dir
    path, start = last_message(config, 1)
    checkpoint = decode_checkpoint((root / "checkpoint").read_bytes())
    (root / "checkpoint").write_bytes(replace(checkpoint, replay_from=int(path.name) + start).encode())
    (root / "abort").touch()
    with path.open("r+b") as file:
        file.seek(start + 120)
        file.write(bytes(40))

    verified = run(spark, options_for(config, verify=True))
    rebuilt = run(spark, options_for(config))

    assert verified.problems == ()
    assert [row[3] for row in verified.tables[0].rows] == [1, 1]
    assert int(rebuilt.fact("messages") or 0) == int(verified.fact("messages") or 0)


@pytest.mark.parametrize("part", PARTS)
def test_one_part_is_rebuilt_alone(spark: SparkSession, config: MessageStoreConfig, tmp_path: Path, part: str) -> None:
    """The same bytes as with the other, and nothing of the other."""
    root, out = config.store_path_root_dir, tmp_path / "out"

    report = run(spark, replace(options_for(config, out=out), parts=(part,)))

    if part == QUEUES:
        assert queue_files(out / "consumequeue") == queue_files(root / "consumequeue")
    else:
        assert index_files(out / "index") == index_files(root / "index")
    assert not (out / ("index" if part == QUEUES else "consumequeue")).exists()
    assert (report.fact("messages") is None, report.fact("keys") is None) == (part == INDEX, part == QUEUES)


def test_what_workers_write_to_disks_of_their_own_is_missed_in_a_sentence(tmp_path: Path) -> None:
    """Nothing is put together of what is here: one task's queues are no store."""
    options = DerivedOptions.parse({"path": str(tmp_path / "made"), "fileBytes": "2000000"})
    writer = DerivedWriter((QUEUES,), options, overwrite=False)
    here, elsewhere = writer.write(iter([])), writer.write(iter([]))
    assert isinstance(elsewhere, Attempt)
    shutil.rmtree(elsewhere.directory)

    with pytest.raises(PipelineError, match=r"the output of 1 of 2 tasks is not in .* must be on a file system"):
        writer.commit([here, elsewhere])

    assert not (tmp_path / "made").exists()


def test_a_queue_that_two_tasks_have_written_is_refused(config: MessageStoreConfig, tmp_path: Path) -> None:
    """Rows that were not brought together by queue: one task's files would take the place of the other's."""
    log = open_directory(config.store_path_root_dir)
    split = plan_splits(log, log.begin, log.end, SplitSizes(1 << 30))[0]
    options = DerivedOptions.parse({"path": str(tmp_path / "made"), "fileBytes": "2000000"})
    rows = next(rows_of(records_of(split), (QUEUES,), options.levels))
    runs = rows.sort_by([(name, "ascending") for name in ORDER])
    writer = DerivedWriter((QUEUES,), options, overwrite=False)
    once, again = writer.write(iter([runs])), writer.write(iter([runs]))

    with pytest.raises(PipelineError, match="two tasks wrote"):
        writer.commit([once, again])

    assert not (tmp_path / "made").exists()
    writer.abort([once, again])
    writer.commit([writer.write(iter([runs]))])
    assert read_counts(tmp_path / "made").units == sum(len(units) // 20 for units in runs["data"].to_pylist())
