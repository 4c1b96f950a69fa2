"""``dledger pipeline changes``: sends the changes of a Delta table to a topic, each once.

A commit of a table is a set of rows: inserted, changed or deleted. They become messages, version by version. Some
versions together go through one named writer, whose rows the target counts (``docs/guarantees.md``), in an order that
depends only on the table; so what a killed run has sent is not sent again. When all of them are stored, the table
itself takes note, as the version of an application transaction of the target: the next writer begins there.

Needs neither Spark's workers nor its JVM: a table's changes are few beside its rows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from dledger.command_line import flag_values
from dledger.command_line.report_page import CountUnit
from dledger.errors import ConfigError
from dledger_spark.errors import JobBusyError, JobError, MissingPartError
from dledger_spark.jobs.batches import STATE, locked
from dledger_spark.jobs.command import report_command, run_standalone
from dledger_spark.jobs.replay import DROPPED_PROPERTIES, ReplayTarget, write_options
from dledger_spark.jobs.report import Fact, JobReport
from dledger_spark.jobs.source import assigned, security_of_environment

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from dledger_spark.source.sink import RowFormat

_VERSIONS_MAX: Final = 100
"""How many versions one writer sends: so many are read again after a kill."""
ROWS_MAX: Final = 2_000_000
"""How many changed rows a version may have: they are sorted in memory."""
_COLUMNS: Final = (("body", "binary"), ("keys", "string"), ("tags", "string"), ("properties", "map<string,string>"))
_CHANGE: Final = "_change_type"
_ADDED: Final = frozenset({_CHANGE, "_commit_version", "_commit_timestamp"})
_BEFORE: Final = "update_preimage"
"""A row as it was before it was changed: not sent."""
_NAMES: Final = {"insert": "insert", "update_postimage": "update", "delete": "delete"}
"""The property ``changeType`` of a message."""


@dataclass(frozen=True, slots=True)
class ChangesOptions:
    """``key``: the column that becomes the messages' keys; empty: the column keys. ``from_version``: the first version
    to send, unless some were sent before. ``once``: end with the newest version at the start.
    """

    path: Path
    target: ReplayTarget
    key: str = ""
    from_version: int = 0
    trigger_s: float = 2.0
    once: bool = False
    show: Callable[[str], None] = field(default=click.echo, repr=False)


def run(options: ChangesOptions) -> JobReport:
    """Send until Ctrl-C, or with ``once`` up to the newest version."""
    from dledger_spark.source.sink import check_target, row_format

    if missing := flag_values.missing_extra("delta", "a Delta table", ("deltalake",)):
        raise MissingPartError(missing)
    began = time.monotonic()
    form = row_format(_COLUMNS)
    check_target(write_options(options.target), form)
    with _only_run(options):
        sender = ChangeSender(options, form)
        try:
            while sender.send() or not options.once:
                if sender.is_done:
                    time.sleep(options.trigger_s)
        except KeyboardInterrupt:
            click.echo("stopping", err=True)
    seconds = time.monotonic() - began
    summary = (
        Fact("table", str(options.path)),
        Fact("to", f"topic {options.target.topic}"),
        Fact("version", sender.sent, CountUnit.COUNT),
        Fact("messages", sender.messages, CountUnit.COUNT),
        Fact("seconds", seconds, CountUnit.SECONDS),
        Fact("messages per second", sender.messages / seconds, CountUnit.PER_SECOND),
    )
    return JobReport("changes", f"Changes of {options.path}", summary)


@contextmanager
def _only_run(options: ChangesOptions) -> Iterator[None]:
    """While it lasts, no other run on this machine sends to the same topic.

    Of two at a time, one may note versions that the other has sent in part, with more of them, by its own writer.
    """
    _opened(options.path)
    state = options.path / STATE
    state.mkdir(exist_ok=True)
    name = hashlib.sha256(_application(options.target).encode()).hexdigest()[:32]
    with locked(state / f"changes-{name}.lock", options.path):
        yield


def _application(target: ReplayTarget) -> str:
    """The id of the transactions that note what the topic has."""
    return f"dledger-changes/{target.group}/{target.topic}"


class ChangeSender:
    """Sends some versions at a time."""

    def __init__(self, options: ChangesOptions, form: RowFormat) -> None:
        self._options = options
        self._form = form
        self._target = write_options(options.target)
        self._table = _opened(options.path)
        self._application = _application(options.target)
        self._noted = self._table.transaction_version(self._application)
        self.sent = options.from_version - 1 if self._noted is None else self._noted
        """The newest version whose changes are all stored; before the first one: one less than it."""
        self._begin = self.sent + 1
        """The version after the one that the table has noted: it names the writer, as it does for the next run."""
        self.messages = 0
        self.is_done = False
        """Whether the newest version is sent."""

    def send(self) -> bool:
        """Send the next versions; whether there were any. Raises ``JobError``, and errors of the target."""
        from dledger_spark.source.sink import open_target

        self._table.update_incremental()
        if self._table.transaction_version(self._application) != self._noted:
            raise self._busy("the table's note has changed")
        newest = self._table.version()
        last = min(newest, self.sent + _VERSIONS_MAX)
        self.is_done = last == newest
        if self.sent >= last:
            return False
        row = 0
        with open_target(self._target, self._form, self._writer()) as target:
            stored = target.begin()
            for version in range(self.sent + 1, last + 1):
                batch = messages_of(self._changes(version), self._options.key, version)
                known = min(batch.num_rows, max(0, stored - row))
                if known < batch.num_rows:
                    target.add(batch.slice(known), row + known)
                row += batch.num_rows
            target.finish()
        if stored > row:
            raise JobError(
                f"the topic has {stored:,} messages of versions {self.sent + 1} to {last}, but they have {row:,} "
                "changes: the table was replaced by another or older one; send it to a new topic"
            )
        if row:
            self._note(last)
            self._options.show(f"versions {self.sent + 1} to {last}: {row - stored:,} messages")
        self.messages += row - stored
        self.sent = last
        return True

    def _writer(self) -> str:
        facts = [self._table.metadata().id, self._application, self._begin]
        return f"changes-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}/0"

    def _changes(self, version: int) -> pa.Table:
        """The changed rows of a version. Raises ``JobError``."""
        import pyarrow as pa
        from deltalake.exceptions import DeltaError

        schema = pa.schema(self._table.schema().to_arrow()).append(pa.field(_CHANGE, pa.string()))
        found: list[pa.RecordBatch] = []
        rows = 0
        try:
            for batch in pa.RecordBatchReader.from_stream(self._table.load_cdf(version, version)):
                found.append(batch)
                rows += batch.num_rows
                if rows > ROWS_MAX:
                    raise JobError(f"version {version} of {self._options.path} changes more than {ROWS_MAX:,} rows")
        except (DeltaError, OSError) as error:
            raise JobError(
                f"the changes of version {version} of {self._options.path} cannot be read ({error}): the table needs "
                "the property delta.enableChangeDataFeed=true since then, and its files of then; start later with "
                "--from-version"
            ) from error
        if not rows:
            return schema.empty_table()
        whole = pa.Table.from_batches(found)
        return whole.select([name for name in whole.column_names if name in schema.names]).cast(
            pa.schema([schema.field(name) for name in whole.column_names if name in schema.names])
        )

    def _note(self, version: int) -> None:
        """Write into the table that everything up to ``version`` is stored."""
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        noted = CommitProperties(app_transactions=[Transaction(self._application, version)])
        try:
            self._table.create_write_transaction([], "append", self._table.schema(), commit_properties=noted)
        except CommitFailedError as error:
            raise self._busy(error) from error
        self._noted, self._begin = version, version + 1

    def _busy(self, reason: object) -> JobBusyError:
        return JobBusyError(
            f"another run sends the changes of {self._options.path} to {self._options.target.topic} ({reason}): no "
            "message is there twice; let only one run"
        )


def messages_of(changes: pa.Table, key: str, version: int) -> pa.RecordBatch:
    """The messages for a version's changes, in an order that depends on nothing but the rows.

    The body is the column body, or, if there is none, the row as JSON. Raises ``ConfigError`` if there is no column
    ``key``.
    """
    import pyarrow as pa

    if key and key not in changes.column_names:
        raise ConfigError([f"--key: no column {key} in the table ({', '.join(changes.column_names)})"])
    rows = [_message(row, key, version) for row in changes.to_pylist() if row[_CHANGE] != _BEFORE]
    rows.sort(key=lambda one: one[0])
    columns = list(zip(*(one[1:] for one in rows), strict=True)) or [()] * len(_COLUMNS)
    kinds = (pa.binary(), pa.string(), pa.string(), pa.map_(pa.string(), pa.string()))
    arrays = [pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in _COLUMNS])


_Message = tuple[tuple[int, str, bytes], bytes, str | None, str | None, list[tuple[str, str]]]
"""Its sort key, and its columns. Null columns are not in the key: one added later does not change the order."""


def _message(row: dict[str, Any], key: str, version: int) -> _Message:  # Any: each column has a type of its own
    change = _NAMES[row[_CHANGE]]
    shown = {name: value for name, value in row.items() if name not in _ADDED}
    body = shown.get("body")
    if isinstance(body, str):
        body = body.encode()
    text = _as_json(shown)
    known = _as_json({name: value for name, value in shown.items() if value is not None})
    keys = shown.get(key or "keys")
    properties = {name: value for name, value in _pairs(shown.get("properties")) if name not in DROPPED_PROPERTIES}
    properties |= {"changeType": change, "tableVersion": str(version)}
    at = shown.get("index")
    return (
        (at if isinstance(at, int) else 0, change, known.encode()),
        body if isinstance(body, bytes) else text.encode(),
        None if keys is None else _plain(_in_json(keys)),
        shown["tags"] if isinstance(shown.get("tags"), str) else None,
        sorted(properties.items()),
    )


def _pairs(value: object) -> list[tuple[str, str]]:
    """A map's entries, if it is one of texts."""
    pairs = value if isinstance(value, list) else []
    return [(one[0], one[1]) for one in pairs if isinstance(one, tuple) and all(isinstance(part, str) for part in one)]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=_as_text)


def _as_json(row: Mapping[str, object]) -> str:
    return json.dumps(_in_json(row), default=_as_text, ensure_ascii=False, sort_keys=True)


def _in_json(value: object) -> object:
    """The same, with numbers that JSON does not have as texts: NaN, Infinity, -Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _in_json(one) for name, one in value.items()}
    return [_in_json(one) for one in value] if isinstance(value, list | tuple) else value


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, date | datetime) else str(value)


def _opened(path: Path) -> DeltaTable:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        return DeltaTable(path)
    except DeltaError as error:
        raise ConfigError([f"{path} cannot be opened as a Delta table: {error}"]) from error


# -- the command line -------------------------------------------------------------------------------------------------


@report_command(
    run,
    name="changes",
    short_help="Send a Delta table's changes to a topic.",
    epilog="""\b
Examples:
  dledger pipeline changes /lake/orders --to 127.0.0.1:10911 --to-group broker-a --to-topic order-changes
  dledger pipeline changes /lake/prices --key product --to 127.0.0.1:10911 --to-group broker-a --to-topic prices --once

\b
Stop it with Ctrl-C; started again, it continues with the first change that the topic does not have.""",
)
@click.argument("path", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "to", required=True, metavar="HOST:PORT,…", help="Nodes of the group to write to.")
@click.option("--to-group", default="default", show_default=True, metavar="NAME", help="Name of that group.")
@click.option("--to-topic", required=True, metavar="TOPIC", help="Topic to write to.")
@click.option("--key", default="", metavar="NAME", help="Column for the messages' keys; default: the column keys.")
@click.option(
    "--from-version",
    type=flag_values.Whole(min=0),
    default=0,
    show_default=True,
    help="First version to send, if none was sent to this topic before.",
)
@click.option(
    "--trigger",
    "trigger_s",
    type=flag_values.Seconds(min=0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to check for new versions.",
)
@click.option("--once", is_flag=True, help="Stop when the newest version is sent.")
@click.option("--to-option", multiple=True, metavar="NAME=VALUE", help="Other option of the sink; may be repeated.")
def command(  # noqa: PLR0913  # one per option
    path: Path,
    to: str,
    to_group: str,
    to_topic: str,
    key: str,
    from_version: int,
    trigger_s: float,
    once: bool,
    to_option: tuple[str, ...],
) -> ChangesOptions:
    """Send the rows that each version of a Delta table inserts, changes or deletes to a topic, each exactly once."""
    others = security_of_environment() | assigned(to_option, "--to-option")
    target = ReplayTarget(to, to_group, to_topic, others)
    return ChangesOptions(path, target, key, from_version, trigger_s, once)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """For ``python -m dledger_spark.jobs.changes``."""
    run_standalone(command, argv)


if __name__ == "__main__":
    main()
