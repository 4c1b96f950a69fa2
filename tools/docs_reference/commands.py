"""The command tree of ``dledger``, as its help shows it."""

from __future__ import annotations

from collections.abc import Iterator

import click

from dledger_cli.cli import main


def walk() -> Iterator[tuple[click.Command, click.Context]]:
    """Every visible command, groups before their subcommands."""
    yield from _walk(main, click.Context(main, info_name="dledger"))


def _walk(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            one = command.get_command(context, name)
            if one is not None and not one.hidden:
                yield from _walk(one, click.Context(one, info_name=name, parent=context))
