"""``dledger consumer``: the progress of consumer groups, their retries and the order in which they consume."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import click

from dledger.command_line import flag_values
from dledger.monitoring import Condition, ConditionKind
from dledger.values import parse_millis
from dledger_cli import terminal
from dledger_cli.targets import BrokerTarget, broker_options
from dledger_cli.terminal import ErrorReportingGroup, Moment, print_broker_tables, start_of

if TYPE_CHECKING:
    from dledger_cli.targets import ChosenBrokers
    from rocketstore.client.aio.admin_requests import ConsumeMode, GroupInfo
    from rocketstore.client.blocking import Admin
    from rocketstore.remoting.topics import MessageQueue
    from rocketstore.state.attributes import RetryPolicy


@click.group(
    cls=ErrorReportingGroup,
    writing=frozenset({"reset-offset", "delete", "set"}),
    short_help="Manage consumer groups.",
    epilog="""\b
Examples:
  dledger consumer progress
  dledger consumer progress -g billing
  dledger consumer reset-offset -g billing -t orders --to 2h --dry-run
  dledger consumer set -g billing --ordered --retries 5""",
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
    """Show the committed offsets of groups, how many messages remain, and how long the oldest has been waiting."""
    with target.brokers() as brokers:
        names = [one.broker for one in brokers.with_topic(topic)] if topic else brokers.every()
        shown = _Progress(brokers.admin, names, topic)
        if group is None:
            _print_totals({one: shown.of(one) for one in shown.groups()}, as_json)
            return
        rows = shown.with_ages(group, shown.of(group))
        for address, one in _troubles(brokers.admin, group):
            click.echo(f"{address}: {terminal.condition_text(one)}", err=True)
    if not rows:
        from rocketstore.client.aio.errors import NotFoundError  # here, so that --help does not load it

        raise NotFoundError(f"group {group} has no offsets" + (f" in topic {topic}" if topic else ""))
    if as_json:
        terminal.print_json([_progress_json(row) for row in rows])
        return
    found = [(name, [row for row in rows if row.queue.broker_name == name]) for name in names]
    print_broker_tables(("topic", "queue", "committed", "min offset", "max offset", "lag", "behind"), found, _queue_row)


@dataclass(frozen=True, slots=True)
class _Row:
    """A group's progress in one queue. Messages that have expired count as consumed."""

    queue: MessageQueue
    committed: int
    min_offset: int
    max_offset: int
    age_ms: int = 0
    """How long the next message has been stored; 0 if it has consumed all, -1 if nobody said."""

    @property
    def lag(self) -> int:
        return max(self.max_offset - max(self.committed, self.min_offset), 0)


class _Progress:
    """The progress of groups at brokers with these ``names``; ``topic``: only in this one."""

    def __init__(self, admin: Admin, names: Sequence[str], topic: str) -> None:
        self._admin = admin
        self._names = names
        self._topic = topic
        self._begins: dict[str, dict[MessageQueue, int]] = {}  # by topic

    def groups(self) -> list[str]:
        """Those that have read the topic; without one, also those that have committed nothing yet."""
        if self._topic:
            return self._admin.groups_of_topic(self._topic)
        return sorted({one.name for one in self._admin.groups() if one.broker in self._names})

    def of(self, group: str) -> list[_Row]:
        """By topic, broker and queue; empty for a group without offsets."""
        from rocketstore.client.aio.errors import NotFoundError

        try:
            found = self._admin.progress(group, self._topic)
        except NotFoundError:
            return []
        return [
            _Row(one.queue, one.committed, self._begin(one.queue), one.max_offset)
            for one in found
            if one.queue.broker_name in self._names
        ]

    def with_ages(self, group: str, rows: Sequence[_Row]) -> list[_Row]:
        """Also how far behind it is in time: one request more for each topic."""
        from rocketstore.client.aio.errors import ClientError

        ages: dict[MessageQueue, int] = {}
        for topic in {one.queue.topic for one in rows}:
            with suppress(ClientError):  # an old broker, or the topic was deleted meanwhile
                ages |= self._admin.ages(group, topic)
        return [dataclasses.replace(one, age_ms=ages.get(one.queue, -1) if one.lag else 0) for one in rows]

    def _begin(self, queue: MessageQueue) -> int:
        from rocketstore.client.aio.errors import NotFoundError

        if queue.topic not in self._begins:
            try:
                ranges = self._admin.queue_ranges(queue.topic)
            except NotFoundError:  # deleted meanwhile
                ranges = []
            self._begins[queue.topic] = {one.queue: one.min_offset for one in ranges}
        return self._begins[queue.topic].get(queue, 0)


RETRY_PREFIX = "%RETRY%"
"""Of the topic with what a group tries again, which is none of those that it was asked to read."""
_OF_GROUPS = (ConditionKind.DIFFERENT_SUBSCRIPTIONS, ConditionKind.SHARED_CLIENT_ID)


def _troubles(admin: Admin, group: str) -> list[tuple[str, Condition]]:
    """Problems of a group's consumers, as far as brokers tell, with the brokers' addresses."""
    from rocketstore.client.aio.errors import ClientError

    return [
        (address, one)
        for address, status in admin.statuses().items()
        if not isinstance(status, ClientError)
        for one in status.runtime.problems
        if one.kind in _OF_GROUPS and one.subject == group
    ]


def _print_totals(found: Mapping[str, Sequence[_Row]], as_json: bool) -> None:
    totals = [
        (
            name,
            len({row.queue.topic for row in rows if not row.queue.topic.startswith(RETRY_PREFIX)}),
            sum(row.lag for row in rows),
        )
        for name, rows in found.items()
    ]
    if as_json:
        terminal.print_json([{"group": name, "topics": topics, "lag": lag} for name, topics, lag in totals])
    else:
        terminal.print_table(("group", "topics", "lag"), [(one, str(two), str(three)) for one, two, three in totals])


def _progress_json(row: _Row) -> dict[str, object]:
    return {
        "broker": row.queue.broker_name,
        "topic": row.queue.topic,
        "queue_id": row.queue.queue_id,
        "committed": row.committed,
        "min_offset": row.min_offset,
        "max_offset": row.max_offset,
        "lag": row.lag,
        "behind_ms": row.age_ms,
    }


def _queue_row(row: _Row) -> tuple[str, ...]:
    figures = (row.queue.queue_id, row.committed, row.min_offset, row.max_offset, row.lag)
    behind = "-" if row.age_ms < 0 else f"{row.age_ms / 1000:,.1f} s"
    return row.queue.topic, *map(str, figures), behind


@consumer.command(
    "reset-offset",
    epilog="""\b
Examples:
  dledger consumer reset-offset -g billing -t orders --to first --dry-run
  dledger consumer reset-offset -g billing -t orders --to 2026-01-31T12:00
  dledger consumer reset-offset -g billing -t orders --to 30m              half an hour back
  dledger consumer reset-offset -g billing -t orders --queue 3 --offset 1200
  dledger consumer reset-offset -g audit -t orders --to last --create      before the group's first member starts

The brokers tell consumers that are online, which go there at once. With --queue or --broker-name they are not told, and
would commit their own position over the new one: stop them first.""",
)
@click.option("-g", "--group", required=True, help="The consumer group.")
@click.option("-t", "--topic", required=True, help="The topic.")
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
    with target.brokers() as brokers:
        admin = brokers.admin
        queues = _queues_of(brokers, topic, queue)
        if not create:
            _check_known(group, admin)
        before = _committed(admin, group, topic) if dry_run else {}
        start = start_of(moment if moment is not None else "first")
        if queue is None and not target.broker_name and not dry_run:
            places = admin.reset_offsets(group, topic, start)
        else:
            if offset is not None:
                _check_offset(admin, queues[0], offset)
            places = {one: admin.offset_at(one, start) if offset is None else offset for one in queues}
            if not dry_run:
                admin.set_offsets(group, places)
    names = sorted({one.broker_name for one in places})
    found = [(name, [(one, at) for one, at in places.items() if one.broker_name == name]) for name in names]
    if as_json:
        shown = {name: {str(one.queue_id): at for one, at in rows} for name, rows in found}
        terminal.print_json(shown if len(shown) > 1 else next(iter(shown.values())))
    elif dry_run:
        changes = [(name, [(one.queue_id, before.get(one, -1), at) for one, at in rows]) for name, rows in found]
        print_broker_tables(("queue", "from", "to"), changes, _change_row)
    else:
        print_broker_tables(("queue", "offset"), found, lambda row: (str(row[0].queue_id), str(row[1])))


def _queues_of(brokers: ChosenBrokers, topic: str, queue: int | None) -> list[MessageQueue]:
    """All queues that can be read, or the one with this number. Raises ``NotFoundError`` if there is none."""
    from rocketstore.client.aio.errors import NotFoundError
    from rocketstore.remoting.topics import MessageQueue

    if queue is None:
        parts = brokers.with_topic(topic)
        return [MessageQueue(topic, one.broker, number) for one in parts for number in range(one.read_queues)]
    part = brokers.only_one_with(topic)
    if queue >= part.read_queues:
        raise NotFoundError(
            f"topic {topic} has {part.read_queues} read queues, numbered from 0: there is no queue {queue}"
        )
    return [MessageQueue(topic, part.broker, queue)]


def _check_offset(admin: Admin, queue: MessageQueue, offset: int) -> None:
    """Raises ``UsageError`` for an offset that the queue does not have."""
    low, high = admin.offset_at(queue, "first"), admin.offset_at(queue, "last")
    if not low <= offset <= high:
        raise click.UsageError(f"queue {queue.queue_id} of {queue.topic} has offsets {low} to {high}, not {offset}")


def _committed(admin: Admin, group: str, topic: str) -> dict[MessageQueue, int]:
    from rocketstore.client.aio.errors import NotFoundError

    try:
        return admin.offsets(group, topic)
    except NotFoundError:
        return {}


def _check_known(group: str, admin: Admin) -> None:
    """Raises ``NotFoundError`` for a group that no broker knows: probably its name is mistyped."""
    from rocketstore.client.aio.errors import NotFoundError

    known = sorted({one.name for one in admin.groups()})
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
    with target.brokers() as brokers:
        names = set(brokers.every())
        known = {one.name for one in brokers.admin.groups() if one.broker in names}
        if name not in known:
            from rocketstore.client.aio.errors import NotFoundError

            raise NotFoundError(f"group {name} does not exist: dledger consumer progress lists the groups")
        if not yes:
            terminal.confirm(f"Delete group {name}, its offsets, the messages it would retry and its dead letters?")
        brokers.admin.delete_group(name, target.broker_name)
    click.echo(f"deleted group {name}")


_LEVELS = "levels"
_DELAYS = f"1s,10s,1m | 1s..5m | 1s..5m*3 | {_LEVELS}"


class RetryDelays(click.ParamType[object]):
    """``1s,10s,1m``: one after the other; ``1s..5m``: twice as long each time; ``1s..5m*3``: three times as long."""

    name = "delays"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> RetryPolicy | Literal["levels"]:
        """From its text."""
        from dledger.errors import InvalidRequestError
        from rocketstore.state.attributes import ExponentialRetryDelays, FixedRetryDelays

        text = str(value).replace(" ", "")
        if text == _LEVELS:
            return "levels"
        try:
            first, is_range, rest = text.partition("..")
            if not is_range:
                return FixedRetryDelays(tuple(map(parse_millis, text.split(","))))
            longest, _, factor = rest.partition("*")
            return ExponentialRetryDelays(parse_millis(first), parse_millis(longest), int(factor or 2))
        except (ValueError, InvalidRequestError) as error:
            self.fail(f"{error}: use {_DELAYS}", param, ctx)


@consumer.command(
    short_help="Show the settings of groups.",
    epilog="""\b
Examples:
  dledger consumer settings
  dledger consumer settings -g billing --json""",
)
@click.option("-g", "--group", help="Only this group.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@broker_options
def settings(group: str | None, as_json: bool, target: BrokerTarget) -> None:
    """Show the retries, the order and the retry delays of groups; and, if they were set, how topics are consumed by
    clients that leave the division of queues to the brokers.
    """
    with target.brokers() as brokers:
        names = set(brokers.every())
        groups = [one for one in brokers.admin.groups() if one.broker in names and group in (None, one.name)]
        modes = [one for one in brokers.admin.consume_modes() if one.broker in names and group in (None, one.group)]
    if group is not None and not groups and not modes:
        from rocketstore.client.aio.errors import NotFoundError  # here, so that --help does not load it

        raise NotFoundError(f"group {group} does not exist: dledger consumer settings lists the groups")
    of_group: dict[tuple[str, str], list[ConsumeMode]] = {(one.broker, one.name): [] for one in groups}
    for mode in modes:
        of_group.setdefault((mode.broker, mode.group), []).append(mode)
    infos = {(one.broker, one.name): one for one in groups}
    rows = [
        _Shown(*key, infos.get(key), found) for key, found in sorted(of_group.items(), key=lambda one: one[0][::-1])
    ]
    if as_json:
        terminal.print_json([row.json() for row in rows])
    else:
        terminal.print_table(
            ("group", "broker", "retries", "ordered", "retry delays", "consume modes"), [row.texts() for row in rows]
        )


class _Shown:
    """One group at one broker; ``info`` is None if it has modes only."""

    def __init__(self, broker: str, name: str, info: GroupInfo | None, modes: list[ConsumeMode]) -> None:
        self._broker = broker
        self._name = name
        self._info = info
        self._modes = modes

    def json(self) -> dict[str, object]:
        info = self._info
        return {
            "group": self._name,
            "broker": self._broker,
            "retries": None if info is None else info.retries_max,
            "ordered": None if info is None else info.is_ordered,
            "retry_delays": None if info is None else _delays_text(info.retry_delays),
            "consume_modes": [
                {"topic": one.topic, "mode": one.mode.name, "share_queues": one.share_queues} for one in self._modes
            ],
        }

    def texts(self) -> tuple[str, ...]:
        info = self._info
        modes = ", ".join(
            f"{one.topic}: {one.mode.name}" + (f" shared by {one.share_queues}" if one.share_queues else "")
            for one in self._modes
        )
        if info is None:
            return self._name, self._broker, "", "", "", modes
        ordered = "yes" if info.is_ordered else "no"
        return self._name, self._broker, str(info.retries_max), ordered, _delays_text(info.retry_delays), modes


def _delays_text(delays: RetryPolicy | Literal["levels"] | None) -> str:
    """As the option takes them."""
    from rocketstore.state.attributes import FixedRetryDelays, format_retention

    if delays is None or isinstance(delays, str):
        return _LEVELS
    if isinstance(delays, FixedRetryDelays):
        return ",".join(map(format_retention, delays.delays_ms))
    return f"{format_retention(delays.initial_ms)}..{format_retention(delays.max_ms)}*{delays.multiplier}"


@consumer.command(
    "set",
    short_help="Create a group, or change its settings.",
    epilog="""\b
Examples:
  dledger consumer set -g billing --retries 5 --retry-delays 1s,10s,1m
  dledger consumer set -g billing --ordered --retry-delays 1s..5m
  dledger consumer set -g billing -t orders --mode pop --share 2      as mqadmin setConsumeMode

Settings that are not named stay as they are.""",
)
@click.option("-g", "--group", required=True, help="The consumer group.")
@click.option("--retries", type=flag_values.Whole(min=0), help="How often a message is tried again before it is dead.")
@click.option("--ordered/--unordered", "ordered", default=None, help="Whether each queue is consumed in order.")
@click.option("--retry-delays", type=RetryDelays(), metavar=_DELAYS, help="How long a failed message waits.")
@click.option("-t", "--topic", help="The topic for --mode.")
@click.option("--mode", type=click.Choice(["pull", "pop"]), help="For clients that leave dividing queues to brokers.")
@click.option(
    "--share", type=flag_values.Whole(min=0), help="With --mode pop: a queue is shared by so many more clients."
)
@broker_options
def set_settings(  # noqa: PLR0913  # one parameter per option
    group: str,
    retries: int | None,
    ordered: bool | None,
    retry_delays: RetryPolicy | Literal["levels"] | None,
    topic: str | None,
    mode: str | None,
    share: int | None,
    target: BrokerTarget,
) -> None:
    """Create a consumer group, or change the settings that are named, at all brokers or one."""
    if (topic is None) != (mode is None):
        raise click.UsageError("--topic and --mode are named together")
    if share is not None and mode != "pop":
        raise click.UsageError("--share needs --mode pop")
    changes_group = not (retries is None and ordered is None and retry_delays is None)
    if not changes_group and mode is None:
        raise click.UsageError("name what to change: --retries, --ordered, --retry-delays, or --topic with --mode")
    from rocketstore.client.aio.admin_requests import ConsumeMode, GroupInfo
    from rocketstore.types import RequestMode

    with target.brokers() as brokers:
        if changes_group:
            info = GroupInfo(group, retries, broker=target.broker_name, is_ordered=ordered, retry_delays=retry_delays)
            brokers.admin.put_group(info)
        if topic is not None and mode is not None:
            wanted = RequestMode[mode.upper()]
            brokers.admin.set_consume_mode(ConsumeMode(topic, group, wanted, share or 0, target.broker_name))
    click.echo(f"changed group {group}")
