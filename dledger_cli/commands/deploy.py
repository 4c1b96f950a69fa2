"""``dledger deploy``: the deployment files that come with the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

import click

from dledger_cli import terminal

KINDS: Final = {
    "compose": "Docker Compose: brokers, the bare log, with TLS, several groups",
    "kubernetes": "Kubernetes manifests: brokers, the bare log, a name server, several groups",
    "systemd": "systemd units for a node, a broker and a name server",
    "prometheus": "Prometheus: scrape configuration, alert rules and their tests",
    "grafana": "Grafana: the dashboard",
}
"""Directories of deployment files, and a line about each."""


def _root() -> Traversable:
    return files("dledger_cli") / "deploy"


def _walk(place: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(place.iterdir(), key=lambda one: one.name):
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.is_file():
            yield prefix + entry.name, entry


def _files_of(kind: str) -> dict[str, str]:
    """Each file of a kind by its path below the kind's directory; raises ``ClickException`` if the package has none."""
    place = _root() / kind
    found = {name: entry.read_text(encoding="utf-8") for name, entry in _walk(place)} if place.is_dir() else {}
    if not found:
        raise click.ClickException(
            f"this installation has no files for {kind}: build the wheel in a clone (pip wheel .), and install that"
        )
    return found


@click.group(
    short_help="Print the deployment files that come with the package.",
    epilog="""\b
Examples:
  dledger deploy list
  dledger deploy show systemd""",
)
def deploy() -> None:
    """Deployment files for Compose, Kubernetes, systemd, Prometheus and Grafana."""


@deploy.command(
    "list",
    epilog="""\b
Examples:
  dledger deploy list --json""",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
def list_kinds(as_json: bool) -> None:
    """Print the name of each file."""
    rows = [(kind, name, about) for kind, about in KINDS.items() for name in _files_of(kind)]
    if as_json:
        terminal.print_json([{"kind": kind, "file": name, "about": about} for kind, name, about in rows])
        return
    terminal.print_table(("kind", "file", "about"), rows)


@deploy.command(
    epilog="""\b
Examples:
  dledger deploy show systemd
  dledger deploy show systemd --file dledger-broker.service
  dledger deploy show kubernetes --into manifests"""
)
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--file", "name", metavar="NAME", help="Print this file only, exactly as it is.")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Write the files there instead of printing them. An existing file is never overwritten.",
)
def show(kind: str, name: str | None, into: Path | None) -> None:
    """Print or write the files of one kind. Several files are separated by lines with their names."""
    found = _files_of(kind)
    if name is not None:
        if name not in found:
            raise click.ClickException(f"no file {name!r} for {kind}: choose from {', '.join(found)}")
        found = {name: found[name]}
    if into is not None:
        _write(found, into)
    elif name is not None:
        click.echo(found[name], nl=False)
    else:
        for one, text in found.items():
            click.echo(f"# ----- {kind}/{one}\n{text.rstrip()}\n")


def _write(found: dict[str, str], into: Path) -> None:
    """All files or, if one of them exists, none."""
    taken = [str(into / name) for name in found if os.path.lexists(into / name)]
    if taken:
        raise click.ClickException(f"{', '.join(taken)} exists already: move it away, or choose another directory")
    for name, text in found.items():
        path = into / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
        click.echo(path)
