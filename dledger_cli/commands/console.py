"""``dledger console``: serves a web page of a group, or of all groups behind name servers."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from pathlib import Path

import click

from dledger.command_line import flag_values
from dledger.command_line.contexts import ContextOption
from dledger.values import is_loopback, parse_address
from dledger_cli import process
from dledger_cli.console import CONSOLE_PACKAGES
from dledger_cli.targets import BrokerTarget, GroupTarget, group_options, precede

DEFAULT_LISTEN = "127.0.0.1:8080"
TOKEN_VARIABLE = "DLEDGER_CONSOLE_TOKEN"


@click.command(
    short_help="Serve a web page that shows a group, or a whole cluster.",
    epilog="""\b
Examples:
  dledger console --nodes 10.0.0.1:30911,10.0.0.2:30911,10.0.0.3:30911
  dledger console --nodes 10.0.0.1:10911 --listen 127.0.0.1:9000        brokers: their listen addresses
  dledger console --nodes 10.0.0.1:10911 --read-only
  dledger console --namesrv 10.0.0.1:9876,10.0.0.2:9876        all groups of brokers, each to be looked into
  DLEDGER_CONSOLE_TOKEN=… dledger console --nodes n0:10911 --listen 0.0.0.0:8080 --allow-remote

Anyone who can reach the console can read messages and (without --read-only) send some, change topics and groups, and
transfer leadership, as far as the console's account may. So it listens on this machine only, unless --allow-remote is
given, and then requires a token: the one in DLEDGER_CONSOLE_TOKEN or --token-file, or a random one that it prints. From
another machine: ssh -L 8080:127.0.0.1:8080 HOST.""",
)
@click.option(
    "--nodes",
    envvar="DLEDGER_CONSOLE_NODES",
    metavar="HOST:PORT,…",
    callback=lambda context, parameter, text: flag_values.addresses(context, parameter, text or None),
    help="Client addresses of some or all nodes, or listen addresses of brokers; the same as -b.",
)
@click.option(
    "-n",
    "--namesrv",
    cls=ContextOption,
    envvar="DLEDGER_NAMESRV",
    metavar="HOST:PORT;…",
    callback=lambda context, parameter, text: flag_values.addresses(context, parameter, text or None),
    help="Show all groups of brokers that these name servers know (also DLEDGER_NAMESRV).",
)
@click.option(
    "--listen",
    envvar="DLEDGER_CONSOLE_LISTEN",
    default=DEFAULT_LISTEN,
    show_default=True,
    metavar="HOST:PORT",
    help="Address to serve the page at; port 0 picks a free one.",
)
@click.option(
    "--allow-remote",
    envvar="DLEDGER_CONSOLE_ALLOW_REMOTE",
    is_flag=True,
    help="Accept connections from other machines.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"Require the token in this file (also {TOKEN_VARIABLE}).",
)
@click.option(
    "--allow-host", "hosts", multiple=True, metavar="NAME", help="Host name that browsers use for this machine."
)
@click.option(
    "--https-cert", type=click.Path(path_type=Path), metavar="FILE", help="Serve HTTPS with this PEM certificate."
)
@click.option("--https-key", type=click.Path(path_type=Path), metavar="FILE", help="PEM file of its key.")
@click.option(
    "--read-only", envvar="DLEDGER_CONSOLE_READ_ONLY", is_flag=True, help="Hide all buttons that change anything."
)
@click.option(
    "--log-level",
    envvar="DLEDGER_LOG_LEVEL",
    type=click.Choice(process.LEVELS),
    default="warning",
    show_default=True,
    help="Log messages of this level and above.",
)
@click.option(
    "--log-format",
    envvar="DLEDGER_LOG_FORMAT",
    type=click.Choice(process.FORMATS),
    default="text",
    show_default=True,
    help="Log as plain text, or as one JSON object per line.",
)
@click.option("--until-stdin-closes", is_flag=True, hidden=True, help="Stop when the parent process exits.")
@group_options
@click.pass_context
def console(  # noqa: PLR0913  # one parameter per option
    context: click.Context,
    nodes: tuple[str, ...] | None,
    namesrv: tuple[str, ...] | None,
    listen: str,
    allow_remote: bool,
    token_file: Path | None,
    hosts: tuple[str, ...],
    https_cert: Path | None,
    https_key: Path | None,
    read_only: bool,
    log_level: str,
    log_format: str,
    until_stdin_closes: bool,
    target: GroupTarget,
) -> None:
    """Serve a live web page of the group: leader, nodes, topics, messages; change topics and groups.

    With name servers, of all groups of brokers that have registered with them.
    """
    if missing := flag_values.missing_extra("console", "the console", CONSOLE_PACKAGES):
        raise click.ClickException(missing)
    from dledger_cli.console.control import NoControl
    from dledger_cli.console.guard import TOKEN_CHARACTERS_MIN, ConsoleRules
    from dledger_cli.console.server import ConsoleServer, ListenAddress

    process.to_stderr(log_level, log_format)
    if (https_cert is None) != (https_key is None):
        raise click.UsageError("--https-cert and --https-key must be given together")
    host, port = _host_and_port(listen)
    if not is_loopback(host) and not allow_remote:
        raise click.UsageError(
            f"--listen {listen} accepts connections from other machines: pass --allow-remote to permit that "
            "(requires a token)"
        )
    token, made_up = _token(token_file), False
    if allow_remote and not token:
        token, made_up = secrets.token_urlsafe(24), True
    if token and len(token) < TOKEN_CHARACTERS_MIN:
        raise click.UsageError(f"the token is too short: use at least {TOKEN_CHARACTERS_MIN} characters")
    target = _any_group(context, target, nodes)
    name_servers = namesrv if namesrv and precede(context, ("namesrv",), ("nodes", "bootstrap")) else ()
    rules = ConsoleRules(
        token=token,
        hosts=frozenset(one.lower() for one in (*hosts, host) if one),
        remote=allow_remote,
        https=https_cert is not None,
    )
    place = ListenAddress(host, port, https_cert, https_key)

    def ready(server: ConsoleServer) -> str:
        told = f"dledger console is ready: {server.url}{f'?token={token}' if made_up else ''}"
        if allow_remote and https_cert is None:
            told += "\nwarning: traffic to browsers on other machines is not encrypted: see --https-cert"
        return told

    def make() -> ConsoleServer:
        brokers = BrokerTarget(target.bootstrap, target.timeout_s, target.security, name_servers)
        return ConsoleServer(target, brokers, place=place, rules=rules, control=NoControl() if read_only else None)

    sys.exit(process.run(make, ready, until_stdin_closes=until_stdin_closes))


def _any_group(context: click.Context, target: GroupTarget, nodes: tuple[str, ...] | None) -> GroupTarget:
    """The addresses from ``--nodes``; without ``--group``, any group is accepted."""
    if nodes is not None:
        target = dataclasses.replace(target, bootstrap=nodes)
    if context.get_parameter_source("group") is click.core.ParameterSource.DEFAULT:
        target = dataclasses.replace(target, group="")
    return target


def _host_and_port(listen: str) -> tuple[str, int]:
    try:
        return parse_address(listen, port_min=0)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from None


def _token(file: Path | None) -> str:
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    return file.read_text(encoding="utf-8").strip()
