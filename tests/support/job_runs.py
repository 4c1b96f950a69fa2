"""Runs of ``export`` and ``table`` as applications, and what they have written as others see it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds

from dledger_spark.jobs.batches import MANIFEST
from dledger_spark.jobs.source import LogSource
from tests.support.spark import ROOT


def start_export(log: Path, out: Path, errors: Path, master: str, **conf: str) -> subprocess.Popen[bytes]:
    """A run with many small batches, in a session of its own."""
    return _start("export", [str(log), "--out", str(out), "--batch-bytes", "200k"], errors, master, conf)


def start_table(
    source: LogSource, entries: int, out: Path, errors: Path, master: str, **conf: str
) -> subprocess.Popen[bytes]:
    """A run that follows until it is stopped, at most so many entries a batch, in a session of its own."""
    words = ["-b", source.bootstrap or "", "-g", source.group, "-t", ",".join(source.topics), "--out", str(out)]
    words += ["--trigger", "0.2", "--option", f"maxOffsetsPerTrigger={entries}", "--option", "minPartitions=2"]
    return _start("table", words, errors, master, conf)


def _start(job: str, words: list[str], errors: Path, master: str, conf: dict[str, str]) -> subprocess.Popen[bytes]:
    settings = {"spark.driver.memory": "1g", "spark.local.dir": str(errors.parent / "local"), **conf}
    words = [*words, "--master", master, "--json"]
    words += [word for name, text in settings.items() for word in ("--conf", f"{name}={text}")]
    with errors.open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", f"dledger_spark.jobs.{job}", *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )


def batches(out: Path) -> int:
    """How many batches are there for everybody."""
    return len(list(out.glob(f"batch=*/{MANIFEST}")))


def is_staging(out: Path) -> bool:
    """Whether files of a batch that is not there yet are being written."""
    return any(out.glob("_state/staging-*/**/*.parquet"))


def seen(out: Path) -> Counter[bytes]:
    """What a reader sees now, who knows nothing of Spark or of us."""
    if not out.is_dir():
        return Counter()
    rows = ds.dataset(out, partitioning="hive")
    if "body" not in rows.schema.names:  # no file is there yet
        return Counter()
    return Counter(rows.to_table(columns=["body"])["body"].to_pylist())


def end_of(errors: Path) -> str:
    """The last that the runs had to say."""
    return errors.read_text()[-4000:] if errors.exists() else ""
