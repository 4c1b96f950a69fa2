"""``dledger context``: addresses and security options under a name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import click

from dledger.command_line import contexts, flag_values
from dledger.values import parse_path
from dledger_cli import terminal


@click.group(
    short_help="Keep addresses and security options under names.",
    epilog="""\b
Examples:
  dledger context add prod -b 10.0.0.1:30911,10.0.0.2:30911 --tls-ca /etc/dledger/ca.crt
  dledger context add orders --namesrv '10.0.0.1:9876;10.0.0.2:9876' --access-key ops --secret-key-file ~/.ops.key
  dledger --context prod status          one command
  dledger context use prod               every command from now on
  dledger context use --none             127.0.0.1 again

An option wins over its environment variable, and that over the context. DLEDGER_CONTEXT=NAME chooses one, too, and
--context "" none. Contexts are kept in $XDG_CONFIG_HOME/dledger/contexts.json (~/.config), without secret keys: only
the file's name is. They hold for commands that talk to a group; servers and demos do not read them. A command whose
addresses the context does not have, as --broker, is refused.""",
)
def context() -> None:
    """Keep addresses and security options under names, as kubectl and natscli do."""


@context.command(
    short_help="Add one; the first one is used at once.",
    epilog="""\b
Examples:
  dledger context add local -b 127.0.0.1:30911
  dledger context add prod -b 10.0.0.1:30911,10.0.0.2:30911 --tls-ca ca.crt --use""",
)
@click.argument("name")
@click.option("-b", "--bootstrap", metavar="HOST:PORT,…", callback=flag_values.addresses, help="Client addresses.")
@click.option("-g", "--group", help="Name of the group.")
@click.option("--broker", metavar="HOST:PORT,…", callback=flag_values.addresses, help="Listen addresses of brokers.")
@click.option("-n", "--namesrv", metavar="HOST:PORT;…", callback=flag_values.addresses, help="Name servers.")
@click.option("--tls-ca", type=click.Path(path_type=Path), metavar="FILE", help="PEM file of the CA.")
@click.option("--tls-cert", type=click.Path(path_type=Path), metavar="FILE", help="PEM file of the certificate.")
@click.option("--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="PEM file of its key.")
@click.option("--insecure", is_flag=True, help="Allow plaintext to other machines.")
@click.option("--access-key", metavar="KEY", help="Access key to sign requests with.")
@click.option("--secret-key-file", type=click.Path(path_type=Path), metavar="FILE", help="File with its secret.")
@click.option(
    "--trust-name-servers", is_flag=True, help="Sign for addresses that name servers, or brokers, tell, without TLS."
)
@click.option("--use", is_flag=True, help="Use it from now on.")
@click.option("--force", is_flag=True, help="Replace one of the same name.")
def add(name: str, use: bool, force: bool, **given: object) -> None:
    """Add a context with the options that are given; file names become absolute."""
    values = {setting: _text(given[setting]) for setting in contexts.SETTINGS if given[setting] not in (None, False)}
    if not values:
        raise click.UsageError("give at least one option: --bootstrap, --broker or --namesrv")
    for setting in sorted(one for one, text in values.items() if not text):
        raise click.UsageError(f"--{setting.replace('_', '-')} is empty: leave it out")
    for setting in sorted(contexts.FILES & values.keys()):
        if not Path(values[setting]).is_file():
            raise click.UsageError(f"--{setting.replace('_', '-')}: there is no file {values[setting]}")
    with contexts.changing(contexts.contexts_path()) as change:
        change.put(contexts.check_name(name), values, replace=force, use=use)
    used = change.contexts.current
    click.echo(f"added {name}" + ("; it is used from now on" if used == name else f"; used is {used or 'none'}"))


def _text(value: object) -> str:
    match value:
        case True:
            return "true"
        case tuple():
            return ",".join(map(str, value))
        case Path():
            try:
                return str(parse_path(str(value)).absolute())
            except ValueError as error:
                raise click.UsageError(str(error)) from None
        case _:
            return str(value)


@context.command(
    "list",
    short_help="List them; the used one has a star.",
    epilog="""\b
Examples:
  dledger context list
  dledger context list --json | jq -r .current""",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def list_(as_json: bool) -> None:
    """List all contexts; the one in use has a star."""
    found = contexts.load(contexts.contexts_path())
    if as_json:
        terminal.print_json({"current": found.current, "contexts": found.known})
        return
    if not found.known:
        click.echo("no contexts: dledger context add NAME --bootstrap HOST:PORT,…")
        return
    rows = [
        ("*" if name == found.current else "", name, _where(values)) for name, values in sorted(found.known.items())
    ]
    terminal.print_table(("", "name", "where"), rows)


def _where(values: Mapping[str, str]) -> str:
    return "; ".join(f"{one} {values[one]}" for one in ("bootstrap", "broker", "namesrv") if one in values)


@context.command(
    short_help="Show one with all of its options.",
    epilog="""\b
Examples:
  dledger context show           the one in use
  dledger context show prod""",
)
@click.argument("name", required=False, shell_complete=contexts.complete_name)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(name: str | None, as_json: bool) -> None:
    """Show a context (default: the one in use) with all of its options."""
    found = contexts.load(contexts.contexts_path())
    chosen = name or found.current
    if not chosen:
        raise click.UsageError("no context is used: give a NAME")
    if as_json:
        terminal.print_json({"name": chosen, **found.named(chosen)})
        return
    for setting, text in found.named(chosen).items():
        option = f"--{setting.replace('_', '-')}"
        click.echo(option if setting in contexts.FLAGS else f"{option} {shlex.quote(text)}")


@context.command(
    short_help="Use one from now on.",
    epilog="""\b
Examples:
  dledger context use prod
  dledger context use --none     127.0.0.1 again""",
)
@click.argument("name", required=False, shell_complete=contexts.complete_name)
@click.option("--none", "no_one", is_flag=True, help="Use none.")
def use(name: str | None, no_one: bool) -> None:
    """Use a context for every command from now on."""
    if no_one == bool(name):
        raise click.UsageError("give a NAME, or --none")
    with contexts.changing(contexts.contexts_path()) as change:
        change.use(name or "")
    click.echo(f"used from now on: {name or 'none'}")


@context.command(
    short_help="Remove one.",
    epilog="""\b
Examples:
  dledger context remove prod""",
)
@click.argument("name", shell_complete=contexts.complete_name)
def remove(name: str) -> None:
    """Remove a context; nothing else is touched."""
    with contexts.changing(contexts.contexts_path()) as change:
        was_used = change.contexts.current == name
        change.remove(name)
    click.echo(f"removed {name}" + ("; none is used now: commands go to 127.0.0.1 again" if was_used else ""))
