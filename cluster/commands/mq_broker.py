"""``dledger broker`` and ``dledger cluster``: run a broker, and show the state of brokers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

import click

from cluster import terminal
from cluster.broker_target import BrokerTarget, broker_options, time_text
from cluster.commands.broker import broker as start
from cluster.reporting import ErrorReportingGroup
from dledger.errors import DLedgerError
from rocketstore.remoting.bodies.ha import HaFacts

if TYPE_CHECKING:
    from rocketstore.client.admin import BrokerStatus

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
_STYLES = {"SYNC_MASTER": "green", "ASYNC_MASTER": "green", "unreachable": "red"}
_HELP = ("-h", "--help")


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


broker.add_command(start, "start")


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
    found = _status_of(node, target)
    facts: dict[str, object] = dataclasses.asdict(found)
    if as_json:
        terminal.print_json(facts)
        return
    del facts["runtime"], facts["conditions"]
    facts["members"] = ", ".join(f"{name}={address}" for name, address in sorted(found.members.items()))
    rows = [(name, _fact_text(value)) for name, value in (*facts.items(), *sorted(found.runtime.items()))]
    terminal.print_table(("name", "value"), rows)
    for one in found.conditions:
        click.echo(terminal.condition_text(one))


def _fact_text(value: object) -> str:
    """As RocketMQ's tools write it, and no digits that mean nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _status_of(node: str | None, target: BrokerTarget) -> BrokerStatus:
    if node is not None and target.name_servers:
        target = dataclasses.replace(target, addresses=(node,), name_servers=())
    with target.groups() as groups:
        return groups.only_one().status(node)


@click.group(
    cls=ErrorReportingGroup,
    short_help="Show all brokers.",
    epilog="""\b
Examples:
  dledger cluster list -b 10.0.0.1:10911""",
)
def cluster() -> None:
    """Show all brokers."""


@cluster.command(
    "list",
    epilog="""\b
Examples:
  dledger cluster list
  dledger cluster list --json | jq -r '.brokers[] | select(.is_master).address'
  dledger cluster list --namesrv 10.0.0.1:9876,10.0.0.2:9876   what brokers, also RocketMQ's, have registered

behind: bytes of the log not yet in the queues. hours: age of the oldest message. Exit code 1 when there is
no master.""",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@broker_options
def list_brokers(as_json: bool, target: BrokerTarget) -> None:
    """Show every broker known to the given ones, one line each."""
    if target.name_servers:
        from cluster.commands import registered

        registered.show(target, as_json=as_json)
        return
    with closing(target.admin()) as admin:
        found = admin.cluster()
    if as_json:
        brokers = [_broker_json(address, answer) for address, answer in found.items()]
        terminal.print_json({"master": _master_of(found), "brokers": brokers})
    else:
        rows = [_row(address, answer) for address, answer in found.items()]
        terminal.print_table(_COLUMNS, rows, _STYLES, least=_LEAST, below=("address", "notes"))
        for address, answer in found.items():
            for one in () if isinstance(answer, DLedgerError) else answer.conditions:
                click.echo(f"{address}: {terminal.condition_text(one)}")
    if _master_of(found) is None:
        raise click.ClickException("no master: sends wait until a majority elects one")


def _master_of(found: Mapping[str, BrokerStatus | DLedgerError]) -> str | None:
    """The master of the highest term; an older one has not noticed yet that it was replaced."""
    masters = [one for one in found.values() if not isinstance(one, DLedgerError) and one.is_master]
    newest = max(masters, key=lambda one: one.term, default=None)
    return newest.address if newest else None


def _broker_json(address: str, answer: BrokerStatus | DLedgerError) -> dict[str, object]:
    if isinstance(answer, DLedgerError):
        return {"reachable": False, "address": address, "is_master": False, "error": str(answer)}
    return {"reachable": True, **dataclasses.asdict(answer)}


def _row(address: str, answer: BrokerStatus | DLedgerError) -> tuple[str, ...]:
    if isinstance(answer, DLedgerError):
        reason = str(answer).removeprefix(f"{address} is unreachable: ")
        return ("", "", "", address, "unreachable", *[""] * (len(_COLUMNS) - 6), reason)
    oldest, ha = answer.earliest_message_ms, HaFacts.of(answer.runtime)
    hours = f"{(time.time() * 1000 - oldest) / 3_600_000:.1f}" if oldest > 0 else ""
    return (
        answer.cluster,
        answer.broker_name,
        answer.node_id,
        address,
        answer.role,
        str(answer.term) if answer.replicated else "",
        answer.version,
        f"{answer.put_tps:.2f}",
        f"{answer.get_tps:.2f}",
        str(answer.dispatch_behind_bytes),
        hours,
        f"{answer.disk_ratio:.0%}",
        ", ".join(filter(None, (_since(answer), "" if ha is None else ha.words))),
    )


def _since(answer: BrokerStatus) -> str:
    return f"since {time_text(answer.boot_ms)}" if answer.boot_ms > 0 else ""
