"""``dledger topic``: creates, lists, shows and deletes topics."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import click

from dledger.command_line import flag_values
from dledger.errors import DLedgerError
from dledger_cli import terminal
from dledger_cli.targets import BrokerTarget, broker_options
from dledger_cli.terminal import ErrorReportingGroup, print_broker_tables, time_text

if TYPE_CHECKING:
    from rocketstore.client.aio.admin_requests import QueueRange, TopicInfo
    from rocketstore.client.blocking import Admin

_PERMISSIONS = {"rw": 6, "r": 4, "w": 2, "none": 0}
_TYPES = ("NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED", "UNSPECIFIED")
_QUEUES = flag_values.Whole(min=1, max=2**31 - 1)
"""Numbers that a request can contain: how many a broker takes, it says itself."""


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
  dledger topic create orders --type fifo --retention 24h
  dledger topic create orders --namesrv 10.0.0.1:9876                 in every group of the cluster
  dledger topic create orders --namesrv 10.0.0.1:9876 --broker-name broker-a"""
)
@click.argument("name")
@click.option(
    "-q",
    "--queues",
    type=_QUEUES,
    help="How many queues it has; default: 4, if the topic is new.",
)
@click.option("-r", "--read-queues", type=_QUEUES, help="How many are read; default: all.")
@click.option("-w", "--write-queues", type=_QUEUES, help="How many are written; default: all.")
@click.option("-p", "--permission", type=click.Choice(list(_PERMISSIONS)), help="Default: rw, if the topic is new.")
@click.option(
    "--type",
    "message_type",
    type=click.Choice(_TYPES, case_sensitive=False),
    help="The messages that it takes, as in RocketMQ 5; default: all, if the topic is new.",
)
@click.option(
    "--retention",
    metavar="DURATION|log",
    help="How long its messages can be read, such as 36h: at most as long as the log keeps them (log, the default).",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@broker_options
def create(  # noqa: PLR0913  # one parameter per option
    name: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    permission: str | None,
    message_type: str | None,
    retention: str | None,
    yes: bool,
    target: BrokerTarget,
) -> None:
    """Create or change a topic. Values not given stay as they are, if the topic exists.

    Messages of another type than the topic's are refused. A retention hides messages; their room in the log, which all
    topics share, is free when the log's own time has passed.
    The brokers say how many queues they take: this project's 1 to 1,024, RocketMQ's more.
    """

    from rocketstore.client.aio.admin_requests import TopicInfo

    def changed(now: TopicInfo | None, broker: str) -> TopicInfo:
        info = now or TopicInfo(name, broker=broker)
        return dataclasses.replace(
            info,
            read_queues=read_queues or queues or info.read_queues,
            write_queues=write_queues or queues or info.write_queues,
            permission=info.permission if permission is None else _PERMISSIONS[permission],
            message_type=(message_type or "").upper(),
            retention=retention or "",
        )

    with target.brokers() as brokers:
        admin = brokers.admin
        try:
            present = {one.broker: one for one in admin.topics() if one.name == name}
            wanted = {broker: changed(present.get(broker), broker) for broker in brokers.every()}
            hidden = _hidden(admin, present, wanted)
        except DLedgerError as error:
            error.outcome = "not_applied"  # nothing was asked for yet
            raise
        if not yes and any(hidden.values()):
            told = ", ".join(f"{count:,}{_at(broker, wanted)}" for broker, count in hidden.items() if count)
            terminal.confirm(f"Messages in queues that can no longer be read, consumed or not: {told}. Shrink {name}?")
        for broker, info in wanted.items():
            admin.put_topic(info)
            _, writes, reads, word, *_ = _row(info)
            click.echo(f"topic {name}{_at(broker, wanted)}: {writes} write queues, {reads} read queues, {word}")


def _hidden(admin: Admin, present: Mapping[str, TopicInfo], wanted: Mapping[str, TopicInfo]) -> dict[str, int]:
    """By broker, how many messages are in queues that would not be read any more."""
    gone = {
        broker: range(info.read_queues, present[broker].read_queues)
        for broker, info in wanted.items()
        if broker in present
    }
    found = dict.fromkeys(gone, 0)
    if not any(gone.values()):
        return found
    (name,) = {one.name for one in wanted.values()}
    for one in admin.queue_ranges(name):
        broker = one.queue.broker_name
        if one.queue.queue_id in gone.get(broker, ()):
            found[broker] += one.max_offset - one.min_offset
    return found


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
    with target.brokers() as brokers:
        topics, names = brokers.admin.topics(), brokers.every()
    found = [(broker, [one for one in topics if one.broker == broker]) for broker in names]
    if as_json:
        terminal.print_json([dataclasses.asdict(one) for _, ones in found for one in ones])
    else:
        print_broker_tables(("topic", "write queues", "read queues", "permission", "type", "retention"), found, _row)


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
    with target.brokers() as brokers:
        places = [one.broker for one in brokers.with_topic(name)]
        ranges = brokers.admin.queue_ranges(name)
    found = [(broker, [one for one in ranges if one.queue.broker_name == broker]) for broker in places]
    if as_json:
        terminal.print_json([_range_json(one) for _, ones in found for one in ones])
        return

    def row(one: QueueRange) -> tuple[str, ...]:
        return (str(one.queue.queue_id), str(one.min_offset), str(one.max_offset), time_text(one.last_update_ms))

    print_broker_tables(("queue", "min offset", "max offset", "last update"), found, row, least=("last update",))


def _range_json(one: QueueRange) -> dict[str, object]:
    return {
        "broker": one.queue.broker_name,
        "queue_id": one.queue.queue_id,
        "min_offset": one.min_offset,
        "max_offset": one.max_offset,
        "last_update_ms": one.last_update_ms,
    }


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
    with target.brokers() as brokers:
        parts = brokers.with_topic(name)
        addresses = {one.name: one.addresses for one in brokers.admin.brokers()}
    found = [(info, sorted(addresses.get(info.broker, {}).items())) for info in parts]
    if as_json:
        shares = [
            {
                **dataclasses.asdict(info),
                "brokers": [
                    {"broker": info.broker, "broker_id": number, "address": address, "role": _role(number)}
                    for number, address in places
                ],
            }
            for info, places in found
        ]
        terminal.print_json(shares[0] if len(shares) == 1 else shares)
        return
    rows = [
        (info.broker, str(number), address, _role(number), str(0 if number else info.write_queues), *_row(info)[2:4])
        for info, places in found
        for number, address in places
    ]
    terminal.print_table(("broker", "id", "address", "role", "write queues", "read queues", "permission"), rows)


def _role(broker_id: int) -> str:
    return "slave" if broker_id else "master"


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
    with target.brokers() as brokers:
        places = [one.broker for one in brokers.with_topic(name)]  # a misspelled name is told before anybody is asked
        if not yes:
            terminal.confirm(f"Delete topic {name} and its messages?")
        brokers.admin.delete_topic(name, target.broker_name)
    for broker in places:
        click.echo(f"deleted topic {name}{_at(broker, places)}")


def _at(broker: str, brokers: Collection[str]) -> str:
    return f" at {broker}" if len(brokers) > 1 else ""


def _row(info: TopicInfo) -> tuple[str, ...]:
    words = {bits: word for word, bits in _PERMISSIONS.items()}
    permission = words.get(info.permission & 6, str(info.permission))
    told = info.message_type.lower() or "any", info.retention or "log"
    return info.name, str(info.write_queues), str(info.read_queues), permission, *told
