"""Topics in which a broker keeps what is its own: its state, delayed messages that wait, transactions in progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column

OWN_TOPICS: Final = ("RMQ_SYS_", "SCHEDULE_TOPIC_", "OFFSET_MOVED_EVENT", "SELF_TEST_TOPIC", "TBW102")
"""Prefixes of their names. Delayed messages and those of transactions come to their real topics when they are due."""


def is_own() -> Column:
    """Whether a row's topic is one of them; false for an entry that is no message."""
    from pyspark.sql import functions as f

    topic = f.coalesce(f.col("topic"), f.lit(""))
    found = f.lit(False)
    for prefix in OWN_TOPICS:
        found = found | f.startswith(topic, f.lit(prefix))
    return found


def is_of_users() -> Column:
    """Whether a row is a message of another topic; false for an entry that is no message."""
    from pyspark.sql import functions as f

    return f.col("topic").isNotNull() & ~is_own()
