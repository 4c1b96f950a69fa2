"""Flame graphs of a leader while one client appends: ``python -m benchmarks.flame`` (``make flame``).

py-spy samples whichever thread holds the interpreter, so waiting is not in the picture, nor are flushes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import Final

import click

from benchmarks.load import LoadClient
from benchmarks.processes import ChildError
from benchmarks.scenarios.appends import BODY_BYTES, BULK_CALLERS, BULK_ENTRIES, WINDOWS
from dledger_cli.local.group import LocalGroup

INSTALL: Final = "the extra `bench` (pip install py-spy)"
WARMUP_SECONDS: Final = 2.0
LOADED_SECONDS: Final = 10.0
"""How much longer the load goes on than the sampling, which takes a while to begin."""
SAMPLES_PER_SECOND: Final = 100
Load = Callable[[LoadClient, float], float]
LOADS: Final[Mapping[str, tuple[str, Load]]] = {
    "alone": (
        "one append after the other",
        lambda client, seconds: client.appends_per_second(seconds, WARMUP_SECONDS, BODY_BYTES, 1),
    ),
    "pipelined": (
        "a full pipeline of appends",
        lambda client, seconds: client.appends_per_second(
            seconds, WARMUP_SECONDS, BODY_BYTES, WINDOWS["append_pipelined"][0]
        ),
    ),
    "bulk": (
        "append_many by four threads",
        lambda client, seconds: client.bulk_appends_per_second(
            seconds, WARMUP_SECONDS, BODY_BYTES, BULK_ENTRIES, BULK_CALLERS
        ),
    ),
}


def py_spy() -> str:
    """The program, beside this interpreter or on the path. Raises ``ChildError`` if it is not installed."""
    found = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if found is None:
        raise ChildError(f"py-spy is not installed: install {INSTALL}")
    return found


def sample(pid: int, seconds: float, title: str) -> str:
    """The SVG of a process. Raises ``ChildError`` with py-spy's words, for instance if it may not look."""
    with tempfile.TemporaryDirectory(prefix="dledger-flame-") as directory:
        options = ["--threads", "--gil", "--nolineno", "--format", "flamegraph", "--output", "flame.svg"]
        argv = ["py-spy", "record", *options, "--rate", str(SAMPLES_PER_SECOND)]
        argv += ["--duration", f"{seconds:.0f}", "--pid", str(pid)]
        done = subprocess.run(
            argv, executable=py_spy(), cwd=directory, capture_output=True, text=True, timeout=seconds + 60, check=False
        )
        if done.returncode:
            raise ChildError(f"`{' '.join(argv)}` failed (it may need root):\n{done.stderr.strip()}")
        svg = (Path(directory) / "flame.svg").read_text(encoding="utf-8")
    return svg.replace(escape(" ".join(argv)), escape(title))


def record(name: str, directory: Path, seconds: float) -> tuple[str, float]:
    """The flame graph of one load on a group of its own, and the load's rate."""
    what, load = LOADS[name]
    with ExitStack() as stack:
        group = stack.enter_context(LocalGroup(directory / name))
        leader = group.leader()
        client = stack.enter_context(LoadClient(group.addresses, group.name, directory / f"{name}.log"))
        loading = stack.enter_context(ThreadPoolExecutor(1)).submit(load, client, seconds + LOADED_SECONDS)
        svg = sample(group.pid(leader), seconds, f"The leader of three nodes, {BODY_BYTES} B entries: {what}")
        rate = loading.result()
        if group.leader() != leader:
            raise ChildError(f"{name}: another node became leader meanwhile: is this machine overloaded?")
    return svg, rate


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(tuple(LOADS)))
@click.option("--seconds", type=click.FloatRange(1, 600), default=30.0, show_default=True, help="Of each load.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("docs/images"),
    show_default=True,
    help="The directory of the SVG files.",
)
def command(names: tuple[str, ...], seconds: float, output: Path) -> None:
    """Draw the leader's time under the loads NAMES (default: all)."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dledger-flame-") as directory:
        for name in names or LOADS:
            try:
                svg, rate = record(name, Path(directory), seconds)
            except ChildError as error:
                raise click.ClickException(str(error)) from error
            file = output / f"flame-append-{name}.svg"
            file.write_text(svg, encoding="utf-8")
            click.echo(f"{file}: {LOADS[name][0]}, {rate:,.0f} entries/s while it was sampled")


if __name__ == "__main__":
    command()
