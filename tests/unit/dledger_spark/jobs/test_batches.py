"""A directory of batches: what is visible when, who may write, what a killed run leaves."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from dledger.errors import ConfigError
from dledger_spark.errors import JobBusyError, JobError
from dledger_spark.jobs.batches import STATE, BatchDirectory, open_batches

ABOUT = {"job": "test", "topics": ["a"]}


def _stage(out: BatchDirectory, rows: int, topic: str = "a") -> Path:
    staging = out.staging()
    part = staging / f"topic={topic}"
    part.mkdir(parents=True)
    pq.write_table(pa.table({"index": list(range(rows))}), part / "part-0.parquet")
    (staging / ".part-0.parquet.crc").write_bytes(b"x")
    return staging


def _visible(path: Path) -> int:
    return int(ds.dataset(path, partitioning="hive").count_rows())


def test_a_batch_appears_whole_and_only_when_it_is_published(tmp_path: Path) -> None:
    """Any reader sees all of a batch or nothing of it; manifests and staged files are no data to readers."""
    with open_batches(tmp_path / "out", ABOUT) as out:
        staging = _stage(out, 5)
        assert _visible(out.path) == 0

        out.publish(0, staging, {"rows": 5})

        assert _visible(out.path) == 5
        assert out.numbers() == [0]
        assert out.manifest(0) == {"rows": 5}
        out.publish(1, out.staging(), {"rows": 0})  # a batch without a row
        assert (out.numbers(), _visible(out.path)) == ([0, 1], 5)


def test_a_published_batch_is_never_replaced(tmp_path: Path) -> None:
    """Where locks are not kept, the rename is what two runs meet at."""
    with open_batches(tmp_path, ABOUT) as out:
        out.publish(0, _stage(out, 5), {"rows": 5})

        with pytest.raises(JobBusyError, match="another run is writing"):
            out.publish(0, _stage(out, 7), {"rows": 7})

        assert _visible(tmp_path) == 5


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """Half a batch is neither seen nor kept."""
    with open_batches(tmp_path, ABOUT) as out:
        left = _stage(out, 5)

    with open_batches(tmp_path, ABOUT) as out:
        assert not left.exists()
        assert out.numbers() == []


def _hold(path: Path, pipe: Connection) -> None:
    with open_batches(path, ABOUT):
        pipe.send("open")
        pipe.recv()


def test_a_second_run_is_refused_until_the_first_ends_or_is_killed(tmp_path: Path) -> None:
    """The kernel keeps the lock: no file that is left behind locks anybody out."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_hold, args=(tmp_path, theirs))
    process.start()
    try:
        assert ours.recv() == "open"
        with pytest.raises(JobBusyError, match=f"process {process.pid}"), open_batches(tmp_path, ABOUT):
            pass
    finally:
        process.kill()
        process.join()

    with open_batches(tmp_path, ABOUT):
        pass


def test_a_directory_about_something_else_is_refused(tmp_path: Path) -> None:
    """Rows of two choices never mix; the message names what differs."""
    with open_batches(tmp_path / "out", ABOUT):
        pass

    with (
        pytest.raises(ConfigError, match=r"topics was \['a'\], is \['b'\]"),
        open_batches(tmp_path / "out", ABOUT | {"topics": ["b"]}),
    ):
        pass


def test_somebody_elses_directory_is_left_alone(tmp_path: Path) -> None:
    """Parquet that is there already is not ours to add to."""
    (tmp_path / "theirs.parquet").write_bytes(b"PAR1")

    with pytest.raises(ConfigError, match="not empty and was not written by such a job"), open_batches(tmp_path, ABOUT):
        pass
    assert not (tmp_path / STATE).exists()


def test_a_place_without_renames_is_refused() -> None:
    """An object store cannot make a batch appear at once."""
    with (
        pytest.raises(ConfigError, match="s3a is not a mounted file system"),
        open_batches(Path("s3a://bucket/x"), ABOUT),
    ):
        pass


def test_a_batch_without_a_readable_manifest_stops_the_job(tmp_path: Path) -> None:
    """Nobody guesses how far a batch reached."""
    with open_batches(tmp_path, ABOUT) as out:
        out.place(0).mkdir()
        with pytest.raises(JobError, match="cannot be read"):
            out.manifest(0)
        (out.place(0) / "_manifest.json").write_text("[]")
        with pytest.raises(JobError, match="not a manifest"):
            out.manifest(0)
