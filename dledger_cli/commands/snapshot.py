"""``dledger snapshot``: the snapshots of a node's state machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import click

from dledger.errors import DamagedSnapshotError
from dledger.statemachine.snapshots import SnapshotMeta, read_meta, snapshot_directories, verify_files
from dledger_cli import terminal
from dledger_cli.targets import GroupTarget, group_options
from dledger_cli.terminal import ErrorReportingGroup

_COLUMNS = ("index", "term", "bytes", "format", "log time", "program", "state")


@click.group(
    cls=ErrorReportingGroup,
    short_help="List, verify and create snapshots of a state machine.",
    epilog="""\b
Examples:
  dledger snapshot list /var/lib/dledger/dledger-n0
  dledger snapshot verify /var/lib/dledger/dledger-n0
  dledger snapshot create n0:30911""",
)
def snapshot() -> None:
    """The snapshots of a node's state machine: those in its directory, and new ones."""


_directory = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")


@snapshot.command(
    "list",
    short_help="List the snapshots of a node, newest first.",
    epilog="""\b
Examples:
  dledger snapshot list /var/lib/dledger/dledger-n0
  dledger snapshot list /var/lib/dledger/dledger-n0 --json | jq .index""",
)
@_directory
@click.option("--json", "as_json", is_flag=True, help="One JSON object per snapshot.")
def show(directory: Path, as_json: bool) -> None:
    """List the snapshots in the directory of a node, newest first. Reads only, also while the node runs."""
    rows = [_row(path, found) for path, found in _found(directory)]
    if as_json:
        for row in rows:
            terminal.print_json(dict(zip(_COLUMNS, row, strict=True)))
    elif rows:
        click.echo(terminal.plain_table(_COLUMNS, rows))
    else:
        click.echo(f"no snapshots in {directory}")


@snapshot.command(
    short_help="Compare the snapshots of a node with their checksums.",
    epilog="""\b
Examples:
  dledger snapshot verify /var/lib/dledger/dledger-n0

Exit code 1 when one is damaged: the node moves it aside at its next start, and uses the previous one.""",
)
@_directory
def verify(directory: Path) -> None:
    """Read all snapshots in the directory of a node, and compare them with their checksums."""
    damaged = 0
    for path, found in _found(directory):
        try:
            if isinstance(found, DamagedSnapshotError):
                raise found
            verify_files(path, found)
        except DamagedSnapshotError as damage:
            damaged += 1
            click.echo(f"{path}: damaged: {damage}")
        else:
            click.echo(f"{path}: intact, {found.size:,} bytes")
    if damaged:
        raise click.ClickException(f"{damaged} damaged snapshots")


@snapshot.command(
    short_help="Have a node write a snapshot now.",
    epilog="""\b
Examples:
  dledger snapshot create n0:30911
  dledger snapshot create n0:30911 --timeout 600     a large one""",
)
@click.argument("address", metavar="HOST:PORT")
@group_options
def create(address: str, target: GroupTarget) -> None:
    """Have the node at HOST:PORT (its port for clients) write a snapshot of what it has applied by now."""
    with closing(target.client()) as client:
        state = client.create_snapshot(address, timeout_s=max(target.timeout_s, 60.0))
    click.echo(f"snapshot of entry {state.index}, {state.size:,} bytes")


def _found(directory: Path) -> Iterator[tuple[Path, SnapshotMeta | DamagedSnapshotError]]:
    for path in snapshot_directories(directory):
        try:
            yield path, read_meta(path)
        except DamagedSnapshotError as damage:
            yield path, damage


def _row(path: Path, found: SnapshotMeta | DamagedSnapshotError) -> tuple[str, ...]:
    if isinstance(found, DamagedSnapshotError):
        return (str(int(path.name)), *[""] * 5, f"damaged: {found}")
    time = datetime.fromtimestamp(found.time_ms / 1000, UTC).isoformat(timespec="seconds") if found.time_ms else ""
    counts = (found.index, found.boundary.term, found.size, found.format)
    return (*map(str, counts), time, found.program, "")
