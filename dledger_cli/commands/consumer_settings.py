"""``dledger consumer settings`` and ``set``: how often messages of a group are tried again, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from dledger.command_line import flag_values
from dledger.values import parse_millis
from dledger_cli import terminal
from dledger_cli.broker_target import BrokerTarget, broker_options

if TYPE_CHECKING:
    from rocketstore.client.aio.admin_records import ConsumeMode, GroupInfo
    from rocketstore.state.attributes import RetryPolicy

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


@click.command(
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


@click.command(
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
    from rocketstore.client.aio.admin_records import ConsumeMode, GroupInfo
    from rocketstore.types import RequestMode

    with target.brokers() as brokers:
        if changes_group:
            info = GroupInfo(group, retries, broker=target.broker_name, is_ordered=ordered, retry_delays=retry_delays)
            brokers.admin.put_group(info)
        if topic is not None and mode is not None:
            wanted = RequestMode[mode.upper()]
            brokers.admin.set_consume_mode(ConsumeMode(topic, group, wanted, share or 0, target.broker_name))
    click.echo(f"changed group {group}")
