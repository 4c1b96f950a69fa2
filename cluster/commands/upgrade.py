"""``dledger upgrade``: from a plain broker to a group, and back."""

from __future__ import annotations

import click

from cluster.commands.upgrade_export import export


@click.group(short_help="From a plain broker to a group, and back.")
def upgrade() -> None:
    """From a plain broker, or a master with its slaves, to a group, and back."""


upgrade.add_command(export)
