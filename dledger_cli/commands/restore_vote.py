"""``dledger restore-vote``: an operator confirms that a stopped node remembers its votes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from dledger.clock import Clock
from dledger.command_line import flag_values
from dledger.config import StoreConfig
from dledger.errors import ConfigError
from dledger.store.file_store import FileStore
from dledger.store.identity import read_identity
from dledger.types import HardState, Standing, Term
from dledger_cli import terminal
from dledger_cli.commands.inspect import node_directory


@click.command(
    "restore-vote",
    short_help="Restore the vote of a stopped node.",
    epilog="""\b
Examples:
  dledger restore-vote /var/lib/dledger/dledger-n0          shows what the node holds, then asks
  dledger restore-vote /var/lib/dledger/dledger-n0 --yes

For a group whose majority has lost its disks, once you accept the loss of entries that only those held: run it
on the node with the longest log and on enough others for a majority (docs/operating.md). A node that merely
has a new disk, or whose memory is in doubt, needs no help while a leader can be elected.""",
)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--data-dir",
    "data_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of the segments, if not DIR/data (may be repeated).",
)
@click.option(
    "--term", type=flag_values.Whole(min=0), help="Continue in this term; only needed if the group's terms diverged."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def restore_vote(directory: Path, data_dirs: tuple[Path, ...], term: int | None, yes: bool) -> None:
    """Let the votes and acknowledgements of the stopped node in DIR count again, at your own risk."""
    directory = node_directory(directory).absolute()
    with closing(open_stopped(directory, data_dirs)) as store:
        state, last = store.hard_state.load(), store.last
        for line in description(directory, store):
            click.echo(line)
        if term is not None and term < last.term:
            raise ConfigError([f"--term {term} is older than the log's last entry, which is of term {last.term}"])
        wanted = Term(state.term if term is None else term)
        vouched = HardState(wanted, state.vote if wanted == state.term else None, Standing.FULL)
        if vouched == state:
            store.members.vouch()
            click.echo("its vote counts already: clearing what it remembers of others, and changing nothing else")
            return
        if not yes:
            terminal.confirm("Confirm that nothing this node has forgotten is still needed?")
        store.hard_state.save(vouched)
        store.members.vouch()  # otherwise it, or others just restored, would be doubted again
    click.echo(f"the vote of {directory.name.removeprefix('dledger-')} counts, in term {wanted}")


def open_stopped(directory: Path, data_dirs: tuple[Path, ...]) -> FileStore:
    """The store of a stopped node. Raises ``ConfigError`` for anything else."""
    identity = read_identity(directory)
    if identity is None or directory.name != f"dledger-{identity.node_id}":
        raise ConfigError([f"{directory} is not a node's directory, or was renamed since it was created"])
    config = StoreConfig(
        base_dir=directory.parent,
        data_dirs=data_dirs,
        segment_bytes=identity.segment_bytes,
        index_segment_bytes=identity.index_segment_bytes,
    )
    return FileStore.open(
        config,
        cluster_id=identity.cluster_id,
        group=identity.group,
        node_id=identity.node_id,
        clock=Clock(),
    )


def description(directory: Path, store: FileStore) -> list[str]:
    """Its content, and whether it counts, in lines."""
    state, last = store.hard_state.load(), store.last
    held = f"entries {store.begin.index + 1} to {last.index}" if last.index > store.begin.index else "no entries"
    vote = f", in which it voted for {state.vote}" if state.vote else ""
    doubt = (", fenced" if state.fenced else "") + (f": {state.doubt}" if state.doubt else "")
    return [
        f"directory  {directory}",
        f"holds      {held}, the last of term {last.term}" if last.index > store.begin.index else f"holds      {held}",
        f"committed  {store.committed_index}, as far as it knows",
        f"term       {state.term}{vote}",
        f"standing   {state.standing.name.lower()}{doubt}",
    ]
