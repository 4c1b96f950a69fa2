"""Selects the part of a log that a job reads, by the same options for all jobs, and measures its extent.

A replicated log is counted in entries, by index, in a directory as in a running group. The log of a plain broker, or
one that was plain once, has no indexes throughout, and is counted in bytes, by position.
"""

from __future__ import annotations

import functools
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, ParamSpec, Protocol, TypeVar

import click
from click.core import ParameterSource

from dledger.command_line import flag_values
from dledger.command_line.contexts import ContextOption, chosen_in
from dledger.errors import ConfigError
from dledger_spark.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dledger.client import DLedgerClient
if TYPE_CHECKING:
    from dledger_spark.directory import LogDirectory, LogSegment
    from dledger_spark.options import ReadOptions
    from dledger_spark.source.client_log import ClientLog
if TYPE_CHECKING:
    from pyspark.sql import Column

FORMAT = "dledger"

_CHOOSING: Final = frozenset(("allowuncommitted", "recordformat", "subscribepattern", "verifycrc"))

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LogSource:
    """A log (``path`` or ``bootstrap``) and a range of it; ``to_index`` and ``to_time_ms`` are exclusive ends."""

    path: str | None = None
    bootstrap: str | None = None
    group: str = "default"
    topics: tuple[str, ...] = ()
    """Empty: all topics."""
    from_index: int | None = None
    to_index: int | None = None
    from_time_ms: int | None = None
    to_time_ms: int | None = None
    read_from: str = "leader"
    others: Mapping[str, str] = field(default_factory=dict)
    """Further options of the format."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.bootstrap is None):
            raise ConfigError(["name the log: its directory, or --bootstrap HOST:PORT,… of a running group"])
        for what, first, last in (
            ("index", self.from_index, self.to_index),
            ("time", self.from_time_ms, self.to_time_ms),
        ):
            if first is not None and last is not None and first >= last:
                raise ConfigError([f"empty range: --from-{what} must be less than --to-{what}"])

    @property
    def is_live(self) -> bool:
        """Whether it is a running group."""
        return self.bootstrap is not None

    @property
    def name(self) -> str:
        """A name for titles and messages."""
        return self.path if self.path is not None else f"group {self.group} at {self.bootstrap}"

    def options(self) -> dict[str, str]:
        """The options for ``spark.read``."""
        found = dict(self.others)
        if self.path is not None:
            # The working directory of Spark's processes may differ from ours.
            found["path"] = str(Path(self.path).absolute())
        else:
            found |= {"bootstrap.servers": self.bootstrap or "", "group": self.group, "readFrom": self.read_from}
        if self.topics:
            found["subscribe"] = ",".join(self.topics)
        if self.from_index is not None:
            found["startingOffsets"] = f'{{"index":{self.from_index}}}'
        if self.to_index is not None:
            found["endingOffsets"] = f'{{"index":{self.to_index}}}'
        if self.from_time_ms is not None:
            found["startingTimestamp"] = str(self.from_time_ms)
        if self.to_time_ms is not None:
            found["endingTimestamp"] = str(self.to_time_ms)
        return found

    def chosen(self) -> dict[str, str]:
        """The further options that affect which rows are read, or their contents."""
        return {name.lower(): text for name, text in self.others.items() if name.lower() in _CHOOSING}

    def between(self, unit: str, first: int, end: int) -> LogSource:
        """The same log from ``first`` up to ``end`` (exclusive), without time limits.

        The whole log if the unit is positions, which the format cannot select.
        """
        whole = replace(self, from_index=None, to_index=None, from_time_ms=None, to_time_ms=None)
        return replace(whole, from_index=first, to_index=end) if unit == "index" else whole

    def read(self, spark: SparkSession, schema: str) -> DataFrame:
        """The rows with only the columns of ``schema``, so that no others are decoded or transferred."""
        return spark.read.format(FORMAT).schema(schema).options(**self.options()).load()


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """Rows in Parquet files instead of a log."""

    path: Path
    topics: tuple[str, ...] = ()
    from_time_ms: int | None = None
    to_time_ms: int | None = None

    @property
    def name(self) -> str:
        """A name for titles and messages."""
        return str(self.path)


def source_options(command: Callable[Concatenate[LogSource, P], Result]) -> Callable[..., Result]:
    """Add the argument DIR and the options of a ``LogSource``, passed to the command as its first argument."""

    @functools.wraps(command)
    def with_source(*args: P.args, **typed: P.kwargs) -> Result:
        return command(_checked_source(typed), *args, **typed)

    return _with_options(with_source, _OPTIONS)


def source_or_parquet_options(
    command: Callable[Concatenate[LogSource | ParquetSource, P], Result],
) -> Callable[..., Result]:
    """The same, with ``--parquet DIR`` as an alternative to the log."""

    @functools.wraps(command)
    def with_source(*args: P.args, **typed: P.kwargs) -> Result:
        parquet = typed.pop("parquet")
        given = click.get_current_context().get_parameter_source
        if parquet is None:
            return command(_checked_source(typed), *args, **typed)
        for name, what in (("path", "DIR"), ("bootstrap", "--bootstrap"), ("from_index", "--from-index")):
            if typed[name] is not None and given(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--parquet replaces the log: leave out {what}")
        source = _log_source(typed | {"path": Path(), "bootstrap": None})
        for name in _NAMES:
            typed.pop(name)
        assert isinstance(parquet, Path)
        found = ParquetSource(parquet, source.topics, source.from_time_ms, source.to_time_ms)
        return command(found, *args, **typed)

    return _with_options(with_source, (*_OPTIONS, _PARQUET))


def _with_options(command: Callable[..., Result], options: Sequence[Callable[..., Any]]) -> Callable[..., Result]:
    for one in reversed(options):
        command = one(command)
    return command


def _checked_source(typed: dict[str, Any]) -> LogSource:  # Any: what click made of each option
    source = _log_source(typed)
    master = click.get_current_context().params.get("master") or ""
    check(source, dialled=not master.startswith("sc://") and not os.environ.get("SPARK_REMOTE"))
    return source


def check(source: LogSource, *, dialled: bool = True) -> None:
    """Look for the log before Spark starts, which takes half a minute.

    ``dialled``: a running group is asked, too, which with Spark Connect only the server may be able to reach. Raises
    ``OptionError`` for options that make no sense or name another group, ``LogDirectoryError`` for a directory without
    a log, and the client's ``DLedgerError`` for a group that does not answer.
    """
    from dledger_spark.directory.files import find
    from dledger_spark.options import ReadOptions

    options = ReadOptions.parse(source.options())
    if source.path is not None:
        find(Path(source.path))
    elif dialled:
        from dledger.client import DLedgerClient

        client = DLedgerClient(options.servers, group=options.group, security=options.security.client())
        with closing(client):  # not one to be shared: Spark starts processes later
            _ask(client, options.group)


def _ask(client: DLedgerClient, group: str) -> None:
    from dledger.errors import IdentityError
    from dledger_spark.errors import OptionError

    try:
        client.metadata()
    except IdentityError as error:
        raise OptionError(f"option --group {group}: {error}") from error


def _log_source(typed: dict[str, Any]) -> LogSource:  # Any: what click made of each option
    """Extract the options of a source from all parameters."""
    path, bootstrap, group, read_from, topics, from_index, to_index, from_time, to_time, option = (
        typed.pop(name) for name in _NAMES
    )
    return LogSource(
        path=None if path is None else str(path),
        bootstrap=bootstrap if path is None else None,
        group=group,
        topics=words(topics),
        from_index=from_index,
        to_index=to_index,
        from_time_ms=_ms(from_time),
        to_time_ms=_ms(to_time),
        read_from=read_from,
        others=(security_of_environment() if path is None else {}) | assigned(option, "--option"),
    )


def words(texts: Sequence[str]) -> tuple[str, ...]:
    """Values of an option that may be repeated and may contain commas."""
    return tuple(one.strip() for text in texts for one in text.split(",") if one.strip())


def security_of_environment() -> dict[str, str]:
    """TLS and access key options of the format, from the environment, and else from the context."""
    name, chosen = chosen_in(click.get_current_context())
    given = {one: os.environ.get(f"DLEDGER_{one.upper()}") or chosen.get(one) for one in _SECURITY}
    found = {_SECURITY[one]: text for one, text in given.items() if text}
    of_environment = os.environ.get("DLEDGER_SECRET_KEY_FILE")
    of_context = "" if os.environ.get("DLEDGER_ACCESS_KEY") else chosen.get("secret_key_file")  # of the context's key
    file = of_environment or of_context
    if file and "secretKey" not in found:
        try:
            found["secretKey"] = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            place = "DLEDGER_SECRET_KEY_FILE" if of_environment else f"context {name}: secret-key-file"
            raise ConfigError([f"{place}: {file} cannot be read: {error}"]) from error
    return found


_SECURITY: Final = {
    "tls_ca": "tlsCa",
    "tls_cert": "tlsCertificate",
    "tls_key": "tlsKey",
    "insecure": "insecure",
    "access_key": "accessKey",
    "secret_key": "secretKey",
}
_NAMES: Final = (
    "path",
    "bootstrap",
    "group",
    "read_from",
    "topics",
    "from_index",
    "to_index",
    "from_time",
    "to_time",
    "option",
)
"""Click's parameter names for the options of a source."""
_PARQUET: Final = click.option(
    "--parquet",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Read Parquet instead of a log: column body, optionally topic, keys, tags, queueId, properties.",
)
_TIMES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M"]
_TIME = click.DateTime(_TIMES)
_OPTIONS = (
    click.argument(
        "path", required=False, metavar="[DIR]", type=click.Path(exists=True, file_okay=False, path_type=Path)
    ),
    click.option(
        "-b",
        "--bootstrap",
        cls=ContextOption,
        envvar="DLEDGER_BOOTSTRAP",
        metavar="HOST:PORT,…",
        help="Read a running group instead of DIR: addresses of nodes (also DLEDGER_BOOTSTRAP).",
    ),
    click.option("-g", "--group", cls=ContextOption, default="default", show_default=True, help="Name of the group."),
    click.option(
        "--read-from",
        type=click.Choice(["leader", "follower", "any"]),
        default="leader",
        show_default=True,
        help="Which node of a running group to read from.",
    ),
    click.option("-t", "--topic", "topics", multiple=True, help="Only these topics; may be repeated or hold commas."),
    click.option("--from-index", type=flag_values.Whole(min=0), help="First entry; default: the first one kept."),
    click.option(
        "--to-index", type=flag_values.Whole(min=0), help="Stop before this entry; default: the committed end."
    ),
    click.option("--from-time", type=_TIME, metavar="TIME", help="From this store time (UTC, 2026-11-20T08:30)."),
    click.option("--to-time", type=_TIME, metavar="TIME", help="Up to this store time (UTC)."),
    click.option(
        "--option", multiple=True, metavar="NAME=VALUE", help="Other option of the format dledger; may be repeated."
    ),
)


def _ms(at: datetime | None) -> int | None:
    return None if at is None else int(at.replace(tzinfo=UTC).timestamp() * 1000)


def assigned(texts: Sequence[str], hint: str) -> dict[str, str]:
    """``NAME=VALUE`` texts as a dict. Raises ``click.BadParameter``, which names the option ``hint``."""
    wrong = [one for one in texts if "=" not in one or one.startswith("=")]
    if wrong:
        raise click.BadParameter(f"invalid option {wrong[0]!r}: use NAME=VALUE", param_hint=hint)
    return {name.strip(): value for name, _, value in (one.partition("=") for one in texts)}


Unit = Literal["index", "position"]
"""The unit of counting, which is also the name of its column."""


class _Places(Protocol):
    def end_within(self, first: int, end: int, size_bytes: int) -> int:
        """The highest end up to ``end`` with at most ``size_bytes`` between ``first`` and it; at least one record."""

    def at_time(self, time_ms: int) -> int:
        """The first place stored at this time or later, or the end."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The committed range now: from ``begin`` up to ``end`` (exclusive), in ``unit``."""

    identity: str
    """Equal for all copies of a replicated log, and different for all other logs."""
    unit: Unit
    begin: int
    end: int
    holds_messages: bool
    places: _Places
    group: str = ""
    """The group's name, for a replicated log, if known."""

    def end_within(self, first: int, end: int, size_bytes: int) -> int:
        """The highest end up to ``end`` with at most ``size_bytes`` between ``first`` and it; at least one record.

        For a plain log always ``end``.
        """
        return self.places.end_within(first, end, size_bytes)

    def at_time(self, time_ms: int) -> int:
        """The first place stored at this time or later, or the end."""
        return self.places.at_time(time_ms)


def read_options(source: LogSource) -> ReadOptions:
    """The format's options, validated before Spark is started. Raises ``ConfigError``."""
    from dledger_spark.errors import OptionError
    from dledger_spark.options import ReadOptions

    try:
        return ReadOptions.parse(source.options())
    except OptionError as error:
        raise ConfigError([str(error)]) from error


def extent_of(source: LogSource) -> Extent:
    """The extent of the selected log. Raises ``ConfigError``, and errors from reading the log."""
    whole = replace(source, from_index=None, to_index=None, from_time_ms=None, to_time_ms=None)
    options = read_options(whole)
    return _of_group(options) if source.is_live else _of_directory(source, options)


def _of_group(options: ReadOptions) -> Extent:
    from dledger_spark.source.client_log import ClientLog

    log = ClientLog(options)
    kept = log.committed()
    holds = kept.holds_messages if options.record_format == "auto" else options.record_format == "message"
    name = identity_of(kept.cluster, kept.group)
    return Extent(name, "index", kept.begin_index, kept.end_index, holds, _GroupPlaces(log), kept.group)


def _of_directory(source: LogSource, options: ReadOptions) -> Extent:
    from dledger.store.identity import read_identity
    from dledger_spark.directory import open_directory
    from dledger_spark.directory.log import first_index_of

    log = open_directory(options.path, allow_uncommitted=options.allow_uncommitted)
    content = log.content() if options.record_format == "auto" else options.record_format
    places = _DirectoryPlaces(log, options)
    if not log.segments or any(one.framing == "plain" for one in log.segments):
        if source.from_index is not None or source.to_index is not None:
            raise ConfigError(
                [f"{source.name} is or was a plain log, which has no indexes: use --from-time and --to-time"]
            )
        identity = f"plain log in {log.path.resolve()}"
        return Extent(identity, "position", log.begin, log.end, content == "message", _PositionPlaces(places))
    node = log.index.directory.parent if log.index is not None else log.path
    known = read_identity(node)
    identity = f"log in {log.path.resolve()}" if known is None else identity_of(known.cluster_id, known.group)
    begin = first_index_of(log, log.segments[0])
    group = "" if known is None else known.group
    return Extent(identity, "index", begin, log.committed + 1, content == "message", places, group)


def identity_of(cluster: str, group: str) -> str:
    """The identity of a replicated log."""
    return f"group {group} of cluster {cluster}"


@dataclass(frozen=True, slots=True)
class _GroupPlaces:
    log: ClientLog

    def end_within(self, first: int, end: int, size_bytes: int) -> int:
        from dledger_spark.source.client_log import IndexRange, TrimmedError, end_within

        try:
            return end_within(IndexRange(first, end), size_bytes, self.log)
        except TrimmedError as error:
            raise JobError(
                f"the log was trimmed meanwhile and now starts at {error.begin_index}: run the job again"
            ) from error

    def at_time(self, time_ms: int) -> int:
        return self.log.index_at(time_ms)


@dataclass(frozen=True, slots=True)
class _DirectoryPlaces:
    log: LogDirectory
    options: ReadOptions

    def end_within(self, first: int, end: int, size_bytes: int) -> int:
        from dledger_spark.directory.log import first_index_of

        begin, last = self._place(first), self._place(end - 1)
        limit = begin[0] + size_bytes
        if last[1] <= limit:
            return end
        number = bisect_right(self.log.segments, limit, key=lambda one: one.base) - 1
        segment, after = self.log.segments[number], self.log.segments[number + 1 : number + 2]
        low = max(first, first_index_of(self.log, segment))  # all earlier entries end before the limit
        high = min(end, first_index_of(self.log, after[0])) if after else end  # all entries from there on end after it
        return max(first + 1, low + self._ending_before(limit, segment, low, high))

    def _ending_before(self, limit: int, segment: LogSegment, low: int, high: int) -> int:
        """How many entries of a segment, from ``low`` up to ``high`` (exclusive), end at or before a position."""
        from dledger_spark.decode import walk

        index = self.log.index
        if index is not None and all(index.place(one) is not None for one in (low, high - 1)):
            return bisect_right(range(low, high), limit, key=lambda one: self._place(one)[1])
        start = self._place(low)[0] - segment.base
        with segment.path.open("rb") as file, mmap.mmap(file.fileno(), segment.size, access=mmap.ACCESS_READ) as mapped:
            found = walk(mapped, segment.framing, start, min(segment.size, self.log.end - segment.base))
        ends = [*(int(one) for one in found.starts[1:]), found.end]
        return bisect_right(ends, limit - segment.base)

    def _place(self, index: int) -> tuple[int, int]:
        from dledger_spark.directory import locate

        place = locate(self.log, index)
        if place is None:
            raise JobError(f"entry {index} is no longer in {self.log.path}: run the job again")
        return place

    def at_time(self, time_ms: int) -> int:
        position = self.position_at(time_ms)
        segment = self.log.segment_at(position) if position < self.log.end else None
        header = None if segment is None else segment.header(position)
        return self.log.committed + 1 if header is None else header.index

    def position_at(self, time_ms: int) -> int:
        from dledger_spark.directory import range_of

        return range_of(self.log, replace(self.options, starting_ms=time_ms))[0]


@dataclass(frozen=True, slots=True)
class _PositionPlaces:
    directory: _DirectoryPlaces

    def end_within(self, first: int, end: int, size_bytes: int) -> int:  # noqa: ARG002  # a port
        # Readers reach a position only by passing everything before it: one batch, of any size, reads the log once.
        return end

    def at_time(self, time_ms: int) -> int:
        return self.directory.position_at(time_ms)


_OWN_TOPICS: Final = ("RMQ_SYS_", "SCHEDULE_TOPIC_", "OFFSET_MOVED_EVENT", "SELF_TEST_TOPIC", "TBW102")
"""Prefixes of their names. Delayed messages and those of transactions come to their real topics when they are due."""


def is_own() -> Column:
    """Whether a row's topic is one of them; false for an entry that is no message."""
    from pyspark.sql import functions as f

    topic = f.coalesce(f.col("topic"), f.lit(""))
    found = f.lit(False)
    for prefix in _OWN_TOPICS:
        found = found | f.startswith(topic, f.lit(prefix))
    return found


def is_of_users() -> Column:
    """Whether a row is a message of another topic; false for an entry that is no message."""
    from pyspark.sql import functions as f

    return f.col("topic").isNotNull() & ~is_own()
