"""Logs for jobs: a few topics, queues, tags and keys over some hours."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from dledger_spark.jobs.stats import HOUR_MS
from rocketstore.message.message import Message
from tests.support.log_bytes import DiskLog, write_disk_log

START_MS = 1_763_596_800_000 + 20 * HOUR_MS
"""2025-11-20, 20:00 UTC: the log goes on to the next day."""
TOPICS = ("orders", "payments", "%RETRY%group")


def messages(count: int) -> list[Message]:
    """``count`` messages over ten hours, with none in the third; queue 0 of orders has most."""
    return [_message(number, count) for number in range(count)]


def _message(number: int, count: int) -> Message:
    topic = TOPICS[0] if number % 10 < 7 else TOPICS[1 + number % 2]
    hour = number * 10 // count
    at = START_MS + (hour + (hour == 3)) * HOUR_MS + number
    properties = {"TAGS": f"tag{number % 3}", "KEYS": f"key{number % 5} all", "colour": "red"}
    return Message(
        topic=topic,
        body=f"body {number}".encode(),
        properties=properties,
        queue_id=0 if number % 4 else 1,
        born_timestamp=at,
        store_timestamp=at,
    )


def write_log(base: Path, count: int, **how: int) -> DiskLog:
    """The log on a disk, in several segments."""
    return write_disk_log(base, messages(count), noop_every=160, **how)


def bodies(log: DiskLog) -> Counter[bytes]:
    """What must be found again, each once."""
    return Counter(row["body"] for row in log.rows if isinstance(row["body"], bytes))
