"""``python -m cluster.drill``: breaks a group on purpose and checks its messages.

Chooses where to run, runs the drills one after the other, reports, and returns the exit code.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from cluster.drill import html, report
from cluster.drill.drills import DRILLS, Drill, DrillOptions
from cluster.drill.history import DrillEvent
from cluster.drill.processes import ProcessMembers, ProcessMigration, ProcessTarget
from cluster.drill.runner import DrillResult, run_drill, run_migration
from cluster.drill.target import Direction, DrillError, DrillTarget, MigrationTarget, NotPossibleError
from dledger.command_line import flag_values, report_page
from dledger_cli import terminal


def _known(_context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """``list`` may stand beside others; other names must exist."""
    unknown = [name for name in names if name not in DRILLS and name not in ("all", "list")]
    if unknown:
        raise click.BadParameter(f"unknown drill {unknown[0]!r}: choose from {', '.join(DRILLS)}, all, list")
    return names


def _list(as_json: bool) -> None:
    rows = [
        *((one.name, one.summary) for one in DRILLS.values()),
        ("all", "one at a time; isolation in both directions"),
    ]
    if as_json:
        terminal.print_json([{"drill": name, "summary": summary} for name, summary in rows])
    else:
        terminal.print_table(("drill", "what happens"), rows)


@click.command(
    short_help="Break a group on purpose and check what happened to its messages.",
    epilog="""\b
Examples:
  python -m cluster.drill list                                what there is
  python -m cluster.drill kill-leader
  python -m cluster.drill kill-leader --nodes 5 --rounds 3 --html report.html
  python -m cluster.drill isolate-leader --direction in
  python -m cluster.drill upgrade --on processes
  python -m cluster.drill all --on processes --json > drills.json

\b
Containers need Docker (tools/with-dockerd.sh starts it); otherwise the drills run on processes, with a note.
Exit code 0: nothing acknowledged was lost, doubled or moved, and the group recovered each time. 1: anything else.""",
)
@click.argument("names", nargs=-1, required=True, metavar="DRILL…", callback=_known)
@click.option("--nodes", type=click.Choice(["3", "5"]), default="3", show_default=True, help="How many brokers.")
@click.option(
    "--rounds", type=flag_values.Whole(1, 100), default=1, show_default=True, help="How many times to inject the fault."
)
@click.option(
    "--rate", type=flag_values.Number(10, 5000), default=500, show_default=True, help="Messages to send per second."
)
@click.option(
    "--direction",
    type=click.Choice(["out", "in"]),
    default="out",
    show_default=True,
    help="isolate-leader: drop packets from the leader, or packets to it.",
)
@click.option(
    "--on",
    "place",
    type=click.Choice(["auto", "containers", "processes"]),
    default="auto",
    show_default=True,
    help="Where the brokers run; auto: in containers if possible.",
)
@click.option(
    "--calm",
    "calm_s",
    type=flag_values.Seconds(0.2, 60),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Quiet time before, between and after the faults.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables.")
@click.option(
    "--html",
    "html_file",
    type=flag_values.NewFile(),
    metavar="FILE",
    help="Write a report with charts to one file.",
)
@click.option("--keep", is_flag=True, help="Keep the group's data and logs.")
def main(  # noqa: PLR0913
    names: tuple[str, ...],
    nodes: str,
    rounds: int,
    rate: float,
    direction: str,
    place: str,
    calm_s: float,
    as_json: bool,
    html_file: Path | None,
    keep: bool,
) -> None:
    """Start a group, inject faults while a producer and a consumer run, and read everything back from every node.

    Each drill reports a timeline, the time without service, and a verdict: acknowledged, lost, duplicated, out of
    order.
    """
    if "list" in names:
        _list(as_json)
        return
    options = DrillOptions(int(nodes), rounds, rate, Direction(direction), calm_s, keep)
    try:
        code = run(names, DrillPlace(place), options, Reporting(as_json, html_file))
    except NotPossibleError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(code)


class DrillPlace(StrEnum):
    """Where the brokers run."""

    CONTAINERS = "containers"
    PROCESSES = "processes"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Reporting:
    """Requested output besides the tables."""

    json: bool = False
    html: Path | None = None


MakeTarget = Callable[[Drill, DrillOptions], DrillTarget]


def run(names: Sequence[str], place: DrillPlace, options: DrillOptions, reporting: Reporting) -> int:
    """Run the drills; returns 0 only if all passed. Raises ``NotPossibleError`` if they cannot run at all."""
    # Clients log their retries; the timeline already contains them.
    logging.getLogger("rocketstore").addHandler(logging.NullHandler())
    results: list[DrillResult] = []
    failures: list[str] = []
    with _targets(place) as (make_target, notes):
        for note in notes:
            click.secho(note, err=True, fg="yellow")
        for drill, chosen in _planned(names, options):
            try:
                results.append(_run_one(drill, chosen, make_target))
            except (DrillError, NotPossibleError) as error:
                failures.append(f"{drill.name}: {error}")
                click.secho(f"✗ {failures[-1]}", err=True, fg="red")
            else:
                if not reporting.json:
                    report.print_result(results[-1])
        if reporting.json:
            terminal.print_json(report.document(results, notes, failures))
        elif len(results) > 1:
            report.print_summary(results)
    if reporting.html is not None:
        report_page.write(html.page(results, notes, failures), reporting.html)
        click.echo(f"\nThe report is in {reporting.html}", err=True)
    return 0 if results and not failures and all(one.passed for one in results) else 1


def _planned(names: Sequence[str], options: DrillOptions) -> Iterator[tuple[Drill, DrillOptions]]:
    """``all`` runs every drill, one-way isolation in both directions."""
    for name in names:
        if name != "all":
            yield DRILLS[name], options
            continue
        for drill in DRILLS.values():
            both = tuple(Direction) if drill.name == "isolate-leader" else (options.direction,)
            for direction in both:
                yield drill, replace(options, direction=direction)


def _run_one(drill: Drill, options: DrillOptions, make_target: MakeTarget) -> DrillResult:
    with _progress(drill) as tell, closing(make_target(drill, options)) as target:
        try:
            if isinstance(target, MigrationTarget):
                return run_migration(drill, target, options, tell)
            return run_drill(drill, target, options, tell)
        except DrillError as error:
            if options.keep:
                raise DrillError("; ".join([str(error), *target.notes])) from error
            raise


@contextmanager
def _progress(drill: Drill) -> Iterator[Callable[[DrillEvent], None]]:
    """Progress for a person at a terminal; the timeline follows at the end."""
    if not sys.stderr.isatty():
        yield lambda _event: None
        return
    with Console(stderr=True).status(f"{drill.name}: starting the group") as status:
        yield lambda event: status.update(escape(f"{drill.name}, {event.at_s:.0f} s: {event.text}"))


@contextmanager
def _targets(place: DrillPlace) -> Iterator[tuple[MakeTarget, list[str]]]:
    """Factories for groups, and notes for the user."""
    with ExitStack() as resources:
        if place is DrillPlace.PROCESSES:
            yield (
                _process_target,
                ["The brokers run as processes on this host, as requested: no containers, no network."],
            )
            return
        try:
            make_target = resources.enter_context(_container_targets())
        except NotPossibleError as error:
            if place is DrillPlace.CONTAINERS:
                raise
            yield _process_target, [f"NOT IN CONTAINERS: the brokers run as processes on this host, because {error}"]
            return
        yield make_target, []


def _process_target(drill: Drill, options: DrillOptions) -> DrillTarget:
    if drill.is_migration:
        return ProcessMigration(size=options.nodes, keep=options.keep)
    if drill.changes_members:
        return ProcessMembers(size=options.nodes, keep=options.keep)
    return ProcessTarget(size=options.nodes, small_disks=drill.small_disks, keep=options.keep)


@contextmanager
def _container_targets() -> Iterator[MakeTarget]:
    """Containers from the image of the current sources. Raises ``NotPossibleError``."""
    try:
        import docker

        from cluster.drill.containers import ContainerMembers, ContainerMigration, ContainerTarget
        from cluster.image import REQUEST_TIMEOUT_S, ImageError, ensure_image
    except ImportError as error:
        raise NotPossibleError(f"the Docker SDK is not installed ({error}): run make install") from error

    with ExitStack() as resources:
        try:
            client = resources.enter_context(closing(docker.from_env(timeout=REQUEST_TIMEOUT_S)))
            image = ensure_image(client)
        except docker.errors.DockerException as error:
            raise NotPossibleError(
                f"no Docker: {error}; tools/with-dockerd.sh COMMAND starts a daemon (root)"
            ) from error
        except ImageError as error:
            raise NotPossibleError(str(error)) from error

        def make(drill: Drill, options: DrillOptions) -> DrillTarget:
            if drill.changes_members:
                return ContainerMembers(client, image, size=options.nodes, keep=options.keep)
            if drill.is_migration:
                return ContainerMigration(client, image, size=options.nodes, keep=options.keep)
            return ContainerTarget(client, image, size=options.nodes, small_disks=drill.small_disks, keep=options.keep)

        yield make


if __name__ == "__main__":
    main()
