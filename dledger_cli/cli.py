"""``dledger``: runs nodes, writes and reads the log, manages a group; runs brokers, sends and consumes messages.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 the outcome of a write is unknown.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from dledger import __version__
from dledger.command_line.contexts import CHOSEN, complete_name
from dledger_cli.terminal import ErrorReportingGroup

COMMANDS: Final = {
    "access": ("access", "Create and check access control accounts."),
    "append": ("log", "Write entries."),
    "bench": ("bench", "Measure a running group or its brokers."),
    "broker": ("broker", "Run a message broker, or show its status."),
    "certs": ("certs", "Create certificates for TLS."),
    "cluster": ("broker", "Show all brokers, spread the leaders over the machines."),
    "completion": ("", "Print a shell's completion script."),
    "console": ("console", "Serve a web page that shows a group, or a whole cluster."),
    "context": ("context", "Keep addresses and security options under names."),
    "consumer": ("consumer", "Manage consumer groups."),
    "demo": ("demo", "Watch a group lose its leader but no data."),
    "deploy": ("deploy", "Print the deployment files that come with the package."),
    "dlq": ("undelivered", "Dead letters: list, send again, export."),
    "get": ("log", "Read entries by index."),
    "ha": ("ha", "Classic masters and slaves."),
    "health": ("health", "Check whether a server is serving."),
    "inspect": ("inspect", "Verify or dump a node's files."),
    "kv": ("kv", "A replicated map: put, get, del, watch, lock."),
    "member": ("member", "Show and change a group's members."),
    "message": ("message", "Send, consume and find messages."),
    "nameserver": ("serve", "Run a name server."),
    "pipeline": ("", "Run a Spark job over the log."),
    "restore-vote": ("inspect", "Restore the vote of a stopped node."),
    "serve": ("serve", "Run a node, or one of each of several groups."),
    "snapshot": ("snapshot", "List, verify and create snapshots of a state machine."),
    "status": ("status", "Show every member."),
    "tail": ("log", "Read the end of the log and follow it."),
    "topic": ("topic", "Create and show topics."),
    "transaction": ("undelivered", "Given-up transactions: list, check again, export."),
    "transfer-leader": ("status", "Transfer leadership."),
    "upgrade": ("upgrade", "Move plain brokers to a group, and back."),
    "verify": ("verify", "Verify the directories of stopped nodes and brokers."),
}
"""Each command's module in ``dledger_cli.commands``, or none for those of this one, and its line in the list."""

ELSEWHERE = {
    "ls": "topic list",
    "endpoint": "status",
    "group": "consumer",
    "groups": "consumer",
    "pub": "append",
    "put": "append",
    "read": "get",
    "start": "serve",
    "sub": "tail -f",
    "watch": "tail -f",
    "write": "append",
}
"""Words of other command lines, and the commands here."""
SHELLS: Final = ("bash", "zsh", "fish")


class _Commands(ErrorReportingGroup):
    """Loads a command on demand: loading all of them takes longer than running most of them."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, _context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def shell_complete(self, context: click.Context, begun: str) -> list[CompletionItem]:
        """Commands and their lines, without loading any."""
        found = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(begun)]
        return [*found, *click.Command.shell_complete(self, context, begun)]

    def resolve_command(
        self, context: click.Context, words: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command; where other tools' words are used, say ours."""
        if words and words[0] in ELSEWHERE:
            raise click.UsageError(f"no command {words[0]!r} here: see `dledger {ELSEWHERE[words[0]]}`", context)
        if words and words[0] not in COMMANDS and not words[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(words[0], COMMANDS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"no such command {words[0][:64]!r}.{hint}", context)
        return super().resolve_command(context, words)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _ = COMMANDS[name]
        found = import_module(f"dledger_cli.commands.{module}") if module else sys.modules[__name__]
        command = getattr(found, name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_Commands,
    writing=frozenset({"append", "transfer-leader"}),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Start with: dledger demo",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option(
    "--context",
    "chosen",
    envvar="DLEDGER_CONTEXT",
    metavar="NAME",
    shell_complete=complete_name,
    help="Take addresses and security options from this context (also DLEDGER_CONTEXT; see `dledger context`).",
)
@click.pass_context
def main(context: click.Context, chosen: str | None) -> None:
    """A Raft-replicated commit log: an ordered, durable log on several nodes that survives losing some of them.

    Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 the outcome of a write is unknown, 130 Ctrl-C, 141 closed
    pipe.
    """
    context.meta[CHOSEN] = chosen
    # Otherwise gRPC's C core prints a message for every connection closed by a stopped node.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@click.command(
    short_help="Print a shell's completion script.",
    epilog="""\b
Examples:
  source <(dledger completion bash)                                        this shell; add the line to ~/.bashrc
  source <(dledger completion zsh)                                         the same; ~/.zshrc, after compinit
  dledger completion fish > ~/.config/fish/completions/dledger.fish        every fish from now on

Bash 4.4 or newer is needed. Completing asks no server.""",
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options, files and names of contexts."""
    chosen = get_completion_class(shell)
    assert chosen is not None
    click.echo(chosen(context.find_root().command, {}, "dledger", "_DLEDGER_COMPLETE").source())


class _Jobs(click.Group):
    """Finds its commands in ``dledger_spark.jobs``, which takes longer to import than most commands take to run."""

    def list_commands(self, _context: click.Context) -> list[str]:
        from dledger_spark.jobs import JOBS

        return list(JOBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(context):
            return None
        command = import_module(f"dledger_spark.jobs.{name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_Jobs,
    short_help="Run a Spark job over the log.",
    epilog="""\b
Examples:
  dledger pipeline stats /var/lib/broker/dledger-n0
  dledger pipeline audit /backup/n0 /backup/n1 /backup/n2
  dledger pipeline export -b 127.0.0.1:10911 -g broker-a --help

\b
Needs Spark (the extra spark: pip install '.[spark]' in a clone) and Java 17 or newer. A job runs on this machine, with
all its processors, unless --master names a cluster; each is also a program for spark-submit, see docs/pipeline.md.""",
)
def pipeline() -> None:
    """Spark jobs for logs too large for one machine."""


if __name__ == "__main__":
    main(prog_name="dledger")
