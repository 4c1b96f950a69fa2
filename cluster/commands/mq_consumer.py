"""``dledger consumer``: shows and changes the progress of consumer groups."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import click

from cluster import terminal
from cluster.broker_target import BrokerTarget, Moment, broker_options, start_of
from cluster.reporting import ErrorReportingGroup


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
    epilog="""\b
Examples:
  dledger consumer progress                          every group, with its lag
  dledger consumer progress -g billing -t orders     every queue
  dledger consumer progress -g billing --json | jq 'map(.lag) | add'"""
)
@click.option("-g", "--group", help="Show this group, queue by queue.")
@click.option("-t", "--topic", default="", help="Only this topic.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@broker_options
def progress(group: str | None, topic: str, as_json: bool, target: BrokerTarget) -> None:
    """Show the committed offsets of groups, and how many messages remain."""
    with closing(target.admin()) as admin:
        groups = admin.groups() if group is None else [group]
        found = {}
        for one in groups:
            if group is not None or admin.offsets(one, topic):
                found[one] = admin.progress(one, topic)
            elif not topic:
                found[one] = []  # registered, but nothing committed yet
    if group is None:
        totals = [(one, len({row.topic for row in rows}), sum(row.lag for row in rows)) for one, rows in found.items()]
        if as_json:
            terminal.print_json([{"group": name, "topics": topics, "lag": lag} for name, topics, lag in totals])
        else:
            terminal.print_table(
                ("group", "topics", "lag"), [(one, str(two), str(three)) for one, two, three in totals]
            )
        return
    rows = found[group]
    if as_json:
        terminal.print_json([{**dataclasses.asdict(row), "lag": row.lag} for row in rows])
        return
    lines = [
        (
            row.topic,
            str(row.queue_id),
            str(row.committed) if row.committed >= 0 else "",
            str(row.min_offset),
            str(row.max_offset),
            str(row.lag),
        )
        for row in rows
    ]
    terminal.print_table(("topic", "queue", "committed", "min offset", "max offset", "lag"), lines)


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
@click.option("--queue", type=click.IntRange(min=0), help="Only this queue.")
@click.option("--offset", type=click.IntRange(min=0), help="With --queue: continue at this offset.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: the offset of each queue.")
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
    with closing(target.admin()) as admin:
        if offset is not None and queue is not None:
            admin.topic(topic)
            places = {queue: offset}
            admin.set_offsets(group, topic, places)
        else:
            start = start_of(moment if moment is not None else "first")
            places = admin.reset_offsets(group, topic, start, None if queue is None else [queue])
    if as_json:
        terminal.print_json({str(queue_id): place for queue_id, place in places.items()})
    else:
        terminal.print_table(("queue", "offset"), [(str(queue_id), str(place)) for queue_id, place in places.items()])


@consumer.command(
    epilog="""\b
Examples:
  dledger consumer delete billing --yes

Stop the group's consumers first, or their next commit creates it again."""
)
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@broker_options
def delete(name: str, yes: bool, target: BrokerTarget) -> None:
    """Delete a group and its offsets."""
    if not yes:
        click.confirm(f"Delete group {name} and its offsets?", abort=True)
    with closing(target.admin()) as admin:
        admin.delete_group(name)
    click.echo(f"deleted group {name}")
