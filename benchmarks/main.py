"""Runs benchmarks: selects the scenarios, shows the results, stores them in ``bench.json`` and judges them."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from benchmarks import curves as curves_file
from benchmarks import figures as figures_file
from benchmarks import probes, report, targets
from benchmarks.context import PEERS_LEFT_OUT, QUIET_BUSY_SHARE_MAX, BenchSettings, Context, busy_share, file_system_of
from benchmarks.figures import Figure, FiguresFileError
from benchmarks.registry import Scenario, UnknownBenchmarkError, chosen
from benchmarks.scenarios import ALL
from dledger.errors import ConfigError

DEFAULT_OUTPUT = Path("build/bench.json")
EXIT_MISSED = 1
EXIT_USAGE = 2


def run(
    names: Sequence[str],
    output: Path,
    *,
    settings: BenchSettings | None = None,
    check: bool = True,
    scenarios: Sequence[Scenario] = ALL,
) -> int:
    """Measure the named benchmarks (all, if none is named), print them and merge them into ``output``.

    Returns 0; 1 if a benchmark failed, or (with ``check``) a target was missed or could not be judged; 2 for a bad
    name, setting or output file, before anything is started.
    """
    console = Console(highlight=False)
    try:
        wanted = chosen(scenarios, names)
        earlier = figures_file.load(output)
        settings = settings or BenchSettings.from_environment(os.environ)
    except (UnknownBenchmarkError, FiguresFileError, ConfigError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return EXIT_USAGE
    with _terminable(), tempfile.TemporaryDirectory(prefix="dledger-bench-", dir=settings.directory) as directory:
        context = Context(settings, Path(directory) / "scenario", Path(directory), say=_sayer(console))
        context.directory.mkdir()
        _describe_machine(context)
        measured, broken = _measure(context, wanted)
        _note_noise(context)
    asked = frozenset(name for _, some in wanted for name in some)
    if context.curves:
        curves_file.save(output.parent, context.curves)
        for one in context.curves:
            path = curves_file.draw(one, output.parent / curves_file.drawing(one))
            console.print(f"drawn: {path}", markup=False, soft_wrap=True)
    figures_file.save(output, figures_file.merged(earlier, measured, asked))
    judgements = targets.judge(measured, quiet=context.quiet)
    report.show(console, measured, judgements)
    if not settings.beside_peers:
        console.print(PEERS_LEFT_OUT, markup=False, soft_wrap=True)
    for line in [*context.missing, *broken]:
        console.print(f"!!! {line}", style="bold red", markup=False, soft_wrap=True)
    console.print(f"written to {output}", markup=False, soft_wrap=True)
    missed = check and any(one.failed for one in judgements)
    return EXIT_MISSED if missed or broken else 0


def _sayer(console: Console) -> Callable[[str], None]:
    started = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[{time.monotonic() - started:6.1f} s] {line}", markup=False, soft_wrap=True)

    return say


def _note_noise(context: Context) -> None:
    """Check, while nothing of ours is running, whether the machine is still quiet enough for targets that need it."""
    busy = busy_share()
    if busy > QUIET_BUSY_SHARE_MAX:
        context.quiet = False
        context.say(f"!!! others use {busy:.0%} of this machine: it is NOT QUIET, ratios decide")


def _describe_machine(context: Context) -> None:
    """Print the facts about the machine needed to interpret the figures."""
    say, directory = context.say, context.directory
    say(f"Python {platform.python_version()}, {os.cpu_count()} processors")
    small, large = (probes.flush_milliseconds(directory, size) for size in (4096, 65536))
    say(f"data on {file_system_of(directory)}; write + fdatasync p50: {small:.3f} ms (4 KiB), {large:.3f} ms (64 KiB)")
    new, again = probes.page_cache_gigabytes_per_second(directory)
    say(f"writing into memory that the page cache takes anew: {new:.2f} GB/s, that it has: {again:.2f} GB/s")


def _measure(context: Context, wanted: Sequence[tuple[Scenario, frozenset[str]]]) -> tuple[list[Figure], list[str]]:
    measured: list[Figure] = []
    broken: list[str] = []
    for scenario, names in wanted:
        context.say(f"{scenario.title} ({', '.join(name for name in scenario.names if name in names)})")
        _note_noise(context)
        before, began_s, context.left_out = len(measured), time.monotonic(), False
        try:
            _check_disk(context, scenario)
            for figure in scenario.measure(context, names):
                measured.append(figure)
                against = f", {figure.baseline}: {report.shown(figure.baseline_value)}" if figure.baseline else ""
                context.say(f"  {figure.name} = {report.shown(figure.value)} {figure.unit}{against}")
        except Exception as error:  # noqa: BLE001  one broken benchmark must not cost the figures of the others
            broken.append(f"{scenario.title}: {type(error).__name__}: {error}")
            context.say(f"!!! {broken[-1]}")
            continue
        finally:
            _empty(context.directory)
            context.say(f"  took {time.monotonic() - began_s:.0f} s{_left_out(context)}")
        if context.left_out and len(measured) == before:
            continue  # all its figures need a peer
        absent = sorted(names - {figure.name for figure in measured[before:]})
        broken += [f"{scenario.title}: gave no figure for {name}" for name in absent]
    return measured, broken


def _left_out(context: Context) -> str:
    return f"; {PEERS_LEFT_OUT}" if context.left_out else ""


def _check_disk(context: Context, scenario: Scenario) -> None:
    """Raises ``OSError`` if it would fill the disk, before it writes anything."""
    needed, free = scenario.disk_gib(context.settings), shutil.disk_usage(context.directory).free / (1 << 30)
    if needed > free:
        raise OSError(
            f"needs up to {needed:.1f} GiB in {context.directory.parent}, where {free:.1f} GiB are free: set BENCH_DIR "
            "to a directory with more, or measure less (QUICK=1, BENCH_LOG_GIB, BENCH_ROUNDS, BENCH_SECONDS)"
        )


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)  # a killed child may still be writing: keep the other figures
    directory.mkdir(exist_ok=True)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM raise an exception, because it must also end the children."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, show_default=True)
@click.option("--check/--no-check", default=True, help="Exit with 1 when a target is missed (the default).")
def command(names: tuple[str, ...], output: Path, check: bool) -> None:
    """Measure NAMES (default: the comma-separated BENCH of the environment, else all) beside their baselines.

    QUICK=1 measures everything roughly, without peers for the JVM and etcd, in ten minutes. BENCH_ROUNDS, BENCH_KILLS,
    BENCH_SECONDS, BENCH_WARMUP_SECONDS, BENCH_LOG_GIB shrink it one by one; BENCH_DIR says where data goes. Targets
    are meant for the defaults.
    """
    picked = names or tuple(name.strip() for name in os.environ.get("BENCH", "").split(",") if name.strip())
    sys.exit(run(picked, output, check=check))
