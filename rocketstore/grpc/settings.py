"""A client's settings: its own, with those that the server decides put in their place.

Clients of some languages understand only one of the two kinds of back-off, so it is chosen by language.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration

from rocketstore.config import KIB
from rocketstore.message.message import DelayLevels
from rocketstore.pb import definition_pb2 as pb
from rocketstore.state.attributes import DELAYS_MAX, ExponentialRetryDelays, FixedRetryDelays, RetryPolicy
from rocketstore.state.changes import GroupConfig

BODY_BYTES_SPARE: Final = 64 * KIB
"""Some clients receive no more than 4 MiB at once, properties and all."""
SEND_ATTEMPTS: Final = 3
SEND_BACKOFF_S: Final = (0.01, 1.0, 2.0)
"""The first pause between attempts to send, the longest, and by how much each is longer."""
RECEIVE_BATCH: Final = 32
LONG_POLLING_S: Final = 20
"""A whole number: some clients take no fraction."""
FIRST_RETRY_LEVEL: Final = 3
"""RocketMQ's: the delay level after which a message is delivered for the second time."""
EXPONENTIAL: Final = frozenset({pb.NODE_JS})
"""Languages whose clients understand no list of pauses."""


def of_producer(given: pb.Settings, body_bytes_max: int) -> pb.Settings:
    """A producer's settings as they are from now on."""
    found = _copied(given)
    found.publishing.max_body_size = body_bytes_max
    found.publishing.validate_message_type = True
    found.backoff_policy.CopyFrom(exponential(SEND_ATTEMPTS, *SEND_BACKOFF_S))
    return found


def of_consumer(given: pb.Settings, group: GroupConfig, delays: DelayLevels) -> pb.Settings:
    """A consumer's settings as they are from now on; ``delays``: for a group without delays of its own."""
    found = _copied(given)
    found.subscription.fifo = group.ordered
    found.subscription.receive_batch_size = RECEIVE_BATCH
    found.subscription.long_polling_timeout.seconds = LONG_POLLING_S
    found.subscription.long_polling_timeout.nanos = 0
    attempts = group.retry_times_max + 1
    policy = group.retry_policy or FixedRetryDelays(delays.delays_ms[FIRST_RETRY_LEVEL - 1 :] or delays.delays_ms[-1:])
    found.backoff_policy.CopyFrom(_retries(attempts, policy, given.user_agent.language))
    return found


def decided(settings: pb.Settings) -> pb.Settings:
    """The part of a consumer's settings that a server decides."""
    found = pb.Settings(backoff_policy=settings.backoff_policy)
    if settings.HasField("subscription"):
        found.subscription.group.CopyFrom(settings.subscription.group)
        found.subscription.fifo = settings.subscription.fifo
    return found


def kept(settings: pb.Settings, before: pb.Settings | None) -> pb.Settings:
    """A consumer's settings with what was decided before of the same group, if anything was."""
    if before is None or not settings.HasField("subscription") or not before.HasField("subscription"):
        return settings
    if before.subscription.group == settings.subscription.group:
        settings.subscription.fifo = before.subscription.fifo
        settings.backoff_policy.CopyFrom(before.backoff_policy)
    return settings


def _copied(given: pb.Settings) -> pb.Settings:
    found = pb.Settings()
    found.CopyFrom(given)
    found.metric.CopyFrom(pb.Metric(on=False))
    return found


def exponential(attempts: int, first_s: float, most_s: float, factor: float) -> pb.RetryPolicy:
    """Pauses that become longer each time."""
    policy = pb.RetryPolicy(max_attempts=attempts)
    set_duration(policy.exponential_backoff.initial, first_s)
    set_duration(policy.exponential_backoff.max, most_s)
    policy.exponential_backoff.multiplier = factor
    return policy


def listed(attempts: int, pauses_s: Sequence[float]) -> pb.RetryPolicy:
    """One pause after the other; the last one counts for all further attempts."""
    policy = pb.RetryPolicy(max_attempts=attempts)
    for pause_s in pauses_s:
        set_duration(policy.customized_backoff.next.add(), pause_s)
    return policy


def _retries(attempts: int, policy: RetryPolicy, language: pb.Language) -> pb.RetryPolicy:
    if isinstance(policy, ExponentialRetryDelays):
        if language in EXPONENTIAL:
            return exponential(attempts, policy.initial_ms / 1000, policy.max_ms / 1000, policy.multiplier)
        count = min(max(attempts - 1, 1), DELAYS_MAX)
        return listed(attempts, [policy.delay_ms(number + 1) / 1000 for number in range(count)])
    delays_ms = policy.delays_ms
    if language in EXPONENTIAL:
        return exponential(attempts, delays_ms[0] / 1000, delays_ms[-1] / 1000, 2.0)
    return listed(attempts, [one / 1000 for one in delays_ms[: max(attempts - 1, 1)]])


def set_duration(duration: Duration, seconds: float) -> None:
    """Set a field to so many seconds."""
    duration.seconds, nanos = divmod(round(seconds * 1e9), 10**9)
    duration.nanos = nanos


def seconds_of(duration: Duration) -> float:
    """A field in seconds."""
    return duration.seconds + duration.nanos / 1e9
