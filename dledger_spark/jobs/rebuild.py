"""Job ``rebuild``: derives a broker's consume queues and key index from its log, byte for byte as the broker writes
them.

One pass over the log, split by split, extracts the units of all queues and the keys. They are grouped by queue; index
files are chained in log order, so one task writes all keys, like one more queue. ``--verify`` derives the same and
compares it with the existing files. A broker rebuilds missing files by itself at startup, on one processor; this job is
for large stores, for checking, and for restoring a store from its log alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from dledger.command_line.report_page import CountUnit
from dledger.errors import ConfigError
from dledger.store.fs import FileSystem
from dledger_spark.jobs.command import job_command, run_standalone
from dledger_spark.jobs.report import Fact, JobReport, ReportColumn, Table
from dledger_spark.rebuild import INDEX, INDEX_DIR, PARTS, QUEUES, QUEUES_DIR
from rocketstore.config import MessageStoreConfig
from rocketstore.index.file import IndexShape
from rocketstore.store.directory import DELETED_FILE, StoreDirectory
from rocketstore.verification.verify import settings_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dledger_spark.rebuild.rows import Written
    from rocketstore.verification.compare import Bounds, Tally

SPLIT_BYTES: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RebuildOptions:
    """The broker to rebuild or verify. ``root`` is its ``storePathRootDir``, ``store`` its settings.

    ``out``: write the result there instead of replacing the broker's files; it must not contain any.
    """

    root: Path
    store: MessageStoreConfig
    out: Path | None = None
    parts: tuple[str, ...] = PARTS
    verify: bool = False
    split_bytes: int = SPLIT_BYTES

    def __post_init__(self) -> None:
        problems = []
        if self.verify and self.out is not None:
            problems.append("--verify writes nothing: leave out --out")
        if not self.parts or set(self.parts) - set(PARTS):
            problems.append(f"parts are {' and '.join(PARTS)}")
        target = self.target
        problems += [
            f"{target / name} exists: name a directory without queues and index"
            for name in ("consumequeue", "index")
            if self.out is not None and (target / name).exists()
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def target(self) -> Path:
        """The directory for the result."""
        return self.out or self.root

    @property
    def shape(self) -> IndexShape:
        """The shape of index files."""
        return IndexShape(self.store.max_hash_slot_num, self.store.max_index_num)


def run(spark: SparkSession, options: RebuildOptions) -> JobReport:
    """Rebuild or verify; the report has a problem for everything that differs.

    Raises ``DirectoryLockedError`` if a broker has the target open, ``PipelineError``, ``DiskError``.
    """
    began_s = time.monotonic()
    report = _verify if options.verify else _rebuild
    return report(spark, options, began_s)


def _rebuild(spark: SparkSession, options: RebuildOptions, began_s: float) -> JobReport:
    from dledger_spark.directory import open_directory
    from dledger_spark.rebuild.rows import exchange, keep_expired_queues, remove_left_overs

    kept: list[str] = []
    with _locked(options.target):
        remove_left_overs(options.target)
        begin = open_directory(options.root).begin
        with _staging(options.target) as staging:
            built = staging / "built"
            written = _derive(spark, options, built, keys_only=False)
            if QUEUES in options.parts:
                kept = keep_expired_queues(built / QUEUES_DIR, options.root / QUEUES_DIR, begin)
                exchange(options.target, built, QUEUES_DIR)
            if INDEX in options.parts:
                exchange(options.target, built, INDEX_DIR)
    took_s = time.monotonic() - began_s
    files = {name: _file_count(options.target / name) for name in (QUEUES_DIR, INDEX_DIR)}
    notes = [f"{len(kept)} queues have no messages left in the log and were kept unchanged"] if kept else []
    facts = (
        *_facts(options, written, took_s),
        Fact("queue files", files[QUEUES_DIR] if QUEUES in options.parts else None, CountUnit.COUNT),
        Fact("index files", files[INDEX_DIR] if INDEX in options.parts else None, CountUnit.COUNT),
    )
    return JobReport("rebuild", f"Rebuilt {' and '.join(options.parts)} in {options.target}", facts, notes=tuple(notes))


def _verify(spark: SparkSession, options: RebuildOptions, began_s: float) -> JobReport:
    from dledger_spark.rebuild.rows import KEYS_FILE
    from rocketstore.verification.compare import compare_index, compare_queues, read_keys

    bounds = _bounds(options)  # before reading the log, so that everything dispatched by then is in the log
    tallies: dict[str, Tally] = {}
    with _staging(None) as staging:
        built = staging / "built"
        written = _derive(spark, options, built, keys_only=True)
        bounds = _with_log(options, bounds)
        if QUEUES in options.parts:
            tallies[QUEUES] = compare_queues(
                built / QUEUES_DIR, options.root / QUEUES_DIR, options.store.consume_queue_file_bytes, bounds
            )
        if INDEX in options.parts:
            keys = read_keys(built / INDEX_DIR / KEYS_FILE)
            tallies[INDEX] = compare_index(keys, options.root / INDEX_DIR, options.shape, bounds)
            del keys
    took_s = time.monotonic() - began_s
    differences = [one for tally in tallies.values() for one in tally.differences]
    columns = ("equal", "expired", "newer", "pending", "deleted")
    table = Table(
        "compared",
        (
            ReportColumn("part"),
            *(ReportColumn(name, CountUnit.COUNT) for name in columns),
            ReportColumn("different", CountUnit.COUNT),
        ),
        tuple(
            (part, *(getattr(tally, name) for name in columns), len(tally.differences))
            for part, tally in tallies.items()
        ),
    )
    verdict = "match the log" if not differences else "do not match the log"
    return JobReport(
        "rebuild",
        f"Verified {options.root}: {' and '.join(options.parts)} {verdict}",
        (Fact("verdict", "different" if differences else "equal"), *_facts(options, written, took_s)),
        (table,),
        problems=tuple(one.sentence() for one in differences),
    )


def _facts(options: RebuildOptions, written: Written, took_s: float) -> tuple[Fact, ...]:
    messages = written.units if QUEUES in options.parts else None
    keys = written.keys if INDEX in options.parts else None
    done = keys or 0 if messages is None else messages
    return (
        Fact("messages", messages, CountUnit.COUNT),
        Fact("keys", keys, CountUnit.COUNT),
        Fact("time", took_s, CountUnit.SECONDS),
        Fact("rate", done / took_s if took_s else None, CountUnit.PER_SECOND),
    )


# -- deriving --------------------------------------------------------------------------------------------------------


def _derive(spark: SparkSession, options: RebuildOptions, target: Path, *, keys_only: bool) -> Written:
    """Write the files derived from the log to ``target``, which must not exist."""
    from dledger_spark.rebuild.rows import ORDER
    from dledger_spark.source import derived as formats

    for one in (formats.DerivedDataSource, formats.QueuesDataSource, formats.IndexDataSource):
        spark.dataSource.register(one)
    kind = formats.FORMATS[tuple(part for part in PARTS if part in options.parts)]
    rows = (
        spark.read.format(kind)
        .option("splitBytes", options.split_bytes)
        .option("delayLevels", options.store.message_delay_level)
        .load(str(options.root.absolute()))
    )
    *same, _ = ORDER
    files = {
        "fileBytes": options.store.consume_queue_file_bytes,
        "layout": "keys" if keys_only else "files",
        "slots": options.shape.slots,
        "entries": options.shape.entries,
    }
    by_queue = rows.repartition(*same).sortWithinPartitions(*ORDER)
    by_queue.write.format(kind).mode("append").options(**files).save(str(target.absolute()))  # workers may be elsewhere
    return formats.read_counts(target)


# -- the store's directory ---------------------------------------------------------------------------------------------


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep brokers out. Raises ``DirectoryLockedError`` if one has it open."""
    lock = StoreDirectory(directory, FileSystem())
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _staging(beside: Path | None) -> Iterator[Path]:
    """A temporary directory, on the file system of ``beside`` if given, removed at the end."""
    from dledger_spark.rebuild.rows import STAGING

    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=beside))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _bounds(options: RebuildOptions) -> Bounds:
    """How far the broker has dispatched according to its files."""
    from dledger_spark.directory.files import NODE_PREFIX
    from rocketstore.verification.compare import Bounds, dispatched_to, read_deleted

    dispatched = dispatched_to(options.root, is_member=any(options.root.glob(f"{NODE_PREFIX}*")))
    return Bounds(0, 0, dispatched, read_deleted(options.store.config_dir / DELETED_FILE))


def _with_log(options: RebuildOptions, bounds: Bounds) -> Bounds:
    from dataclasses import replace

    from dledger_spark.directory import open_directory

    log = open_directory(options.root)
    return replace(bounds, begin=log.begin, end=log.end)


def _file_count(directory: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(directory))


# -- the command -------------------------------------------------------------------------------------------------------


@job_command(
    run,
    name="rebuild",
    short_help="Rebuild or verify a broker's consume queues and key index.",
    epilog="""\b
Exit code 0: rebuilt, or equal; 1: different, or the log is damaged, or a broker is running there; 2: usage.

\b
Examples:
  dledger pipeline rebuild --verify /data/broker-a
  dledger pipeline rebuild /data/broker-a --conf-file broker.conf
  dledger pipeline rebuild /backup/broker-a --out /data/restored --part queues""",
)
@click.argument("root", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--verify", is_flag=True, help="Write nothing; compare and report the first unit or entry that differs.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write to this directory instead of DIR; the broker of DIR may then be running.",
)
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part; may be repeated. Default: both."
)
@click.option(
    "-c",
    "--conf-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The broker's conf file: sizes of queue and index files, delay levels. Default: RocketMQ's defaults.",
)
def command(
    root: Path, verify: bool, out: Path | None, parts: tuple[str, ...], conf_file: Path | None
) -> RebuildOptions:
    """Rebuild consume queues and the key index from a broker's log.

    DIR is the broker's storePathRootDir. The broker must not run, except for --verify and --out. Only entries known to
    be committed are used; the broker builds the rest itself when started.
    """
    store = settings_for(root, conf_file)
    return RebuildOptions(root, store, out, parts or (PARTS if store.message_index_enable else (QUEUES,)), verify)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """For ``python -m dledger_spark.jobs.rebuild`` and ``spark-submit``."""
    run_standalone(command, argv)


if __name__ == "__main__":
    main()
