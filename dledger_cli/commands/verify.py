"""``dledger verify``: verifies the directories of stopped nodes and brokers, and compares their logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dledger.errors import ConfigError
from dledger.store.format import parse_segment_name
from dledger.store.inspect import ProblemItem
from dledger.store.verify import LogDivergence, VerifiedNode, compare_nodes, is_node_directory, verify_node
from dledger_cli import terminal

if TYPE_CHECKING:  # imported only for a broker's directory
    from rocketstore.verification.verify import LogPart, VerifiedBroker


@dataclass(slots=True)
class _Found:
    """The results of everything that was verified."""

    nodes: list[VerifiedNode] = field(default_factory=list)
    brokers: list[VerifiedBroker] = field(default_factory=list)
    differences: list[LogDivergence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[ProblemItem]:
        return [one for node in self.nodes for one in node.problems] + [
            one for broker in self.brokers for one in broker.problems
        ]

    @property
    def is_ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems and not self.differences


@click.command(
    short_help="Verify the directories of stopped nodes and brokers.",
    epilog="""\b
Examples:
  dledger verify /var/lib/dledger/dledger-n0             log, index, checkpoint, term and vote, identity
  dledger verify /data/a/dledger-n0 /data/b/dledger-n1   the same, and whether their logs are equal
  dledger verify /data/broker-a -c broker.conf           also queues, key index and state of a broker, plain or not
  dledger verify /var/lib/dledger --json | jq .problems

Reads only; meant for stopped nodes and brokers (of a running one the very end may look torn). What an unclean stop
left after the last flush is not damage: the next start cuts it. Exit code 1 when something is damaged or differs; each
line names the file and the offset.""",
)
@click.argument(
    "directories",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR...",
    nargs=-1,
    required=True,
)
@click.option(
    "--data-dir",
    "data_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the node's segments are, if not in DIR/data (may be repeated; with one DIR only).",
)
@click.option(
    "-c",
    "--conf-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A broker's conf file: sizes of queue and index files, delay levels. Default: RocketMQ's defaults.",
)
@click.option("--log-only", is_flag=True, help="Skip what a broker derives from its log.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def verify(
    directories: tuple[Path, ...], data_dirs: tuple[Path, ...], conf_file: Path | None, log_only: bool, as_json: bool
) -> None:
    """Verify all files of the stopped nodes and brokers in DIR..., and compare the logs of nodes of one group."""
    if data_dirs and len(directories) > 1:
        raise click.UsageError("--data-dir says where one node's segments are: name one directory only")
    found = _Found()
    for directory in directories:
        _verify(directory, data_dirs, conf_file, found, log_only=log_only)
    for difference in compare_nodes(found.nodes):
        if isinstance(difference, LogDivergence):
            found.differences.append(difference)
        else:
            found.notes.append(difference)
    _print(found, as_json)
    raise SystemExit(0 if found.is_ok else 1)


def _verify(
    directory: Path, data_dirs: tuple[Path, ...], conf_file: Path | None, found: _Found, *, log_only: bool
) -> None:
    """Verify a node's directory, a broker's root, or a directory that contains several nodes."""
    if is_node_directory(directory):
        found.nodes.append(verify_node(directory, data_dirs))
        return
    nodes = [path for path in sorted(directory.glob("dledger-*")) if path.is_dir() and is_node_directory(path)]
    is_plain = (directory / "commitlog").is_dir() and not nodes
    if not nodes and not is_plain:
        what = "a node (data/ and index/, or a dledger-…) nor a broker's commitlog/"
        raise ConfigError([f"{directory} holds neither {what}"])
    verified = [verify_node(path, data_dirs) for path in nodes]
    found.nodes += verified
    is_broker = is_plain or (directory / "consumequeue").is_dir()
    if not is_broker:
        return
    if len(nodes) > 1:
        raise ConfigError([f"{directory} holds {len(nodes)} nodes and one broker's files: name one broker's directory"])
    from rocketstore.commit_log.base_log import base_log_now
    from rocketstore.verification.verify import settings_for, verify_broker

    old = base_log_now(nodes[0]) if nodes else None
    if log_only and nodes and old is None:
        return
    log = _part_of(verified[0]) if verified else None
    found.brokers.append(verify_broker(settings_for(directory, conf_file), log, old=old, derived=not log_only))


def _part_of(node: VerifiedNode) -> LogPart:
    """The committed log, as far as it is sound, from which a broker's files are derived."""
    from rocketstore.verification.verify import LogPart

    size = node.identity.segment_bytes if node.identity else 1 << 30
    begin = node.checkpoint.begin.position if node.checkpoint else 0
    return LogPart(
        {parse_segment_name(path.name) or 0: path for path in node.segments},
        size,
        begin,
        max(begin, node.committed_end),
    )


# --- printing ---------------------------------------------------------------------------------------------------------


def _print(found: _Found, as_json: bool) -> None:
    if as_json:
        terminal.print_json(_document(found))
        return
    for node in found.nodes:
        click.echo(_node_line(node))
    for broker in found.brokers:
        click.echo(_broker_line(broker))
    for note in found.notes:
        click.echo(note)
    for problem in found.problems:
        click.echo(f"DAMAGED: {problem.path}: offset {problem.offset}: {problem.reason}")
    unlisted = sum(node.problem_count - len(node.problems) for node in found.nodes)
    if unlisted:
        click.echo(f"DAMAGED: {unlisted:,} more problems are not listed")
    for one in found.differences:
        click.echo(f"DIFFERS: {one.sentence()} ({one.place.path}: offset {one.place.offset})")
    if found.is_ok:
        are_equal = len(found.nodes) > 1 and not found.notes
        click.echo("no problems found" + (", and the logs are equal" if are_equal else ""))


def _node_line(node: VerifiedNode) -> str:
    span = f"{node.first_index} to {node.last_index}" if node.entries else "none"
    torn = f", torn end at {node.torn.path}: offset {node.torn.offset}" if node.torn else ""
    return f"{node.directory}: {node.entries:,} entries ({span}), committed {node.committed}{torn}"


def _broker_line(broker: VerifiedBroker) -> str:
    torn = f", torn end at {broker.torn.path}: offset {broker.torn.offset}" if broker.torn else ""
    what = f"{broker.messages:,} messages, {broker.keys:,} keys"
    return f"{broker.root}: {what}, read from {broker.begin} to {broker.end}{torn}"


def _document(found: _Found) -> dict[str, object]:
    return {
        "ok": found.is_ok,
        "nodes": [
            {
                "directory": str(one.directory),
                "entries": one.entries,
                "first_index": one.first_index,
                "last_index": one.last_index,
                "committed_index": one.committed,
                "torn": _item(one.torn),
                "problem_count": one.problem_count,
            }
            for one in found.nodes
        ],
        "brokers": [
            {
                "directory": str(one.root),
                "messages": one.messages,
                "keys": one.keys,
                "begin": one.begin,
                "end": one.end,
                "torn": _item(one.torn),
            }
            for one in found.brokers
        ],
        "notes": found.notes,
        "problems": _items(found.problems),
        "differences": [
            {"directories": [one.one, one.other], "index": one.index, **(_item(one.place) or {})}
            for one in found.differences
        ],
    }


def _items(problems: Sequence[ProblemItem]) -> list[dict[str, object] | None]:
    return [_item(one) for one in problems]


def _item(problem: ProblemItem | None) -> dict[str, object] | None:
    if problem is None:
        return None
    return {"file": str(problem.path), "offset": problem.offset, "reason": problem.reason}
