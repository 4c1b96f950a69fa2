"""``dledger demo``: a demonstration that needs no running group."""

from __future__ import annotations

from pathlib import Path

import click

from dledger.command_line import extras
from dledger_cli.console import CONSOLE_PACKAGES


@click.command(
    short_help="Watch a group lose its leader but no data.",
    epilog="""\b
Examples:
  dledger demo
  dledger demo --file /var/log/syslog
  dledger demo --console       then keep running with a web console: kill the leader yourself
  dledger demo --brokers       the page with three message brokers, a producer and consumers, until Ctrl-C
  dledger demo --keep          leave the three nodes running and print their addresses""",
)
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Append the lines of this file; default: the source text of the installed packages.",
)
@click.option("--keep", is_flag=True, help="Leave the group running.")
@click.option("--console", is_flag=True, help="Keep the group and its web console running until Ctrl-C.")
@click.option(
    "--brokers", is_flag=True, help="Run three message brokers and their web console until Ctrl-C; no walkthrough."
)
def demo(file: Path | None, keep: bool, console: bool, brokers: bool) -> None:
    """Three nodes, a real text, SIGKILL for the leader in the middle, and the proof that nothing was lost."""
    if brokers and (file is not None or keep):
        raise click.UsageError("--brokers cannot be combined with --file or --keep")
    if keep and console:
        raise click.UsageError("--keep and --console exclude each other: choose one")
    if (console or brokers) and (missing := extras.problem("console", "the console", CONSOLE_PACKAGES)):
        raise click.ClickException(missing)
    from dledger_cli import demo as story

    raise SystemExit(story.run_brokers() if brokers else story.run(file, keep=keep, console=console))
