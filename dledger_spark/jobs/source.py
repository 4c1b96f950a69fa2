"""Selects the part of a log that a job reads: the same options for all jobs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import click
from click.core import ParameterSource

from dledger.command_line import flag_values
from dledger.command_line.contexts import ContextOption, chosen_in
from dledger.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dledger.client import DLedgerClient

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
