"""What a replay is named by, where it begins, and how fast it goes. No Spark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dledger.errors import AccessDeniedError, ConfigError, IdentityError, InvalidRequestError
from dledger_spark.errors import JobError
from dledger_spark.jobs import replay
from dledger_spark.jobs.replay import (
    ReplayOptions,
    ReplayTarget,
    RowPace,
    check_loop,
    first_of,
    rows_at_once,
    rows_identity,
    writer_of,
)
from dledger_spark.jobs.report import JobReport
from dledger_spark.jobs.source import Extent, LogSource, ParquetSource
from tests.unit.dledger_spark.jobs.reports import REPORT
from tests.unit.dledger_spark.jobs.test_export_plan import Entries

SOURCE = LogSource(path="/logs")
OPTIONS = ReplayOptions(SOURCE, ReplayTarget("h:1", "g", "t"))


def _remembered(seen: list[ReplayOptions]) -> Callable[..., JobReport]:
    """In place of running a job."""

    def take(_run: object, options: ReplayOptions, _frame: object) -> JobReport:
        seen.append(options)
        return REPORT

    return take


def _extent(begin: int) -> Extent:
    return Extent("group g of cluster c", "index", begin, 1000, True, Entries())


def test_the_writers_name_is_made_of_what_decides_which_rows_are_meant() -> None:
    """Not of how fast or how far, nor of which node is asked: those may change between two runs."""
    name = writer_of(OPTIONS, {"first": 0})

    same = [
        replace(OPTIONS, rate=5.0),
        replace(OPTIONS, source=replace(SOURCE, to_index=7)),
        replace(OPTIONS, source=replace(SOURCE, path="/copy")),
        replace(OPTIONS, target=replace(OPTIONS.target, bootstrap="other:2")),
    ]
    other = [
        replace(OPTIONS, tags=("a",)),
        replace(OPTIONS, where="1 = 1"),
        replace(OPTIONS, writers=5),
        replace(OPTIONS, source=replace(SOURCE, topics=("a",))),
        replace(OPTIONS, source=replace(SOURCE, from_time_ms=7)),
        replace(OPTIONS, target=replace(OPTIONS.target, topic="u")),
        replace(OPTIONS, target=replace(OPTIONS.target, group="h")),
    ]
    assert {writer_of(one, {"first": 0}) for one in same} == {name}
    assert len({name, writer_of(OPTIONS, {"first": 1}), *(writer_of(one, {"first": 0}) for one in other)}) == 2 + len(
        other
    )


def test_options_that_decide_which_rows_there_are_make_another_replay() -> None:
    """A broker's entries are not its messages; a key that was changed, or a finer cut, is no other replay."""
    plain = rows_identity(SOURCE, _extent(0), 0)
    others = [{"recordFormat": "entry"}, {"subscribePattern": "a.*"}, {"verifyCrc": "skip"}]

    found = [rows_identity(replace(SOURCE, others=one), _extent(0), 0) for one in others]

    assert all(one not in (plain, *found[:number]) for number, one in enumerate(found))
    assert rows_identity(replace(SOURCE, others={"secretKey": "s", "splitBytes": "1m"}), _extent(0), 0) == plain


def test_a_replay_begins_where_it_did_before() -> None:
    """A begin that retention may have moved is refused, or taken as a replay of its own."""
    assert first_of(SOURCE, _extent(0), skip_lost=False) == 0
    assert first_of(replace(SOURCE, from_index=40), _extent(40), skip_lost=False) == 40
    assert first_of(replace(SOURCE, from_time_ms=50_000), _extent(40), skip_lost=False) == 50
    for source in (SOURCE, replace(SOURCE, from_index=39), replace(SOURCE, from_time_ms=40_000)):
        with pytest.raises(JobError, match="--from-index 40"):
            first_of(source, _extent(40), skip_lost=False)
        assert first_of(source, _extent(40), skip_lost=True) == 40


class _Answers:
    """In place of a client of the target: what it says of itself, or why it does not."""

    def __init__(self, answer: Exception | tuple[str, str]) -> None:
        self._answer = answer

    def metadata(self, timeout_s: float) -> SimpleNamespace:
        assert timeout_s > 0
        if isinstance(self._answer, Exception):
            raise self._answer
        return SimpleNamespace(cluster_id=self._answer[0], group=self._answer[1])


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        (("c", "g"), ["a:1", "b:2"]),
        (("d", "g"), []),
        (IdentityError("this node serves group 'h', not 'g'"), []),
        (InvalidRequestError("Method not found!"), []),
        (AccessDeniedError("needs SUB"), ["a:1"]),
    ],
    ids=["itself", "another cluster", "another group", "a plain broker", "not told"],
)
def test_a_target_is_known_by_what_it_says_of_itself(
    answer: Exception | tuple[str, str], refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its addresses only if it does not say it to this account; no question where the topics or the end differ."""
    monkeypatch.setattr("dledger_spark.source.client_log.shared_client", lambda *_: _Answers(answer))
    target = ReplayTarget("b:1,a:1" if refused == ["a:1"] else "b:1", "g", "t")
    source = LogSource(bootstrap="a:1", group="g", topics=("t",))
    extent = replace(_extent(0), group="g")

    for one in ("a:1", "b:2"):
        live = replace(source, bootstrap=one)
        if one in refused:
            with pytest.raises(ConfigError, match=r"would read its own output: .*--to-index, 1000 at most"):
                check_loop(live, target, extent)
        else:
            check_loop(live, target, extent)
        check_loop(replace(live, topics=("u",)), target, extent)
        check_loop(replace(live, to_index=1000), target, extent)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=50), st.floats(1, 10_000))
def test_rows_never_go_faster_than_the_rate(batches: list[int], rate: float) -> None:
    """Whatever they come in; and a pace that nobody holds up is not slower either."""
    now = 100.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    pace = RowPace(rate, lambda: now, wait)
    for rows in batches:
        pace.take(rows)

    assert now - 100.0 == pytest.approx(sum(batches) / rate)


def test_a_pause_is_not_made_up_for() -> None:
    """After a stall rows do not come in a burst."""
    now, waits = [0.0], list[float]()
    pace = RowPace(10, lambda: now[0], waits.append)

    pace.take(5)
    now[0] = 100.0
    pace.take(5)

    assert waits == [0.5, 0.5]
    assert [rows_at_once(rate) for rate in (0.5, 100, 1e9)] == [1, 10, 10_000]


def test_parquet_is_read_instead_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment names a group; both on one command line are refused."""
    seen: list[ReplayOptions] = []
    monkeypatch.setattr("dledger_spark.jobs.command.run_job", _remembered(seen))
    words = ["--parquet", str(tmp_path), "--to", "h:1", "--to-topic", "t", "-t", "a,b", "--from-time", "2026-01-01"]

    CliRunner(env={"DLEDGER_BOOTSTRAP": "x:1"}).invoke(replay.command, words)
    refused = CliRunner().invoke(replay.command, [*words, "-b", "x:1"])
    nowhere = CliRunner().invoke(replay.command, words[:2])

    assert seen[0].source == ParquetSource(tmp_path, ("a", "b"), 1767225600000)
    assert (refused.exit_code, nowhere.exit_code) == (2, 2)
    assert "--to HOST:PORT" in nowhere.output


def test_the_target_is_the_group_that_is_read_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """And security is the environment's."""
    seen: list[ReplayOptions] = []
    monkeypatch.setattr("dledger_spark.jobs.command.run_job", _remembered(seen))
    monkeypatch.setattr("dledger_spark.jobs.source.check", lambda *_arguments, **_options: None)

    CliRunner(env={"DLEDGER_ACCESS_KEY": "me", "DLEDGER_SECRET_KEY": "s"}).invoke(
        replay.command, ["-b", "h:1", "-g", "g", "-t", "a", "--to-topic", "b", "--to-option", "batchBytes=1k"]
    )

    assert seen[0].target.options() == {
        "bootstrap.servers": "h:1",
        "group": "g",
        "topic": "b",
        "accessKey": "me",
        "secretKey": "s",
        "batchBytes": "1k",
    }
