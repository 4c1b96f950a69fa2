"""``dledger consumer``: shows and changes the progress of consumer groups."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cluster import terminal
from cluster.broker_target import BrokerTarget, Moment, broker_options, start_of
from cluster.commands import by_broker
from cluster.reporting import ErrorReportingGroup
from dledger import flag_values
from dledger.conditions import Condition, ConditionKind
from dledger.errors import DLedgerError

if TYPE_CHECKING:
    from rocketstore.client.admin import Admin, QueueProgress


@click.group(
    cls=ErrorReportingGroup,
    writing=frozenset({"reset-offset", "delete"}),
    short_help="Manage consumer groups.",
    epilog="""\b
Examples:
  dledger consumer progress
  dledger consumer progress -g billing
  dledger consumer reset-offset -g billing -t orders --to 2h --dry-run""",
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
    troubles: list[tuple[str, Condition]] = []
    with target.groups() as groups:
        for broker, admin in groups.with_topic(topic) if topic else groups.every():
            found.append((broker, _progress_at(admin, group, topic)))
            troubles += [(broker, one) for one in _troubles_at(admin, group)] if group is not None else []
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
    for broker, one in troubles:
        click.echo(f"{broker}: {terminal.condition_text(one)}" if broker else terminal.condition_text(one), err=True)


_OF_GROUPS = (ConditionKind.DIFFERENT_SUBSCRIPTIONS, ConditionKind.SHARED_CLIENT_ID)


def _troubles_at(admin: Admin, group: str | None) -> list[Condition]:
    """What is wrong with a group's consumers, as far as its broker says."""
    try:
        return [one for one in admin.status().conditions if one.kind in _OF_GROUPS and one.subject == group]
    except DLedgerError:  # it only adds to what was asked
        return []


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
  dledger consumer reset-offset -g billing -t orders --to first --dry-run
  dledger consumer reset-offset -g billing -t orders --to 2026-01-31T12:00
  dledger consumer reset-offset -g billing -t orders --to 30m              half an hour back
  dledger consumer reset-offset -g billing -t orders --queue 3 --offset 1200
  dledger consumer reset-offset -g audit -t orders --to last --create      before the group's first member starts

Running consumers continue from there after their next commit, within 5 seconds by default. Clients other than this
project's may not: stop them first.""",
)
@click.option("-g", "--group", required=True)
@click.option("-t", "--topic", required=True)
@click.option("--to", "moment", type=Moment(ends=True), metavar="first|last|TIME", help="New position.")
@click.option("--queue", type=flag_values.Whole(min=0), help="Only this queue.")
@click.option("--offset", type=flag_values.Whole(min=0), help="With --queue: continue at this offset.")
@click.option("--dry-run", is_flag=True, help="Show the present and the new offsets, and change nothing.")
@click.option("--create", is_flag=True, help="Set the first offsets of a group that does not exist yet.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object: the offset of each queue, by broker if there are several."
)
@broker_options
def reset_offset(  # noqa: PLR0913  # one parameter per option
    group: str,
    topic: str,
    moment: str | int | None,
    queue: int | None,
    offset: int | None,
    dry_run: bool,
    create: bool,
    as_json: bool,
    target: BrokerTarget,
) -> None:
    """Move a group's position back or forward."""
    if (moment is None) == (offset is None):
        raise click.UsageError("give either --to or --offset")
    if offset is not None and queue is None:
        raise click.UsageError("--offset needs --queue")
    with target.groups() as groups:
        if queue is None:
            start = start_of(moment if moment is not None else "first")
            plans = [
                (
                    broker,
                    admin,
                    {one: admin.offset_at(topic, one, start) for one in range(admin.topic(topic).read_queues)},
                )
                for broker, admin in groups.with_topic(topic)
            ]
        else:
            plans = [("", *_place_of_one(groups.only_one_with(topic), topic, queue, moment, offset))]
        if not create:
            _check_known(group, [admin for _, admin, _ in plans])
        before = [admin.offsets(group, topic) for _, admin, _ in plans] if dry_run else []
        if not dry_run:
            for _, admin, places in plans:
                admin.set_offsets(group, topic, places)
    if as_json:
        found = {broker: {str(one): place for one, place in places.items()} for broker, _, places in plans}
        terminal.print_json(found if len(found) > 1 else next(iter(found.values())))
    elif dry_run:
        changes = [
            (broker, [(one, old.get((topic, one), -1), place) for one, place in places.items()])
            for (broker, _, places), old in zip(plans, before, strict=True)
        ]
        by_broker.print_table(("queue", "from", "to"), changes, _change_row)
    else:
        rows = [(broker, list(places.items())) for broker, _, places in plans]
        by_broker.print_table(("queue", "offset"), rows, lambda row: (str(row[0]), str(row[1])))


def _place_of_one(
    admin: Admin, topic: str, queue: int, moment: str | int | None, offset: int | None
) -> tuple[Admin, dict[int, int]]:
    """Raises ``NotFoundError`` for a queue that the topic does not have, ``UsageError`` for an offset outside of it."""
    from rocketstore.client.errors import NotFoundError

    queues = admin.topic(topic).read_queues
    if queue >= queues:
        raise NotFoundError(f"topic {topic} has {queues} read queues, numbered from 0: there is no queue {queue}")
    if offset is None:
        return admin, {queue: admin.offset_at(topic, queue, start_of(moment if moment is not None else "first"))}
    found = admin.queue_range(topic, queue)
    low = max(found.min_offset, 0)
    if not low <= offset <= found.max_offset:
        raise click.UsageError(f"queue {queue} of {topic} has offsets {low} to {found.max_offset}, not {offset}")
    return admin, {queue: offset}


def _check_known(group: str, admins: Sequence[Admin]) -> None:
    """Raises ``NotFoundError`` for a group that no broker knows: probably its name is mistyped."""
    from rocketstore.client.errors import NotFoundError

    known = sorted({name for admin in admins for name in admin.groups()})
    if group not in known:
        near = difflib.get_close_matches(group, known, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise NotFoundError(
            f"group {group} does not exist{meant}: nothing was changed. dledger consumer progress lists the groups; "
            "pass --create to set the first offsets of a new one"
        )


def _change_row(row: tuple[int, int, int]) -> tuple[str, ...]:
    queue, before, after = row
    return str(queue), str(before) if before >= 0 else "", str(after)


@consumer.command(
    short_help="Delete a group, its offsets, retries and dead letters.",
    epilog="""\b
Examples:
  dledger consumer delete billing --yes
  dledger consumer delete -g billing --yes           the same

Stop the group's consumers first, or their next commit creates it again.""",
)
@click.argument("name", required=False)
@click.option("-g", "--group", metavar="NAME", help="The group, instead of the argument.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@broker_options
def delete(name: str | None, group: str | None, yes: bool, target: BrokerTarget) -> None:
    """Delete a group with its offsets, the messages it would retry, and its dead letters."""
    if (name is None) == (group is None):
        raise click.UsageError("name the group to delete once: as the argument, or with -g")
    name = name or group or ""
    if not yes:
        terminal.confirm(f"Delete group {name}, its offsets, the messages it would retry and its dead letters?")
    with target.groups() as groups:
        groups.only_one().delete_group(name)
    click.echo(f"deleted group {name}")
