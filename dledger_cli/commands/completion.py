"""``dledger completion``: scripts with which shells complete commands, options and names of contexts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


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
