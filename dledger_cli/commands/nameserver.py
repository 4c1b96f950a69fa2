"""``dledger nameserver``: one name server as a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dledger_cli import process

if TYPE_CHECKING:
    from rocketstore.nameserver.server import NameServer
    from rocketstore.nameserver.settings import NameServerConfig


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
