"""The harness: choosing, sharing set-ups, surviving a broken benchmark, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import main
from benchmarks.context import PEERS_LEFT_OUT, QUICK, BenchSettings, Context
from benchmarks.figures import Figure
from benchmarks.peers import java
from benchmarks.registry import Scenario, UnknownBenchmarkError, chosen
from benchmarks.scenarios import ALL
from benchmarks.targets import TARGETS


class Recorder:
    """A scenario that measures nothing and remembers what it was asked for."""

    def __init__(self, *figures: Figure, error: Exception | None = None) -> None:
        self._figures = figures
        self._error = error
        self.asked: list[frozenset[str]] = []

    def __call__(self, context: Context, names: frozenset[str]) -> Iterator[Figure]:
        """Yield the figures asked for, then fail if told to."""
        assert not any(context.directory.iterdir())
        (context.directory / "log").write_bytes(b"gigabytes")
        self.asked.append(names)
        yield from (figure for figure in self._figures if figure.name in names)
        if self._error is not None:
            raise self._error

    def scenario(self, *names: str) -> Scenario:
        """This recorder under some names."""
        return Scenario("a scenario", names or tuple(figure.name for figure in self._figures), self)


@pytest.fixture(autouse=True)
def _a_quiet_machine_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at the machine takes seconds and is no part of what is tested here."""
    monkeypatch.setattr(main, "busy_share", lambda: 0.0)
    monkeypatch.setattr("benchmarks.probes.flush_milliseconds", lambda _directory, _size: 0.1)
    monkeypatch.setattr("benchmarks.probes.page_cache_gigabytes_per_second", lambda _directory: (1.0, 8.0))


@pytest.fixture
def settings(tmp_path: Path) -> BenchSettings:
    """Data beside the test's own files."""
    return BenchSettings(directory=tmp_path)


def names_in(path: Path) -> list[str]:
    """What a run wrote."""
    return [row["name"] for row in json.loads(path.read_text())]


def test_a_shared_set_up_runs_once(tmp_path: Path, settings: BenchSettings) -> None:
    """Names of one scenario are measured by one call of it; scenarios nobody asked for do not run."""
    both = Recorder(Figure("a", 1.0, "s", "", None), Figure("b", 1.0, "s", "", None))
    other = Recorder(Figure("c", 1.0, "s", "", None))
    output = tmp_path / "bench.json"

    code = main.run(["b", "a"], output, settings=settings, scenarios=[both.scenario(), other.scenario()])

    assert (code, both.asked, other.asked) == (0, [frozenset({"a", "b"})], [])
    assert names_in(output) == ["a", "b"]


def test_what_a_scenario_wrote_is_gone_before_the_next(tmp_path: Path, settings: BenchSettings) -> None:
    """However it ended: all of them together need more than many disks have."""
    broken, sound = Recorder(error=OSError("no space left")), Recorder(Figure("c", 1.0, "s", "", None))

    main.run([], tmp_path / "bench.json", settings=settings, scenarios=[broken.scenario("a"), sound.scenario()])

    assert (len(broken.asked), len(sound.asked)) == (1, 1)
    assert names_in(tmp_path / "bench.json") == ["c"]
    assert list(tmp_path.iterdir()) == [tmp_path / "bench.json"]


def test_no_names_mean_all(tmp_path: Path, settings: BenchSettings) -> None:
    """`make bench` measures everything."""
    recorder = Recorder(Figure("a", 1.0, "s", "", None), Figure("b", 1.0, "s", "", None))

    main.run([], tmp_path / "bench.json", settings=settings, scenarios=[recorder.scenario()])

    assert recorder.asked == [frozenset({"a", "b"})]


def test_an_unknown_name_starts_nothing(tmp_path: Path, settings: BenchSettings) -> None:
    """A typing error is answered at once, with the names there are, and changes no file."""
    recorder = Recorder(Figure("a", 1.0, "s", "", None))

    assert main.run(["a", "aa"], tmp_path / "bench.json", settings=settings, scenarios=[recorder.scenario()]) == 2
    assert (recorder.asked, list(tmp_path.iterdir())) == ([], [])
    with pytest.raises(UnknownBenchmarkError, match="no benchmark is called aa; there are: a"):
        chosen([recorder.scenario()], ["a", "aa"])


def test_a_broken_benchmark_costs_only_itself(tmp_path: Path, settings: BenchSettings) -> None:
    """The other figures are measured and kept; the run fails and says what broke."""
    broken = Recorder(Figure("a", 1.0, "s", "", None), error=RuntimeError("the reason")).scenario("a", "b")
    fine = Recorder(Figure("c", 1.0, "s", "", None)).scenario()
    output = tmp_path / "bench.json"

    assert main.run([], output, settings=settings, scenarios=[broken, fine]) == 1
    assert names_in(output) == ["a", "c"]


def test_a_figure_that_was_promised_must_come(tmp_path: Path, settings: BenchSettings) -> None:
    """A scenario that silently leaves out a name fails the run."""
    assert main.run(["b"], tmp_path / "o.json", settings=settings, scenarios=[Recorder().scenario("b")]) == 1


@pytest.mark.parametrize(("value", "check", "code"), [(149.0, True, 0), (151.0, True, 1), (151.0, False, 0)])
def test_a_missed_target_is_the_exit_code(
    tmp_path: Path, settings: BenchSettings, value: float, check: bool, code: int
) -> None:
    """`make bench` is red when a target is missed; `--no-check` only measures."""
    recorder = Recorder(Figure("idle_rss", value, "MB", "python", 50.0))

    assert main.run([], tmp_path / "o.json", settings=settings, check=check, scenarios=[recorder.scenario()]) == code


def test_a_missing_peer_is_printed_loudly(
    tmp_path: Path, settings: BenchSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stands in the output with what to install, in the file as null, and in the exit code."""

    def measure(context: Context, _names: frozenset[str]) -> Iterator[Figure]:
        context.baseline_missing("PySyncObj", "it")
        yield Figure("append_pipelined", 1e6, "entries/s", "PySyncObj", None)

    scenario = Scenario("appends", ("append_pipelined",), measure)

    code = main.run([], tmp_path / "o.json", settings=settings, scenarios=[scenario])

    assert code == 1
    assert "!!! baseline missing: PySyncObj: install it" in capsys.readouterr().out
    assert json.loads((tmp_path / "o.json").read_text())[0]["ratio"] is None


def test_a_quick_run_says_once_more_what_it_left_out(
    tmp_path: Path, settings: BenchSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scenario whose figures all need a peer gives none, which is no failure; each says how long it took."""

    def measure(context: Context, _names: frozenset[str]) -> Iterator[Figure]:
        assert not context.has(java)
        context.without("RocketMQ", java)
        yield from ()

    scenario = Scenario("remoting", ("remoting_send_one",), measure)

    quick = replace(settings, beside_peers=False)
    assert main.run([], tmp_path / "o.json", settings=quick, scenarios=[scenario]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith(f"took 0 s; {PEERS_LEFT_OUT}") for line in lines)
    assert PEERS_LEFT_OUT in lines


def test_noise_seen_at_any_time_makes_the_ratio_decide(
    tmp_path: Path, settings: BenchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was quiet at first and busy at the end is not quiet: the absolute target is not judged."""
    slow = Figure("append_pipelined", 30_000, "entries/s", "PySyncObj", 5_000)
    scenario = Recorder(slow).scenario()
    busy = iter([0.0, 0.0, 0.0, 0.5])
    monkeypatch.setattr(main, "busy_share", lambda: next(busy))

    assert main.run([], tmp_path / "quiet.json", settings=settings, scenarios=[scenario]) == 1
    assert main.run([], tmp_path / "noisy.json", settings=settings, scenarios=[scenario]) == 0


def test_the_directory_of_a_run_is_removed(tmp_path: Path, settings: BenchSettings) -> None:
    """Nothing but the figures stays behind, also when a benchmark broke."""
    main.run([], tmp_path / "o.json", settings=settings, scenarios=[Recorder(error=OSError("full")).scenario("a")])

    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]


def test_every_name_is_measured_by_one_scenario_and_every_target_by_some() -> None:
    """The registry has no name twice, and no target that nothing measures."""
    names = [name for scenario in ALL for name in scenario.names]

    assert len(names) == len(set(names))
    assert set(TARGETS) <= set(names)


def test_a_scenario_that_would_fill_the_disk_is_not_begun(
    tmp_path: Path, settings: BenchSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told how much is missing and where, and the others are measured."""
    large, small = Recorder(Figure("a", 1.0, "s", "", None)), Recorder(Figure("b", 1.0, "s", "", None))
    needy = replace(large.scenario(), disk_gib=lambda _settings: 1e9)

    assert main.run([], tmp_path / "o.json", settings=settings, scenarios=[needy, small.scenario()]) == 1
    assert (large.asked, names_in(tmp_path / "o.json")) == ([], ["b"])
    assert "needs up to 1000000000.0 GiB" in capsys.readouterr().out.replace("\n", " ")


def test_each_scenario_needs_less_disk_when_it_is_quick() -> None:
    """Or as little as it has of its own."""
    for scenario in ALL:
        assert 0 < scenario.disk_gib(QUICK) <= scenario.disk_gib(BenchSettings()), scenario.title
