"""``dledger message resume``: asks the producers of a transaction that was given up once more."""

from __future__ import annotations

import click

from cluster.broker_target import BrokerTarget, broker_options
from cluster.commands.mq_query import check_offset_id


@click.command(
    "resume",
    short_help="Check a transaction that was given up again.",
    epilog="""\b
Examples:
  dledger message print -t TRANS_CHECK_MAX_TIME_TOPIC           those that were given up
  dledger message resume 7F00000100002A9F0000000000000400""",
)
@click.argument("message_id", metavar="OFFSET_MESSAGE_ID")
@broker_options
def resume(message_id: str, target: BrokerTarget) -> None:
    """Begin a transaction again that was given up: its producers are asked what became of it.

    The message id is that of its message in the topic TRANS_CHECK_MAX_TIME_TOPIC.
    """
    check_offset_id(message_id)
    with target.brokers() as brokers:
        brokers.admin.resume_transaction(message_id, target.broker_name)
    click.echo(f"{message_id} is a transaction again: its producers are asked in the next round of checks")
