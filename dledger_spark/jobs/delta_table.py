"""A Delta table that holds a log's messages, and, in the same transactions, how far it holds them.

The protocol's application transactions are the position: their id names the log, their version is the index of the
first entry that is not in the table. A second one is the checksum of the log up to there, so that another log of the
same names is told from this one. Rows and position become visible together, so nothing else has to be kept in step
with the table: a run without any memory of its own continues exactly where the last commit ended. A commit is refused
if the same application has committed since the table was opened; so of two runs at the same time, one is stopped, and
no row is there twice.

The table's source is one of its properties (``dledger.rows``); a log or selection that differs is refused.

``Compactor`` merges the small files of a table that is written at the same time, and removes files that no version
needs. It runs in a thread of its own, on a table of its own: it moves rows, and neither adds any nor changes a
position, so appends go on beside it. Upserts rewrite files themselves, so they wait for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction, WriterProperties
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from dledger.errors import ConfigError
from dledger_spark.errors import JobBusyError, JobError
from dledger_spark.jobs.delta_files import LOG, DataFile, newest, stats_columns, sync_versions

ROWS: Final = "dledger.rows"
UNKNOWN: Final = -1
_FIRST: Final = "dledger.first"
_END: Final = "dledger.end"
_TERM: Final = "dledger.term"
_COMMITS_READ: Final = 64
"""At first, when looking for the last commit of a run."""
_STATS: Final = "delta.dataSkippingStatsColumns"
_PROPERTIES: Final = {
    "delta.enableChangeDataFeed": "true",  # for those who follow the table's changes
    "delta.logRetentionDuration": "interval 7 days",  # a follower commits often: Delta's 30 days are millions of files
}


@dataclass(frozen=True, slots=True)
class TableOrigin:
    """The source of a table. ``cluster`` and ``group`` name the log; ``rows``: the settings that select its rows."""

    cluster: str
    group: str
    rows: Mapping[str, object]

    @property
    def application(self) -> str:
        """The id of the table's transactions."""
        return f"dledger/{self.cluster}/{self.group}"

    @property
    def text(self) -> str:
        """As it is kept in the table."""
        return json.dumps({"cluster": self.cluster, "group": self.group, **self.rows}, sort_keys=True)


@dataclass(frozen=True, slots=True)
class EntrySpan:
    """Entries from ``first`` up to ``end`` (exclusive); ``term`` and ``chain_crc`` of the last one, -1 if not known."""

    first: int
    end: int
    term: int = UNKNOWN
    chain_crc: int = UNKNOWN


class LogTable:
    """An open table, as of its newest version. Created by ``open_table``; used by one thread."""

    def __init__(self, path: Path, table: DeltaTable, origin: TableOrigin) -> None:
        self.path = path
        self.origin = origin
        self._table = table
        self._kept = _version_kept(path, table)
        self._synced = table.version()

    @property
    def version(self) -> int:
        """The table's version, which each commit raises."""
        return self._table.version()

    @property
    def position(self) -> int | None:
        """The index of the first entry that is not in the table; None if nothing was committed yet."""
        return self._kept.transaction_version(self.origin.application)

    @property
    def chain_crc(self) -> int:
        """``chainCrc`` of the last entry in the table, which covers all before it; -1 if not known."""
        noted = self._kept.transaction_version(f"{self.origin.application}/chainCrc")
        return UNKNOWN if noted is None else noted

    def append(self, files: Sequence[DataFile], span: EntrySpan) -> None:
        """Add files that hold the entries of ``span``: all of them, or none.

        Raises ``JobBusyError`` if another run has committed since this one opened the table.
        """
        self._check_position(span)
        actions: list[AddAction | RemoveAction] = [
            AddAction(one.path, one.size_bytes, {}, one.modified_ms, True, one.stats) for one in files
        ]
        try:
            self._table.create_write_transaction(
                actions, "append", self._table.schema(), commit_properties=self._commit_of(span)
            )
        except CommitFailedError as error:
            raise self._busy(error) from error
        self._table.update_incremental()
        self._committed(span.end)

    def upsert(self, rows: pa.Table, key: str, span: EntrySpan) -> None:
        """Replace the rows that have the keys of ``rows``, and add the others, with the position, in one commit.

        ``rows``: in the order of the log; of several with one key the last counts. Rows without a key (null) are
        added. Raises ``JobBusyError`` like ``append``.
        """
        self._check_position(span)
        merger = self._table.merge(
            newest(rows, key),
            predicate=f"held.{_quoted(key)} = new.{_quoted(key)}",
            source_alias="new",
            target_alias="held",
            streamed_exec=False,  # so that files whose keys are out of range are not read
            writer_properties=WriterProperties(compression="ZSTD"),
            commit_properties=self._commit_of(span),
        )
        try:
            merger.when_matched_update_all().when_not_matched_insert_all().execute()
        except CommitFailedError as error:
            raise self._busy(error) from error
        self._table.update_incremental()
        self._committed(span.end)

    def _committed(self, end: int) -> None:
        self._kept = self._table
        if self.position != end:
            raise self._busy(f"it holds the entries before {self.position} now")
        version = self.version
        sync_versions(self.path, self._synced + 1, version)
        self._synced = version

    def _check_position(self, span: EntrySpan) -> None:
        there, first, end = self.position, span.first, span.end
        if (there is not None and first < there) or end <= first:
            raise JobError(
                f"{self.path} already holds the entries before {there}: entries {first} to {end - 1} would be there "
                "twice. The log is shorter than the table says: it was replaced by another or older one; follow it "
                "into a new directory"
            )

    def _commit_of(self, span: EntrySpan) -> CommitProperties:
        facts = {_FIRST: span.first, _END: span.end, _TERM: span.term}
        application = self.origin.application
        return CommitProperties(
            custom_metadata={name: str(value) for name, value in facts.items()},
            app_transactions=[
                Transaction(application, span.end),
                Transaction(f"{application}/chainCrc", span.chain_crc),
            ],
        )

    def _busy(self, reason: object) -> JobBusyError:
        return JobBusyError(
            f"{self.path} was changed by another run while this one wrote to it ({reason}). No row is there "
            "twice; let only one run write to a table, and start it again"
        )


def open_table(path: Path, schema: pa.Schema, origin: TableOrigin) -> LogTable:
    """Open a table, or create it; columns that it lacks are added, with nulls in the rows that it has.

    Raises ``ConfigError`` if the directory holds something else, or a column has another type there.
    """
    path = path.absolute()
    table = _existing(path)
    if table is None:
        table = _created(path, schema, origin)
    _check_origin(path, table, origin)
    missing = _missing(path, pa.schema(table.schema().to_arrow()), schema)
    if missing:
        table.alter.add_columns(missing)
    stats = ",".join(stats_columns(pa.schema(table.schema().to_arrow())))
    if table.metadata().configuration.get(_STATS) != stats:
        table.alter.set_table_properties({_STATS: stats})
    return LogTable(path, table, origin)


def _version_kept(path: Path, newest: DeltaTable) -> DeltaTable:
    """The table as of the version whose rows it has: an older one, if it was restored after the last commit of a run.

    Restoring leaves the transactions as they are, so their position is beyond rows that are not there any more. Raises
    ``JobError`` if that version is no longer kept.
    """
    table, until = newest, newest.version()
    while (commit := _restoring(newest, until)) is not None:
        said: Mapping[str, Any] = commit.get("operationParameters", {})  # Any: a JSON document
        try:
            table = DeltaTable(path)
            table.load_as_version(_version_said(said))
        except (DeltaError, ValueError) as error:
            raise JobError(
                f"version {commit['version']} restored {path} to another ({said}), which is not readable ({error}): "
                "it is not known how much of the log it holds: follow the log into a new directory"
            ) from error
        until = min(table.version(), commit["version"] - 1)
    return table


def _restoring(table: DeltaTable, until: int) -> dict[str, Any] | None:  # Any: as above
    """The last commit, up to version ``until``, that restored an older version, unless a run has committed since."""
    limit = _COMMITS_READ
    while True:
        commits = table.history(limit)
        for one in (each for each in commits if each["version"] <= until):
            if _END in one:
                return None
            if one.get("operation") == "RESTORE":
                return one
        if len(commits) < limit:
            return None
        limit *= 8


def _version_said(said: Mapping[str, Any]) -> int | str | datetime:  # Any: as above
    """The version to restore, or its time: deltalake notes milliseconds, Spark a text."""
    if said.get("version") is not None:
        return int(said["version"])
    if "datetime" in said:
        return datetime.fromtimestamp(int(said["datetime"]) / 1000, UTC)
    return str(said.get("timestamp"))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def refuse_foreign(path: Path) -> None:
    """Raises ``ConfigError`` for a directory that holds something, and no Delta table."""
    if not path.is_dir() or (path / LOG).is_dir():
        return
    if any(not one.name.startswith((".", "_")) for one in path.iterdir()):
        raise ConfigError([f"{path} is not empty, and not a Delta table: name another directory"])


def _existing(path: Path) -> DeltaTable | None:
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        refuse_foreign(path)
        return None
    except DeltaError as error:
        raise JobError(f"{path} cannot be opened as a Delta table: {error}") from error


def _created(path: Path, schema: pa.Schema, origin: TableOrigin) -> DeltaTable:
    try:
        return DeltaTable.create(
            path,
            Schema.from_arrow(schema),
            configuration={**_PROPERTIES, _STATS: ",".join(stats_columns(schema)), ROWS: origin.text},
            raise_if_key_not_exists=False,
        )
    except DeltaError as error:
        table = _existing(path)  # another run was faster
        if table is None:
            raise JobError(f"{path}: the table cannot be created: {error}") from error
        return table


def _check_origin(path: Path, table: DeltaTable, origin: TableOrigin) -> None:
    kept = table.metadata().configuration.get(ROWS)
    if kept is None:
        raise ConfigError([f"{path} is a table that was not written from a log: name another directory"])
    there: dict[str, Any] = json.loads(kept)  # Any: a JSON document
    wanted = json.loads(origin.text)
    differing = [name for name in sorted({*there, *wanted}) if there.get(name) != wanted.get(name)]
    if differing:
        said = "; ".join(f"{name} was {there.get(name)!r}, is {wanted.get(name)!r}" for name in differing)
        raise ConfigError([f"{path} holds something else ({said}): name another directory"])


def _missing(path: Path, there: pa.Schema, wanted: pa.Schema) -> list[Field]:
    """The columns to add. Raises ``ConfigError`` for those of another type."""
    known = {field.name: field.type for field in there}
    # As Delta keeps them: its types are fewer than Arrow's.
    columns = pa.schema(Schema.from_arrow(wanted).to_arrow())
    wrong = [one for one in columns if one.name in known and not _same(known[one.name], one.type)]
    if wrong:
        said = "; ".join(f"column {one.name} is {known[one.name]} there, and {one.type} now" for one in wrong)
        raise ConfigError([f"{path}: {said}: a type cannot change; leave the column out, or write to a new directory"])
    lower = {name.lower(): name for name in known}
    if alike := [one.name for one in columns if one.name not in known and one.name.lower() in lower]:
        said = "; ".join(f"column {name} is {lower[name.lower()]} there" for name in alike)
        raise ConfigError(
            [f"{path}: {said}: names that differ only in case are one; name it so, or write to a new directory"]
        )
    return [field for field in Schema.from_arrow(wanted).fields if field.name not in known]


def _same(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether types are equal but for the names that libraries give to the parts of a list or map."""
    if pa.types.is_map(one) and pa.types.is_map(other):
        return _same(one.key_type, other.key_type) and _same(one.item_type, other.item_type)
    if pa.types.is_list(one) and pa.types.is_list(other):
        return _same(one.value_type, other.value_type)
    return bool(one.equals(other))


FILE_BYTES: Final = 128 << 20
"""The size of merged files; larger ones are left alone."""


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The files of one compaction."""

    merged: int
    made: int
    removed: int
    """Files that no version of the last ``keep_hours`` needs, among them those of runs that died."""


def compact(path: Path, keep_hours: int) -> CompactionResult:
    """Merge small files; remove those unused for ``keep_hours``: versions older than that cannot be read any more.

    Raises ``JobError``; the table is whole then, too.
    """
    try:
        table = DeltaTable(path)
        before = table.version()
        done = table.optimize.compact(target_size=FILE_BYTES, max_concurrent_tasks=1)
        sync_versions(path, before + 1, table.version())
        removed = table.vacuum(keep_hours, dry_run=False, enforce_retention_duration=False, full=True)
    except DeltaError as error:
        raise JobError(f"{path} could not be compacted: {error}") from error
    return CompactionResult(int(done["numFilesRemoved"]), int(done["numFilesAdded"]), len(removed))


class Compactor:
    """Compacts every ``every_s`` seconds while a table is written. A context manager, which waits for the thread."""

    def __init__(self, path: Path, every_s: float, keep_hours: int) -> None:
        self._path = path
        self._every_s = every_s
        self._keep_hours = keep_hours
        self._next_at = time.monotonic() + every_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compaction")
        self._running: Future[CompactionResult] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if error is None and self._running is not None:
            self._running.result()

    def step(self, *, beside: bool) -> CompactionResult | None:
        """Start a compaction if one is due; the result of one that has ended. Raises ``JobError`` if that failed.

        ``beside``: whether the caller goes on meanwhile; else it waits for the end.
        """
        if self._running is None and time.monotonic() >= self._next_at:
            self._running = self._thread.submit(compact, self._path, self._keep_hours)
        if self._running is None or (beside and not self._running.done()):
            return None
        ended, self._running = self._running, None
        self._next_at = time.monotonic() + self._every_s
        return ended.result()
