"""The command-line framework of all jobs: where they run, how they report, how they end.

A job's function takes a session and its options and returns a report; its command converts the command line to options.
This module connects the two, for ``dledger pipeline <job>`` and for ``spark-submit``::

    @job_command(run, name="stats", short_help="…", epilog="…")
    @click.argument("path")
    def command(path: str) -> StatsOptions:
        '''What --help says.'''
        return StatsOptions(path)

    def main(argv: Sequence[str] | None = None) -> None:
        run_standalone(command, argv)
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, ParamSpec, TypeVar

import click

from dledger.command_line import flag_values
from dledger.errors import ConfigError, DLedgerError
from dledger_spark.errors import JobError, MissingPartError, SparkFailedError
from dledger_spark.jobs.report import EXIT_FAILED, JobReport, print_json, print_report, write_page
from dledger_spark.jobs.source import assigned
from dledger_spark.session import START_DEFAULTS, is_remote, open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PYTHON_ERROR: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception|Interrupt)): (.+)$")
_JAVA_FRAME: Final = re.compile(r"^\s+at |^\s*\.\.\. \d+ more$|^\s+File \"")
_LINES_MAX: Final = 4


def reason(text: str) -> str:
    """The last error raised by Python code, as a sentence; otherwise the first lines, without the stack."""
    lines = text.splitlines()
    found = next(filter(None, map(_PYTHON_ERROR.match, lines)), None)
    if found is not None:
        kind, words = found[1], found[2].strip()
        return f"{kind}: {words}" if kind in _PLAIN else words
    kept = [line.strip() for line in lines if line.strip() and not _JAVA_FRAME.match(line)]
    return " ".join(kept[:_LINES_MAX]) or "Spark gave no reason"


_PLAIN: Final = frozenset(
    {"TypeError", "ValueError", "KeyError", "AttributeError", "RuntimeError", "OSError", "IndexError"}
)
"""Exceptions whose message is unclear without their name."""


EXIT_USAGE = 2
PROGRESS_BAR = "spark.ui.showConsoleProgress"
NOT_REMOTE = {
    "table": "its tasks write files, for which Spark Connect has no call",
}
"""Jobs that cannot run on Spark Connect, and why."""
_SHUFFLE = "spark.sql.shuffle.partitions"

P = ParamSpec("P")
Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class JobFrame:
    """Where a job runs, and where its report goes."""

    master: str | None
    conf: Mapping[str, str]
    as_json: bool
    html: Path | None
    job: str = ""


def job_command(
    run: Callable[[SparkSession, Options], JobReport], *, name: str, short_help: str, epilog: str
) -> Callable[[Callable[P, Options]], click.Command]:
    """Make a command from a function that converts the command line to the job's options."""

    def decorate(parse: Callable[P, Options]) -> click.Command:
        @functools.wraps(parse)
        def whole(
            master: str | None,
            conf: tuple[str, ...],
            as_json: bool,
            html: Path | None,
            debug: bool,
            *args: P.args,
            **typed: P.kwargs,
        ) -> None:
            with _traces(debug):
                require_spark()  # also reading a directory needs its packages
                options = parse(*args, **typed)
                report = run_job(run, options, JobFrame(master, assigned(conf, "--conf"), as_json, html, name))
            click.get_current_context().exit(report.exit_code)

        return _with_options(whole, (*_SPARK_OPTIONS, *_REPORT_OPTIONS), name, short_help, epilog)

    return decorate


def report_command(
    run: Callable[[Options], JobReport], *, name: str, short_help: str, epilog: str
) -> Callable[[Callable[P, Options]], click.Command]:
    """The same for a job that needs Spark's packages, and no session."""

    def decorate(parse: Callable[P, Options]) -> click.Command:
        @functools.wraps(parse)
        def whole(as_json: bool, html: Path | None, debug: bool, *args: P.args, **typed: P.kwargs) -> None:
            with _traces(debug):
                require_spark()
                report = run(parse(*args, **typed))
                _output(report, as_json=as_json, html=html)
            click.get_current_context().exit(report.exit_code)

        return _with_options(whole, _REPORT_OPTIONS, name, short_help, epilog)

    return decorate


def _with_options(
    command: Callable[..., None],
    options: Sequence[Callable[[Callable[..., None]], Callable[..., None]]],
    name: str,
    short_help: str,
    epilog: str,
) -> click.Command:
    for option in reversed(options):
        command = option(command)
    return click.command(name, short_help=short_help, epilog=epilog)(command)


_SPARK_OPTIONS = (
    click.option(
        "--master",
        envvar="SPARK_MASTER",
        metavar="URL",
        help="Where Spark runs: local[N], spark://HOST:7077, yarn, k8s://…, sc://HOST; default: all processors of "
        "this machine, or as set by spark-submit.",
    ),
    click.option(
        "--conf",
        multiple=True,
        metavar="NAME=VALUE",
        help="Spark setting, for example spark.driver.memory=4g; may be repeated.",
    ),
)
_REPORT_OPTIONS = (
    click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables."),
    click.option(
        "--html",
        "html",
        type=flag_values.NewFile(),
        metavar="FILE",
        help="Also write the report as a page with charts to one file.",
    ),
    click.option("--debug", is_flag=True, help="Show where in Python and Spark an error came from."),
)


@contextmanager
def _traces(shown: bool) -> Iterator[None]:
    """Print an error's stack trace, if ``shown``, above its sentence."""
    try:
        yield
    except DLedgerError:
        if shown:
            traceback.print_exc()
        raise


def run_job(run: Callable[[SparkSession, Options], JobReport], options: Options, frame: JobFrame) -> JobReport:
    """Run the job in a session and output its report, which is returned for the exit code."""
    with job_session(frame) as spark, spark_errors_in_a_sentence():
        report = run(spark, options)
    _output(report, as_json=frame.as_json, html=frame.html)
    return report


def _output(report: JobReport, *, as_json: bool, html: Path | None) -> None:
    try:  # the one is not lost with the other
        (print_json if as_json else print_report)(report)
    finally:
        if html is not None:
            write_page(report, html)


@contextmanager
def job_session(frame: JobFrame) -> Iterator[SparkSession]:
    """A session for one job, stopped afterwards unless it already existed.

    Raises ``MissingPartError``, ``SparkFailedError``, ``PipelineError``, ``JobError`` if the job cannot run there.
    """
    require_spark()
    from pyspark.sql import SparkSession

    before = SparkSession.getActiveSession()
    defaults = {**START_DEFAULTS, PROGRESS_BAR: str(sys.stderr.isatty()).lower()}
    with spark_errors_in_a_sentence():
        spark = open_session(frame.master, "dledger", frame.conf, defaults)
    try:
        if is_remote(spark) and frame.job in NOT_REMOTE:
            raise JobError(
                f"{frame.job} does not support Spark Connect: {NOT_REMOTE[frame.job]}. Name a cluster (--master "
                "spark://…) or this machine (--master 'local[*]'), and unset SPARK_REMOTE"
            )
        with spark_errors_in_a_sentence():
            _suit_machine(spark)
        yield spark
    finally:
        if before is None:
            spark.stop()


def _suit_machine(spark: SparkSession) -> None:
    """Use fewer partitions per shuffle than Spark's 200 if everything runs on one machine."""
    if is_remote(spark):  # the machine and settings are the server's
        return
    context = spark.sparkContext
    if (context.master or "").startswith("local") and _SHUFFLE not in spark.conf.getAll:
        spark.conf.set(_SHUFFLE, str(2 * context.defaultParallelism))


def require_spark() -> None:
    """Raises ``MissingPartError`` unless Spark's Python packages are installed."""
    if missing := flag_values.missing_extra("spark", "Spark", ("pyspark", "pyarrow")):
        raise MissingPartError(f"{missing}; Spark also needs Java 17 or newer")


@contextmanager
def spark_errors_in_a_sentence() -> Iterator[None]:
    """Convert Spark's errors to ``SparkFailedError``."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise SparkFailedError(reason(str(error))) from error


def run_standalone(command: click.Command, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a job's command as a separate program, with errors as sentences and the exit codes of ``dledger``."""
    try:
        command.main(args=None if argv is None else list(argv), prog_name=command.name)
    except ConfigError as error:
        for problem in error.problems:
            click.echo(f"error: {problem}", err=True)
        sys.exit(EXIT_USAGE)
    except DLedgerError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)
    sys.exit(0)
