"""``dledger serve`` and ``nameserver``: runs one node, or a node of each of several groups, or one name server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from dledger import settings
from dledger.config import ServerConfig
from dledger_cli import process
from dledger_cli.metrics import metered

if TYPE_CHECKING:
    from dledger.server import DLedgerServer
    from dledger.statemachine.ports import StateMachine
    from rocketstore.nameserver.server import NameServer
    from rocketstore.nameserver.settings import NameServerConfig


@click.command(
    short_help="Run a node, or one of each of several groups.",
    epilog="""\b
Examples:
  dledger serve -s /var/lib/dledger                      one node on 127.0.0.1:20911, clients on 30911
  dledger serve -c broker-n0.conf                        as RocketMQ's DLedger brokers are configured
  dledger serve -c orders.conf -c users.conf             members of two groups in one process, at the same ports
  dledger serve -i n1 -s /data -p 'n0-a:20911;n1-b:20911;n2-c:20911'
  dledger serve -c n0.conf --set segment_bytes=256m --set retention_hours=24
  dledger serve -s /tmp/try --set segment_bytes=64m --set index_segment_bytes=5m       a first try on a small disk

\b
Segments are reserved in full length, so that a full disk is an error and not a crash: with the default of 1 GiB, an
empty node takes 1.2 GiB.

Every setting is also read from the environment, as DLEDGER_<NAME> (DLEDGER_MEMBERS, DLEDGER_NODE_ID, …).
Flags win over the environment, which wins over the file.""",
)
@process.conf_files_option(
    "Properties file with RocketMQ's, DLedger's or this project's setting names. Several: one for each group; "
    "they share ports, certificates and access rules, and have directories of their own."
)
@click.option("-g", "--group", help="Name of the group.")
@click.option("-i", "--id", "node_id", help="This node's id; one of the members.")
@click.option("-p", "--peers", "members", metavar="ID-HOST:PORT;…", help="All members, including this one.")
@click.option("-s", "--store", "base_dir", metavar="DIR", help="Directory that holds dledger-ID/.")
@click.option("--client-port", metavar="PORT", help="Port for clients; default: peer port + 10000; 0 picks a free one.")
@click.option(
    "--flush", "flush_mode", type=click.Choice(["sync", "async"]), help="Acknowledge after or before the flush."
)
@process.server_options(
    repair="Move a damaged or fenced log aside (to damaged-N) and fetch it again from the other members."
)
def serve(
    config_files: Sequence[Path],
    assignments: Sequence[str],
    insecure: bool,
    repair: bool,
    log_level: str,
    log_format: str,
    until_stdin_closes: bool,
    **named: str | None,
) -> None:
    """Run a node until SIGTERM or SIGINT, which stop it gracefully: a leader first transfers leadership."""
    flags = process.begin(named, assignments, insecure=insecure, log_level=log_level, log_format=log_format)
    configs = load_nodes(config_files, named, flags)
    sys.exit(run_nodes(config_files, configs, repair=repair, until_stdin_closes=until_stdin_closes))


def load_nodes(
    files: Sequence[Path], named: Mapping[str, str | None], flags: Mapping[str, str]
) -> Sequence[ServerConfig]:
    """The settings of a node of each group, at least one; logs what is strange in them.

    Raises ``ConfigError``, and ``click.UsageError`` for flags of one group (``named``) if there are several.
    """
    process.refuse_flags_of_one(named, _OF_ONE_GROUP, files)
    loaded = [settings.load(file, os.environ, flags) for file in files or (None,)]
    for one in loaded:
        process.warn(one.warnings)
    return [one.config for one in loaded]


_OF_ONE_GROUP: Final = {"group": "group", "node_id": "id", "members": "peers", "base_dir": "store"}
"""Flags, with their names on the command line."""


def run_nodes(
    files: Sequence[Path],
    configs: Sequence[ServerConfig],
    *,
    repair: bool,
    until_stdin_closes: bool,
    machine: Callable[[str], StateMachine | None] = lambda _group: None,
    started: Callable[[DLedgerServer], None] = lambda _server: None,
) -> int:
    """Run a node of each group until a signal; returns the exit code. ``configs``: as from ``load_nodes``.

    ``machine``: a new state machine for a group, or None. ``started``: called with each node.
    """
    if len(configs) > 1:
        named = list(zip(map(str, files), configs, strict=True))
        return _run_groups(named, machine, started, repair=repair, until_stdin_closes=until_stdin_closes)
    (config,) = configs
    return run_node(config, machine(config.group), started, repair=repair, until_stdin_closes=until_stdin_closes)


def _run_groups(
    named: Sequence[tuple[str, ServerConfig]],
    machine: Callable[[str], StateMachine | None],
    started: Callable[[DLedgerServer], None],
    *,
    repair: bool,
    until_stdin_closes: bool,
) -> int:
    from dledger.hosted_groups import GroupsServer, check_together
    from dledger.monitoring import SILENT

    check_together(named)
    first = named[0][1]
    process.name_speaker(node=first.node_id)

    def ready(server: GroupsServer) -> str:
        for member in server.servers.values():
            started(member)
        one = server.servers[first.group]
        return (
            f"dledger {first.node_id} of groups {', '.join(server.servers)} is ready: clients {one.client_address}, "
            f"gRPC port {one.grpc_port or 'none'}, peers {first.self_member.address}, "
            f"stores {', '.join(str(config.store.base_dir) for _, config in named)}"
        )

    with metered(first.metrics_host, first.metrics_port) as exporter:

        def make() -> GroupsServer:
            instruments = exporter.instruments_of if exporter else lambda _group: SILENT
            server = GroupsServer(named, repair=repair, instruments=instruments, state_machine=machine)
            if exporter:
                exporter.watch_groups(server)
            return server

        return process.run(make, ready, until_stdin_closes=until_stdin_closes)


def run_node(
    config: ServerConfig,
    machine: StateMachine | None = None,
    started: Callable[[DLedgerServer], None] = lambda _server: None,
    *,
    repair: bool,
    until_stdin_closes: bool,
) -> int:
    """Run a process's only node until a signal; see ``run_nodes``."""
    from dledger.monitoring import SILENT
    from dledger.server import DLedgerServer

    process.name_speaker(node=config.node_id, group=config.group)

    def ready(server: DLedgerServer) -> str:
        started(server)
        return (
            f"dledger {config.node_id} of group {config.group} is ready: clients {server.client_address}, "
            f"gRPC port {server.grpc_port or 'none'}, peers {config.self_member.address}, "
            f"store {config.store.base_dir}, flush {config.store.flush_mode}"
        )

    with metered(config.metrics_host, config.metrics_port) as exporter:

        def make() -> DLedgerServer:
            instruments = exporter.instruments if exporter else SILENT
            server = DLedgerServer(config, repair=repair, instruments=instruments, state_machine=machine)
            if exporter:
                exporter.watch_node(server)
            return server

        return process.run(make, ready, until_stdin_closes=until_stdin_closes)


@click.command(
    short_help="Run a name server.",
    epilog="""\b
Examples:
  dledger nameserver                                    on 127.0.0.1:9876
  dledger nameserver -c namesrv.conf                    RocketMQ's own conf
  dledger nameserver --host 0.0.0.0 --insecure          for other machines, without TLS
  dledger nameserver --set allowedBrokers=10.0.0.0/24 --set allowedAdmins=127.0.0.1

\b
Brokers and clients of RocketMQ 4 (Java, Go, C++) use it as their own: namesrvAddr=HOST:9876. Run two or three, on
different machines, and give all addresses to everybody (HOST:9876;HOST:9876): they do not talk to each other.

Every setting is also read from the environment, as DLEDGER_<NAME> (DLEDGER_LISTEN_PORT, DLEDGER_KV_CONFIG_PATH, …).
Flags win over the environment, which wins over the file. Settings without effect are listed at startup.""",
)
@process.conf_option("Properties file with RocketMQ's or this project's setting names.")
@click.option("--port", "listen_port", metavar="PORT", help="Port to listen on; default: 9876; 0 picks a free one.")
@click.option("--host", "listen_host", metavar="HOST", help="Address to listen on; default: 127.0.0.1.")
@click.option(
    "--kv", "kv_config_path", metavar="FILE", help="File for administrators' values; default: ~/namesrv/kvConfig.json."
)
@process.server_options()
def nameserver(
    config_file: Path | None,
    assignments: Sequence[str],
    insecure: bool,
    log_level: str,
    log_format: str,
    until_stdin_closes: bool,
    **named: str | None,
) -> None:
    """Run one name server until SIGTERM or SIGINT: brokers register with it, and clients ask it where topics are."""
    from rocketstore.nameserver.settings import load_name_server_settings

    flags = process.begin(named, assignments, insecure=insecure, log_level=log_level, log_format=log_format)
    config, warnings = load_name_server_settings(config_file, os.environ, flags)
    process.warn(warnings)
    sys.exit(_run(config, until_stdin_closes=until_stdin_closes))


def _run(config: NameServerConfig, *, until_stdin_closes: bool) -> int:
    from dledger_cli.metrics import metered
    from rocketstore.nameserver.server import NameServer

    def ready(server: NameServer) -> str:
        return f"name server is ready: {server.address}, values {config.kv_config_path}"

    with metered(config.metrics_host, config.metrics_port) as exporter:

        def make() -> NameServer:
            server = NameServer(config)
            if exporter:
                exporter.watch_name_server(server)
            return server

        return process.run(make, ready, until_stdin_closes=until_stdin_closes)
