"""Which rows of a log are a broker's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger_spark.jobs.source import is_of_users, is_own
from rocketstore.types import HALF_TOPIC, HIDDEN_TOPICS, OP_TOPIC, SCHEDULE_TOPIC

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_an_entry_that_is_no_message_is_neither_the_brokers_nor_a_users(spark: SparkSession) -> None:
    """What waits in internal topics is the broker's; retries and dead letters are the users'."""
    own = {SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC, "TBW102", *HIDDEN_TOPICS}
    users = {"orders", "%RETRY%group", "%DLQ%group", "MY_SCHEDULE_TOPIC_XXXX"}
    topics: list[str | None] = [*own, *users, None]
    rows = spark.createDataFrame([(one,) for one in topics], "topic string")

    assert {row[0] for row in rows.where(is_own()).collect()} == own
    assert {row[0] for row in rows.where(is_of_users()).collect()} == users
    assert {row[0] for row in rows.where(~is_own()).collect()} == {*users, None}
