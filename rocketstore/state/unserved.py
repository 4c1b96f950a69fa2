"""Parts of RocketMQ 5's store that nothing here reads, so that messages would be missing without a word.

Two kinds of messages are in its log without a place in an ordinary queue. Those with a time of delivery of their own
wait in the topic ``rmq_sys_wheel_timer``, and ``timerwheel`` says when they are due. Those of topics of the queue type
BatchCQ are stored many in one record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from struct import Struct
from typing import Any, Final

import numpy as np

from rocketstore.state.rocketmq_files import batch_topics

TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
SYS_FLAG_INNER_BATCH: Final = 0x80
"""A record that holds several messages."""
_WHEEL: Final = "timerwheel"
_TIMER_CHECK: Final = "config/timercheck"
_BATCH_QUEUES: Final = "batchconsumequeue"
_CHECK: Final = Struct(">qqq")
"""The time up to which everything was delivered, a position in the timer's log, and the next offset in the topic."""
_SLOT: Final = np.dtype([("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("magic", ">i4")])
_PRECISIONS_MS: Final = (1000, 500, 200, 100)
"""Of the times in the wheel: ``timerPrecisionMs``, which the file does not say."""
_DATABASE: Final = "CURRENT"
"""The file that every RocksDB has."""
_NAMED_MAX: Final = 3
_OTHERS: Final = {
    "compaction": "compacted topics (RocketMQ 5)",
    "config/metadata": "topics and groups in RocksDB (RocketMQ 5): export them to JSON there first",
    "config/topics": "topics in RocksDB (RocketMQ 5): export them to JSON there first",
    "config/consumerOffsets": "offsets in RocksDB (RocketMQ 5): export them to JSON there first",
}
"""Parts of a directory that nothing here reads."""


def unserved(root: Path, timer_end: int, with_batches: Collection[str] = ()) -> list[str]:
    """The messages that a broker on this directory does not serve, in sentences. Raises ``OSError``.

    ``timer_end``: the next offset of ``TIMER_TOPIC``, queue 0; ``with_batches``: topics with such records in the log.
    """
    return [*_sentences(root, timer_end, with_batches)]


def topics_of_batches(root: Path) -> set[str]:
    """Topics whose records hold several messages each. Raises ``OSError``."""
    queues = root / _BATCH_QUEUES
    with_queues = {one.name for one in queues.iterdir() if one.is_dir()} if queues.is_dir() else set()
    return with_queues | batch_topics(root / "config")


def timed_messages(root: Path, timer_end: int) -> int:
    """How many messages at most wait for their time. Raises ``OSError``."""
    try:
        with (root / _TIMER_CHECK).open("rb") as file:
            found = file.read(_CHECK.size)
    except FileNotFoundError:
        found = b""
    numbers: tuple[int, int, int] = _CHECK.unpack(found) if len(found) == _CHECK.size else (0, 0, 0)
    delivered_ms, _, taken = numbers
    return _in_wheel(root / _WHEEL, delivered_ms) + max(0, timer_end - taken)


def _sentences(root: Path, timer_end: int, with_batches: Collection[str]) -> Iterator[str]:
    waiting = timed_messages(root, timer_end)
    if waiting:
        yield (
            f"{_WHEEL}: up to {waiting:,} messages that RocketMQ 5 was to deliver at a time of their own: they are "
            "never delivered here, so let RocketMQ deliver them first"
        )
    batches = sorted(topics_of_batches(root).union(with_batches))
    if batches:
        more = f" and {len(batches) - _NAMED_MAX} more" if len(batches) > _NAMED_MAX else ""
        yield (
            f"{_BATCH_QUEUES}: messages of topics with queues of batches (BatchCQ, RocketMQ 5), which nobody can "
            f"read or write here: {', '.join(batches[:_NAMED_MAX])}{more}"
        )
    for path, what in _OTHERS.items():
        if _is_filled(root / path):
            yield f"{path}: {what}"


def _is_filled(path: Path) -> bool:
    """Whether it is a directory with directories or databases in it: RocketMQ 5 makes some in every store."""
    return path.is_dir() and any(one.is_dir() or one.name == _DATABASE for one in path.iterdir())


def _in_wheel(path: Path, delivered_ms: int) -> int:
    try:
        slots = path.stat().st_size // _SLOT.itemsize
    except FileNotFoundError:
        return 0
    if not slots:
        return 0
    wheel: Any = np.memmap(path, _SLOT, "r", shape=(slots,))  # Any: numpy's types know no fields
    used = wheel[wheel["count"] > 0]
    if not len(used):
        return 0
    latest = int(used["time"].max())
    precision_ms = min(_PRECISIONS_MS, key=lambda one: abs(latest * one - delivered_ms)) if delivered_ms else 1
    return int(used["count"][used["time"] * precision_ms > delivered_ms].sum())
