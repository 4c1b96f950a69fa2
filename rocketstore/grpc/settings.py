"""What a client is told about how to behave: its own settings, with those that the server decides put in their place.

Clients of some languages understand only one of the two kinds of back-off, so it is chosen by language.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration

from rocketstore.config import KIB
from rocketstore.pb import definition_pb2 as pb

BODY_BYTES_SPARE: Final = 64 * KIB
"""Some clients receive no more than 4 MiB at once, properties and all."""
SEND_ATTEMPTS: Final = 3
SEND_BACKOFF_S: Final = (0.01, 1.0, 2.0)
"""The first pause between attempts to send, the longest, and by how much each is longer."""
RECEIVE_BATCH: Final = 32
LONG_POLLING_S: Final = 20
"""A whole number: some clients take no fraction."""
RETRY_ATTEMPTS: Final = 17
RETRY_S: Final = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""RocketMQ's pauses before a message is delivered again."""
EXPONENTIAL: Final = frozenset({pb.NODE_JS})
"""Languages whose clients understand no list of pauses."""


def merged(given: pb.Settings, *, body_bytes_max: int, is_fifo: bool, attempts: int = RETRY_ATTEMPTS) -> pb.Settings:
    """A client's settings as they are from now on. ``is_fifo``, ``attempts``: of a consumer's group."""
    found = pb.Settings()
    found.CopyFrom(given)
    found.metric.CopyFrom(pb.Metric(on=False))
    language = given.user_agent.language
    if given.HasField("subscription"):
        subscription = found.subscription
        subscription.fifo = is_fifo
        subscription.receive_batch_size = RECEIVE_BATCH
        subscription.long_polling_timeout.seconds = LONG_POLLING_S
        subscription.long_polling_timeout.nanos = 0
        found.backoff_policy.CopyFrom(_retries(attempts, language))
    else:
        found.publishing.max_body_size = body_bytes_max
        found.publishing.validate_message_type = True
        found.backoff_policy.CopyFrom(exponential(SEND_ATTEMPTS, *SEND_BACKOFF_S))
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


def _retries(attempts: int, language: pb.Language) -> pb.RetryPolicy:
    if language in EXPONENTIAL:
        return exponential(attempts, RETRY_S[0], RETRY_S[-1], 2.0)
    return listed(attempts, RETRY_S[: max(attempts - 1, 1)])


def set_duration(duration: Duration, seconds: float) -> None:
    """Set a field to so many seconds."""
    duration.seconds, nanos = divmod(round(seconds * 1e9), 10**9)
    duration.nanos = nanos


def seconds_of(duration: Duration) -> float:
    """A field in seconds."""
    return duration.seconds + duration.nanos / 1e9
