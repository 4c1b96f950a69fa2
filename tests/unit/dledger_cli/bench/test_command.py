"""``dledger bench`` on the command line: what it refuses, prints and ends with."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Sequence

import pytest
from click.testing import CliRunner, Result

from dledger.errors import DLedgerError, QuorumAckTimeoutError, UnavailableError
from dledger_cli import cli, targets
from dledger_cli.commands import bench as commands_bench
from dledger_cli.commands.bench import LoadPlan, LoadReport, Meter, Recent, document, lines, second_line
from tests.unit.dledger_cli.bench.test_load import AnsweredItem


class BenchClient:
    """Answers each append as the test says."""

    def __init__(self, error: Callable[[int], DLedgerError | None]) -> None:
        self._error = error
        self.bodies: list[bytes] = []

    def metadata(self) -> None:
        """There is somebody."""

    def submit(self, body: bytes) -> AnsweredItem:
        self.bodies.append(body)
        return AnsweredItem(self._error(len(self.bodies)))

    def close(self) -> None:
        """Nothing to close."""


Bench = Callable[[Sequence[str], Callable[[int], DLedgerError | None]], tuple[Result, BenchClient]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run ``dledger bench append`` with these words against a client that answers so."""

    def run(words: Sequence[str], error: Callable[[int], DLedgerError | None]) -> tuple[Result, BenchClient]:
        client = BenchClient(error)
        monkeypatch.setattr(targets.GroupTarget, "client", lambda _target: client)
        return CliRunner().invoke(cli.main, ["bench", "append", *words]), client

    return run


def no_error(_number: int) -> None:
    """All is well."""


def test_figures_are_lines_for_people(bench: Bench) -> None:
    """Rate, size, every latency asked for."""
    shown, client = bench(["--records", "500", "--size", "100", "--clients", "2", "--in-flight", "7"], no_error)

    assert shown.exit_code == 0, shown.output
    assert len(client.bodies) == 500
    assert {len(body) for body in client.bodies} == {100}
    assert re.findall(r"^(\S+)", shown.stdout, re.MULTILINE) == (
        ["records", "rate", "average", "p50", "p95", "p99", "p99.9", "max"]
    )
    assert shown.stdout.startswith("records        500 of 100 bytes acknowledged in ")
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())


def test_figures_are_one_json_object_for_programs(bench: Bench) -> None:
    """The same, with the plan."""
    shown, _ = bench(["--records", "50", "--rate", "5000", "--json"], no_error)

    told = json.loads(shown.stdout)

    assert shown.exit_code == 0
    assert (told["load"], told["group"], told["records"], told["failed"]) == ("append", "default", 50, 0)
    assert told["rate_limit_per_s"] == 5000.0
    assert told["mb_per_s"] == pytest.approx(told["records_per_s"] * 256 / 1e6)
    assert sorted(told["latency_ms"]) == ["average", "max", "p50", "p95", "p99", "p99_9"]
    assert (told["errors"], told["interrupted"]) == ([], False)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (UnavailableError("nobody"), 1, "failed         1 UnavailableError (not stored), first: nobody"),
        (QuorumAckTimeoutError("late"), 3, "failed         1 QuorumAckTimeoutError (unknown outcome), first: late"),
    ],
)
def test_a_failed_record_is_told_by_the_exit_code(bench: Bench, error: DLedgerError, code: int, told: str) -> None:
    """1 if it is not stored, 3 if nobody knows."""
    shown, _ = bench(["--records", "10"], lambda number: error if number == 3 else None)

    assert shown.exit_code == code
    assert told in shown.stdout.splitlines()
    assert "records        9 of" in shown.stdout


def test_one_unknown_outcome_among_failures_is_what_the_exit_code_tells(bench: Bench) -> None:
    """Whoever repeats the load because nothing was stored would be wrong."""
    errors = {3: UnavailableError("nobody"), 5: QuorumAckTimeoutError("late"), 7: UnavailableError("nobody")}

    shown, _ = bench(["--records", "10"], errors.get)

    assert shown.exit_code == 3
    assert "records        7 of" in shown.stdout


def test_a_number_of_records_has_all_the_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a load of which nobody said how many ends by itself."""
    monkeypatch.setattr(commands_bench, "SECONDS", 1e-9)

    shown, client = bench(["--records", "50"], no_error)
    endless, _ = bench([], no_error)

    assert (shown.exit_code, len(client.bodies)) == (0, 50)
    assert endless.exit_code == 0


def test_large_records_are_fewer_in_flight(bench: Bench) -> None:
    """A thousand of a megabyte would measure a queue."""
    shown, _ = bench(["--records", "1", "--size", str(1 << 20), "--json"], no_error)

    assert json.loads(shown.stdout)["in_flight"] == 8


def test_ctrl_c_prints_what_was_measured(bench: Bench) -> None:
    """And says so, also by its exit code."""

    def interrupt(number: int) -> None:
        if number == 20:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    shown, client = bench(["--seconds", "3600"], interrupt)

    assert shown.exit_code == 128 + signal.SIGINT
    assert f"records        {len(client.bodies):,} of" in shown.stdout
    assert shown.stdout.endswith("interrupted: these are the figures until then\n")
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--records", "5", "--seconds", "5"], "give --records or --seconds, not both"),
        (["--records", "0"], "0 is not allowed: use 1 or more"),
        (["--seconds", "0"], "0 is not allowed: use more than 0"),
        (["--rate", "-1"], "-1 is not allowed: use more than 0"),
        (["--size", "4194305"], "4,194,305 is not allowed: use 1 to 4,194,304"),
        (["--in-flight", "0"], "0 is not allowed: use 1 to 100,000"),
        (["--clients", "x"], "'x' is not a whole number"),
        (["--records", "3", "--clients", "4"], "--records 3 is less than --clients 4"),
        (["--size", "1000000", "--in-flight", "600", "--clients", "2"], "holds 1,201,228,800 bytes in memory"),
        (["--size", "1000000", "--in-flight", "2000"], "holds 2,002,048,000 bytes in memory: at most 1,073,741,824"),
        (["--size", "1", "--in-flight", "100000", "--clients", "256"], "bytes in memory: at most 1,073,741,824"),
        (["--seconds", "nan"], "invalid duration 'nan'"),
        (["--rate", "nan"], "'nan' is not a finite number"),
        (["--topic", "t"], "no such option"),
    ],
)
def test_wrong_words_are_refused(bench: Bench, words: list[str], complaint: str) -> None:
    """Exit code 2, and nothing is sent."""
    shown, client = bench(words, no_error)

    assert shown.exit_code == 2
    assert complaint in " ".join(shown.stderr.split())
    assert client.bodies == []


def test_messages_need_a_topic() -> None:
    """There is no topic that would be right for everybody."""
    shown = CliRunner().invoke(cli.main, ["bench", "send"])

    assert shown.exit_code == 2
    assert "missing option '-t' / '--topic'" in shown.stderr


def test_the_line_of_a_second_fits_narrow_terminals() -> None:
    """Also of fast groups with slow records."""
    line = second_line(3600, 1.0, 4 << 20, Recent(12_345, 1.234, 56.7), 1_000_000)

    assert line == " 3600 s     12,345/s  51778.68 MB/s  avg 1,234 ms  max 56,700 ms  1,000,000 failed"
    assert second_line(2, 1.0, 256, Recent(0, 0.0, 0.0), 0) == "    2 s          0/s     0.00 MB/s"
    assert second_line(4, 2.0, 1000, Recent(500, 0.1, 0.2), 0).startswith("    4 s        250/s     0.25 MB/s")


def test_figures_have_their_units() -> None:
    """Latencies in milliseconds, rates of what was acknowledged, however many failed."""
    meter = Meter()
    for latency_s in (0.05, 0.05, 0.35):
        meter.acknowledge(latency_s)
    meter.fail(UnavailableError("away"))
    report = LoadReport("send", {"topic": "t"}, LoadPlan(4, None, None, 1, 1), 1000, meter.read(), 0.5, False)

    told = document(report)

    assert told["latency_ms"] == pytest.approx(
        {"average": 150.0, "max": 350.0, "p50": 50.0, "p95": 350.0, "p99": 350.0, "p99_9": 350.0}, rel=0.02
    )
    assert (told["records_per_s"], told["mb_per_s"], told["failed"]) == (6.0, 0.006, 1)
    assert {"rate           6 records/s, 0.01 MB/s", "average        150 ms"} <= set(lines(report))


def test_a_load_without_an_answer_has_no_rate() -> None:
    """Nothing is divided by no time."""
    report = LoadReport("send", {"topic": "t"}, LoadPlan(1, None, None, 1, 1), 256, Meter().read(), 0.0, True)

    assert document(report)["records_per_s"] == 0.0
    assert document(report)["latency_ms"] == {"average": None, "max": None}
    assert next(lines(report)).startswith("records        0 of 256 bytes")
