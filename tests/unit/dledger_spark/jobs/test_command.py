"""The frame of the jobs: what is loaded when, exit codes, where reports go. No Spark runs here."""

from __future__ import annotations

import errno
import importlib
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from dledger.command_line.contexts import changing, contexts_path
from dledger.errors import ConfigError, UnavailableError
from dledger_cli.cli import main as dledger
from dledger_spark.errors import JobError, LogDirectoryError, MissingPartError, OptionError, SparkFailedError
from dledger_spark.jobs import JOBS, command, source, stats
from dledger_spark.jobs.command import (
    PROGRESS_BAR,
    JobFrame,
    job_command,
    job_session,
    reason,
    require_spark,
    run_standalone,
)
from dledger_spark.jobs.report import JobReport
from dledger_spark.jobs.source import LogSource, source_options
from dledger_spark.session import START_DEFAULTS
from tests.docs.documents import ROOT
from tests.support.fake_group import fake_group
from tests.unit.dledger_spark.jobs.reports import REPORT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[JobFrame]:
    """Jobs get no session; the frames that they would have got one for."""
    seen: list[JobFrame] = []

    @contextmanager
    def no_session(frame: JobFrame) -> Iterator[None]:
        seen.append(frame)
        yield None

    @contextmanager
    def no_errors() -> Iterator[None]:
        yield

    monkeypatch.setattr(command, "job_session", no_session)
    monkeypatch.setattr(command, "spark_errors_in_a_sentence", no_errors)
    monkeypatch.setattr(source, "check", lambda *_arguments, **_options: None)
    return seen


def _sample(report: JobReport, sources: list[LogSource] | None = None) -> click.Command:
    def run(_spark: SparkSession, source: LogSource) -> JobReport:
        if sources is not None:
            sources.append(source)
        return report

    @job_command(run, name="sample", short_help="A sample.", epilog="")
    @source_options
    def parse(source: LogSource) -> LogSource:
        """Do nothing to a log."""
        return source

    return parse


@pytest.mark.parametrize("words", [("--help",), ("pipeline", "--help"), *(("pipeline", job, "--help") for job in JOBS)])
def test_help_loads_neither_spark_nor_arrow(words: tuple[str, ...]) -> None:
    """Most machines that run ``dledger`` have no Spark, and loading it takes a second."""
    code = (
        "import sys\nfrom dledger_cli.cli import main\n"
        f"try:\n    main({list(words)!r}, prog_name='dledger')\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'pyspark', 'pyarrow', 'pandas', 'py4j'}))\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


def test_every_job_has_what_the_frame_expects() -> None:
    """``run``, ``command`` of the same name, ``main`` for spark-submit, and a place in the command line."""
    for job in JOBS:
        module: Any = importlib.import_module(f"dledger_spark.jobs.{job}")
        assert module.command.name == job
        assert callable(module.run)
        assert callable(module.main)
        result = CliRunner().invoke(dledger, ["pipeline", job, "--help"])
        assert result.exit_code == 0
        assert "Examples:" in result.output


def test_an_unknown_job_is_wrong_usage() -> None:
    """Exit code 2."""
    assert CliRunner().invoke(dledger, ["pipeline", "nonsense"]).exit_code == 2


def test_without_spark_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence, no stack trace."""
    monkeypatch.setitem(sys.modules, "pyspark", None)

    with pytest.raises(MissingPartError) as told:
        require_spark()

    shown = CliRunner().invoke(dledger, ["pipeline", "stats", "/"])
    assert (shown.exit_code, shown.stderr.startswith("error: Spark requires pyspark")) == (1, True)
    assert str(told.value).startswith("Spark requires pyspark, not installed here: run pip install 'pyspark")
    assert "Java 17 or newer" in str(told.value)


class Session:
    """As much of a session as the frame asks for."""

    ends = 0

    def stop(self) -> None:
        """Count it."""
        self.ends += 1


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_unless_the_user_says_otherwise(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a default, so that a setting of the user's wins; whatever else is usual stays."""
    (tmp_path / "commitlog").mkdir()
    opened: list[tuple[Any, Mapping[str, str]]] = []

    def open_nothing(_master: str | None, _app: str, conf: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        opened.append((conf, defaults))
        raise JobError("enough")

    monkeypatch.setattr(command, "open_session", open_nothing)
    theirs, ours = pty.openpty() if terminal else os.pipe()
    with open(ours, "w") as stderr, open(theirs), monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        for words in ((), ("--conf", f"{PROGRESS_BAR}=true")):
            with pytest.raises(JobError, match="enough"):
                stats.command.main([str(tmp_path), *words], standalone_mode=False)

    assert [conf for conf, _ in opened] == [{}, {PROGRESS_BAR: "true"}]
    assert all(defaults == {**START_DEFAULTS, PROGRESS_BAR: str(terminal).lower()} for _, defaults in opened)


def test_a_session_that_cannot_be_made_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a stack trace: a server that refuses, a master that is none."""
    from pyspark.errors import PySparkRuntimeError

    def fail(*_: object) -> None:
        raise PySparkRuntimeError("[WHY] because")

    monkeypatch.setattr(command, "open_session", fail)

    with pytest.raises(SparkFailedError, match="because"), job_session(JobFrame(None, {}, False, None)):
        pass


def test_a_job_that_cannot_run_on_spark_connect_says_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches would be counted at the server: the report would say that there was nothing."""
    session: Any = Session()  # Any: it stands for Spark's
    monkeypatch.setattr(command, "open_session", lambda *_: session)
    monkeypatch.setattr(command, "is_remote", lambda _: True)
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)  # another test's may still be there

    with pytest.raises(JobError, match=r"table does not support Spark Connect.*--master"):
        job_session(JobFrame("sc://h", {}, False, None, "table")).__enter__()
    with job_session(JobFrame("sc://h", {}, False, None, "stats")):
        assert session.ends == 1

    assert session.ends == 2


def test_a_report_goes_to_standard_output_and_the_page(frames: list[JobFrame], tmp_path: Path) -> None:
    """``--json`` and ``--html`` together; master and settings reach the session."""
    page = tmp_path / "report.html"
    words = [str(tmp_path), "--json", "--html", str(page), "--master", "local[1]", "--conf", "spark.a=b=c"]

    result = CliRunner().invoke(_sample(REPORT), words)

    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == json.loads(json.dumps(REPORT.to_json()))
    assert page.read_text().startswith("<!doctype html>")
    assert (frames[0].master, frames[0].conf) == ("local[1]", {"spark.a": "b=c"})


def test_a_page_that_cannot_be_written_is_refused_before_the_job_runs(frames: list[JobFrame], tmp_path: Path) -> None:
    """Not after hours."""
    result = CliRunner().invoke(_sample(REPORT), [str(tmp_path), "--html", str(tmp_path / "gone" / "report.html")])

    assert result.exit_code == 2
    assert f"there is no directory {tmp_path / 'gone'}" in result.output
    assert frames == []


def test_a_report_is_not_lost_with_its_page(
    frames: list[JobFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may fill up while a job runs: what it found is printed all the same."""

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.html")

    monkeypatch.setattr(command, "write_page", full)

    result = CliRunner().invoke(_sample(REPORT), [str(tmp_path), "--json", "--html", str(tmp_path / "report.html")])

    assert isinstance(result.exception, OSError)
    assert json.loads(result.output) == json.loads(json.dumps(REPORT.to_json()))


def test_a_page_is_not_lost_with_its_report(
    frames: list[JobFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads standard output may have gone: the page is written all the same."""

    def gone(_report: JobReport) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(command, "print_report", gone)

    CliRunner().invoke(_sample(REPORT), [str(tmp_path), "--html", str(tmp_path / "report.html")])

    assert "</html>" in (tmp_path / "report.html").read_text()


def test_problems_end_with_1(frames: list[JobFrame], tmp_path: Path) -> None:
    """By the house's rules for exit codes."""
    result = CliRunner().invoke(_sample(replace(REPORT, problems=("p",))), [str(tmp_path)])

    assert result.exit_code == 1
    assert "PROBLEM: p" in result.output


def test_what_was_typed_becomes_the_options_of_the_format(frames: list[JobFrame], tmp_path: Path) -> None:
    """Times are UTC; topics may be repeated or hold commas."""
    sources: list[LogSource] = []
    words = ["-b", "h:1,i:2", "-g", "g", "-t", "a,b", "-t", "c", "--from-time", "2026-11-20T08:30", "--to-index", "9"]

    result = CliRunner().invoke(_sample(REPORT, sources), [*words, "--read-from", "any", "--option", "verifyCrc=fail"])

    assert result.exit_code == 0, result.output
    assert sources[0].options() == {
        "bootstrap.servers": "h:1,i:2",
        "group": "g",
        "readFrom": "any",
        "subscribe": "a,b,c",
        "startingTimestamp": "1795163400000",
        "endingOffsets": '{"index":9}',
        "verifyCrc": "fail",
    }


def test_a_directory_wins_over_the_environments_group(frames: list[JobFrame], tmp_path: Path) -> None:
    """DLEDGER_BOOTSTRAP is set for other commands."""
    sources: list[LogSource] = []

    CliRunner(env={"DLEDGER_BOOTSTRAP": "h:1"}).invoke(_sample(REPORT, sources), [str(tmp_path)])

    assert sources[0].options() == {"path": str(tmp_path)}


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["-b", "127.0.0.1:1", "--option", "fetchTimeoutMs=100"], UnavailableError, "127.0.0.1:1 is unreachable"),
        (["-b", "nonsense"], OptionError, "invalid address 'nonsense'"),
        (["."], LogDirectoryError, "holds no log"),
        ([".", "--option", "foo=1"], OptionError, "option foo is unknown"),
    ],
)
def test_what_cannot_be_read_is_refused_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], error: type[Exception], said: str
) -> None:
    """Spark takes half a minute to start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "open_session", lambda *_: pytest.fail("Spark was started"))

    result = CliRunner().invoke(_sample(REPORT), words)

    assert isinstance(result.exception, error)
    assert said in str(result.exception)


def test_another_groups_name_is_refused_before_spark_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer names the right one."""
    monkeypatch.setattr(command, "open_session", lambda *_: pytest.fail("Spark was started"))
    with fake_group(1) as group:
        result = CliRunner().invoke(_sample(REPORT), ["-b", group.addresses[0], "-g", "wrong"])

    assert isinstance(result.exception, OptionError)
    assert "option --group wrong: this node serves group " in str(result.exception)


@pytest.mark.parametrize("words", [["--master", "sc://h"], []])
def test_only_the_server_of_spark_connect_must_reach_the_group(
    frames: list[JobFrame], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """This machine may be outside."""
    seen: list[bool] = []
    monkeypatch.setattr(source, "check", lambda _source, *, dialled: seen.append(dialled))
    CliRunner(env={"SPARK_REMOTE": ""}).invoke(_sample(REPORT), ["-b", "h:1", *words])
    CliRunner(env={"SPARK_REMOTE": "sc://h"}).invoke(_sample(REPORT), ["-b", "h:1"])

    assert seen == [not words, False]


@pytest.mark.parametrize("debug", [False, True])
def test_a_stack_trace_is_shown_when_it_is_asked_for(debug: bool) -> None:
    """Otherwise the sentence is all there is."""
    result = CliRunner().invoke(_sample(REPORT), ["-b", "nonsense", *(["--debug"] if debug else [])])

    assert ("Traceback" in result.stderr) == debug


def test_a_job_reads_the_group_of_a_context_with_its_certificates(
    frames: list[JobFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context holds for jobs as for every command; a variable wins over it."""
    (tmp_path / "secret").write_text("hidden\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("DLEDGER_BOOTSTRAP", "DLEDGER_TLS_CA", "DLEDGER_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)
    values = {"bootstrap": "h:1", "tls_ca": "/context.crt", "access_key": "me"}
    with changing(contexts_path()) as change:
        change.put("prod", {**values, "secret_key_file": str(tmp_path / "secret")}, replace=False, use=True)
    sources: list[LogSource] = []

    (tmp_path / "other").write_text("of the variable\n")
    for environment in (
        {},
        {"DLEDGER_TLS_CA": "/variable.crt"},
        {"DLEDGER_SECRET_KEY_FILE": str(tmp_path / "other")},
        {"DLEDGER_ACCESS_KEY": "alice"},
    ):
        CliRunner(env=environment).invoke(_sample(REPORT, sources), [])

    found = [one.options() for one in sources]
    assert [one["bootstrap.servers"] for one in found] == ["h:1"] * 4
    assert [one["tlsCa"] for one in found] == ["/context.crt", "/variable.crt", *["/context.crt"] * 2]
    assert [one["accessKey"] for one in found] == [*["me"] * 3, "alice"]
    assert [one.get("secretKey") for one in found] == ["hidden", "hidden", "of the variable", None]  # not of alice


def test_a_secret_that_cannot_be_read_is_told_with_the_place_that_names_it(
    frames: list[JobFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable, or the context."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with changing(contexts_path()) as change:
        change.put("prod", {"bootstrap": "h:1", "secret_key_file": "/gone"}, replace=False, use=True)

    for environment, place in (
        ({}, "context prod: secret-key-file: /gone"),
        ({"DLEDGER_SECRET_KEY_FILE": "/away"}, "DLEDGER_SECRET_KEY_FILE: /away"),
    ):
        result = CliRunner(env=environment).invoke(_sample(REPORT), [])
        assert f"{place} cannot be read" in str(result.exception)


def test_times_are_utc_wherever_the_job_runs(
    frames: list[JobFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in its report."""
    sources: list[LogSource] = []
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        CliRunner().invoke(_sample(REPORT, sources), [str(tmp_path), "--from-time", "2026-11-20T08:30"])
    finally:
        monkeypatch.undo()
        time.tzset()

    assert [one.from_time_ms for one in sources] == [int(datetime(2026, 11, 20, 8, 30, tzinfo=UTC).timestamp() * 1000)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "name the log"),
        ({"path": "a", "bootstrap": "b"}, "name the log"),
        ({"path": "a", "from_index": 9, "to_index": 9}, "empty range: --from-index"),
        ({"path": "a", "from_time_ms": 2, "to_time_ms": 1}, "empty range: --from-time"),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused(fields: dict[str, Any], said: str) -> None:
    """As a usage error, before Spark starts."""
    with pytest.raises(ConfigError, match=said):
        LogSource(**fields)


@pytest.mark.parametrize(("error", "code"), [(ConfigError(["bad"]), 2), (JobError("bad"), 1), (None, 0)])
def test_as_a_program_of_its_own_a_job_ends_as_the_house_does(
    error: Exception | None, code: int, frames: list[JobFrame], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What spark-submit runs: a sentence and an exit code."""

    def run(_spark: SparkSession, _options: int) -> JobReport:
        if error is not None:
            raise error
        return REPORT

    @job_command(run, name="sample", short_help="A sample.", epilog="")
    def parse() -> int:
        """Fail."""
        return 0

    with pytest.raises(SystemExit) as end:
        run_standalone(parse, [])

    assert (end.value.code or 0) == code
    assert capsys.readouterr().err == ("" if error is None else "error: bad\n")


def test_the_reason_of_a_failed_job_is_found_between_the_stack_traces() -> None:
    """Spark wraps the worker's error into several others."""
    said = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "/x/batch.py", line 10, in read
    raise BrokenRecordError(where)
dledger_spark.errors.BrokenRecordError: /logs/00000000000000000000: damaged at offset 77: bad CRC

\tat org.apache.spark.api.python.BasePythonRunner.x(PythonRunner.scala:572)
Caused by: org.apache.spark.SparkException: boo
"""

    assert reason(said) == "/logs/00000000000000000000: damaged at offset 77: bad CRC"
    assert reason("ValueError: 3") == "ValueError: 3"
    assert reason("[PATH_NOT_FOUND] no such path\n\tat org.x\nJVM stack\n") == "[PATH_NOT_FOUND] no such path JVM stack"
    assert reason("") == "Spark gave no reason"
