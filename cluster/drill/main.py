"""Chooses where to run, runs the drills one after the other, reports, and returns the exit code."""

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
from cluster.drill.context import DrillOptions
from cluster.drill.drills import DRILLS, Drill
from cluster.drill.history import DrillEvent
from cluster.drill.member_processes import ProcessMembers
from cluster.drill.migration import run_migration
from cluster.drill.processes import ProcessMigration, ProcessTarget
from cluster.drill.runner import DrillResult, run_drill
from cluster.drill.target import Direction, DrillError, DrillTarget, MigrationTarget, NotPossibleError
from dledger.command_line import html_page
from dledger.command_line.extras import install_command
from dledger_cli import terminal


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
        html_page.write(html.page(results, notes, failures), reporting.html)
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

        from cluster.drill.containers import ContainerMigration, ContainerTarget
        from cluster.drill.member_containers import ContainerMembers
        from cluster.image import REQUEST_TIMEOUT_S, ImageError, ensure_image
    except ImportError as error:
        raise NotPossibleError(f"the Docker SDK is not installed ({error}): run {install_command('drill')}") from error

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
