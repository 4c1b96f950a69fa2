"""Options that other systems' sources and sinks have and this one has not: what to say instead.

Someone who brings a job along from Kafka writes them in good faith; the nearest name of ours would mislead.
"""

from __future__ import annotations

from typing import Final

_SECURITY: Final = "a group's are tlsCa, tlsCertificate, tlsKey, and accessKey with secretKey"
_ONE_LOG: Final = "a group is one log with one index: use subscribe, and filter by the column queueId"
_INSTEAD: Final = {
    "assign": _ONE_LOG,
    "startingoffsetsbytimestamp": "use startingTimestamp, one time (ms) for the whole log",
    "endingoffsetsbytimestamp": "use endingTimestamp, one time (ms) for the whole log",
    "startingoffsetsbytimestampstrategy": (
        "leave it out: startingTimestamp starts with the first message stored then or later, or at the end if "
        "there is none"
    ),
    "kafkaconsumer.polltimeoutms": "use fetchTimeoutMs",
    "fetchoffset.retryintervalms": "use fetchRetries and fetchTimeoutMs",
    "groupidprefix": "a stream keeps its position in its checkpoint; to publish it as a consumer group, use "
    "consumerGroup",
    "pulltimeoutms": "use fetchTimeoutMs",
    "pullbatchsize": "use splitBytes, and maxOffsetsPerTrigger in a stream",
    "subexpression": "filter by the column tags",
}
_PREFIXES: Final = {
    "kafka.security.": _SECURITY,
    "kafka.ssl.": _SECURITY,
    "kafka.sasl.": _SECURITY,
    "kafka.": "settings of Kafka's clients have no effect here: leave it out",
}
"""The first that fits counts."""


def instead_of(name: str) -> str | None:
    """What to use in place of an option that another system has; None if none is known of that name."""
    lower = name.lower()
    return _INSTEAD.get(lower) or next((text for prefix, text in _PREFIXES.items() if lower.startswith(prefix)), None)
