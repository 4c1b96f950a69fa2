"""Half messages and their ends: the records of a transaction, as RocketMQ writes them, and which transactions are open.

A *half* message has the producer's properties and ``REAL_TOPIC`` and ``REAL_QID``. A commit stores its body and its
property string again, unchanged, in the real queue, with the half's position as prepared offset. An *op* message says
that the half with this queue offset has ended, either way.

The log decides: a half is open until the log holds its commit or its op. ``OpenHalves`` remembers what the log says, in
the log's order, and which ends are on their way into it, so that none is sent there twice. Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import Enum, auto
from typing import Final

from rocketstore.message.message import (
    PROPERTY_CHECK_TIMES,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_COMMITTED,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION,
    HostAddress,
    Message,
)
from rocketstore.message.properties import decode_properties, encode_properties
from rocketstore.message.record import CorruptRecordError, body_at, decode_record, encode_record
from rocketstore.types import CHECKED_TOO_OFTEN_TOPIC, HALF_TOPIC, OP_TOPIC

PROPERTY_CHECK_IMMUNITY: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
_OP_PROPERTIES: Final = b"WAIT\x01true\x02TAGS\x01d"
_HOST_FLAGS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6
_OURS: Final = tuple(f"{name}\x01".encode() for name in (PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID))
_DIGITS_MAX: Final = 19


def make_half(message: Message) -> None:
    """Turn a message whose topic and queue are checked into the half message that waits in its stead."""
    text = message.property_string or encode_properties(message.properties)
    real = (PROPERTY_REAL_TOPIC, message.topic), (PROPERTY_REAL_QUEUE_ID, str(message.queue_id))
    segments = [one for one in text.split(b"\x02") if one and not one.startswith(_OURS)]
    segments += [f"{name}\x01{value}".encode() for name, value in real]
    message.properties = {}
    message.property_string = b"\x02".join(segments)
    message.topic, message.queue_id = HALF_TOPIC, 0
    message.sys_flag &= ~SYS_FLAG_TRANSACTION


def committed(record: bytes) -> Message:
    """The message that a half message becomes. Raises ``CorruptRecordError``: it names no queue to become part of."""
    half = decode_record(record)
    topic, queue_id = _real_queue(half)
    return Message(
        topic,
        half.body,
        queue_id,
        {},
        half.flag,
        half.sys_flag & ~(SYS_FLAG_TRANSACTION | _HOST_FLAGS) | SYS_FLAG_COMMITTED,
        half.born_timestamp,
        half.born_host,
        half.store_host,
        half.reconsume_times,
        half.offset,
        property_string=_property_string(record, half),
    )


def real_topic(record: bytes) -> str | None:
    """A message's topic, also while it is not committed; None for damage."""
    try:
        message = decode_record(record, check_crc=False)
    except CorruptRecordError:
        return None
    return message.properties.get(PROPERTY_REAL_TOPIC, "") if message.topic == HALF_TOPIC else message.topic


def op_message(queue_offset: int, host: HostAddress, now_ms: int) -> Message:
    """Says that the half message with this queue offset has ended."""
    body = str(queue_offset).encode()
    return Message(
        OP_TOPIC, body, born_timestamp=now_ms, born_host=host, store_host=host, property_string=_OP_PROPERTIES
    )


def op_target(op: Message) -> int:
    """The queue offset that an op message names; -1 if it names none."""
    return int(op.body) if op.body.isdigit() and len(op.body) <= _DIGITS_MAX else -1


def check_record(record: bytes, times: int) -> bytes:
    """The half message of a check, with its real queue, as RocketMQ's broker sends it.

    Raises ``CorruptRecordError``.
    """
    half = decode_record(record)
    topic, queue_id = _real_queue(half)
    shown = replace(
        half,
        topic=topic,
        queue_id=queue_id,
        sys_flag=half.sys_flag & ~_HOST_FLAGS,
        properties=half.properties | {PROPERTY_CHECK_TIMES: str(times)},
    )
    return encode_record(shown, queue_offset=half.queue_offset, physical_offset=half.offset)


def given_up(record: bytes, times: int, host: HostAddress) -> Message:
    """The message that keeps a half message about which no producer says anything. Raises ``CorruptRecordError``."""
    half = decode_record(record)
    return _again(half, CHECKED_TOO_OFTEN_TOPIC, times, host)


def resumed(record: bytes, host: HostAddress) -> Message:
    """A given up message as a half message again. Raises ``CorruptRecordError``: it is no such message."""
    message = decode_record(record)
    _real_queue(message)
    return _again(message, HALF_TOPIC, 0, host)


def _again(message: Message, topic: str, times: int, host: HostAddress) -> Message:
    return Message(
        topic,
        message.body,
        0,
        message.properties | {PROPERTY_CHECK_TIMES: str(times)},
        message.flag,
        message.sys_flag & ~(SYS_FLAG_TRANSACTION | _HOST_FLAGS),
        message.born_timestamp,
        message.born_host,
        host,
        message.reconsume_times,
    )


def _real_queue(half: Message) -> tuple[str, int]:
    topic = half.properties.get(PROPERTY_REAL_TOPIC, "")
    queue_id = half.properties.get(PROPERTY_REAL_QUEUE_ID, "")
    if not topic or topic in (HALF_TOPIC, OP_TOPIC) or not (queue_id.isascii() and queue_id.isdigit()):
        raise CorruptRecordError(f"the half message {half.queue_offset} names no topic and queue")
    return topic, int(queue_id)


def _property_string(record: bytes, message: Message) -> bytes:
    """Exactly as stored."""
    return bytes(record[body_at(message.sys_flag) + len(message.body) + 1 + len(message.topic) + 2 :])


_IMMUNITY_S_MAX: Final = 30 * 24 * 3600
_CHECK_DIGITS_MAX: Final = 9


class Phase(Enum):
    """How far the end of a transaction has come."""

    OPEN = auto()
    ENDING = auto()
    """Its end was given to the log, which has not shown it yet."""
    COMMITTED = auto()
    """The log has its commit, and not yet its op."""


class Half:
    __slots__ = (
        "asked", "checked_before", "commit_offset", "group", "immunity_ms", "offset", "op_due_ms", "phase",
        "queue_offset", "rounds", "stored_ms",
    )  # fmt: skip

    def __init__(  # what a record says
        self,
        queue_offset: int,
        offset: int,
        stored_ms: int,
        group: str,
        immunity_ms: int | None = None,
        checked_before: int = 0,
    ) -> None:
        self.queue_offset = queue_offset
        self.offset = offset
        """Physical, of its record."""
        self.stored_ms = stored_ms
        self.group = group
        self.immunity_ms = immunity_ms
        """For how long its producer wants not to be asked; None: the broker's setting."""
        self.checked_before = checked_before
        """How often RocketMQ's broker had its producer asked, before it stored it again."""
        self.asked = 0
        """How often this master had its producer asked."""
        self.rounds = 0
        """In how many of this master's rounds it was due, whether or not there was anybody to ask."""
        self.phase = Phase.OPEN
        self.commit_offset = 0
        """Where its commit is, if it is committed."""
        self.op_due_ms = 0
        """When (monotonic) to write its op if the log does not show one."""


def half_of(queue_offset: int, offset: int, stored_ms: int, properties: bytes) -> Half:
    """From what a record of the half topic says."""
    found = decode_properties(properties)
    seconds = _number(found.get(PROPERTY_CHECK_IMMUNITY, ""))
    immunity_ms = None if seconds < 0 else min(seconds, _IMMUNITY_S_MAX) * 1000
    checked = max(_number(found.get(PROPERTY_CHECK_TIMES, "")), 0)
    return Half(queue_offset, offset, stored_ms, found.get(PROPERTY_PRODUCER_GROUP, ""), immunity_ms, checked)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _CHECK_DIGITS_MAX else -1


class OpenHalves:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._halves: OrderedDict[int, Half] = OrderedDict()  # by queue offset, in that order
        self._early: dict[int, Half] = {}  # ended before the log's order came to them
        self._by_offset: dict[int, Half] = {}
        self._groups: Counter[str] = Counter()
        self._unfinished: dict[int, Half] = {}
        self.next_offset = 0
        """The first queue offset that the log's order has not come to."""

    def __len__(self) -> int:
        return len(self._halves)

    def __iter__(self) -> Iterator[Half]:
        return iter(self._halves.values())

    def of_group(self, group: str) -> int:
        """How many a producer group has open."""
        return self._groups[group]

    @property
    def oldest(self) -> int:
        """All before this queue offset have ended."""
        return next(iter(self._halves), self.next_offset)

    @property
    def oldest_commit(self) -> int | None:
        """The position of the first commit that has no op yet, if there is one."""
        return min((one.commit_offset for one in self._unfinished.values()), default=None)

    @property
    def unfinished(self) -> Iterable[Half]:
        """Those with a commit and without an op."""
        return self._unfinished.values()

    def find(self, queue_offset: int) -> Half | None:
        """The open transaction whose half message is there."""
        return self._halves.get(queue_offset) or self._early.get(queue_offset)

    def at(self, offset: int) -> Half | None:
        """The open transaction whose half message's record is there."""
        return self._by_offset.get(offset)

    def add_early(self, half: Half) -> Half:
        """One that the log holds and whose turn has not come; the same one if it is known already."""
        known = self.find(half.queue_offset)
        if known is None:
            known = self._early[half.queue_offset] = half
        return known

    def add(self, half: Half) -> None:
        """The log's order has come to a half."""
        if half.queue_offset < self.next_offset:
            return  # seen before
        self.next_offset = half.queue_offset + 1
        half = self._early.pop(half.queue_offset, half)  # with its mark
        self._halves[half.queue_offset] = half
        self._by_offset[half.offset] = half
        self._groups[half.group] += 1

    def committed(self, prepared_offset: int, commit_offset: int, op_due_ms: int = 0) -> None:
        """The log's order has come to a commit, whose op should follow before ``op_due_ms``."""
        half = self._by_offset.get(prepared_offset)
        if half is not None and half.phase is not Phase.COMMITTED:
            half.phase = Phase.COMMITTED
            half.commit_offset = commit_offset
            half.op_due_ms = op_due_ms
            self._unfinished[half.queue_offset] = half

    def ended(self, queue_offset: int) -> None:
        """The log's order has come to an op."""
        half = self._halves.pop(queue_offset, None)
        if half is not None:
            del self._by_offset[half.offset]
            self._unfinished.pop(queue_offset, None)
            self._groups[half.group] -= 1
            if not self._groups[half.group]:
                del self._groups[half.group]
