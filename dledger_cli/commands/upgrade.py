"""``dledger upgrade``: from plain brokers to a group, and back.

``export`` makes a plain broker's directory of a stopped group member's log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dledger.errors import ConfigError
from dledger.store.verify import is_node_directory, verify_node
from dledger_cli import terminal

if TYPE_CHECKING:
    from rocketstore.upgrade.export import Exported


class _Steps(click.Group):
    """Loads ``check`` on demand, which takes longer to import than ``export``."""

    def list_commands(self, context: click.Context) -> list[str]:
        return ["check", *super().list_commands(context)]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name != "check":
            return super().get_command(context, name)
        from dledger_cli.commands.upgrade_check import check

        return check


@click.group(
    cls=_Steps,
    short_help="Move plain brokers to a group, and back.",
    epilog="""\b
Examples:
  dledger upgrade check --nodes /data/a,/data/b,/data/c    may these brokers start as a group?
  dledger upgrade export /data/a /data/plain               from a group's member back to a plain broker

The whole migration: docs/brokers.md.""",
)
def upgrade() -> None:
    """From plain brokers (masters and slaves) to a group that elects its master, and back."""


@upgrade.command(
    short_help="Export a stopped group member as a plain broker's directory.",
    epilog="""\b
Examples:
  dledger upgrade export /data/broker-n0 /data/plain -c broker-n0.conf
  dledger broker -c plain.conf         with storePathRootDir=/data/plain; or RocketMQ's own broker, with the same file

Stop all members first, and export the one whose log reaches furthest (dledger verify shows the committed index).
Messages keep their queue offsets, so consumers continue where they are; ids that name physical offsets change. The
member's directory is only read. DIR.partial, beside the new directory, is what an interrupted export leaves: remove
it and start again.""",
)
@click.argument("root", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.argument("target", type=click.Path(path_type=Path), metavar="NEW-DIR")
@click.option(
    "-c",
    "--conf-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The broker's conf file: file sizes, delay levels, where its files are. Default: RocketMQ's defaults.",
)
@click.option(
    "--data-dir",
    "data_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the member's segments are, if not below DIR (may be repeated).",
)
@click.option("--link", is_flag=True, help="Link the old files of a log that began as a plain one instead of copying.")
@click.option("--whole-log", is_flag=True, help="Also export entries that are not known to be committed.")
@click.option("--committed-only", is_flag=True, help="Leave such entries out, although they hold messages.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def export(  # noqa: PLR0913  # options
    root: Path,
    target: Path,
    conf_file: Path | None,
    data_dirs: tuple[Path, ...],
    *,
    link: bool,
    whole_log: bool,
    committed_only: bool,
    as_json: bool,
) -> None:
    """Export the stopped group member in DIR into NEW-DIR, for a plain broker: ours or RocketMQ's."""
    from rocketstore.upgrade.export import Choices, export_member
    from rocketstore.verification.verify import settings_for

    if whole_log and committed_only:
        raise click.UsageError("--whole-log and --committed-only exclude each other")
    nodes = [one for one in sorted(root.glob("dledger-*")) if one.is_dir() and is_node_directory(one)]
    if len(nodes) != 1:
        what = "no group member (dledger-…)" if not nodes else f"{len(nodes)} group members"
        raise ConfigError([f"{root} holds {what}: name the storePathRootDir of one broker that is in a group"])
    store = settings_for(root, conf_file)
    node = verify_node(nodes[0], data_dirs)
    with _progress() as progress:
        done = export_member(store, node, target, Choices(link, whole_log, committed_only), progress=progress)
    if as_json:
        terminal.print_json({**asdict(done), "target": str(target)})
        return
    size = node.identity.segment_bytes if node.identity else 0
    for line in _lines(done, size):
        click.echo(line)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """One bar after the other, on a terminal."""
    shown: dict[str, tuple[terminal.Advance, int]] = {}
    from contextlib import ExitStack

    with ExitStack() as bars:

        def told(step: str, done: int, total: int) -> None:
            if step not in shown:
                bars.close()
                shown[step] = (bars.enter_context(terminal.progress(step, total)), 0)
            advance, before = shown[step]
            advance(done - before)
            shown[step] = (advance, done)

        yield told


def _lines(done: Exported, segment_bytes: int) -> Iterator[str]:
    """The result, for people."""
    old = f" and {done.copied:,} in files taken over as they are" if done.copied else ""
    yield f"{done.target}: {done.messages:,} messages{old}, physical offsets {done.begin} to {done.end}"
    expired = f" ({done.expired_queues:,} without messages: their numbering goes on)" if done.expired_queues else ""
    yield f"verified: {done.queues:,} queues{expired}, {done.keys:,} keys; every record equals the member's"
    if done.left_out:
        what = ", ".join(f"{count:,} of {topic}" for topic, count in sorted(done.left_out.items()))
        yield f"left out, because only a group needs them: {what}"
    yield (
        f"state: {done.topics:,} topics, {done.groups:,} groups with {done.offsets:,} offsets, "
        f"progress of {done.delay_levels:,} delay levels"
    )
    yield f"exported up to entry {done.last_index} of the group's log"
    if done.tail:
        yield (
            f"left out: {done.tail:,} entries behind it, not known to be committed, "
            f"with {done.tail_messages:,} messages"
        )
    yield f"the broker's conf file needs: storePathRootDir={done.target} mappedFileSizeCommitLog={segment_bytes}"
