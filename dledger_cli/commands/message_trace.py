"""``dledger message trace``: who sent and who consumed a message, when, and how long it took."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from dledger_cli import terminal
from dledger_cli.broker_target import BrokerTarget, broker_options
from dledger_cli.moments import Moment, time_text
from rocketstore.message.trace import TRACE_TOPIC

if TYPE_CHECKING:
    from rocketstore.client.aio.admin_records import Traced


@click.command(
    "trace",
    short_help="Show who sent and consumed a message.",
    epilog="""\b
Examples:
  dledger message trace 7F0000011F9018B4AAC24DD5B1B70000
  dledger message trace 7F0000011F9018B4AAC24DD5B1B70000 --json | jq .cost_ms""",
)
@click.argument("message_id", metavar="MESSAGE_ID")
@click.option("-t", "--trace-topic", default=TRACE_TOPIC, show_default=True, help="Where its clients write traces.")
@click.option("--begin", type=Moment(), default=0, metavar="TIME", help="Only traces written at this time or later.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per step.")
@broker_options
def trace(message_id: str, trace_topic: str, begin: int, as_json: bool, target: BrokerTarget) -> None:
    """Show the way of the message with this id (that of its producer), as its clients have written it.

    Producers and consumers of this project write traces with trace=True, RocketMQ's with enableMsgTrace. Traces are
    written about a second later. Exit code 1 if there is none.
    """
    with target.brokers() as brokers:
        steps = brokers.admin.trace(message_id, topic=trace_topic, begin_ms=begin)
    if not steps:
        raise click.ClickException(
            f"no trace of message {message_id} in {trace_topic}: its clients wrote none (trace=True), it has expired, "
            "or it is written in a moment"
        )
    if as_json:
        for one in steps:
            terminal.print_json(dataclasses.asdict(one))
        return
    terminal.print_table(("step", "group", "client", "began", "took", "result", "at"), [_row(one) for one in steps])


def _row(one: Traced) -> tuple[str, ...]:
    took = f"{one.cost_ms} ms" if one.cost_ms >= 0 else ""
    if one.step == "ended":
        result = ""
    elif one.step == "consumed" and one.cost_ms < 0:
        result = "not done yet"
    else:
        result = "ok" if one.ok else "failed"
    step = f"{one.step} (try {one.retries + 1})" if one.retries else one.step
    texts = (step, one.group or "-", one.host, time_text(one.time_ms), took, result, one.detail)
    return tuple(terminal.printable(text.encode()) for text in texts)
