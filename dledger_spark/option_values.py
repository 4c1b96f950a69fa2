"""Parsers for values that only Spark's options have; all others are in ``dledger.values``.

Options of other systems' sources and sinks have replacements here. Users who migrate a job from Kafka may write them; a
hint at our most similar name would mislead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from dledger.values import split

EARLIEST: Final = -2
"""``startingOffsets=earliest``, with Kafka's number."""
SCHEMA_BYTES_MAX: Final = 1 << 20
SECRET_BYTES_MAX: Final = 4096
LATEST: Final = -1
"""``latest``, with Kafka's number."""


def text_value(text: str) -> str:
    return text


def path_value(text: str) -> str:
    """A local path; Spark's catalog passes ``file:`` URIs."""
    for prefix in ("file://", "file:"):
        if text.startswith(prefix):
            return text[len(prefix) :]
    if "://" in text:
        raise ValueError(
            f"{text} is not on a local file system: mount or copy the directory, or read the running group"
        )
    return text


def names_value(text: str) -> tuple[str, ...]:
    names = tuple(split(text, ","))
    if not names:
        raise ValueError("name at least one topic")
    return names


def schema_value(text: str) -> bytes:
    """A schema, or ``@`` and the file that holds it. Raises ``ValueError``."""
    return _contents(text[1:], SCHEMA_BYTES_MAX) if text.startswith("@") else text.encode()


def secret_value(path: str) -> str:
    """The secret in a file, without blanks around it. Raises ``ValueError``."""
    found = _contents(path, SECRET_BYTES_MAX).decode(errors="replace").strip()
    if not found:
        raise ValueError(f"{path} is empty")
    return found


def _contents(path: str, bytes_max: int) -> bytes:
    try:
        with open(path, "rb") as file:
            found = file.read(bytes_max + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if len(found) > bytes_max:
        raise ValueError(f"{path} has more than {bytes_max} bytes: name the right file")
    return found


def delimiter_value(text: str) -> str:
    """One character, or ``\\t``. Raises ``ValueError``."""
    found = "\t" if text == "\\t" else text
    if len(found) != 1 or found in '"\r\n':
        raise ValueError(f"invalid delimiter {text!r}: use one character, such as ; or \\t")
    return found


def pattern_value(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"invalid regular expression {text!r}: {error}") from error
    return text


def choice_value(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        for one in choices:
            if text.lower() == one:
                return one
        raise ValueError(f"invalid value {text!r}: use one of {', '.join(choices)}")

    return parse


def offsets_value(*, starting: bool) -> Callable[[str], int]:
    """``earliest``, ``latest``, ``{"index": N}``, or N; -2 and -1 as in Kafka."""
    words = {"earliest": EARLIEST, "latest": LATEST} if starting else {"latest": LATEST}
    allowed = f'{", ".join(words)} or {{"index": N}}'

    def parse(text: str) -> int:
        if text.lower() in words:
            return words[text.lower()]
        try:
            value = json.loads(text)
        except ValueError:
            raise ValueError(f"invalid offset {text!r}: use {allowed}") from None
        if isinstance(value, dict) and set(value) == {"index"}:
            value = value["index"]
        elif isinstance(value, dict):
            raise ValueError(f"a group is one log with one index, not one per topic and partition: {allowed}")
        if not isinstance(value, int) or isinstance(value, bool) or (value < 0 and value not in words.values()):
            raise ValueError(f"invalid offset {text!r}: use {allowed}")
        return value

    return parse


_SECURITY: Final = "a group's are tlsCa, tlsCertificate, tlsKey, and accessKey with secretKey"
_ONE_LOG: Final = "a group is one log with one index: use subscribe, and filter by the column queueId"
_INSTEAD: Final = {
    "assign": _ONE_LOG,
    "includeheaders": "leave it out of a write: a column headers or properties is written whenever there is one",
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
