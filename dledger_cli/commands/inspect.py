"""``dledger inspect``, ``restore-vote`` and ``member force``: about the directories of stopped nodes.

The first verifies and dumps files. With the second, an operator confirms that a node remembers its votes. With the
third, a group whose majority is lost for good goes on as one member, under another cluster id.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import click

from dledger.clock import Clock
from dledger.command_line import flag_values
from dledger.config import ServerConfig, StoreConfig, parse_members
from dledger.core.membership import implicit_configuration
from dledger.core.noops import describe_payload
from dledger.errors import ConfigError
from dledger.runtime.events import members_text, peers_setting
from dledger.store.file_store import FileStore
from dledger.store.format import EntryHeader, magic_of
from dledger.store.fs import FileSystem
from dledger.store.identity import read_identity, write_identity
from dledger.store.inspect import (
    BlankItem,
    DataItem,
    EndItem,
    ProblemItem,
    RecordItem,
    UnitItem,
    begin_of,
    inspect_data,
    inspect_index,
    problems,
    segment_paths,
)
from dledger.store.verify import PROBLEMS_MAX, is_node_directory
from dledger.types import Configuration, HardState, LogIndex, Magic, MemberRole, NodeId, Standing, Term
from dledger_cli import terminal

BODY_PREVIEW_BYTES = 60


@click.command(
    "inspect",
    short_help="Verify or dump a node's files.",
    epilog="""\b
Examples:
  dledger inspect /var/lib/dledger/dledger-n0            every file, its entries, the first bad offset
  dledger inspect /var/lib/dledger                       the same, when it holds one node
  dledger inspect dledger-n0 --dump | less               every entry, blank and problem
  dledger inspect dledger-n0 --json | jq .problems

Read-only, for a stopped node (the very end of a running one may look torn). Exit code 1 when
something is damaged; `dledger serve --repair` then fetches the log again from the other members.""",
)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--data-dir",
    "data_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of the segments, if not DIR/data (may be repeated).",
)
@click.option("--dump", is_flag=True, help="Print every entry, not only a summary.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document; with --dump one object per line.")
def inspect(directory: Path, data_dirs: tuple[Path, ...], dump: bool, as_json: bool) -> None:
    """Verify the segment and index files in DIR, offline: every header, checksum, chain and index unit."""
    node_dir = node_directory(directory)
    if not data_dirs and not (node_dir / "data").is_dir():
        raise ConfigError([f"{node_dir} has no data/: name the directory of its segments with --data-dir"])
    data_dirs = data_dirs or (node_dir / "data",)
    data = sorted((path for one in data_dirs for path in segment_paths(one)), key=lambda path: path.name)
    if dump:
        damaged = _dump(inspect_data(data, begin_of(node_dir)), as_json)
    else:
        damaged = _summary(node_dir, data_dirs, data, as_json)
    raise SystemExit(1 if damaged else 0)


def node_directory(directory: Path) -> Path:
    """A node's directory, or the only one in ``directory``. Raises ``ConfigError``."""
    if is_node_directory(directory):
        return directory
    named = sorted(path for path in directory.glob("dledger-*") if path.is_dir())
    nodes = [path for path in named if is_node_directory(path)]
    if len(nodes) == 1:
        return nodes[0]
    held = ", ".join(path.name for path in named) or "no dledger-… directory"
    raise ConfigError([f"{directory} is not a node's directory (it holds {held}): name one that has data/ and index/"])


# --- dump ------------------------------------------------------------------------------------------------------------


def _dump(items: Iterator[DataItem], as_json: bool) -> bool:
    damaged = False
    for item in items:
        damaged |= isinstance(item, ProblemItem)
        if as_json:
            terminal.print_json(_item_json(item))
        else:
            click.echo(_item_line(item))
    return damaged


def _item_json(item: DataItem) -> dict[str, object]:
    place: dict[str, object] = {"file": str(item.path), "offset": item.offset}
    match item:
        case RecordItem(header=header, body=body):
            names = ("index", "term", "position", "size", "channel", "chain_crc", "body_crc")
            fields = {name: getattr(header, name) for name in names}
            told = {"producers": said} if (said := _said(header, body)) else {}
            return {"type": _kind(header), **place, **fields, **told, "body": body.decode(errors="backslashreplace")}
        case BlankItem(length=length):
            return {"type": "BLANK", **place, "length": length}
        case EndItem():
            return {"type": "END", **place}
        case ProblemItem(reason=reason):
            return {"type": "PROBLEM", **place, "reason": reason}


def _item_line(item: DataItem) -> str:
    place = f"{item.path.name}+{item.offset}"
    match item:
        case RecordItem(header=header, body=body):
            preview = ascii(body[:BODY_PREVIEW_BYTES].decode(errors="backslashreplace"))[1:-1]
            more = "…" if len(body) > BODY_PREVIEW_BYTES else ""
            kind = "" if (name := _kind(header)) == Magic.NORMAL.name else f" {name}"
            text = _said(header, body) or preview + more
            return f"{place}  index {header.index} term {header.term}{kind} {len(body)} bytes  {text}"
        case BlankItem(length=length):
            return f"{place}  blank of {length} bytes"
        case EndItem():
            return f"{place}  end, zeros follow"
        case ProblemItem(reason=reason):
            return f"{place}  DAMAGED: {reason}"


def _said(header: EntryHeader, body: bytes) -> str:
    """A NOOP's producer payload in words; empty for other entries."""
    return describe_payload(body) if _kind(header) == Magic.NOOP.name else ""


def _kind(header: EntryHeader) -> str:
    return magic_of(header.magic, header.channel).name if header.magic in set(Magic) else str(header.magic)


# --- summary ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _FileSummary:
    """The contents of one file."""

    path: Path
    kind: str
    entries: int = 0
    first_index: int | None = None
    last_index: int | None = None
    end_offset: int = 0
    first_bad_offset: int | None = None

    def see(self, index: int, end_offset: int) -> None:
        self.entries += 1
        self.first_index = index if self.first_index is None else self.first_index
        self.last_index = index
        self.end_offset = end_offset


def _summary(node_dir: Path, data_dirs: tuple[Path, ...], data: list[Path], as_json: bool) -> bool:
    files = {path: _FileSummary(path, "data") for path in data}
    for item in inspect_data(data, begin_of(node_dir)):
        match item:
            case RecordItem(path=path, offset=offset, header=header):
                files[path].see(header.index, offset + header.size)
            case ProblemItem(path=path, offset=offset):
                files[path].first_bad_offset = offset
            case BlankItem() | EndItem():
                pass
    index_paths = segment_paths(node_dir / "index") if (node_dir / "index").is_dir() else []
    files |= {path: _FileSummary(path, "index") for path in index_paths}
    for unit in inspect_index(index_paths):
        if isinstance(unit, UnitItem):
            files[unit.path].see(unit.unit.index, unit.offset + 32)
        elif isinstance(unit, ProblemItem):
            files[unit.path].first_bad_offset = unit.offset
    every = problems(node_dir, data_dirs) if index_paths else iter([
        ProblemItem(node_dir / "index", 0, "no index files: they are rebuilt when the node starts")
    ])  # fmt: skip
    found = list(itertools.islice(every, PROBLEMS_MAX))
    unlisted = sum(1 for _ in every)
    _print_summary(node_dir, list(files.values()), found, unlisted, as_json)
    return bool(found)


def _print_summary(
    node_dir: Path, files: Sequence[_FileSummary], found: Sequence[ProblemItem], unlisted: int, as_json: bool
) -> None:
    if as_json:
        names = ("kind", "entries", "first_index", "last_index", "end_offset", "first_bad_offset")
        described = [{"file": str(one.path), **{name: getattr(one, name) for name in names}} for one in files]
        listed = [{"file": str(one.path), "offset": one.offset, "reason": one.reason} for one in found]
        document = {
            "directory": str(node_dir),
            "ok": not found,
            "files": described,
            "problem_count": len(found) + unlisted,
            "problems": listed,
        }
        terminal.print_json(document)
        return
    rows = [
        (
            str(one.path.relative_to(node_dir) if one.path.is_relative_to(node_dir) else one.path),
            f"{one.entries:,}",
            *("" if figure is None else str(figure) for figure in (one.first_index, one.last_index)),
            f"{one.end_offset:,}",
            "" if one.first_bad_offset is None else str(one.first_bad_offset),
        )
        for one in files
    ]
    terminal.print_table(("file", "entries", "first index", "last index", "bytes", "first bad offset"), rows)
    for problem in found:
        click.echo(f"DAMAGED: {problem.path}: offset {problem.offset}: {problem.reason}")
    if unlisted:
        click.echo(f"DAMAGED: {unlisted:,} more problems are not listed")
    if not found:
        click.echo("no problems found")


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
        renamed = dataclasses.replace(
            identity, cluster_id=cluster_id or f"{identity.cluster_id}-{secrets.token_hex(_ID_BYTES)}"
        )
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
    member = dataclasses.replace(own, role=MemberRole.VOTER, uid=store.members.uid, promote=False, replaces="")
    index = max(before.index, store.last.index) + 1
    return Configuration((member,), LogIndex(index), store.hard_state.load().term, before.next_number)
