"""``dledger member force``: a group whose majority is lost for good goes on as one member, under another cluster id."""

from __future__ import annotations

import secrets
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click

from dledger.config import ServerConfig, parse_members
from dledger.core.membership import implicit_configuration
from dledger.errors import ConfigError
from dledger.members import Configuration, MemberRole
from dledger.runtime.events import members_text, peers_setting
from dledger.store.file_store import FileStore
from dledger.store.fs import FileSystem
from dledger.store.identity import read_identity, write_identity
from dledger.types import HardState, LogIndex, NodeId, Standing
from dledger_cli import terminal
from dledger_cli.commands.inspect import node_directory
from dledger_cli.commands.restore_vote import description, open_stopped

_ID_BYTES = 3


@click.command(
    short_help="Go on with one node after a majority was lost.",
    epilog="""\b
Examples:
  dledger member force /var/lib/dledger/dledger-n1          shows what it holds, then asks
  dledger member force dledger-n1 --peers 'n0-a:20911;n1-b:20911;n2-c:20911' --yes

For a group whose majority will never come back. Run it on the stopped node with the longest log (`dledger inspect`
shows where each ends): entries that only the lost nodes held are lost, also acknowledged ones. The group continues
with this node alone, under a new cluster id, so that a lost node that turns up is refused. Then add others with
`dledger member add`, on empty directories.""",
)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--data-dir",
    "data_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of the segments, if not DIR/data (may be repeated).",
)
@click.option("--peers", metavar="ID-HOST:PORT;…", help="The members, as in its conf file, if they were never changed.")
@click.option("--cluster-id", help="The new cluster id; default: the old one and some random letters.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def force(directory: Path, data_dirs: tuple[Path, ...], peers: str | None, cluster_id: str | None, yes: bool) -> None:
    """Make the stopped node in DIR the only member of its group, at the price of what only the others held."""
    directory = node_directory(directory).absolute()
    identity = read_identity(directory)
    with closing(open_stopped(directory, data_dirs)) as store:
        assert identity is not None  # it is open
        node_id = NodeId(identity.node_id)
        before = _members(store, node_id, peers)
        renamed = replace(identity, cluster_id=cluster_id or f"{identity.cluster_id}-{secrets.token_hex(_ID_BYTES)}")
        if renamed == identity:
            raise ConfigError([f"--cluster-id {cluster_id} is the present one: nodes that are lost might come back"])
        for line in description(directory, store):
            click.echo(line)
        click.echo(f"members    {members_text(before)}: only {node_id} stays")
        click.echo(f"cluster    {identity.cluster_id} becomes {renamed.cluster_id}")
        if not yes:
            terminal.confirm(f"Give up the others, and whatever they hold beyond entry {store.last.index}, for good?")
        # First the identity: a node that was interrupted here refuses to start, and the command can be repeated.
        write_identity(FileSystem(), directory, renamed)
    with closing(open_stopped(directory, data_dirs)) as store:  # which doubts itself because of the other file
        alone = _alone(before, node_id, store)
        store.members.save_committed(alone, alone.index)
        store.members.remember({})
        state = store.hard_state.load()
        store.hard_state.save(HardState(state.term, state.vote, Standing.FULL))
    click.echo(f"{node_id} is the only member now; start it with these settings, and add others:")
    click.echo(f"  cluster_id={renamed.cluster_id}")
    click.echo(f"  dLegerPeers={peers_setting(alone)}")


def _members(store: FileStore, node_id: NodeId, peers: str | None) -> Configuration:
    """The newest committed ones that are known here."""
    saved = store.members.saved.configuration
    if saved is None and peers is None:
        raise ConfigError(["this directory does not know the members, which were never changed: give --peers"])
    found = saved
    if found is None:
        members = parse_members(peers or "")
        found = implicit_configuration(ServerConfig(node_id=node_id, members=members))
    if found.find(node_id) is None:
        raise ConfigError([f"{node_id} is not a member ({members_text(found)}): only a member can go on alone"])
    return found


def _alone(before: Configuration, node_id: NodeId, store: FileStore) -> Configuration:
    """Newer than every configuration in the log, so that an uncommitted one there does not count."""
    own = before.find(node_id)
    assert own is not None  # it was looked for
    member = replace(own, role=MemberRole.VOTER, uid=store.members.uid, promote=False, replaces="")
    index = max(before.index, store.last.index) + 1
    return Configuration((member,), LogIndex(index), store.hard_state.load().term, before.next_number)
