"""``dledger``: runs nodes, writes and reads the log, manages a group; runs brokers, sends and consumes messages.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 the outcome of a write is unknown.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Final

import click
from click.shell_completion import CompletionItem

from dledger import __version__
from dledger.command_line.contexts import CHOSEN, complete_name
from dledger_cli.reporting import ErrorReportingGroup

COMMANDS: Final = {
    "access": ("access", "Create and check access control accounts."),
    "append": ("log", "Write entries."),
    "bench": ("bench", "Measure a running group or its brokers."),
    "broker": ("broker", "Run a message broker, or show its status."),
    "certs": ("certs", "Create certificates for TLS."),
    "cluster": ("broker", "Show all brokers, spread the leaders over the machines."),
    "completion": ("completion", "Print a shell's completion script."),
    "console": ("console", "Serve a web page that shows a group, or a whole cluster."),
    "context": ("context", "Keep addresses and security options under names."),
    "consumer": ("consumer", "Manage consumer groups."),
    "demo": ("demo", "Watch a group lose its leader but no data."),
    "deploy": ("deploy", "Print the deployment files that come with the package."),
    "dlq": ("dlq", "Dead letters: list, send again, export."),
    "get": ("log", "Read entries by index."),
    "ha": ("ha", "Classic masters and slaves."),
    "health": ("health", "Check whether a server is serving."),
    "inspect": ("inspect", "Verify or dump a node's files."),
    "kv": ("kv", "A replicated map: put, get, del, watch, lock."),
    "member": ("member", "Show and change a group's members."),
    "message": ("message", "Send, consume and find messages."),
    "nameserver": ("nameserver", "Run a name server."),
    "pipeline": ("pipeline", "Run a Spark job over the log."),
    "restore-vote": ("restore_vote", "Restore the vote of a stopped node."),
    "serve": ("serve", "Run a node, or one of each of several groups."),
    "snapshot": ("snapshot", "List, verify and create snapshots of a state machine."),
    "status": ("status", "Show every member."),
    "tail": ("log", "Read the end of the log and follow it."),
    "topic": ("topic", "Create and show topics."),
    "transaction": ("transaction", "Given-up transactions: list, check again, export."),
    "transfer-leader": ("status", "Transfer leadership."),
    "upgrade": ("upgrade", "Move plain brokers to a group, and back."),
    "verify": ("verify", "Verify the directories of stopped nodes and brokers."),
}
"""Each command's module in ``dledger_cli.commands``, and its line in the list of commands."""

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
        command = getattr(import_module(f"dledger_cli.commands.{module}"), name.replace("-", "_"))
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


if __name__ == "__main__":
    main(prog_name="dledger")
