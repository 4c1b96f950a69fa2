"""Messages that no consumer gets: walking over them in bulk, and delivering dead letters again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from dledger.access.rules import DEAD_PREFIX

if TYPE_CHECKING:
    from rocketstore.client.aio.consumer_options import Sql
    from rocketstore.client.blocking import Admin
    from rocketstore.message.message import Message
    from rocketstore.remoting.topics import MessageQueue

PAGE: Final = 256
RESEND_LEVEL: Final = 1
"""The shortest delay."""
RESENDS_MAX: Final = 1_000_000
"""A dead letter was delivered more often than its group allows."""


def walk(
    admin: Admin, queue: MessageQueue, place: int, end: int, count: int = sys.maxsize, expression: str | Sql = "*"
) -> Iterator[Message]:
    """At most ``count`` messages of a queue from offset ``place`` to before ``end``, as they are stored."""
    left = count
    while left > 0 and place < end:
        messages, next_offset = admin.messages(
            queue, place, max_messages=min(left, PAGE, end - place), expression=expression
        )
        yield from messages
        left -= len(messages)
        if next_offset <= place:
            return
        place = next_offset


def send_again(admin: Admin, group: str, position: int, broker: str = "") -> None:
    """Deliver a copy of the dead letter at this position of a broker's log to its group once more, after a second; the
    letter itself stays.
    """
    topic = f"{DEAD_PREFIX}{group}"
    admin.send_back(group, topic, position, delay_level=RESEND_LEVEL, retries_max=RESENDS_MAX, broker=broker)
