"""Options of other systems' sources and sinks that are not supported here, and their replacements.

Users who migrate a job from Kafka may write them; a hint at our most similar name would mislead.
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
"""The first match counts."""


def instead_of(name: str) -> str | None:
    """The replacement for another system's option; None if the name is unknown."""
    lower = name.lower()
    return _INSTEAD.get(lower) or next((text for prefix, text in _PREFIXES.items() if lower.startswith(prefix)), None)
