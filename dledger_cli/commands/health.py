"""``dledger health``: whether servers answer, for containers and process managers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from dledger.command_line import flag_values
from dledger.command_line.contexts import ContextOption
from dledger.errors import ConfigError
from dledger.values import address_text
from dledger_cli import terminal
from dledger_cli.targets import CommandSecurity, security_options

if TYPE_CHECKING:
    import ssl

    from dledger.config import SecurityConfig
    from dledger.remoting.frame import Frame

    MakeContext = Callable[[], ssl.SSLContext]

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class OwnServer:
    """The server configured in the environment: its address, certificates and CA."""

    address: str
    security: SecurityConfig

    def tls(self) -> MakeContext | None:
        """With the server's own certificate, which has the node's id, not the address dialled."""
        from dledger.rpc.tls import TlsFiles, client_context, read

        ca = self.security.tls_trust_cert_path
        if not self.security.has_tls or ca is None:
            return None
        context = client_context(read(TlsFiles(ca, self.security.tls_cert_path, self.security.tls_key_path)))
        return lambda: context


@click.command(
    short_help="Check whether a server is serving.",
    epilog="""\b
Examples:
  dledger health                      the server that this environment's settings describe (DLEDGER_…), or all of them
  dledger health 127.0.0.1:10911
  dledger health -b $DLEDGER_BOOTSTRAP    each of a group
  dledger health 127.0.0.1:9876       a name server, ours or RocketMQ's
  dledger health --nameserver         the name server that this environment's settings describe

Exit codes: 0 serving, 1 not serving or no answer, 2 wrong usage or settings.""",
)
@click.argument("addresses", required=False, metavar="[HOST:PORT,…]", callback=flag_values.addresses)
@click.option(
    "-b",
    "--bootstrap",
    cls=ContextOption,
    metavar="HOST:PORT,…",
    callback=flag_values.addresses,
    help="The same as the argument, as for other commands; default: the context's.",
)
@click.option("--nameserver", is_flag=True, help="Without an address: the settings are those of a name server.")
@click.option(
    "--timeout",
    "timeout_s",
    type=flag_values.Seconds(min=0, min_open=True),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the answer.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per server.")
@security_options
def health(  # one parameter per option
    addresses: tuple[str, ...] | None,
    bootstrap: tuple[str, ...] | None,
    nameserver: bool,
    timeout_s: float,
    as_json: bool,
    security: CommandSecurity,
) -> None:
    """Check whether servers answer requests of clients; without an address, the one in this container.

    They are asked over RocketMQ's protocol, at the port of clients, without an account. gRPC's health protocol, for
    other probes, is served at the gRPC port.
    """
    of_context = click.get_current_context().get_parameter_source("bootstrap") is ParameterSource.DEFAULT_MAP
    if addresses and bootstrap and not of_context:
        raise click.UsageError("addresses are given twice: with --bootstrap and without")
    if not nameserver or not of_context:  # a context's are those of nodes
        addresses = addresses or bootstrap
    problems = 0
    if addresses:
        asked = [(one, security_context([one], security)) for one in addresses]
    else:
        own = [own_name_server(os.environ)] if nameserver else own_servers(os.environ)
        asked = [(one.address, one.tls()) for one in own]
    for address, tls in asked:
        problem = problem_of(address, tls, timeout_s)
        problems += bool(problem)
        if as_json:
            terminal.print_json({"address": address, "serving": not problem, "problem": problem})
        else:
            click.echo(f"error: {address}: {problem}" if problem else f"{address}: serving", err=bool(problem))
    if problems and not addresses and (group := os.environ.get("DLEDGER_BOOTSTRAP")):
        click.echo(
            f"This was the server of this environment's settings. For the group: dledger health -b {group}", err=True
        )
    if problems:
        raise SystemExit(1)


def security_context(addresses: Sequence[str], security: CommandSecurity) -> MakeContext | None:
    """How to connect; None: plaintext. Raises ``ConfigError`` for unusable files, and plaintext to other machines."""
    from dledger.rpc.tls import ContextSource
    from dledger.values import plaintext_problems

    known = security.for_client()
    if known.tls is not None:
        return ContextSource(known.tls)
    problems = plaintext_problems(addresses, "use TLS (--tls-ca)", "pass --insecure")
    if problems and not known.insecure:
        raise ConfigError(problems)
    return None


def problem_of(address: str, tls: MakeContext | None, timeout_s: float) -> str:
    """The problem with a server; empty if it answers: whatever it is, and whatever it says to somebody unknown."""
    import asyncio
    import ssl

    from dledger.remoting.client import UnreachableError
    from dledger.remoting.codes import TLS_REQUIRED, AnswerCode
    from dledger.remoting.connection import DisconnectedError
    from dledger.rpc.tls import explain

    try:
        answer = asyncio.run(_ask(address, tls, timeout_s))
    except UnreachableError as error:
        if isinstance(error.__cause__, ssl.SSLError):
            return explain(error.__cause__, address)
        return str(error).removeprefix(f"cannot connect to {address}: ")
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except DisconnectedError as error:
        hint = "" if tls is not None else ": it may require TLS (--tls-ca), or not be a port for clients"
        return f"{str(error).rpartition(' ended: ')[2]}{hint}"
    if answer.fields.items() >= TLS_REQUIRED.items():
        return f"{answer.remark}: give --tls-ca"
    if answer.code == AnswerCode.SERVICE_NOT_AVAILABLE:
        return answer.remark or "it says that it is not available"
    return ""


async def _ask(address: str, tls: MakeContext | None, timeout_s: float) -> Frame:
    from dledger.remoting.client import RemotingClient
    from dledger.remoting.frame import Frame
    from rocketstore.remoting.codes import RequestCode

    client = RemotingClient(tls=tls)
    try:
        return await client.call(address, Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0), timeout_s)
    finally:
        await client.close(at_once=True)


def own_name_server(environ: Mapping[str, str]) -> OwnServer:
    """The name server with these settings, as its own machine reaches it. Raises ``ConfigError``."""
    from rocketstore.nameserver.settings import load_name_server_settings

    file = Path(environ["DLEDGER_CONFIG"]) if environ.get("DLEDGER_CONFIG") else None
    config, _warnings = load_name_server_settings(file, environ, {})
    return OwnServer(_reachable(config.listen_host, config.listen_port), config.security)


def own_servers(environ: Mapping[str, str]) -> list[OwnServer]:
    """The servers with these settings, as their own machine reaches them: several for brokers of several groups.

    Raises ``ConfigError``.
    """
    files = [Path(text) for text in environ.get("DLEDGER_CONFIG", "").split(os.pathsep) if text]
    found = [_own_server(environ, file) for file in files or (None,)]
    return list({one.address: one for one in found}.values())  # log nodes of several groups share one


def _own_server(environ: Mapping[str, str], file: Path | None) -> OwnServer:
    from rocketstore.settings import load_broker_settings

    try:
        config, _warnings = load_broker_settings(file, environ, {})
    except ConfigError:
        from dledger import settings

        node = settings.load(file, environ, {}).config  # no broker's settings: a node's, or neither's
        return OwnServer(_reachable(node.client_bind_host, node.client_bind_port), node.security)
    security = config.security if config.dledger is None else config.dledger.security
    return OwnServer(_reachable(config.bind_host, config.listen_port), security)


def _reachable(host: str, port: int) -> str:
    host = _ANY_HOST.get(host, host)
    return address_text(host, port)
