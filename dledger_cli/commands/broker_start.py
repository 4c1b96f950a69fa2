"""``dledger broker``: runs one broker, alone or as a member of a DLedger group."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from dledger_cli import logs, process
from dledger_cli.metrics import metered
from rocketstore.broker_config import BrokerConfig
from rocketstore.settings import load_broker_settings

if TYPE_CHECKING:
    from rocketstore.server import BrokerServer

_YOUNG_OBJECTS_MAX = 50_000


@click.command(
    short_help="Run a message broker.",
    epilog="""\b
Examples:
  dledger broker -s /var/lib/broker                     a plain broker on 127.0.0.1:10911
  dledger broker -c broker-n0.conf                      RocketMQ's own conf, with or without enableDLegerCommitLog
  dledger broker -c a-n0.conf -c b-n0.conf               members of two groups in one process
  dledger broker -c broker-n0.conf --set flushDiskType=ASYNC_FLUSH --set fileReservedTime=24
  dledger broker -s /data --port 10911 --set brokerIP1=10.0.0.7
                                                        reachable from other machines as 10.0.0.7
  dledger broker -s /tmp/try --set mappedFileSizeCommitLog=64m
                                                        a first try on a small disk

\b
Files are reserved in full length, so that a full disk is an error and not a crash: with the default of 1 GiB, a broker
takes about 2 GiB after its first message. Choose the size before the first start, and keep it.

\b
A conf file with enableDLegerCommitLog=true makes a replicated broker: start one process per member of dLegerPeers.
Clients talk to listenPort. The members talk to each other on the ports of dLegerPeers; `dledger status` works at
listenPort and at the peer port + 10000.

\b
Several conf files make a broker of each of several groups, so that machines share the writing: each with its own
brokerName, directory and ports for clients; the port of dLegerPeers, certificates and access rules are shared.

Every setting is also read from the environment, as DLEDGER_<NAME> (DLEDGER_LISTEN_PORT, DLEDGER_BROKER_NAME, …).
Flags win over the environment, which wins over the file. Settings without effect are listed at startup.

SIGTERM stops gracefully: a master transfers leadership first.""",
)
@process.conf_files_option(
    "Properties file with RocketMQ's, DLedger's or this project's setting names. Several: one for each group."
)
@click.option("-s", "--store", "store_path_root_dir", metavar="DIR", help="Directory for all data; default: ~/store.")
@click.option("-n", "--name", "broker_name", help="The broker's name; the same for all members of a group.")
@click.option("-i", "--id", "node_id", help="This member's id in a DLedger group (dLegerSelfId).")
@click.option("--port", "listen_port", metavar="PORT", help="Port for producers and consumers; default: 10911.")
@click.option(
    "--flush",
    "flush_disk_type",
    type=click.Choice(["sync", "async"]),
    help="Acknowledge after or before the flush.",
)
@process.server_options(
    repair="Move a damaged or fenced replicated log aside (to damaged-N) and fetch it again from the other members."
)
def broker(
    config_files: Sequence[Path],
    assignments: Sequence[str],
    insecure: bool,
    repair: bool,
    log_level: str,
    log_format: str,
    until_stdin_closes: bool,
    **named: str | None,
) -> None:
    """Run one broker until SIGTERM or SIGINT: RocketMQ's message store, for its clients and ours."""
    flags = process.begin(named, assignments, insecure=insecure, log_level=log_level, log_format=log_format)
    process.refuse_flags_of_one(named, _OF_ONE_BROKER, config_files)
    loaded = [load_broker_settings(file, os.environ, flags) for file in config_files or (None,)]
    for _, warnings in loaded:
        process.warn(warnings)
    if len(loaded) == 1:
        sys.exit(_run(loaded[0][0], repair=repair, until_stdin_closes=until_stdin_closes))
    named_configs = [(str(file), config) for file, (config, _) in zip(config_files, loaded, strict=True)]
    sys.exit(_run_several(named_configs, repair=repair, until_stdin_closes=until_stdin_closes))


_OF_ONE_BROKER: Final = {
    "store_path_root_dir": "store",
    "broker_name": "name",
    "node_id": "id",
    "listen_port": "port",
}
"""Flags, with their names on the command line."""


def _run(config: BrokerConfig, *, repair: bool, until_stdin_closes: bool) -> int:
    from dledger.instruments import SILENT
    from rocketstore.server import BrokerServer

    logs.name_speaker(node=config.node_id, group=config.name if config.dledger is None else config.dledger.group)
    with metered(config.metrics_host, config.metrics_port) as exporter:

        def make() -> BrokerServer:
            _collect_less()
            broker = BrokerServer(config, repair=repair, instruments=exporter.instruments if exporter else SILENT)
            if exporter:
                exporter.watch_broker(broker)
            return broker

        return process.run(make, _ready_line, until_stdin_closes=until_stdin_closes)


def _run_several(named: Sequence[tuple[str, BrokerConfig]], *, repair: bool, until_stdin_closes: bool) -> int:
    from dledger.instruments import SILENT
    from rocketstore.server import BrokersServer, check_brokers_together

    nodes = check_brokers_together(named)
    first, peers = named[0][1], nodes[0].self_member.address
    logs.name_speaker(node=first.node_id)

    def ready(server: BrokersServer) -> str:
        brokers = server.servers.values()
        clients = ", ".join(f"{one.config.name} {one.address}" for one in brokers)
        grpc = ", ".join(f"{one.config.name} {one.grpc_port or 'none'}" for one in brokers)
        stores = ", ".join(str(one.config.store.store_path_root_dir) for one in brokers)
        return (
            f"broker {first.node_id} of groups {', '.join(server.servers)} of cluster {first.cluster_name} is ready: "
            f"clients {clients}, gRPC ports {grpc}, peers {peers}, stores {stores}"
        )

    with metered(first.metrics_host, first.metrics_port) as exporter:

        def make() -> BrokersServer:
            _collect_less()
            instruments = exporter.instruments_of if exporter else lambda _group: SILENT
            server = BrokersServer(named, repair=repair, instruments=instruments)
            if exporter:
                exporter.watch_brokers(server)
            return server

        return process.run(make, ready, until_stdin_closes=until_stdin_closes)


def _collect_less() -> None:
    """Run the garbage collector less often: every message creates objects that die without it.

    With Python's thresholds, a broker under load spends up to 15 % of its time scanning messages that are being stored.
    Imported modules are never garbage and are frozen.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS_MAX, 20, 20)


def _ready_line(server: BrokerServer) -> str:
    config = server.config
    if config.dledger is None:
        kind = f"plain, flush {config.store.flush_disk_type}"
    else:
        kind = f"group {config.dledger.group}, peers {config.dledger.self_member.address}"
        kind += f", flush {config.dledger.store.flush_mode}"
    return (
        f"broker {config.name} {config.node_id} of cluster {config.cluster_name} is ready: clients {server.address}, "
        f"gRPC port {server.grpc_port or 'none'}, store {config.store.store_path_root_dir}, {kind}"
    )
