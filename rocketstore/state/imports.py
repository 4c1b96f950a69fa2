"""Reads what RocketMQ's own brokers keep in ``config/``, so that an old store directory can be taken over.

Read once, while this broker has neither a snapshot nor a log; the first master publishes them to all. The files are
never written: there is one truth, the log, and a readable snapshot of it beside them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dledger.errors import InvalidRequestError
from rocketstore.state.changes import (
    OFFSETS_MAX,
    Change,
    CommitOffsets,
    PutTopic,
    QueueOffset,
    SetDelayOffsets,
    TopicConfig,
)
from rocketstore.types import HIDDEN_TOPICS

_BARE_KEY: Final = re.compile(r"([{,]\s*)(-?\d+)(\s*:)")
_log = logging.getLogger("rocketstore")


def read_rocketmq_files(directory: Path) -> tuple[Change, ...]:
    """The changes that make the tables of these files. A file that is no such file is logged and left out."""
    changes: list[Change] = []
    readers: tuple[tuple[str, Callable[[Mapping[str, Any]], Iterator[Change]]], ...] = (
        ("topics.json", _topics),
        ("subscriptionGroup.json", _groups),
        ("consumerOffset.json", _consumer_offsets),
        ("delayOffset.json", _delay_offsets),
    )
    for name, reader in readers:
        path = directory / name
        try:
            changes.extend(list(reader(_parse(path.read_text(encoding="utf-8")))))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidRequestError) as error:
            _log.error("%s: not taken over: %s", path, error)
        else:
            _log.info("%s: taken over", path)
    return tuple(changes)


def _parse(text: str) -> Mapping[str, Any]:  # Any: values of any shape, whose use raises what the caller catches
    """JSON as Java's writer makes it: keys that are numbers have no quotes."""
    value = json.loads(_quote_keys(text))
    if not isinstance(value, dict):
        raise InvalidRequestError("not an object")
    return value


def _quote_keys(text: str) -> str:
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)  # strings stand at odd places
    parts[::2] = [_BARE_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
    return "".join(parts)


def _topics(content: Mapping[str, Any]) -> Iterator[Change]:
    for name, topic in content["topicConfigTable"].items():
        if name in HIDDEN_TOPICS:
            continue
        try:
            yield PutTopic(TopicConfig(name, topic["readQueueNums"], topic["writeQueueNums"], topic["perm"]))
        except InvalidRequestError as error:
            _log.warning("topics.json: topic left out: %s", error)


def _groups(content: Mapping[str, Any]) -> Iterator[Change]:
    for group in content["subscriptionGroupTable"]:
        yield CommitOffsets(group, ())


def _consumer_offsets(content: Mapping[str, Any]) -> Iterator[Change]:
    for key, queues in content["offsetTable"].items():
        topic, _, group = key.partition("@")
        offsets = [QueueOffset(topic, int(queue_id), int(offset)) for queue_id, offset in queues.items()]
        for start in range(0, len(offsets), OFFSETS_MAX):
            yield CommitOffsets(group, tuple(offsets[start : start + OFFSETS_MAX]))


def _delay_offsets(content: Mapping[str, Any]) -> Iterator[Change]:
    yield SetDelayOffsets(tuple((int(level), int(offset)) for level, offset in content["offsetTable"].items()))
