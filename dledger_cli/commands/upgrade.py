"""``dledger upgrade``: from plain brokers to a group, and back."""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

_MODULES: Final = {"check": "upgrade_check", "export": "upgrade_export"}
"""Maps each command to its module in ``dledger_cli.commands``."""


class _Steps(click.Group):
    """Loads a command on demand."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        module = _MODULES.get(name)
        if module is None:
            return None
        command = getattr(import_module(f"dledger_cli.commands.{module}"), name)
        assert isinstance(command, click.Command)
        return command


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
