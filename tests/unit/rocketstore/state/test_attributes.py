"""Attributes of topics and groups."""

from __future__ import annotations

import pytest

from dledger.errors import InvalidRequestError
from rocketstore.state.attributes import (
    DELAYS_MAX,
    ExponentialRetryDelays,
    FixedRetryDelays,
    RetryPolicy,
    TopicAttributes,
    format_retention,
    parse_changes,
    parse_retention,
    policy_of_rocketmq,
    rocketmq_policy,
)


@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        (FixedRetryDelays((10, 30, 5)), [10, 30, 5, 5, 5]),
        (ExponentialRetryDelays(10, 100, 3), [10, 30, 90, 100, 100]),
        (ExponentialRetryDelays(7, 100, 1), [7, 7, 7, 7, 7]),
        (ExponentialRetryDelays(0, 100, 3), [0, 0, 0, 0, 0]),
    ],
)
def test_the_delay_before_each_repetition(policy: RetryPolicy, delays: list[int]) -> None:
    """The last of a list, and the longest of growing ones, hold from then on, however often a message comes."""
    assert [policy.delay_ms(deliveries) for deliveries in range(1, 6)] == delays
    assert policy.delay_ms(10**9) == delays[-1]
    assert policy_of_rocketmq(rocketmq_policy(policy)) == policy


def test_a_retry_policy_is_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="1 to 64 delays"):
        FixedRetryDelays((1,) * (DELAYS_MAX + 1))
    with pytest.raises(InvalidRequestError, match="use a whole number"):
        FixedRetryDelays((-1,))


def test_changes_of_attributes_are_read_with_their_signs() -> None:
    assert parse_changes(" +message.type = FIFO , -reserve.time,") == {"+message.type": "FIFO", "-reserve.time": ""}
    for wrong in ("a=b", "+a", "-a=b", "+a=1,+a=2", "x" * 5000):
        with pytest.raises(InvalidRequestError, match=r"attribute"):
            parse_changes(wrong)


def test_a_topics_retention_in_its_own_name_and_in_rocketmqs() -> None:
    """RocketMQ's is in hours; both mean the same, and it is told in ours."""
    found = TopicAttributes().changed({"+retention": "90m"})
    assert (found.retention_ms, found.texts()) == (5_400_000, {"retention": "90m"})
    found = found.changed({"+reserve.time": "48", "+message.type": "DELAY"})
    assert found.texts() == {"message.type": "DELAY", "retention": "2d"}
    assert TopicAttributes.of_texts(found.texts() | {"other": "x"}) == found
    for removed in ({"-retention": ""}, {"-reserve.time": ""}, {"+reserve.time": "-1"}):
        assert found.changed(removed).retention_ms == 0
    for name, wrong in (("retention", "x"), ("retention", "1s"), ("retention", "9999d"), ("reserve.time", "1.5")):
        with pytest.raises(InvalidRequestError, match=name if name == "retention" else "whole number of hours"):
            found.changed({f"+{name}": wrong})


@pytest.mark.parametrize("retention_ms", [60_000, 61_001, 5_400_000, 86_400_000])
def test_a_retention_is_read_as_it_is_written(retention_ms: int) -> None:
    assert parse_retention(format_retention(retention_ms)) == retention_ms
