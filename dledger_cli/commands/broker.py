"""``dledger broker`` and ``dledger cluster``: run brokers, alone or as members of a group, and show them."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from dledger_cli import process, terminal
from dledger_cli.commands.rebalance import rebalance
from dledger_cli.metrics import metered
from dledger_cli.targets import BrokerTarget, broker_options
from dledger_cli.terminal import ErrorReportingGroup, time_text
from rocketstore.broker_config import BrokerConfig
from rocketstore.settings import load_broker_settings

if TYPE_CHECKING:
    from dledger_cli.targets import ChosenBrokers
    from rocketstore.client.aio.admin_requests import BrokerStatus
    from rocketstore.client.aio.errors import ClientError
    from rocketstore.server import BrokerServer

_COLUMNS = (
    "cluster",
    "broker",
    "id",
    "address",
    "role",
    "term",
    "version",
    "in/s",
    "out/s",
    "behind",
    "hours",
    "space",
    "notes",
)
_LEAST = ("hours", "behind", "version", "space", "id", "out/s", "in/s", "cluster", "term")
_STYLES = {"SYNC_MASTER": "green", "ASYNC_MASTER": "green", "master": "green", "unreachable": "red"}
_HELP = ("-h", "--help")
_YOUNG_OBJECTS_MAX = 50_000


class _StartingGroup(ErrorReportingGroup):
    """``dledger broker -c FILE`` means ``dledger broker start -c FILE``, as with RocketMQ's mqbroker."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Options before any command belong to ``start``."""
        if args and args[0].startswith("-") and args[0] not in _HELP:
            args = ["start", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_StartingGroup,
    short_help="Run a message broker, or show its status.",
    epilog="""\b
Examples:
  dledger broker -c broker-n0.conf          run one, as RocketMQ's mqbroker does; the same as `broker start`
  dledger broker start --help               all its options
  dledger broker status -b 10.0.0.1:10911""",
)
def broker() -> None:
    """Run a message broker, or show its status."""


@broker.command(
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
def start(
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
    from dledger.monitoring import SILENT
    from rocketstore.server import BrokerServer

    process.name_speaker(node=config.node_id, group=config.name if config.dledger is None else config.dledger.group)
    with metered(config.metrics_host, config.metrics_port) as exporter:

        def make() -> BrokerServer:
            _collect_less()
            broker = BrokerServer(config, repair=repair, instruments=exporter.instruments if exporter else SILENT)
            if exporter:
                exporter.watch_broker(broker)
            return broker

        return process.run(make, _ready_line, until_stdin_closes=until_stdin_closes)


def _run_several(named: Sequence[tuple[str, BrokerConfig]], *, repair: bool, until_stdin_closes: bool) -> int:
    from dledger.monitoring import SILENT
    from rocketstore.server import BrokersServer, check_brokers_together

    nodes = check_brokers_together(named)
    first, peers = named[0][1], nodes[0].self_member.address
    process.name_speaker(node=first.node_id)

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


@broker.command(
    short_help="Show everything a broker reports.",
    epilog="""\b
Examples:
  dledger broker status
  dledger broker status -b 10.0.0.1:10911,10.0.0.2:10911                      the master of them
  dledger broker status -b 10.0.0.1:10911 --node 10.0.0.2:10911               this one
  dledger broker status --namesrv 10.0.0.1:9876 --broker-name broker-a        the master of these
  dledger broker status --json | jq .dispatch_behind_bytes""",
)
@click.option("--node", metavar="HOST:PORT", help="Query this broker; default: the master.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@broker_options
def status(node: str | None, as_json: bool, target: BrokerTarget) -> None:
    """Show everything a broker reports: role, offsets, rates and the figures of its store."""
    with target.brokers() as brokers:
        found = _broker_at(brokers, node) if node is not None else _only_one(brokers, target.given_brokers)
    if found.status is None:
        raise found.failure or click.ClickException(f"{found.address} does not answer")
    facts = _facts(found)
    if as_json:
        terminal.print_json(facts)
        return
    info, table = found.status.runtime, found.status.table
    facts["members"] = ", ".join(f"{name}={address}" for name, address in info.members)
    rows = [(name, _fact_text(value)) for name, value in facts.items() if name not in ("runtime", "conditions")]
    terminal.print_table(("name", "value"), [*rows, *sorted(table.items())])
    for one in info.problems:
        click.echo(terminal.condition_text(one))


def _fact_text(value: object) -> str:
    """As RocketMQ's tools write it, and no digits that mean nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.2f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class _Broker:
    """One address of a list of brokers, and the broker's own report; otherwise why there is none."""

    cluster: str
    name: str
    id: int
    """0 is the master."""
    address: str
    status: BrokerStatus | None = None
    failure: ClientError | None = None

    @property
    def role(self) -> str:
        """A broker of RocketMQ before 5 does not tell it."""
        if self.status is None and self._is_silent:
            return "unreachable"
        told = self.status.runtime.store_role if self.status is not None else ""
        return told or ("slave" if self.id else "master")

    @property
    def is_master(self) -> bool:
        """One that does not answer at all is none; for one that answers, and does not tell, its id counts."""
        told = self.status is not None and self.status.runtime.store_role
        return self.status.runtime.is_master if self.status is not None and told else not (self.id or self._is_silent)

    @property
    def term(self) -> int:
        """0 for a broker that replicates no log."""
        return self.status.runtime.term if self.status is not None else 0

    @property
    def _is_silent(self) -> bool:
        from rocketstore.client.aio.errors import RefusedError  # here, so that --help does not load it

        return self.failure is not None and not isinstance(self.failure, RefusedError)


def _listed(brokers: ChosenBrokers, given: Sequence[str]) -> list[_Broker]:
    """Every address of the chosen names, and those of ``given`` that the broker that was asked does not know yet.

    Raises ``ClientError`` if nobody says which brokers there are.
    """
    from rocketstore.client.aio.errors import ClientError

    routed = sorted(brokers.found(), key=lambda one: (one.cluster, one.name))
    answers = brokers.admin.statuses()
    found = []
    for one in routed:
        for number, address in sorted(one.addresses.items()):
            answer = answers.get(address)
            if isinstance(answer, ClientError):
                found.append(_Broker(one.cluster, one.name, number, address, failure=answer))
            elif answer is not None:
                found.append(_Broker(one.cluster, one.name, number, address, answer))
    for address in given:
        if address not in answers:
            found += _unlisted(brokers, address, found)
    return found


def _unlisted(brokers: ChosenBrokers, address: str, known: Sequence[_Broker]) -> list[_Broker]:
    """A given broker that is none of those known; nothing if it is one of them at another address."""
    from rocketstore.client.aio.errors import ClientError

    last = known[-1]
    place = (last.cluster, last.name, last.id + 1, address)
    try:
        status = brokers.admin.status(address)
    except ClientError as error:
        return [_Broker(*place, failure=error)]
    nodes = {one.status.runtime.node for one in known if one.status is not None}
    return [] if status.runtime.node in nodes else [_Broker(*place, status)]


def _only_one(brokers: ChosenBrokers, given: Sequence[str]) -> _Broker:
    """The master of the only name, otherwise one that answers. Raises ``UsageError`` for several names."""
    brokers.only_one()
    return max(_listed(brokers, given), key=lambda one: (one.status is not None, one.is_master, one.term))


def _broker_at(brokers: ChosenBrokers, address: str) -> _Broker:
    """The broker at an address, whether any list has it or not."""
    from rocketstore.client.aio.errors import ClientError

    found = brokers.admin.status(address)
    with suppress(ClientError):  # nobody says which brokers there are, as RocketMQ's do not
        for one in brokers.admin.brokers():
            for number, its in one.addresses.items():
                if its == address:
                    return _Broker(one.cluster, one.name, number, address, found)
    return _Broker("", "", 0 if found.runtime.is_master else 1, address, found)


def _facts(one: _Broker) -> dict[str, object]:
    """For JSON: RocketMQ's own values are in ``runtime``. Values that a broker does not report are 0, or empty."""
    place: dict[str, object] = {
        "address": one.address,
        "cluster": one.cluster,
        "broker_name": one.name,
        "broker_id": one.id,
        "is_master": one.is_master,
    }
    if one.status is None:
        return {"reachable": False, **place, "error": str(one.failure)}
    info, table = one.status.runtime, one.status.table
    members = dict(info.members)
    return {
        "reachable": True,
        **place,
        "node_id": info.node,
        "role": one.role,
        "replicated": bool(info.role),
        "raft_role": info.role,
        "term": info.term,
        "leader": info.leader,
        "leader_address": members.get(info.leader, ""),
        "members": members,
        "min_offset": info.begin or 0,
        "max_offset": info.end or 0,
        "end_offset": info.written or info.end or 0,
        "dispatch_behind_bytes": info.dispatch_behind or 0,
        "put_tps": info.put_tps or 0.0,
        "get_tps": info.get_tps or 0.0,
        "disk_ratio": _figure(table, "commitLogDiskRatio"),
        "put_total": int(_figure(table, "msgPutTotalTodayNow")),
        "get_total": int(_figure(table, "msgGetTotalTodayNow")),
        "earliest_message_ms": int(_figure(table, "earliestMessageTimeStamp")),
        "version": info.release or info.version,
        "boot_ms": int(_figure(table, "bootTimestamp")),
        "runtime": dict(table),
        "note": _note(one),
        "conditions": [dataclasses.asdict(problem) for problem in info.problems],
    }


def _figure(table: Mapping[str, str], name: str) -> float:
    try:
        figure = float(table.get(name, ""))
    except ValueError:
        return 0.0
    return figure if 0 <= figure < float("inf") else 0.0


@click.group(
    cls=ErrorReportingGroup,
    short_help="Show all brokers, spread the leaders over the machines.",
    epilog="""\b
Examples:
  dledger cluster list -b 10.0.0.1:10911
  dledger cluster rebalance --namesrv 10.0.0.1:9876""",
)
def cluster() -> None:
    """Show all brokers, and spread the leaders of their groups over the machines."""


cluster.add_command(rebalance, "rebalance")


@cluster.command(
    "list",
    epilog="""\b
Examples:
  dledger cluster list
  dledger cluster list --json | jq -r '.brokers[] | select(.is_master).address'
  dledger cluster list --namesrv 10.0.0.1:9876,10.0.0.2:9876   what brokers, also RocketMQ's, have registered

behind: bytes of the log not yet in the queues. hours: age of the oldest message. Exit code 1 if brokers of some name
have no master.""",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@broker_options
def list_brokers(as_json: bool, target: BrokerTarget) -> None:
    """Show every broker that the given ones know, one line each."""
    with target.brokers() as brokers:
        found = _listed(brokers, target.given_brokers)
    masters = sorted((one for one in found if one.is_master), key=lambda one: one.term)
    without = sorted({one.name for one in found} - {one.name for one in masters})
    if as_json:
        names = {one.name for one in found}
        master = masters[-1].address if masters and len(names) == 1 else None
        terminal.print_json({"master": master, "brokers": [_facts(one) for one in found]})
    else:
        # Anybody may have registered anything.
        rows = [tuple(terminal.printable(cell.encode()) for cell in _row(one)) for one in found]
        terminal.print_table(_COLUMNS, rows, _STYLES, least=_LEAST, below=("address", "notes"))
        for one in found:
            for problem in () if one.status is None else one.status.runtime.problems:
                click.echo(f"{one.address}: {terminal.condition_text(problem)}")
    if without:
        raise click.ClickException(f"no master: {', '.join(without)}: sends wait until there is one")


def _row(one: _Broker) -> tuple[str, ...]:
    if one.status is None:
        reason = str(one.failure).removeprefix(f"cannot connect to {one.address}: ")
        return (one.cluster, one.name, str(one.id), one.address, one.role, *[""] * (len(_COLUMNS) - 6), reason)
    info, table = one.status.runtime, one.status.table
    oldest = _figure(table, "earliestMessageTimeStamp")
    hours = f"{(time.time() * 1000 - oldest) / 3_600_000:.1f}" if oldest > 0 else ""
    rates = ["" if rate is None else f"{rate:.2f}" for rate in (info.put_tps, info.get_tps)]
    behind = "" if info.dispatch_behind is None else str(info.dispatch_behind)
    space = f"{_figure(table, 'commitLogDiskRatio'):.0%}" if "commitLogDiskRatio" in table else ""
    term = str(info.term) if info.role else ""
    version = info.release or info.version
    return (
        *(one.cluster, one.name, str(one.id), one.address, one.role, term, version),
        *(*rates, behind, hours, space, _note(one)),
    )


def _note(one: _Broker) -> str:
    """When it was started, and how it stands in classic replication."""
    if one.status is None:
        return ""
    booted, ha = _figure(one.status.table, "bootTimestamp"), one.status.runtime.ha
    since = f"since {time_text(int(booted))}" if booted > 0 else ""
    return ", ".join(filter(None, (since, "" if ha is None else ha.words)))
