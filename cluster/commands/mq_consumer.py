"""``dledger consumer``: shows and changes the progress of consumer groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cluster import terminal
from cluster.broker_target import BrokerTarget, Moment, broker_options, start_of
from cluster.commands import by_broker
from cluster.reporting import ErrorReportingGroup
from dledger import flag_values

if TYPE_CHECKING:
    from rocketstore.client import Admin, QueueProgress


@click.group(
    cls=ErrorReportingGroup,
    writing=frozenset({"reset-offset", "delete"}),
    short_help="Manage consumer groups.",
    epilog="""\b
Examples:
  dledger consumer progress
  dledger consumer progress -g billing
  dledger consumer reset-offset -g billing -t orders --to 2h""",
)
def consumer() -> None:
    """Manage consumer groups."""


@consumer.command(
    short_help="Show committed offsets, and how far groups are behind.",
    epilog="""\b
Examples:
  dledger consumer progress                          every group, with its lag
  dledger consumer progress -g billing -t orders     every queue
  dledger consumer progress -g billing --json | jq 'map(.lag) | add'""",
)
@click.option("-g", "--group", help="Show this group, queue by queue.")
@click.option("-t", "--topic", default="", help="Only this topic.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@broker_options
def progress(group: str | None, topic: str, as_json: bool, target: BrokerTarget) -> None:
    """Show the committed offsets of groups, and how many messages remain."""
    from rocketstore.client.errors import NotFoundError  # here, so that --help does not load gRPC

    found: list[tuple[str, dict[str, list[QueueProgress]]]] = []
    with target.groups() as groups:
        for broker, admin in groups.with_topic(topic) if topic else groups.every():
            found.append((broker, _progress_at(admin, group, topic)))
    if group is None:
        _print_totals([rows for _, rows in found], as_json)
        return
    if not any(group in rows for _, rows in found):
        raise NotFoundError(f"group {group} has no offsets" + (f" in topic {topic}" if topic else ""))
    queues = [(broker, rows.get(group, [])) for broker, rows in found]
    if as_json:
        lags = iter([row.lag for _, rows in queues for row in rows])
        terminal.print_json([{**facts, "lag": next(lags)} for facts in by_broker.facts(queues)])
        return
    columns = ("topic", "queue", "committed", "min offset", "max offset", "lag")
    by_broker.print_table(columns, queues, _queue_row)


def _progress_at(admin: Admin, group: str | None, topic: str) -> dict[str, list[QueueProgress]]:
    """By group; without one, also those that have committed nothing yet."""
    found: dict[str, list[QueueProgress]] = {}
    for one in admin.groups() if group is None else [group]:
        if admin.offsets(one, topic):
            found[one] = admin.progress(one, topic)
        elif group is None and not topic:
            found[one] = []  # registered, but nothing committed yet
    return found


def _print_totals(found: list[dict[str, list[QueueProgress]]], as_json: bool) -> None:
    totals = []
    for name in sorted({name for rows in found for name in rows}):
        rows = [row for one in found for row in one.get(name, [])]
        totals.append((name, len({row.topic for row in rows}), sum(row.lag for row in rows)))
    if as_json:
        terminal.print_json([{"group": name, "topics": topics, "lag": lag} for name, topics, lag in totals])
    else:
        terminal.print_table(("group", "topics", "lag"), [(one, str(two), str(three)) for one, two, three in totals])


def _queue_row(row: QueueProgress) -> tuple[str, ...]:
    return (
        row.topic,
        str(row.queue_id),
        str(row.committed) if row.committed >= 0 else "",
        str(row.min_offset),
        str(row.max_offset),
        str(row.lag),
    )


@consumer.command(
    "reset-offset",
    epilog="""\b
Examples:
  dledger consumer reset-offset -g billing -t orders --to first
  dledger consumer reset-offset -g billing -t orders --to 2026-01-31T12:00
  dledger consumer reset-offset -g billing -t orders --to 30m              half an hour back
  dledger consumer reset-offset -g billing -t orders --queue 3 --offset 1200

Running consumers continue from there after their next commit, within 5 seconds by default. Clients other than this
project's may not: stop them first.""",
)
@click.option("-g", "--group", required=True)
@click.option("-t", "--topic", required=True)
@click.option("--to", "moment", type=Moment(ends=True), metavar="first|last|TIME", help="New position.")
@click.option("--queue", type=flag_values.Whole(min=0), help="Only this queue.")
@click.option("--offset", type=flag_values.Whole(min=0), help="With --queue: continue at this offset.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object: the offset of each queue, by broker if there are several."
)
@broker_options
def reset_offset(
    group: str,
    topic: str,
    moment: str | int | None,
    queue: int | None,
    offset: int | None,
    as_json: bool,
    target: BrokerTarget,
) -> None:
    """Move a group's position back or forward."""
    if (moment is None) == (offset is None):
        raise click.UsageError("give either --to or --offset")
    if offset is not None and queue is None:
        raise click.UsageError("--offset needs --queue")
    places: list[tuple[str, dict[int, int]]] = []
    with target.groups() as groups:
        if offset is not None and queue is not None:
            admin = groups.only_one_with(topic)
            admin.topic(topic)
            admin.set_offsets(group, topic, {queue: offset})
            places.append(("", {queue: offset}))
        else:
            start = start_of(moment if moment is not None else "first")
            for broker, admin in groups.with_topic(topic) if queue is None else [("", groups.only_one_with(topic))]:
                chosen = None if queue is None else [queue]
                places.append((broker, admin.reset_offsets(group, topic, start, chosen)))
    if as_json:
        found = {broker: {str(queue_id): place for queue_id, place in one.items()} for broker, one in places}
        terminal.print_json(found if len(found) > 1 else next(iter(found.values())))
        return
    rows = [(broker, list(one.items())) for broker, one in places]
    by_broker.print_table(("queue", "offset"), rows, lambda row: (str(row[0]), str(row[1])))


@consumer.command(
    epilog="""\b
Examples:
  dledger consumer delete billing --yes
  dledger consumer delete -g billing --yes           the same

Stop the group's consumers first, or their next commit creates it again."""
)
@click.argument("name", required=False)
@click.option("-g", "--group", metavar="NAME", help="The group, instead of the argument.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@broker_options
def delete(name: str | None, group: str | None, yes: bool, target: BrokerTarget) -> None:
    """Delete a group with its offsets, what it has to try again, and its dead letters."""
    if (name is None) == (group is None):
        raise click.UsageError("name the group to delete once: as the argument, or with -g")
    name = name or group or ""
    if not yes:
        click.confirm(f"Delete group {name}, its offsets, what it has to try again and its dead letters?", abort=True)
    with target.groups() as groups:
        groups.only_one().delete_group(name)
    click.echo(f"deleted group {name}")
