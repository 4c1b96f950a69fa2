"""Job ``audit``: compares the replicas of a group byte for byte, by checksums of blocks.

Each task digests a stretch of one replica; Spark groups the digests by block. Only what all replicas know to be
committed is compared. Where a block differs, its bytes are read again, so that the report can name the entry, the
field, and the damaged copy. It replaces ``md5sum``, which only says that files differ.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from dledger.command_line import flag_values
from dledger.command_line.report_page import CountUnit
from dledger.errors import ConfigError
from dledger_spark.audit.difference import DifferenceKind, Directories, Finding, examine, outvoted
from dledger_spark.audit.replica import (
    BLOCK_BYTES,
    SPLIT_BYTES,
    CommonEnd,
    Coverage,
    Replica,
    ReplicaDigest,
    Stretch,
    block_bounds,
    common_end,
    coverage,
    open_replicas,
    plan,
    split_bytes_for,
)
from dledger_spark.errors import JobError
from dledger_spark.jobs.command import job_command, run_standalone
from dledger_spark.jobs.report import Fact, JobReport, ReportColumn, Table
from dledger_spark.jobs.source import assigned, security_of_environment
from dledger_spark.session import is_remote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BLOCKS_PER_PIECE: Final = 100_000
"""How many blocks' digests one task compares."""
_DIFFERING_MAX: Final = 10_000
"""How many differing blocks are examined; the others are only counted."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The replicas to compare: ``directories`` (of nodes, or of their brokers; at least two), or a running group.

    ``connection`` are options of the format ``dledger`` for a group: ``bootstrap.servers``, ``group``, ….
    """

    directories: tuple[Path, ...] = ()
    block_bytes: int = BLOCK_BYTES
    split_bytes: int | None = None
    """How much of a directory a task digests; None: depends on the number of processors."""
    connection: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        if self.block_bytes < 1 or (self.split_bytes is not None and self.split_bytes < 1):
            problems.append("block and split sizes must be greater than 0")
        if bool(self.directories) == bool(self.connection):
            problems.append("name the replicas' directories, or --bootstrap HOST:PORT,… of a running group")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, slots=True)
class Differences:
    """The differing blocks, in order of position."""

    blocks: tuple[tuple[int, tuple[ReplicaDigest, ...]], ...]

    @property
    def count(self) -> int:
        """The number of differing blocks, as far as examined."""
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class _AuditedMember:
    """One replica, for the report."""

    name: str
    place: str
    begin_index: int
    committed: int | None


def run(spark: SparkSession, options: AuditOptions) -> JobReport:
    """Compare. The report has a problem for everything that is wrong.

    Raises ``ConfigError`` if these are not replicas of one log; ``JobError`` if nothing can be compared; clients'
    errors.
    """
    return _audit_group(spark, options) if options.connection else _audit_directories(spark, options)


def _audit_directories(spark: SparkSession, options: AuditOptions) -> JobReport:
    replicas = open_replicas(options.directories)
    end = common_end(replicas)
    if end is None:
        raise JobError(
            "no part of the log is known as committed to all replicas: "
            + "; ".join(f"{one.name} knows up to entry {one.committed}" for one in replicas)
        )
    covered = coverage(
        [(one.name, int(one.begin.position)) for one in replicas], end.position, replicas[0].segment_bytes
    )
    split_bytes = options.split_bytes or _split_bytes(spark, covered)
    stretches = plan(covered, replicas, options.block_bytes, split_bytes)
    began_s = time.monotonic()
    found = differences(_digests(spark, stretches, options), _pieces(covered, options))
    took_s = time.monotonic() - began_s
    reader = Directories({one.name: one for one in replicas}, end.position)
    findings = _of_checkpoints(replicas) + examine(_with_ends(found, covered, options.block_bytes), reader)
    members = [_AuditedMember(one.name, str(one.directory), one.begin.index + 1, one.committed) for one in replicas]
    return _report(members, end, covered, found, findings, took_s)


def _audit_group(spark: SparkSession, options: AuditOptions) -> JobReport:
    """Audit running nodes: they digest, Spark compares, and only differing blocks are fetched."""
    from dledger_spark.audit.live import RunningNodes, connected, live_chain_crc, live_coverage, live_plan, look, said
    from dledger_spark.options import ReadOptions

    with connected(ReadOptions.parse(options.connection)) as client:
        group = look(client)
        lowest = min(group.nodes, key=lambda one: one.committed_position)
        if lowest.committed_index < 0 or any(one.begin_position >= lowest.committed_position for one in group.nodes):
            raise JobError(f"no part of the log is on all nodes: {lowest.name} knows up to {lowest.committed_index}")
        covered = live_coverage(group.nodes, lowest.committed_position, options.block_bytes)
        stretches = live_plan(covered, group.nodes, options.block_bytes)
        began_s = time.monotonic()
        found = differences(_digests(spark, stretches, options), _pieces(covered, options))
        took_s = time.monotonic() - began_s
        reader = RunningNodes(client, group.nodes, options.block_bytes)
        findings = examine(_with_ends(found, covered, options.block_bytes), reader)
        chain_crc = live_chain_crc(client, group.nodes, lowest.committed_index)
        told = said(client, group)
    end = CommonEnd(lowest.committed_index, lowest.committed_position, chain_crc, lowest.name)
    members = [_AuditedMember(one.name, one.address, one.begin_index, one.committed_index) for one in group.nodes]
    return _report(members, end, covered, found, findings, took_s, (*group.silent, *told))


def _split_bytes(spark: SparkSession, covered: Coverage) -> int:
    if is_remote(spark):  # only the server knows how many tasks it runs at once
        return SPLIT_BYTES
    return split_bytes_for(covered, spark.sparkContext.defaultParallelism)


def _digests(spark: SparkSession, stretches: Sequence[Stretch], options: AuditOptions) -> DataFrame:
    """Raises ``JobError`` if there are none."""
    if not stretches:
        raise JobError("no two replicas hold the same part of the log, so there is nothing to compare")
    from dledger_spark.source.blocks import NAME, BlocksDataSource

    spark.dataSource.register(BlocksDataSource)
    reader = spark.read.format(NAME).option("plan", json.dumps(stretches)).option("blockBytes", options.block_bytes)
    if options.connection:
        reader = reader.options(**options.connection)
    return reader.load()


def _pieces(covered: Coverage, options: AuditOptions) -> int:
    """The number of tasks for comparing digests: Spark's default is 200, each with a file in every other task."""
    return 1 + covered.compared_bytes // options.block_bytes // _BLOCKS_PER_PIECE


def _with_ends(
    found: Differences, covered: Coverage, block_bytes: int
) -> list[tuple[int, int, tuple[ReplicaDigest, ...]]]:
    """The differing blocks, with their ends."""
    return [(position, _end_of(position, covered, block_bytes), digests) for position, digests in found.blocks]


def differences(rows: DataFrame, pieces: int = 1) -> Differences:
    """Group the digests by block, in ``pieces`` tasks; matching ones are only counted."""
    from pyspark.sql import functions as sf

    blocks = (
        rows.repartition(pieces, "position")
        .groupBy("position")
        .agg(
            sf.min("crc32c").alias("low"),
            sf.max("crc32c").alias("high"),
            sf.min("bytes").alias("least"),
            sf.max("bytes").alias("most"),
            sf.count("error").alias("errors"),
            sf.collect_list(sf.struct("replica", "bytes", "crc32c", "error")).alias("digests"),
        )
    )
    differing = blocks.where("low <> high or least <> most or errors > 0").select("position", "digests")
    found = [
        (
            row["position"],
            tuple(
                sorted(
                    ReplicaDigest(one["replica"], row["position"], one["bytes"], one["crc32c"], one["error"] or "")
                    for one in row["digests"]
                )
            ),
        )
        for row in differing.orderBy("position").limit(_DIFFERING_MAX + 1).collect()
    ]
    return Differences(tuple(found))


def _end_of(position: int, covered: Coverage, block_bytes: int) -> int:
    held = next(one for one in covered.ranges if one.start <= position < one.stop)
    return next(end for _, end in block_bounds(position, held.stop, block_bytes))


def _of_checkpoints(replicas: Sequence[Replica]) -> list[Finding]:
    return [
        Finding(DifferenceKind.CHECKPOINT, (one.name,), "", -1, -1, -1, -1, "", {}, one.problem)
        for one in replicas
        if one.problem
    ]


def _report(  # one parameter per input of the report
    members: Sequence[_AuditedMember],
    end: CommonEnd,
    covered: Coverage,
    found: Differences,
    findings: Sequence[Finding],
    took_s: float,
    said: Sequence[str] = (),
) -> JobReport:
    equal = not findings and not found.count
    problems = (*said, *(one.sentence() for one in findings))
    facts = (
        Fact("verdict", "equal" if equal else "different"),
        Fact("replicas", len(members), CountUnit.COUNT),
        Fact("compared", covered.compared_bytes, CountUnit.BYTES),
        Fact("up to entry", end.index, CountUnit.COUNT),
        Fact("up to position", end.position, CountUnit.COUNT),
        Fact("chain crc", None if end.chain_crc is None else f"{end.chain_crc:#010x}"),
        Fact("bounded by", end.bounded_by),
        Fact("blocks that differ", found.count, CountUnit.COUNT),
        Fact("held by one only", covered.alone_bytes, CountUnit.BYTES),
        Fact("digested", covered.held_bytes, CountUnit.BYTES),
        Fact("time", took_s, CountUnit.SECONDS),
        Fact("rate", covered.held_bytes / took_s if took_s else None, CountUnit.BYTES_PER_SECOND),
    )
    notes = [
        f"{one.name} knows that entries up to {one.committed} are committed; entries after {end.index} were not "
        "compared"
        for one in members
        if one.committed is not None and one.committed > end.index
    ]
    if found.count > _DIFFERING_MAX:
        notes.append(f"more than {_DIFFERING_MAX:,} blocks differ: only the first were examined")
    title = "all replicas are equal" if equal else "the replicas differ"
    return JobReport(
        "audit",
        f"Audit of {', '.join(one.name for one in members)}: {title}",
        facts,
        (_member_table(members, found), *_finding_tables(findings)),
        problems=problems,
        notes=tuple(notes),
    )


def _member_table(members: Sequence[_AuditedMember], found: Differences) -> Table:
    counts = {one.name: 0 for one in members}
    for _, digests in found.blocks:
        for name in outvoted(digests):
            counts[name] += 1
    return Table(
        "replicas",
        (
            ReportColumn("replica"),
            ReportColumn("place"),
            ReportColumn("begins at entry", CountUnit.COUNT),
            ReportColumn("committed up to", CountUnit.COUNT),
            ReportColumn("blocks in question", CountUnit.COUNT),
        ),
        tuple((one.name, one.place, one.begin_index, one.committed, counts[one.name]) for one in members),
    )


def _finding_tables(findings: Sequence[Finding]) -> Iterator[Table]:
    if findings:
        yield Table(
            "findings",
            (
                ReportColumn("kind"),
                ReportColumn("damaged"),
                ReportColumn("segment"),
                ReportColumn("block", CountUnit.COUNT),
                ReportColumn("position", CountUnit.COUNT),
                ReportColumn("index", CountUnit.COUNT),
                ReportColumn("term", CountUnit.COUNT),
                ReportColumn("field"),
                ReportColumn("values"),
                ReportColumn("evidence"),
            ),
            tuple(
                (
                    str(one.kind),
                    ", ".join(one.replicas) or "unknown",
                    one.segment or None,
                    *(number if number >= 0 else None for number in (one.block, one.position, one.index, one.term)),
                    one.field or None,
                    ", ".join(f"{name}: {value}" for name, value in one.values.items()) or None,
                    one.detail,
                )
                for one in findings
            ),
        )


@job_command(
    run,
    name="audit",
    short_help="Compare the replicas of a group and report the first difference.",
    epilog="""\b
Exit code 0: equal; 1: they differ, or something could not be read; 2: not replicas of one log.

\b
Examples:
  dledger pipeline audit /data/dledger-n0 /backup/dledger-n1 /mnt/c/dledger-n2
  dledger pipeline audit -b 10.0.0.1:30911,10.0.0.2:30911 -g orders
  dledger pipeline audit --json broker-a broker-b broker-c""",
)
@click.argument(
    "directories", nargs=-1, metavar="[DIR]...", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "-b",
    "--bootstrap",
    metavar="HOST:PORT,…",
    help="Audit all nodes of this running group instead of directories.",
)
@click.option("-g", "--group", default="default", show_default=True, help="Name of the group.")
@click.option(
    "--option",
    "others",
    multiple=True,
    metavar="NAME=VALUE",
    help="Connection option as in the format dledger: tlsCa, accessKey, secretKey, …; may be repeated.",
)
@click.option(
    "--block-bytes",
    type=flag_values.Whole(min=512),
    default=BLOCK_BYTES,
    show_default=True,
    help="Bytes covered by one checksum.",
)
def command(
    directories: tuple[Path, ...], bootstrap: str | None, group: str, others: tuple[str, ...], block_bytes: int
) -> AuditOptions:
    """Compare the committed logs of two or more replicas, byte for byte.

    DIR is a node's directory (dledger-n0), or a broker's that has one in it; the nodes may run meanwhile. With
    --bootstrap each node of a running group digests its own disk, and only blocks that differ are fetched. Logs are
    compared up to the lowest known commit index of all replicas; each pair from the first entry that both keep.
    """
    connection: dict[str, str] = {}
    if bootstrap is not None:
        given = assigned(others, "--option")
        connection = {"bootstrap.servers": bootstrap, "group": group, **security_of_environment(), **given}
    return AuditOptions(directories, block_bytes, connection=connection)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """For ``python -m dledger_spark.jobs.audit`` and ``spark-submit``."""
    run_standalone(command, argv)


if __name__ == "__main__":
    main()
