"""``dledger health``: one request of gRPC's health protocol, for containers and process managers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from cluster import terminal
from cluster.security_options import CommandSecurity, security_options
from dledger import flag_values
from dledger.contexts import ContextOption
from dledger.errors import ConfigError
from dledger.values import address_text

if TYPE_CHECKING:
    import ssl

    import grpc

    from dledger.config import SecurityConfig

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class OwnServer:
    """The server configured in the environment: its address, certificates and CA."""

    address: str
    name: str
    security: SecurityConfig

    def channel(self) -> grpc.Channel:
        """A channel to it, using the node's own certificate, which contains the node's id, not the address dialled."""
        import grpc

        files = (self.security.tls_trust_cert_path, self.security.tls_key_path, self.security.tls_cert_path)
        if not self.security.has_tls:
            return grpc.insecure_channel(self.address)
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files if file is not None))
        return grpc.secure_channel(self.address, credentials, [("grpc.ssl_target_name_override", self.name)])


@click.command(
    short_help="Check whether a server is serving.",
    epilog="""\b
Examples:
  dledger health                      the server that this environment's settings describe (DLEDGER_…)
  dledger health 127.0.0.1:10911
  dledger health -b $DLEDGER_BOOTSTRAP    each of a group
  dledger health 127.0.0.1:10911 --service dledger.v1.LogService
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
@click.option("--service", default="", help="Check one gRPC service; default: the whole server.")
@click.option("--nameserver", is_flag=True, help="Ask a name server, which has RocketMQ's protocol and no gRPC.")
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
    service: str,
    nameserver: bool,
    timeout_s: float,
    as_json: bool,
    security: CommandSecurity,
) -> None:
    """Check with gRPC's health protocol whether servers are serving; without an address, the one in this container."""
    if nameserver and service:
        raise click.UsageError("a name server has no gRPC services: omit --service")
    of_context = click.get_current_context().get_parameter_source("bootstrap") is ParameterSource.DEFAULT_MAP
    if addresses and bootstrap and not of_context:
        raise click.UsageError("addresses are given twice: with --bootstrap and without")
    if not nameserver or not of_context:  # a context's are those of nodes
        addresses = addresses or bootstrap
    problems = 0
    for address in addresses or (None,):
        if nameserver:
            asked, problem = _check_name_server(address, timeout_s, security)
        else:
            asked, problem = _check_server(address, service, timeout_s, security)
        problems += bool(problem)
        if as_json:
            terminal.print_json({"address": asked, "serving": not problem, "problem": problem})
        else:
            click.echo(f"error: {asked}: {problem}" if problem else f"{asked}: serving", err=bool(problem))
    if problems and not addresses and (group := os.environ.get("DLEDGER_BOOTSTRAP")):
        click.echo(
            f"This was the server of this environment's settings. For the group: dledger health -b {group}", err=True
        )
    if problems:
        raise SystemExit(1)


def _check_server(address: str | None, service: str, timeout_s: float, security: CommandSecurity) -> tuple[str, str]:
    """Whom it asked, and the problem, if any."""
    if address is None:
        own = own_server(os.environ)
        address, channel = own.address, own.channel()
    else:
        from dledger.client.channel_maker import ChannelMaker

        channel = ChannelMaker(security.for_client(), [address]).open(address)
    with channel:
        return address, ask(channel, service, timeout_s)


def _check_name_server(address: str | None, timeout_s: float, security: CommandSecurity) -> tuple[str, str]:
    """Whom it asked, and the problem, if any."""
    from dledger.remoting.blocking import BlockingRemotingClient
    from dledger.remoting.client import UnreachableError
    from dledger.remoting.connection import DisconnectedError
    from dledger.remoting.errors import FrameError
    from dledger.remoting.frame import Frame
    from rocketstore.client.name_server_tls import context_maker
    from rocketstore.remoting.codes import RequestCode

    tls: Callable[[], ssl.SSLContext] | None
    if address is None:
        address, tls = own_name_server(os.environ)
    else:
        tls = context_maker([address], security.for_client())
    with closing(BlockingRemotingClient(tls=tls)) as frames:
        try:
            answer = frames.call(address, Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0), timeout_s)
        except (UnreachableError, DisconnectedError, TimeoutError, FrameError) as error:
            return address, str(error) or f"no answer within {timeout_s:g} s"
    return address, f"it answered {answer.code}: {answer.remark}" if answer.code else ""


def own_name_server(environ: Mapping[str, str]) -> tuple[str, Callable[[], ssl.SSLContext] | None]:
    """The name server with these settings, as its own machine reaches it. Raises ``ConfigError``."""
    from dledger.rpc.tls_keeper import TlsKeeper
    from rocketstore.nameserver.settings import load_name_server_settings

    file = Path(environ["DLEDGER_CONFIG"]) if environ.get("DLEDGER_CONFIG") else None
    config, _warnings = load_name_server_settings(file, environ, {})
    keeper = TlsKeeper(config.security, name="name server", member=None) if config.security.has_tls else None
    return _reachable(config.listen_host, config.listen_port), None if keeper is None else keeper.connecting


def own_server(environ: Mapping[str, str]) -> OwnServer:
    """The server with these settings, as its own machine reaches it. Raises ``ConfigError``."""
    from rocketstore.settings import load_broker_settings

    file = Path(environ["DLEDGER_CONFIG"]) if environ.get("DLEDGER_CONFIG") else None
    try:
        config, _warnings = load_broker_settings(file, environ, {})
    except ConfigError:
        from dledger import settings

        node = settings.load(file, environ, {}).config  # no broker's settings: a node's, or neither's
        return OwnServer(_reachable(node.client_bind_host, node.client_bind_port), node.node_id, node.security)
    security = config.security if config.dledger is None else config.dledger.security
    return OwnServer(_reachable(config.bind_host, config.listen_port), config.node_id, security)


def _reachable(host: str, port: int) -> str:
    host = _ANY_HOST.get(host, host)
    return address_text(host, port)


def ask(channel: grpc.Channel, service: str, timeout_s: float) -> str:
    """The problem with the server; empty if it is serving."""
    import grpc
    from grpc_health.v1 import health_pb2

    request, answer_type = health_pb2.HealthCheckRequest(service=service), health_pb2.HealthCheckResponse
    # Bytes both ways, not the generated stub: a request can be signed only as the bytes that are sent.
    check = channel.unary_unary(f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check", None, None)
    try:
        answer = answer_type.FromString(check(request.SerializeToString(), timeout=timeout_s))
    except grpc.RpcError as error:
        from dledger.client.rpc_failures import reason_of
        from dledger.rpc.tls import is_silent_refusal

        details = error.details() or error.code().name
        if is_silent_refusal(details):
            return "it closed the connection: it may require TLS (--tls-ca), or be a name server (--nameserver)"
        return reason_of(details)
    return "" if answer.status == answer_type.SERVING else answer_type.ServingStatus.Name(answer.status)
