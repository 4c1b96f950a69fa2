"""``dledger topic``: creates, lists, shows and deletes topics."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from cluster import terminal
from cluster.broker_target import BrokerTarget, broker_options, time_text
from cluster.commands import by_broker
from cluster.reporting import ErrorReportingGroup
from dledger import flag_values
from dledger.errors import DLedgerError

if TYPE_CHECKING:
    from rocketstore.client.admin import Admin, QueueRange
    from rocketstore.client.topics import TopicInfo

_PERMISSIONS = {"rw": 6, "r": 4, "w": 2, "none": 0}
_QUEUES = flag_values.Whole(min=1, max=65536)


@click.group(
    cls=ErrorReportingGroup,
    writing=frozenset({"create", "delete"}),
    short_help="Create and show topics.",
    epilog="""\b
Examples:
  dledger topic create orders --queues 8
  dledger topic list
  dledger topic status orders""",
)
def topic() -> None:
    """Create, list, show and delete topics."""


@topic.command(
    epilog="""\b
Examples:
  dledger topic create orders --queues 8
  dledger topic create orders --write-queues 4 --read-queues 8        drain 4 queues before removing them
  dledger topic create orders --permission r                          stop writing to it
  dledger topic create orders --namesrv 10.0.0.1:9876                 in every group of the cluster
  dledger topic create orders --namesrv 10.0.0.1:9876 --broker-name broker-a"""
)
@click.argument("name")
@click.option("-q", "--queues", type=_QUEUES, help="How many queues it has; default: 4, if the topic is new.")
@click.option("-r", "--read-queues", type=_QUEUES, help="How many are read; default: all.")
@click.option("-w", "--write-queues", type=_QUEUES, help="How many are written; default: all.")
@click.option("-p", "--permission", type=click.Choice(list(_PERMISSIONS)), help="Default: rw, if the topic is new.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@broker_options
def create(
    name: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    permission: str | None,
    yes: bool,
    target: BrokerTarget,
) -> None:
    """Create or change a topic. Of one that exists, what is not given stays as it is."""

    from rocketstore.client.topics import TopicInfo

    def changed(now: TopicInfo | None) -> TopicInfo:
        info = now or TopicInfo(name)
        return dataclasses.replace(
            info,
            read_queues=read_queues or queues or info.read_queues,
            write_queues=write_queues or queues or info.write_queues,
            permission=info.permission if permission is None else _PERMISSIONS[permission],
        )

    with target.groups() as groups:
        try:
            places = [(broker, admin, _present(admin, name)) for broker, admin in groups.every()]
            hidden = {broker: _hidden(admin, now, changed(now)) for broker, admin, now in places}
        except DLedgerError as error:
            error.outcome = "not_applied"  # nothing was asked for yet
            raise
        if not yes and any(hidden.values()):
            told = ", ".join(f"{count:,}{_at(broker)}" for broker, count in hidden.items() if count)
            terminal.confirm(f"Messages in queues that can no longer be read, consumed or not: {told}. Shrink {name}?")
        for broker, admin, now in places:
            wanted = changed(now)
            admin.put_topic(wanted)
            _, writes, reads, word = _row(wanted)
            click.echo(f"topic {name}{_at(broker)}: {writes} write queues, {reads} read queues, {word}")


def _present(admin: Admin, name: str) -> TopicInfo | None:
    """The topic as it is; None if it is new."""
    return next((one for one in admin.topics() if one.name == name), None)


def _hidden(admin: Admin, now: TopicInfo | None, wanted: TopicInfo) -> int:
    """How many messages are in queues that would not be read any more."""
    if now is None or wanted.read_queues >= now.read_queues:
        return 0
    gone = range(wanted.read_queues, now.read_queues)
    ranges = [one for one in admin.queue_ranges(now.name) if one.queue_id in gone]
    return sum(max(0, one.max_offset - max(0, one.min_offset)) for one in ranges)


@topic.command(
    "list",
    epilog="""\b
Examples:
  dledger topic list
  dledger topic list --json | jq -r '.[].name'""",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@broker_options
def list_topics(as_json: bool, target: BrokerTarget) -> None:
    """Show every topic."""
    with target.groups() as groups:
        found = [(broker, admin.topics()) for broker, admin in groups.every()]
    if as_json:
        terminal.print_json(by_broker.facts(found))
    else:
        by_broker.print_table(("topic", "write queues", "read queues", "permission"), found, _row)


@topic.command(
    epilog="""\b
Examples:
  dledger topic status orders
  dledger topic status orders --json | jq 'map(.max_offset - .min_offset) | add'"""
)
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@broker_options
def status(name: str, as_json: bool, target: BrokerTarget) -> None:
    """Show the first offset, the end and the last change of each queue."""
    with target.groups() as groups:
        found = [(broker, admin.queue_ranges(name)) for broker, admin in groups.with_topic(name)]
    if as_json:
        terminal.print_json(by_broker.facts(found))
        return

    def row(one: QueueRange) -> tuple[str, ...]:
        return (str(one.queue_id), str(one.min_offset), str(one.max_offset), time_text(one.last_update_ms))

    by_broker.print_table(("queue", "min offset", "max offset", "last update"), found, row, least=("last update",))


@topic.command(
    epilog="""\b
Examples:
  dledger topic route orders"""
)
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; an array if several groups have the topic.")
@broker_options
def route(name: str, as_json: bool, target: BrokerTarget) -> None:
    """Show the queues of a topic and the brokers that have them."""
    with target.groups() as groups:
        found = [
            (admin.topic(name), [one for one in admin.cluster().values() if not isinstance(one, DLedgerError)])
            for _, admin in groups.with_topic(name)
        ]
    if as_json:
        shares = [
            {
                **dataclasses.asdict(info),
                "brokers": [
                    {"broker": one.broker_name, "broker_id": one.broker_id, "address": one.address, "role": one.role}
                    for one in brokers
                ],
            }
            for info, brokers in found
        ]
        terminal.print_json(shares[0] if len(shares) == 1 else shares)
        return
    rows = [
        (
            one.broker_name,
            str(one.broker_id),
            one.address,
            one.role,
            str(info.write_queues) if one.is_master else "0",
            *_row(info)[2:],
        )
        for info, brokers in found
        for one in brokers
    ]
    terminal.print_table(("broker", "id", "address", "role", "write queues", "read queues", "permission"), rows)


@topic.command(
    epilog="""\b
Examples:
  dledger topic delete orders --yes"""
)
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@broker_options
def delete(name: str, yes: bool, target: BrokerTarget) -> None:
    """Delete a topic and its messages."""
    with target.groups() as groups:
        places = groups.with_topic(name)
        for _, admin in places:
            admin.topic(name)  # a misspelled name is told before anybody is asked
        if not yes:
            terminal.confirm(f"Delete topic {name} and its messages?")
        for broker, admin in places:
            admin.delete_topic(name)
            click.echo(f"deleted topic {name}{_at(broker)}")


def _at(broker: str) -> str:
    return f" at {broker}" if broker else ""


def _row(info: TopicInfo) -> tuple[str, str, str, str]:
    words = {bits: word for word, bits in _PERMISSIONS.items()}
    permission = words.get(info.permission & 6, str(info.permission))
    return info.name, str(info.write_queues), str(info.read_queues), permission
